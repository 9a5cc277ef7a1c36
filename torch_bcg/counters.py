"""What happened, counted: one process-wide object that the runtime adds to and nobody decides by.

``counters`` is what the runtime writes; ``stats()`` is what users read, a frozen copy. Counting
never changes what a call does, and no field is ever derived from a guess: a share that cannot be
measured is not here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Counters", "Coverage", "Stats", "counters", "stats"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the work was replayed, as shares from 0 to 1 (0 where nothing ran yet).

    Attributes:
        calls: Replays among replays and eager calls. Probe and warming calls are in neither.
        rows: Rows replayed among the rows of those calls, of graphs with a padded size.
        kernels: Kernels replayed from recordings among all kernels of those calls.
    """

    calls: float
    rows: float
    kernels: float


@dataclass(frozen=True, slots=True)
class Stats:
    """What happened since the process began or ``counters.clear()``.

    A kernel is a dispatched operation on tensors that is no view and no allocation.

    Attributes:
        probes: Calls run node by node to find out what cannot be recorded.
        warming: Calls run for real because their shape or static tensors were new, or for a trial.
        captures: Programs recorded.
        replays: Calls answered by a program.
        eager_calls: Calls whose segments ran unrecorded, by the text of the reason.
        kernels: Kernels of replayed calls and eager calls, recorded or not.
        recorded_kernels: Those of ``kernels`` that a recording replayed.
        copied_bytes: Bytes copied in, across cuts, back and out by replays; arguments that are the
            slots themselves are counted as well.
        rows: Rows of replayed calls and eager calls, of graphs with a padded size.
        replayed_rows: Those of ``rows`` that a program replayed.
        pad_rows: Rows replayed only to fill a padded size.
        pool_bytes: Bytes that slots and recordings hold now.
        inner_compilations: Segments given to the compiler of ``inner``; those alike count once.
        inner_seconds: What that took.
        unfused: Recorded segments that ``inner`` could not compile, by the text of the reason.
        coverage: The shares that follow from these.
    """

    probes: int
    warming: int
    captures: int
    replays: int
    eager_calls: Mapping[str, int]
    kernels: int
    recorded_kernels: int
    copied_bytes: int
    rows: int
    replayed_rows: int
    pad_rows: int
    pool_bytes: int
    inner_compilations: int
    inner_seconds: float
    unfused: Mapping[str, int]
    coverage: Coverage

    def json(self) -> str:
        """The same as one JSON object, fields in the order above."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        """One table: names to the left, figures to the right, reasons under what they explain."""
        rows: list[tuple[str, str]] = []
        for name, value in asdict(self).items():
            if name in ("eager_calls", "unfused"):
                rows.append((name, f"{sum(value.values()):,}"))
                rows += [(f"  {why}", f"{n:,}") for why, n in sorted(value.items())]
            elif name == "coverage":
                rows += [(f"coverage of {what}", f"{share:.1%}") for what, share in value.items()]
            else:
                rows.append((name, f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"))
        left = max(len(name) for name, _ in rows)
        right = max(len(figure) for _, figure in rows)
        return "\n".join(f"{name:<{left}}  {figure:>{right}}" for name, figure in rows)


@dataclass(slots=True)
class Counters:
    """The figures of ``Stats``, while they grow. Only the runtime adds to them."""

    probes: int = 0
    warming: int = 0
    captures: int = 0
    replays: int = 0
    eager_calls: dict[str, int] = field(default_factory=dict)
    kernels: int = 0
    recorded_kernels: int = 0
    copied_bytes: int = 0
    rows: int = 0
    replayed_rows: int = 0
    pad_rows: int = 0
    pool_bytes: int = 0
    inner_compilations: int = 0
    inner_seconds: float = 0.0
    unfused: dict[str, int] = field(default_factory=dict)

    def eager_call(self, reason: str) -> None:
        """Count one eager call under the text of its reason."""
        self.eager_calls[reason] = self.eager_calls.get(reason, 0) + 1

    def clear(self) -> None:
        """Back to zero, but for ``pool_bytes``: memory held now is held after a clear as well."""
        held = self.pool_bytes
        self.__init__(pool_bytes=held)  # type: ignore[misc]

    @contextmanager
    def expect(self, **deltas: int | Mapping[str, int]) -> Iterator[None]:
        """Assert by how much the named counters grow inside the ``with``; for tests.

        ``eager_calls`` takes a number (the sum over reasons) or a mapping from reason to number.
        Counters not named may do as they like.

        Raises:
            AssertionError: Some grew by another number; the message names each of them.
        """
        unknown = sorted(deltas.keys() - {f.name for f in fields(self)})
        if unknown:
            raise TypeError(f"no such counter: {', '.join(unknown)}")
        before = _snapshot(self)
        yield
        after = _snapshot(self)
        wrong = [
            f"{name}: expected {want}, found {got}"
            for name, want in deltas.items()
            if (got := _grown(before[name], after[name], by_reason=isinstance(want, Mapping)))
            != want
        ]
        if wrong:
            raise AssertionError("counters grew otherwise: " + "; ".join(wrong))


counters = Counters()


def stats() -> Stats:
    """A frozen copy of what was counted so far, over all compiled functions of the process.

    Calls are whole calls of a compiled graph, kernels are dispatched operations that are no view
    and no allocation, bytes are bytes, rows are rows of the padded dimension, shares go from 0 to
    1. ``Stats`` says what each field holds.

    Returns:
        The copy; it does not change afterwards. ``print`` shows a table, ``.json()`` text for
        tools.
    """
    figures = _snapshot(counters)
    calls = counters.replays + sum(counters.eager_calls.values())
    coverage = Coverage(
        calls=_share(counters.replays, calls),
        rows=_share(counters.replayed_rows, counters.rows),
        kernels=_share(counters.recorded_kernels, counters.kernels),
    )
    return Stats(**figures, coverage=coverage)


def _snapshot(source: Counters) -> dict[str, Any]:
    return asdict(source)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _grown(before: Any, after: Any, *, by_reason: bool) -> Any:
    if not isinstance(before, dict):
        return after - before
    more = {why: n - before.get(why, 0) for why, n in after.items() if n != before.get(why, 0)}
    return more if by_reason else sum(more.values())
