"""What ``demo`` was asked and what it found, as plain data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_bcg import __version__
from torch_bcg.counters import Stats
from torch_bcg.graph.ir import Plan

TOLERANCE = 1e-4  # relative and absolute, of float32 logits
ENOUGH = 3  # calls of a size, one of which is replayed: a new size is recorded at its second one


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for."""

    model: str
    layers: int
    lengths: tuple[int, ...]
    calls: int
    device: str
    seed: int
    dump: Path | None


@dataclass(frozen=True, slots=True)
class Row:
    """The calls of one size.

    Attributes:
        length: the size: of sequences, or rows that a step was brought up to.
        replays: how many of ``calls`` were replayed.
        first_ms: of the first compiled call of this size.
        eager_ms, replayed_ms: medians of the calls that were replayed; None if none was.
        largest_difference: from eager, absolute, over all calls.
        close, bitwise: whether every call is within `TOLERANCE`, and equal to the bit.
    """

    length: int
    calls: int
    replays: int
    first_ms: float
    eager_ms: float | None
    replayed_ms: float | None
    largest_difference: float
    close: bool
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All that the demo found.

    Attributes:
        asked: for what.
        title: what the model is called.
        marked: what ran between recorded segments.
        sizes: what ``Row.length`` is: ``"length"`` or ``"rows"``.
        kinds: how many steps were ``"prefill"``, ``"mixed"`` and ``"decode"``; empty: no steps.
        first_ms: of the first compiled call; compilation, probe and capture are in it.
        plans: of every graph.
        rows: by size.
        counted: by the runtime.
    """

    asked: Asked
    title: str
    marked: str
    sizes: str
    kinds: Mapping[str, int]
    first_ms: float
    plans: tuple[Plan, ...]
    rows: tuple[Row, ...]
    counted: Stats

    @property
    def replayed(self) -> bool:
        """Whether something was replayed, and every size that had enough calls for it."""
        enough = [row for row in self.rows if row.calls >= ENOUGH]
        return any(row.replays for row in self.rows) and all(row.replays for row in enough)

    @property
    def passed(self) -> bool:
        """Whether every call agreed with eager, and replays are where they should be."""
        return self.replayed and all(row.close for row in self.rows)

    @property
    def verdict(self) -> str:
        """One sentence."""
        calls = sum(row.calls for row in self.rows)
        wrong = [str(row.length) for row in self.rows if not row.close]
        if wrong:
            where = f"{self.sizes} {', '.join(wrong)}"
            return f"different from eager by more than {TOLERANCE:g} at {where}"
        if not self.replayed:
            return "equal to eager, but some sizes were never replayed"
        exact = ", to the bit" if all(row.bitwise for row in self.rows) else ""
        return f"equal: all {calls} calls agree with eager within {TOLERANCE:g}{exact}"

    def json(self) -> str:
        """One JSON object."""
        asked = asdict(self.asked) | {"dump": str(self.asked.dump) if self.asked.dump else None}
        whole = {
            "passed": self.passed,
            "verdict": self.verdict,
            "tolerance": TOLERANCE,
            **asked,
            "recorder": recorder(self.asked.device),
            "marked": self.marked,
            "kinds": dict(self.kinds),
            "first_ms": self.first_ms,
            "graphs": [_figures(plan) for plan in self.plans],
            "rows": [asdict(row) for row in self.rows],
            "stats": asdict(self.counted),
            "versions": {"torch": torch.__version__, "torch_bcg": __version__},
        }
        return json.dumps(whole, indent=1)


def recorder(device: str) -> str:
    """The recorder of a device."""
    return "CudaRecorder" if device.startswith("cuda") else "HostRecorder"


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "segments": len(plan.segments),
        "recorded_segments": len(plan.graph_segments),
        "kernels": plan.kernels,
        "recorded_kernels": plan.recorded_kernels,
        "cuts": dict(Counter(r.kind for r in plan.reasons)),
        "unrecorded": str(plan.unrecorded) if plan.unrecorded else None,
    }
