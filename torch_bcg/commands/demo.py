"""``demo``: one small model, every call compared with eager, and what that says in numbers.

`run` works and returns plain data, which `commands.tables` draws. Time is measured from call to
return, the device idle before and after; a call counts as replayed if a replay was counted.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_bcg
from torch_bcg.commands.models import VOCABULARY, build
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
    model, attention = build(asked.model, asked.layers, asked.device, asked.seed)
    options: dict[str, Any] = {"mark": [attention]}
    compiled = torch.compile(model, backend="bcg", options=options)
    counters.clear()  # the process is ours: what is counted is what this demo did
    dump = torch_bcg.dump_to(asked.dump) if asked.dump else contextlib.nullcontext()
    total = len(asked.lengths) * asked.calls
    with torch.inference_mode(), dump, bar(total, progress) as advance:
        rows = tuple(_row(length, asked, model, compiled, advance) for length in asked.lengths)
    plans = tuple(g.plan for g in sorted(graphs_of(compiled), key=lambda g: g.number))
    return Result(asked, attention.__name__, plans, rows, stats())


def _row(
    length: int,
    asked: Asked,
    model: Callable[..., Any],
    compiled: Callable[..., Any],
    advance: Callable[[], None],
) -> Row:
    eager_ms: list[float] = []
    replayed_ms: list[float] = []
    taken_ms: list[float] = []
    differences: list[float] = []
    close = bitwise = True
    for _ in range(asked.calls):
        ids = _ids(length, asked.device)
        before = counters.replays
        expected, eager = _timed(model, ids)
        found, taken = _timed(compiled, ids)
        if counters.replays > before:
            eager_ms.append(eager)
            replayed_ms.append(taken)
        taken_ms.append(taken)
        differences.append((found - expected).abs().max().item())
        close = close and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        bitwise = bitwise and torch.equal(found, expected)
        advance()
    return Row(
        length,
        asked.calls,
        len(replayed_ms),
        taken_ms[0],
        statistics.median(eager_ms) if eager_ms else None,
        statistics.median(replayed_ms) if replayed_ms else None,
        max(differences),
        close,
        bitwise,
    )


def _timed(fn: Callable[..., Any], ids: Tensor) -> tuple[Tensor, float]:
    """Logits, and milliseconds from call to the end of the device's work."""
    _wait(ids.device)
    started = time.perf_counter()
    logits = fn(ids).logits
    _wait(ids.device)
    return logits, 1e3 * (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _ids(length: int, device: str) -> Tensor:
    ids = torch.randint(3, VOCABULARY, (1, length), device=device)
    # One graph for all lengths from the first call on; only sizes are symbols then, and no number.
    torch._dynamo.maybe_mark_dynamic(ids, 1)
    return ids
