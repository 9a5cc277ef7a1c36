"""The steps of a program: zero-argument callables made once, each for one decision of the plan.

All take what they need when they are made. ``cells`` is the program's list of per-call values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bcg.graph import modes
from torch_bcg.graph.sizes import Geometry
from torch_bcg.runtime import memory
from torch_bcg.runtime.recorders import put
from torch_bcg.runtime.slots import Slots

_HALF = 1 << 31
_LARGE = 3e38  # a float32 may be infinite from here on
Cells = list[Any]
Step = Callable[[], object]


def copy_in(cells: Cells, slots: Sequence[Tensor], places: Sequence[int]) -> Step:
    """Copies arguments of one dtype into their slots; one that is the slot already is skipped."""
    slots = list(slots)
    members = list(zip([s.data_ptr() for s in slots], slots, places, strict=True))
    if len(slots) == 1:
        ((pointer, slot, place),) = members

        def copy_one() -> None:
            source = cells[place]
            if source.data_ptr() != pointer:
                slot.copy_(source)

        return copy_one

    def copy_many() -> None:
        sources = [cells[p] for p in places]
        if all(s.data_ptr() != m[0] for s, m in zip(sources, members, strict=True)):
            torch._foreach_copy_(slots, sources)
            return
        moved = [(m[1], s) for s, m in zip(sources, members, strict=True) if s.data_ptr() != m[0]]
        if moved:
            torch._foreach_copy_([slot for slot, _ in moved], [source for _, source in moved])

    return copy_many


def copy_expanded(cells: Cells, slot: Tensor, place: int) -> Step:
    """Copies an argument on its own, each address of expanded dims once."""
    narrowed = memory.once(slot)

    def step() -> None:
        narrowed(slot).copy_(narrowed(cells[place]))

    return step


def copy_back(cells: Cells, slot: Tensor, place: int) -> Step:
    """Copies a slot that was written to the caller's tensor."""

    def step() -> None:
        cells[place].copy_(slot)

    return step


def fill_tails(slots: Slots, fills: Sequence[Step]) -> Step:
    """Fills padded rows that nobody writes, unless the last call was of this very size."""
    mine = object()

    def step() -> None:
        if slots.tails is not mine or slots.lent:
            for fill in fills:
                fill()
            slots.tails = mine

    return step


def fill_numbers(
    cells: Cells,
    forward: Callable[..., Sequence[Any]],
    loads: Sequence[int],
    fills: Sequence[tuple[Tensor, int]],
) -> Step:
    """Puts this call's numbers into their 0-dim slots; a 0-dim CPU tensor counts as a number."""
    dtypes = [slot.dtype for slot, _ in fills]

    def step() -> None:
        numbers = forward(*[cells[i] for i in loads])
        for (slot, i), dtype in zip(fills, dtypes, strict=True):
            slot.fill_(as_taken(numbers[i], dtype))

    return step


def as_taken(number: Any, dtype: torch.dtype) -> Any:
    """A number as a kernel takes it that computes in ``dtype``, which may be too small for it."""
    if dtype is torch.int32 and isinstance(number, int) and not -_HALF <= number < _HALF:
        return (number + _HALF) % (2 * _HALF) - _HALF
    if dtype is torch.float32 and isinstance(number, (int, float)) and abs(number) > _LARGE:
        return ctypes.c_float(number).value
    return number


def eager(
    cells: Cells,
    forward: Callable[..., Sequence[Any]],
    bound: Sequence[Any],
    loads: Sequence[int],
    stores: Sequence[tuple[int, int]],
    bridges: Sequence[tuple[int, Tensor, str, str]],
) -> Step:
    """Runs an eager segment.

    Args:
        cells: values of one call.
        forward: the code, from operands to results.
        bound: its first operands, with a fixed place.
        loads: cells of the other operands.
        stores: (result, cell) of what the call keeps.
        bridges: (result, slot, node, segment) of what recorded segments read.
    """
    bound = tuple(bound)
    if not loads and not stores and not bridges:
        return lambda: forward(*bound)
    places = [(i, s, memory.once(s), n, w) for i, s, n, w in bridges]

    def step() -> None:
        results = forward(*bound, *[cells[i] for i in loads])
        for i, cell in stores:
            cells[cell] = results[i]
        for i, slot, once, name, segment in places:
            put(results[i], slot, once, name, segment)

    return step


def with_modes(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves no mode behind, even where ``forward`` raises between entering and leaving one."""

    def guarded(*args: Any) -> Any:
        with modes.preserved():
            return forward(*args)

    return guarded


def hand_out(
    cells: Cells,
    make: Callable[[], Tensor],
    parts: Sequence[tuple[int, Callable[[Tensor], Tensor]]],
) -> Step:
    """Hands one storage of outputs out of program memory; ``parts``: (cell, tensor from copy)."""

    def step() -> None:
        copy = make()
        for cell, part in parts:
            cells[cell] = part(copy)

    return step


def view_out(cells: Cells, cell: int, base: int, dtype: str, geometry: Geometry) -> Step:
    """An output that is a view of the caller's own tensor."""

    def step() -> None:
        cells[cell] = memory.moved_view(cells[base], dtype, geometry)

    return step


def remake_out(
    cells: Cells, forward: Callable[..., Sequence[Any]], loads: Sequence[int], stores: Sequence[int]
) -> Step:
    """Outputs remade from values of this call: arguments themselves, their views, numbers."""

    def step() -> None:
        results = forward(*[cells[i] for i in loads])
        for cell, result in zip(stores, results, strict=True):
            cells[cell] = result

    return step
