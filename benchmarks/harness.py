"""What every benchmark here shares: where it ran, how it times, prints and saves.

Times are host time from call to return, or to the end of the device's work where a benchmark asks
for that, with the device idle before each call. All variants are timed in one run, one call each in
turn: the order moves on by one every repeat and is reversed in every second one, so that no variant
always follows the same other. Where a benchmark says so, each has untimed calls first, since steps
of an engine follow each other: what comes after another variant finds nothing in the caches of the
host. Garbage collection is off meanwhile, and results are let go outside the timed span.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import torch_bcg
from torch_bcg.counters import Stats
from torch_bcg.graph.ir import Plan

ROOT = Path(__file__).resolve().parent.parent
Call = Callable[[Tensor], Any]


class Refused(Exception):  # noqa: N818  # no fault of the program: there is nothing to report
    """A benchmark that must not report a number: the message says why."""


# where it ran


def environment() -> dict[str, Any]:
    """Versions, hardware, date, command and commit: what a number is worth nothing without."""
    gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "torch_bcg": torch_bcg.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if gpu else None,
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        # Where files lie on this machine is nobody's business.
        "command": shlex.join(Path(a).name if "/" in a else a for a in sys.argv),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit, ``+changes`` if the tree has some; ``GIT_SHA`` where there is no repository."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_SHA")


# options, exit status and progress


def parser(doc: str, only: bool = True, device: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; ``doc`` is the docstring of the module."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if only:
        made.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for the JSON")
    if device:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        made.add_argument("--device", default=default, help="cuda where there is one, else cpu")
    return made


def status(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Runs a benchmark. Exit status: 0 done; 1 refused, with the reason on stderr."""
    try:
        with torch.no_grad():
            run(args)
    except Refused as reason:
        say(f"refused: {reason}")
        return 1
    return 0


def check_names(chosen: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """The names to run, in the order of ``known``; all without ``--only``."""
    known = list(known)
    unknown = sorted(set(chosen or ()) - set(known))
    if unknown:
        raise Refused(f"--only: no such name: {', '.join(unknown)}. There are {', '.join(known)}.")
    return [name for name in known if chosen is None or name in chosen]


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr: what it gives is called once a piece, with what comes next.

    It is drawn by those calls alone: a thread that draws would take the interpreter from whatever
    is being timed.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False
    ) as bar:
        task = bar.add_task(title, total=total)
        drawn = 0.0

        def step(what: str = "") -> None:
            nonlocal drawn
            bar.update(task, advance=1, description=f"{title} {what}".rstrip())
            if time.monotonic() - drawn > 0.2 or what:
                bar.refresh()
                drawn = time.monotonic()

        yield step


def say(text: str) -> None:
    """One line about what happens now, on stderr."""
    print(text, file=sys.stderr, flush=True)


# time


def wait_idle(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fed(call: Call, inputs: Iterable[Tensor]) -> Call:
    """``call`` with inputs of its own, one after the other, whatever it is given."""
    given = itertools.cycle(inputs)
    return lambda x: call(next(given))


def noting(call: Call, host: list[float], times: int = 1) -> Call:
    """So many calls back to back, and a note of the microseconds until they return."""

    def noted(x: Tensor) -> Any:
        start = time.perf_counter_ns()
        for _ in range(times):
            result = call(x)
        host.append((time.perf_counter_ns() - start) / 1000)
        return result

    return noted


def measure(
    calls: Mapping[str, Call],
    inputs: Sequence[Tensor],
    repeats: int,
    device: torch.device,
    wall: bool = False,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Microseconds from call to return, ``repeats`` for each of ``calls``, all in turn.

    With ``wall`` a call ends when the device has done its work. So many ``untimed`` calls come
    before each timed one.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        with progress("timing", repeats) as step:
            for i in range(repeats):
                x = inputs[i % len(inputs)]
                shift = i % len(names)
                order = names[shift:] + names[:shift]
                for name in reversed(order) if i % 2 else order:
                    call = calls[name]
                    for _ in range(untimed):
                        call(x)
                    wait_idle(device)
                    start = time.perf_counter_ns()
                    result = call(x)
                    if wall:
                        wait_idle(device)
                    end = time.perf_counter_ns()
                    samples[name].append((end - start) / 1000)
                    del result
                step("")
    finally:
        gc.enable()
    return samples


# what happened meanwhile


def replayed(before: Stats, after: Stats) -> bool:
    """Whether every graph was replayed between the two and nothing was run another way."""
    others = ("probes", "warming", "captures", "eager_calls")
    same = all(getattr(before, name) == getattr(after, name) for name in others)
    return same and after.replays > before.replays


def plans_of(compiled: Call) -> tuple[Plan, ...]:
    """The plans of everything that was compiled for a function."""
    explained: Any = torch_bcg.explain(compiled)
    plans: tuple[Plan, ...] = explained.plans
    return plans


# results


@dataclass
class Record:
    """One figure: the median of ``n`` samples between their 20th and 80th percentile."""

    name: str
    variant: str
    unit: str
    p20: float
    p50: float
    p80: float
    n: int
    params: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, variant: str, unit: str, samples: Sequence[float], **params: Any
    ) -> Record:
        """The record of ``samples``; ``params`` is whatever else tells this one from others."""
        p20 = p80 = samples[0]
        if len(samples) > 1:
            _, p20, *_, p80, _ = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(name, variant, unit, p20, statistics.median(samples), p80, len(samples), params)


@dataclass(frozen=True)
class Claim:
    """A figure beside its limit, and whether that is met: None where it is not judged."""

    claim: str
    value: float
    limit: str
    met: bool | None

    @classmethod
    def at_most(cls, claim: str, value: float, limit: float) -> Claim:
        """Met by a value that is no larger."""
        return cls(claim, value, f"at most {limit}", value <= limit)

    @classmethod
    def at_least(cls, claim: str, value: float, limit: float) -> Claim:
        """Met by a value that is no smaller."""
        return cls(claim, value, f"at least {limit}", value >= limit)

    def on(self, device: torch.device) -> Claim:
        """The same on a GPU; on a CPU it is not judged."""
        return self if device.type == "cuda" else replace(self, met=None)

    def __str__(self) -> str:
        verdict = {True: "yes", False: "NO", None: "not judged"}[self.met]
        return f"{self.claim} = {self.value:.4g}, {self.limit}: {verdict}"


def save(out: Path | None, name: str, records: Iterable[Record], **more: Any) -> None:
    """Writes ``out/name.json``: the environment, the records, and what else is given."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "records": list(records), **more}
    path = out / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, default=asdict) + "\n", encoding="utf-8")
    say(f"wrote {path}")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    text = [[f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return "\n".join(
        "  ".join(
            [
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(r, widths, strict=True))
            ]
        )
        for r in text
    )
