"""Plots of times by number of tokens: SVG files that are the same for the same figures."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path

from harness import Refused

Point = tuple[int, float, float, float]  # tokens, p20, p50, p80


@dataclass
class Plot:
    """One kind of time of all variants."""

    path: Path
    label: str
    lines: dict[str, list[Point]]

    @property
    def digest(self) -> str:
        """Of the figures and of how they are drawn."""
        seen = repr((self.label, self.lines)) + inspect.getsource(Plot.draw)
        return hashlib.sha256(seen.encode()).hexdigest()

    @property
    def drawn(self) -> bool:
        """Whether the file is this very plot."""
        return self.path.exists() and self.digest in self.path.read_text(encoding="utf-8")

    def draw(self) -> None:
        """Writes the file; what Inductor fuses has the colour of what it does not, and dashes.

        Raises:
            Refused: there is no matplotlib.
        """
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError:
            raise Refused("plots need matplotlib: pip install '.[bench]'.") from None
        plain = {n: n.replace("-inductor", "").replace("inductor-", "") for n in self.lines}
        plain = {n: "bcg" if kind == "inductor" else kind for n, kind in plain.items()}
        others = [kind for kind in dict.fromkeys(plain.values()) if kind != "eager"]
        ticks = sorted({tokens for points in self.lines.values() for tokens, *_ in points})
        with mpl.rc_context({"svg.hashsalt": "torch_bcg", "svg.fonttype": "none"}):
            shown = Figure(figsize=(8, 4.5), layout="constrained")
            axes = shown.subplots()
            for name, points in self.lines.items():
                tokens, low, middle, high = zip(*points, strict=True)
                color = "black" if name == "eager" else f"C{others.index(plain[name])}"
                style = "-" if plain[name] == name else "--"
                axes.plot(tokens, middle, style, marker="o", ms=4, color=color, label=name)
                axes.fill_between(tokens, low, high, color=color, alpha=0.15, lw=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "1235" else "")
            axes.set(xlabel="tokens", ylabel=self.label)
            axes.grid(alpha=0.3, which="both")
            shown.legend(loc="outside right upper", frameon=False)
            metadata = {"Date": None, "Creator": None, "Description": self.digest}
            shown.savefig(self.path, format="svg", metadata=metadata)
