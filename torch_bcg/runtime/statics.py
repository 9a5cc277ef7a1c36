"""Tensors at their own addresses: the set a program was recorded with, and what may overlap it."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bcg.graph.ir import GraphSegment, Plan, Value
from torch_bcg.graph.sizes import Geometry
from torch_bcg.runtime import memory
from torch_bcg.runtime.memory import Range

# Compares addresses in C++; builds without CUDA do not have it.
_in_cpp: Callable[..., bool] | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def same_addresses(args: Sequence[Any], pointers: list[int | None], indices: list[int]) -> bool:
    """Whether the tensors at ``indices`` of ``args`` lie at the ``pointers`` of those places."""
    if _in_cpp is not None and indices:
        given = args if isinstance(args, list) else list(args)
        return bool(_in_cpp(given, pointers, indices))
    return all(args[i].data_ptr() == pointers[i] for i in indices)


@dataclass(slots=True)
class Statics:
    """The static tensors a program was recorded with.

    Attributes:
        names: their names, for messages.
        places: their places among the arguments.
        found_at: their addresses; of a wrapper subclass, those of its inner tensors.
        objects: weak references; a program dies with any of its tensors.
        indices: places of the plain ones.
        early: of these, those to compare before anything of a call runs: what the opening reads;
            without an opening all of them.
        late: the others, to compare once the opening runs.
        pointers: by place, the addresses of the plain ones.
        wrapped: (place, addresses of the inner tensors) of wrapper subclasses.
        own: (name, tensor, addresses) of those that the graph itself holds, which are no arguments.
    """

    names: list[str]
    places: list[int]
    found_at: list[tuple[int, ...]]
    objects: list[weakref.ref[Tensor]]
    indices: list[int]
    early: list[int]
    late: list[int]
    pointers: list[int | None]
    wrapped: list[tuple[int, tuple[int, ...]]]
    own: list[tuple[str, Tensor, tuple[int, ...]]]

    def match(self, args: Sequence[Any]) -> bool:
        """Whether ``args`` has the same memory in the same places."""
        return self.match_early(args) and self.match_late(args)

    def match_early(self, args: Sequence[Any]) -> bool:
        """Whether that is so of all but ``late``."""
        for place, inner in self.wrapped:
            if memory.addresses(args[place]) != inner:
                return False
        for _, tensor, found_at in self.own:
            if memory.addresses(tensor) != found_at:
                return False
        return same_addresses(args, self.pointers, self.early)

    def match_late(self, args: Sequence[Any]) -> bool:
        """Whether that is so of ``late``."""
        return same_addresses(args, self.pointers, self.late)

    def match_first(self, args: Sequence[Any]) -> bool:
        """Whether that is so of the first tensor: it tells two sets apart that nobody moves."""
        return same_addresses(args, self.pointers, self.indices[:1])

    def watch(self, died: Callable[[object], None]) -> None:
        """Calls ``died`` when a tensor of the set is garbage collected."""
        alive = [ref() for ref in self.objects]
        self.objects = [weakref.ref(t, died) for t in alive if t is not None]

    def dead(self) -> bool:
        """Whether a tensor of the set is gone."""
        return any(ref() is None for ref in self.objects)

    def moved(self, args: Sequence[Any]) -> list[str]:
        """Names of tensors that ``args`` has elsewhere, if it shares any tensor with this set.

        A set with nothing in common is another module's, not this one's moved; so is a tensor that
        is still there beside the one in its place, of a module that shares others with this one.
        """
        own = [name for name, tensor, found_at in self.own if memory.addresses(tensor) != found_at]
        old = [ref() for ref in self.objects]
        new = [args[i] for i in self.places]
        if not any(a is b for a, b in zip(old, new, strict=True)):
            return own
        return own + [
            name
            for name, a, b, found_at in zip(self.names, old, new, self.found_at, strict=True)
            if (a is None or a is b) and memory.addresses(b) != found_at
        ]


@dataclass(slots=True)
class Overlaps:
    """Finds arguments whose memory overlaps in a way that slots would hide.

    What lies at its own address (static tensors, arguments passed on) behaves as in eager. Only a
    pair in which one is copied and one is written can go wrong. Of what a number is read from, the
    number is a copy.
    """

    moving: list[tuple[int, int, bool, bool]]  # place, bytes (-1: not of the key), copied, written
    static: list[Range]
    static_written: list[Range]

    def found(self, args: Sequence[Any]) -> tuple[int, int] | None:
        """The places of an overlapping pair (-1: a static tensor), or None."""
        ranges: list[tuple[int, int, int, bool, bool]] = []
        for i, size, copied, written in self.moving:
            low = args[i].data_ptr()
            high = low + (memory.extent(args[i]) if size < 0 else size)
            if copied and _meets(self.static if written else self.static_written, low, high):
                return i, -1
            for j, low2, high2, copied2, written2 in ranges:
                if low < high2 and low2 < high and (copied or copied2) and (written or written2):
                    return j, i
            ranges.append((i, low, high, copied, written))
        return None


def _meets(ranges: list[Range], low: int, high: int) -> bool:
    i = bisect_right(ranges, (low, low))
    before = i > 0 and ranges[i - 1][1] > low
    return before or (i < len(ranges) and ranges[i][0] < high)


def statics_of(
    plan: Plan,
    args: Sequence[Any],
    attribute: Callable[[str], Tensor],
    opening: GraphSegment | None,
) -> Statics:
    """The static tensors among ``args``, and those that the graph holds.

    Args:
        plan: names them.
        args: of a call.
        attribute: gives a tensor of the graph's by name.
        opening: the segment that may run before static tensors that it does not read are compared;
            None: all are compared first.
    """
    place = {name: i for i, name in enumerate(plan.arguments)}
    values = [v for v in plan.values if v.home == "static" and v.name in place]
    names = [v.name for v in values]
    plain = [place[v.name] for v in values if v.spec is not None]
    early = plain
    if opening is not None:
        read = {v.storage for v in plan.values if v.name in opening.reads}
        early = [place[v.name] for v in values if v.storage in read and v.spec is not None]
        early = early or plain[:1]  # without any, two sets would not be told apart
    found_at = [memory.addresses(args[place[n]]) for n in names]
    others = [v.name for v in plan.values if v.home == "static" and v.name not in place]
    own = [(n, x := attribute(n), memory.addresses(x)) for n in others]
    return Statics(
        names,
        [place[n] for n in names],
        found_at,
        [weakref.ref(args[place[n]]) for n in names],
        plain,
        early,
        [i for i in plain if i not in early],
        [x.data_ptr() if i in plain else None for i, x in enumerate(args)],
        [(place[v.name], at) for v, at in zip(values, found_at, strict=True) if v.spec is None],
        own,
    )


def overlaps_of(
    plan: Plan, geometries: Mapping[str, Geometry], static: Mapping[str, Any]
) -> Overlaps | None:
    """The check for calls of one size, or None where nothing can go wrong.

    Args:
        plan: says what is copied and what is written.
        geometries: of its values in such a call.
        static: the static tensors by name.
    """
    place = {name: i for i, name in enumerate(plan.arguments)}
    known = [v for v in plan.values if v.spec is not None]
    fixed = [v for v in known if v.home == "static"]
    given = [v for v in known if v.home in ("slot", "reference")]
    where = {v.spec.device for v in (*given, *fixed) if v.written and v.spec is not None}
    counted = [v.name for v in (*given, *fixed) if v.counted and v.spec and v.spec.device in where]
    moving = given + [v for v in fixed if v.name in counted]
    copied = {v.name for v in given if v.home == "slot"}.union(counted)
    if not where or not copied:
        return None

    def ranges(values: Sequence[Value]) -> list[Range]:
        starts = [(static[v.name].data_ptr(), memory.extent(static[v.name])) for v in values]
        return memory.merged([(low, low + size) for low, size in starts])

    def extent(v: Value) -> int:
        assert v.spec is not None
        itemsize: int = getattr(torch, v.spec.dtype).itemsize
        if v.name not in geometries:
            return -1
        return memory.reach(*geometries[v.name][:2]) * itemsize

    return Overlaps(
        [(place[v.name], extent(v), v.name in copied, v.written) for v in moving],
        ranges(fixed),
        ranges([v for v in fixed if v.written]),
    )
