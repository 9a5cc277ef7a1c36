"""Alike neighbours of a plan, found: forty layers that look alike are shown once and counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch_bcg.graph.amounts import bytes_of
from torch_bcg.graph.flow import Flow
from torch_bcg.graph.ir import EagerSegment, Plan, Segment

_LONGEST = 4
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours shown once.

    Attributes:
        shown: segments in full.
        again: segments after them that repeat ``shown`` but for names, a whole number of times.
    """

    shown: tuple[Segment, ...]
    again: tuple[Segment, ...] = ()

    @property
    def times(self) -> int:
        """How often ``shown`` comes again."""
        return len(self.again) // len(self.shown)

    def __str__(self) -> str:
        """Which segments come again, e.g. ``segments 3..84: 41 times segments 1..2``."""
        first, last = self.again[0].index, self.again[-1].index
        one, other = self.shown[0].index, self.shown[-1].index
        above = f"segment {one}" if one == other else f"segments {one}..{other}"
        ends = (self.again[: len(self.shown)], self.again[-len(self.shown) :])
        from_, to = (max((s.module for s in end), key=len) for end in ends)
        place = f", {from_} to {to}" if from_ != to else ""
        return f"segments {first}..{last}: {self.times} times {above}, names apart{place}"


def folded(plan: Plan) -> list[Run]:
    """The segments of a plan in order; neighbours that come three times or more are one run."""
    flow = plan.flow
    shapes = [_shape(s, flow) for s in plan.segments]
    runs: list[Run] = []
    at = 0
    while at < len(shapes):
        length, times = _repeats(shapes, at)
        end = at + length
        runs.append(Run(plan.segments[at:end], plan.segments[end : end + length * (times - 1)]))
        at += length * times
    return runs


def _repeats(shapes: Sequence[object], at: int) -> tuple[int, int]:
    """(length, times) of what repeats at a place; the one that covers most, then the shortest."""
    best = (1, 1)
    for length in range(1, _LONGEST + 1):
        times = 1
        first = shapes[at : at + length]
        while shapes[at + length * times : at + length * (times + 1)] == first:
            times += 1
        if times >= _FEWEST and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _shape(segment: Segment, flow: Flow) -> object:
    """All that reports show of a segment, but for names of nodes and places."""
    reasons = segment.reasons if isinstance(segment, EagerSegment) else ()
    crossing = flow.crossing(segment.index)
    return (
        segment.kind,
        segment.kernels,
        re.sub(r"\d+", "*", segment.module),
        tuple((r.kind, r.detail, r.where) for r in reasons),
        tuple(str(v.spec) for v in crossing),
        str(bytes_of(crossing)),
        tuple(str(flow.values[n].spec) for n in segment.outputs),
        len(segment.copy_back),
        len(segment.number_slots),
    )
