"""A program: the steps of one graph for one key and one set of static addresses, ready to replay.

A step is a zero-argument callable, whatever it does. What differs from call to call goes through
``cells``, a list that is filled before the steps and put back after them, so nothing of a caller
outlives the call. The recordings run at the sizes of the program's key; the steps around them are
bound once for each size that a call may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torch_bcg.counters import counters
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import Plan
from torch_bcg.runtime.calls import Bound
from torch_bcg.runtime.device import Pool
from torch_bcg.runtime.statics import Statics
from torch_bcg.runtime.workspace import Workspace

# Sizes of calls that the steps of one program are kept for.
MOST_BOUND = 256


class Misfit(Exception):  # noqa: N818 - it ends a replay, it is no error of anybody
    """The call is not this program's: a late static tensor lies elsewhere, is another, or gone.

    At most the opening ran.
    """


@dataclass(eq=False)
class Program:
    """Recordings bound to memory.

    Attributes:
        plan: what it was built from.
        key: values of the plan's symbols that it was recorded at.
        statics: the static tensors whose addresses it holds.
        bind: makes the steps for a call's own key.
        kernels, recorded_kernels: of one call, and those of them that recordings launch.
        grown: bytes that the pool grew by when it was recorded.
        owners: recordings and memory, kept alive.
        pool: in which it was recorded.
        fusing: what of it is fused; None: nothing was to be.
        bytes: what it added: of slots, and of the pool.
        bound: the steps by the key of the call.
        replays: calls so far.
        dead: freed, or a static tensor is gone; it is not replayed again.
    """

    plan: Plan
    key: tuple[int, ...]
    statics: Statics
    bind: Callable[[tuple[int, ...]], Bound]
    kernels: int
    recorded_kernels: int
    grown: int
    owners: list[object]
    pool: Pool
    fusing: Fusing | None = None
    bytes: int = 0
    bound: dict[tuple[int, ...], Bound] = field(default_factory=dict)
    replays: int = 0
    dead: bool = False

    def at(self, key: tuple[int, ...]) -> Bound:
        """The steps for a call of this key, which is the program's or is padded to it."""
        bound = self.bound.get(key)
        if bound is None:
            if len(self.bound) >= MOST_BOUND:
                del self.bound[next(k for k in self.bound if k != self.key)]  # the one bound first
            bound = self.bound[key] = self.bind(key)
        return bound

    @property
    def space(self) -> Workspace:
        """What it was recorded in."""
        (space,) = (o for o in self.owners if isinstance(o, Workspace))
        return space

    def slot(self, name: str) -> Tensor:
        """The memory that an argument is copied to, lent to somebody who may write it."""
        self.space.slots.lent = True
        slot: Tensor = self.space.resolve(name)
        return slot

    def replay(
        self, args: Sequence[Any], bound: Bound, late: Callable[[Sequence[Any]], bool]
    ) -> tuple[Any, ...]:
        """One call: copy in, steps, outputs. The caller has checked key, overlaps, early addresses.

        ``late`` tells of the late ones, and is asked here while the device runs the opening.
        ``args`` is read before the first eager step and never after: a call amid this one may fill
        the same list.

        Raises:
            Misfit: see there.
        """
        if self.dead:  # of a call of another set, whose tensors do not keep this one
            raise Misfit
        # Held here: what a marked function frees (it may call reset) lives until the call ends.
        cells, _owners, _bind = bound.cells, self.owners, self.bind
        steps = bound.steps
        try:
            for cell, place in bound.loads:
                cells[cell] = args[place]
            if bound.early:
                for step in steps[: bound.early]:
                    step()
                if not late(args):
                    raise Misfit
                steps = steps[bound.early :]
            for step in steps:
                step()
            self.replays += 1
            return bound.result(cells)
        finally:
            cells[:] = bound.template

    def __del__(self) -> None:
        if not self.dead:
            self.pool.settle()
        self.free()

    def free(self) -> None:
        """Lets go of recordings, slots and everything bound to them."""
        self.dead = True
        counters.pool_bytes -= self.grown
        self.grown = self.bytes = 0
        self.owners, self.bound, self.bind = [], {}, _freed


def _freed(key: tuple[int, ...]) -> Bound:
    raise Misfit
