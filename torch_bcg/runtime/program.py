"""A program: the steps of one graph for one key and one set of static addresses, ready to replay.

A step is a zero-argument callable, whatever it does. What differs from call to call goes through
``cells``, a list that is filled before the steps and put back after them, so nothing of a caller
outlives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bcg.counters import counters
from torch_bcg.graph.ir import Plan
from torch_bcg.graph.sizes import Geometry
from torch_bcg.runtime.statics import Overlaps, Statics
from torch_bcg.runtime.steps import Step


@dataclass(eq=False)
class Program:
    """Steps bound to memory.

    Attributes:
        plan: what it was built from.
        key: values of the plan's symbols.
        geometries: of the plan's values at that key.
        statics: the static tensors whose addresses it holds.
        overlaps: the check before a call, or None if nothing can go wrong.
        loads: (cell, place of the argument).
        steps: in order; the last ones make the outputs.
        cells, template: values of one call, and what is put back afterwards.
        result: the output leaves, from the cells.
        replays: calls so far.
        dead: freed, or a static tensor is gone; it is not replayed again.
        copied_bytes: bytes copied in, back, across cuts and out in one call.
        recorded_kernels: kernels of one call that recordings launch.
        bytes: memory of its slots, and what the pool grew by when it was recorded.
        owners: recordings and slots, kept alive.
    """

    plan: Plan
    key: tuple[int, ...]
    geometries: Mapping[str, Geometry]
    statics: Statics
    overlaps: Overlaps | None
    loads: list[tuple[int, int]]
    steps: list[Step]
    cells: list[Any]
    template: list[Any]
    result: Callable[[list[Any]], tuple[Any, ...]]
    copied_bytes: int
    recorded_kernels: int
    bytes: int
    owners: list[object]
    replays: int = 0
    dead: bool = False

    def replay(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """One call: copy in, steps, outputs. The caller has checked key, addresses and overlaps."""
        # Held here: what a marked function frees (it may call reset) lives until the call ends.
        cells, template, _owners = self.cells, self.template, self.owners
        try:
            for cell, place in self.loads:
                cells[cell] = args[place]
            for step in self.steps:
                step()
            self.replays += 1
            return self.result(cells)
        finally:
            cells[:] = template

    def geometry_of(self, argument: str) -> tuple[torch.Size, tuple[int, ...], torch.dtype] | None:
        """Shape, strides and dtype an argument was recorded with; None for a number."""
        value = self.plan.value(argument)
        if value.spec is None:
            return None
        size, stride, _ = self.geometries[argument]
        return torch.Size(size), stride, getattr(torch, value.spec.dtype)

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Lets go of recordings, slots and everything bound to them."""
        self.dead = True
        counters.pool_bytes -= self.bytes
        self.bytes = 0
        self.steps, self.cells, self.template, self.owners = [], [], [], []
