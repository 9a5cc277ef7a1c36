"""``demo``: one small model, every call compared with eager, and what that says in numbers.

`run` works and returns plain data, which `commands.tables` draws. Time is measured from call to
return, the device idle before and after; a call counts as replayed if a replay was counted.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import torch_bcg
from torch_bcg.commands.cases import Call, Thunk, case_of
from torch_bcg.commands.results import TOLERANCE, Asked, Result, Row
from torch_bcg.commands.tables import bar
from torch_bcg.counters import counters, stats
from torch_bcg.programs import graphs_of


def run(asked: Asked, progress: bool = False) -> Result:
    """Builds, compiles, calls and compares.

    Args:
        asked: what to do.
        progress: whether to draw a progress bar on stderr.

    Raises:
        MisuseError: the model cannot be built here.
    """
    case = case_of(asked)
    counters.clear()  # the process is ours: what is counted is what this demo did
    dump = torch_bcg.dump_to(asked.dump) if asked.dump else contextlib.nullcontext()
    found: dict[int, list[_Compared]] = {}
    kinds: Counter[str] = Counter()
    first_ms: float | None = None
    total = len(asked.lengths) * asked.calls
    with torch.inference_mode(), dump, bar(total, progress) as advance:
        for call in case.calls:
            compared = _compared(call, asked.device)
            first_ms = compared.taken_ms if first_ms is None else first_ms
            found.setdefault(call.size, []).append(compared)
            kinds.update([call.kind] if call.kind else [])
            advance()
    return Result(
        asked=asked,
        title=case.title,
        marked=case.marked,
        sizes=case.sizes,
        kinds=kinds,
        first_ms=first_ms or 0.0,
        plans=tuple(g.plan for g in sorted(graphs_of(case.compiled), key=lambda g: g.number)),
        rows=tuple(_row(size, found[size]) for size in sorted(found)),
        counted=stats(),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """One call, eager and compiled."""

    eager_ms: float
    taken_ms: float
    replayed: bool
    difference: float
    close: bool
    bitwise: bool


def _compared(call: Call, device: str) -> _Compared:
    before = counters.replays
    expected, eager_ms = _timed(call.eager, device)
    found, taken_ms = _timed(call.compiled, device)
    return _Compared(
        eager_ms,
        taken_ms,
        counters.replays > before,
        (found - expected).abs().max().item(),
        torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE),
        torch.equal(found, expected),
    )


def _row(size: int, found: Sequence[_Compared]) -> Row:
    replayed = [c for c in found if c.replayed]
    return Row(
        size,
        len(found),
        len(replayed),
        found[0].taken_ms,
        statistics.median(c.eager_ms for c in replayed) if replayed else None,
        statistics.median(c.taken_ms for c in replayed) if replayed else None,
        max(c.difference for c in found),
        all(c.close for c in found),
        all(c.bitwise for c in found),
    )


def _timed(call: Thunk, device: str) -> tuple[Tensor, float]:
    """Logits, and milliseconds from call to the end of the device's work."""
    _wait(device)
    started = time.perf_counter()
    logits = call()
    _wait(device)
    return logits, 1e3 * (time.perf_counter() - started)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
