"""A program: the steps of one graph for one key and one set of static addresses, ready to replay.

A step is a zero-argument callable, whatever it does. What differs from call to call goes through
``cells``, a list that is filled before the steps and put back after them, so nothing of a caller
outlives the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_bcg.graph.ir import Plan
from torch_bcg.runtime.statics import Overlaps, Statics
from torch_bcg.runtime.steps import Step


@dataclass(slots=True)
class Program:
    """Steps bound to memory.

    Attributes:
        plan: what it was built from.
        key: values of the plan's symbols.
        statics: the static tensors whose addresses it holds.
        overlaps: the check before a call, or None if nothing can go wrong.
        loads: (cell, place of the argument).
        steps: in order; the last ones make the outputs.
        cells, template: values of one call, and what is put back afterwards.
        result: the output leaves, from the cells.
        replays: calls so far.
        copied_bytes: bytes copied in, back, across cuts and out in one call.
        bytes: memory the program owns outside the pool's recordings.
        owners: recordings and slots, kept alive.
    """

    plan: Plan
    key: tuple[int, ...]
    statics: Statics
    overlaps: Overlaps | None
    loads: list[tuple[int, int]]
    steps: list[Step]
    cells: list[Any]
    template: list[Any]
    result: Callable[[list[Any]], tuple[Any, ...]]
    copied_bytes: int
    bytes: int
    owners: list[object]
    replays: int = 0
    dead: bool = False

    def replay(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """One call: copy in, steps, outputs. The caller has checked key, addresses and overlaps."""
        cells = self.cells
        try:
            for cell, place in self.loads:
                cells[cell] = args[place]
            for step in self.steps:
                step()
            self.replays += 1
            return self.result(cells)
        finally:
            cells[:] = self.template

    def free(self) -> None:
        """Lets go of recordings, slots and everything bound to them."""
        self.dead = True
        self.steps.clear()
        self.cells.clear()
        self.template.clear()
        self.owners.clear()
