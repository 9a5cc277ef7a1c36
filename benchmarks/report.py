"""Tables and plots of the results, in the places of the pages that are marked for them.

A place is named after a file of the results folder, without its ending, and what to make of it:

  <!-- report: dsv4_h200 latency, latency plot, host plot -->
  <!-- /report -->

  claims         every claim, with what was measured and whether it is met
  latency        medians of that time by variant and number of tokens; likewise any other time that
                 the records name, such as "host" or "back to back"
  latency plot   the same over that of the floor, an SVG beside the JSON; without a floor over eager
  host plot      any other time, in milliseconds
  start, losses  the two tables of bench_start.py

Above them stand the device, the commit and the command that made the file. What is slower than
eager, not met or left out is said where the rest is. A file that is not there leaves its place as
it is. A plot is drawn anew only where its figures, or how they are drawn, have changed: matplotlib
(the extra "bench") is needed for that alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, Record, Refused, say
from plots import Plot, Point

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
BEGIN = re.compile(r"^<!-- report: ", re.MULTILINE)
PLACE = re.compile(
    r"^(<!-- report: (\S+) (.+?) -->\n)(?:(?!<!-- report: ).)*?(<!-- /report -->)",
    re.MULTILINE | re.DOTALL,
)
IN_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
FLOORS = ("floor", "eager")  # what latencies of a plot are relative to: the first that there is
SAID = ("layers", "width", "experts", "dtype")  # params of all records that a heading names
MIB = 2**20


@dataclass
class Results:
    """What one benchmark has saved."""

    stem: str
    environment: dict[str, Any]
    records: list[Record]
    claims: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Results:
        """Those of a file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        records = [Record(**values) for values in content["records"]]
        more = {name: content[name] for name in ("claims", "notes") if name in content}
        return cls(path.stem, content["environment"], records, **more)

    @property
    def heading(self) -> str:
        """Where it was measured, of which commit and by which command."""
        e, params = self.environment, [r.params for r in self.records]
        on_cpu = any(str(p.get("device", "")).startswith("cpu") for p in params)
        device = e["cpu"] if on_cpu or not e["gpu"] else e["gpu"]
        commit, changes, _ = (e["commit"] or "unknown").partition("+changes")
        where = f"{device}, torch {e['torch']}, commit {commit[:7]}{changes and ' with changes'}"
        values = {name: {p[name] for p in params if name in p} for name in SAID}
        said = "".join(f", {name} {its.pop()}" for name, its in values.items() if len(its) == 1)
        return f"{where}, {e['date'][:10]}: `python benchmarks/{e['command']}`{said}."

    def by(self, second: str, **those: Any) -> dict[str, dict[Any, Record]]:
        """Records that are like ``those``, by variant and the param ``second``.

        Raises:
            Refused: there are none.
        """
        found: dict[str, dict[Any, Record]] = {}
        for r in self.records:
            its = {"name": r.name, **r.params}
            if second in its and those.items() <= its.items():
                found.setdefault(r.variant, {})[its[second]] = r
        if not found:
            what = ", ".join(f"{name} {value}" for name, value in those.items())
            raise Refused(f"{self.stem} has no {what} by {second}.")
        return found


# tables


def figure(x: float, digits: int = 3) -> str:
    """So many digits at least, never an exponent."""
    if isinstance(x, int) or x == 0 or not math.isfinite(x):
        return f"{x:,.0f}"
    return f"{x:,.{max(0, digits - 1 - math.floor(math.log10(abs(x))))}f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, the first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    cells = [[str(c).replace("|", "\\|") for c in row] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def claims(results: Results) -> str:
    """Every claim, and how many are met."""
    if not results.claims:
        raise Refused(f"{results.stem} has no claims.")
    met = {True: "yes", False: "NO", None: "not judged"}
    rows = [(c["claim"], figure(c["value"], 4), c["limit"], met[c["met"]]) for c in results.claims]
    judged = [c["met"] for c in results.claims if c["met"] is not None]
    count = f"Met: {judged.count(True)} of {len(judged)}." if judged else "None is judged."
    return f"{markdown(('claim', 'value', 'limit', 'met'), rows)}\n\n{count}"


def times(results: Results, kind: str) -> str:
    """Medians in milliseconds, and how many times as long eager takes."""
    found = results.by("tokens", time=kind)
    base = found.get("eager", {})
    sizes = sorted({tokens for each in found.values() for tokens in each})
    below = max(1 - r.p20 / r.p50 for each in found.values() for r in each.values())
    above = max(r.p80 / r.p50 - 1 for each in found.values() for r in each.values())
    slower = [
        f"{name} at {tokens:,}"
        for name, each in found.items()
        for tokens, r in sorted(each.items())
        if tokens in base and r.p50 > base[tokens].p50
    ]

    def cell(tokens: int, r: Record | None) -> str:
        if r is None:
            return "-"
        ratio = f" ({base[tokens].p50 / r.p50:.2f})" if tokens in base else ""
        return figure(r.p50 * IN_MS[r.unit]) + ratio

    rows = [(name, *(cell(n, each.get(n)) for n in sizes)) for name, each in found.items()]
    head = f"{kind}, ms" + " (eager / it)" * bool(base)
    said = f"p20 is at most {below:.0%} below a median, p80 {above:.0%} above."
    said += f" Slower than eager: {', '.join(slower) or 'none'}." * bool(base)
    return f"{markdown((head, *(f'{n:,} tokens' for n in sizes)), rows)}\n\n{said}"


def starts(results: Results) -> str:
    """What it took to record all sizes."""
    rows = []
    for name, r in results.by("kind", name="start").items():
        seconds = [f"{r[kind].p50:.2f}" for kind in ("all", "dynamo", "inner", "capture")]
        params, pool = r["all"].params, figure(r["pool"].p50 / MIB)
        its = params["layers"], params["sizes"], *seconds, figure(r["compilations"].p50), pool
        rows.append((name, *its))
    seconds = ["all s", "Dynamo s", "inner s", "capture s"]
    return markdown(("variant", "layers", "sizes", *seconds, "compilations", "pool MiB"), rows)


def losses(results: Results) -> str:
    """Where recording loses, and after how many replays it has paid."""
    rows = []
    for name, r in results.by("kind", name="losses").items():
        eager, replay, params = r["eager"].p50, r["replay"].p50, r["capture"].params
        after = params["pays_after"]
        pays = "never" if after is None else f"{after:,.0f} replays"
        us = f"{eager:,.0f}", f"{replay:,.0f}", f"{eager / replay:.2f}"
        rows.append((name, params["rows"], *us, f"{r['capture'].p50:.3f}", pays))
    heads = ("rows", "eager us", "replay us", "eager / replay", "capture s", "pays after")
    return markdown(("variant", *heads), rows)


TABLES: dict[str, Callable[[Results], str]] = {"claims": claims, "start": starts, "losses": losses}


# plots and pages


def plot_of(results: Results, kind: str, folder: Path) -> Plot:
    """Latency over that of the floor, any other time in milliseconds."""
    found, label = results.by("tokens", time=kind), f"{kind}, ms"
    floor = next((n for n in FLOORS if n in found and kind == "latency"), None)
    if floor:
        label = f"{kind} / {kind} of {floor}"
    lines: dict[str, list[Point]] = {}
    for name, each in found.items():
        for tokens, r in sorted(each.items()):
            if floor and tokens not in found[floor]:
                continue
            unit = 1 / found[floor][tokens].p50 if floor else IN_MS[r.unit]
            point = (tokens, r.p20 * unit, r.p50 * unit, r.p80 * unit)
            lines.setdefault(name, []).append(point)
    return Plot(folder / f"{results.stem}_{kind.replace(' ', '_')}.svg", label, lines)


def filled(page: Path, folder: Path, plots: list[Plot]) -> str:
    """The text of a page with its places filled; ``plots`` gets those that it shows."""

    def part(what: str, results: Results) -> str:
        if not what.endswith(" plot"):
            return TABLES[what](results) if what in TABLES else times(results, what)
        plots.append(plot := plot_of(results, what.removesuffix(" plot"), folder))
        link = Path(os.path.relpath(plot.path, page.parent)).as_posix()
        return f"![{plot.label}, by tokens; bands from p20 to p80]({link})"

    def place(found: re.Match[str]) -> str:
        begin, stem, what, end = found.groups()
        path = folder / f"{stem}.json"
        if not path.exists():
            say(f"{page.name}: {stem} stays as it is, there is no {path.name}")
            return found.group()
        results = Results.of(path)
        parts = [results.heading, *(part(each, results) for each in what.split(", "))]
        if results.notes:
            notes = "; ".join(f"{name}: {why.rstrip('.')}" for name, why in results.notes.items())
            parts.append(f"Left out: {notes}.")
        return begin + "\n\n".join(parts) + "\n" + end

    text = page.read_text(encoding="utf-8")
    if len(BEGIN.findall(text)) != len(PLACE.findall(text)):
        raise Refused(f"{page.name}: a place says not what belongs there, or has no end.")
    return PLACE.sub(place, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 1 refused or, with --check, not up to date."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("pages", type=Path, nargs="*", help="README.md and benchmarks/README.md")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON")
    options.add_argument("--check", action="store_true", help="write nothing, exit 1 for a change")
    args = options.parse_args(argv)
    plots: list[Plot] = []
    try:
        texts = {page: filled(page, args.results, plots) for page in args.pages or PAGES}
        stale = {plot.path: plot for plot in plots if not plot.drawn}
        changed = [page for page, text in texts.items() if text != page.read_text(encoding="utf-8")]
        for path in (*stale, *changed):
            say(f"{path.name} {'would change' if args.check else 'is written'}")
            if not args.check:
                stale[path].draw() if path in stale else path.write_text(texts[path], "utf-8")
    except Refused as reason:
        say(f"refused: {reason}")
        return 1
    return int(args.check and bool(stale or changed))


if __name__ == "__main__":
    sys.exit(main())
