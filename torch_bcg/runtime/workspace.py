"""What a program is made in: every fixed value by name, bound to memory at the sizes of its key."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bcg.graph.ir import GraphSegment, Plan, Segment, TensorSpec, Value
from torch_bcg.graph.lower import Code, Lowering
from torch_bcg.graph.sizes import Geometry, compiled
from torch_bcg.runtime import memory
from torch_bcg.runtime.device import Pool
from torch_bcg.runtime.slots import Slots


class Workspace:
    """Binds names to memory.

    Attributes:
        plan, lowering: what is built, and what makes the code of its segments.
        key: values of the plan's symbols, at which recorded segments run.
        at: geometries of the plan's tensors by key.
        most_key: the largest key that is expected.
        geometries, most: geometries at the two keys.
        pool, slots: where memory comes from.
        args: arguments of a call by name; static tensors are bound, others only looked at.
        bound: values by name.
        held: storage -> tensors that keep the memory of a recorded segment for later ones.
        flats: slots of the graph by name, which the program keeps alive.
        codes: by index, what was recorded of segments.
        unfused: by index, why what should be fused is not.
        grown: bytes that the pool grew by when they were recorded.
    """

    def __init__(
        self,
        plan: Plan,
        lowering: Lowering,
        at: Callable[..., Mapping[str, Geometry]],
        key: tuple[int, ...],
        most: tuple[int, ...],
        args: Sequence[Any],
        pool: Pool,
        slots: Slots,
    ) -> None:
        self.plan, self.lowering = plan, lowering
        self.at, self.key, self.most_key = at, key, most
        self.geometries = at(*key)
        self.most = self.geometries if most == key else at(*most)
        self.pool, self.slots = pool, slots
        self.args = dict(zip(plan.arguments, args, strict=True))
        self.values = {v.name: v for v in plan.values}
        self.bound: dict[str, Any] = {}
        self.held: dict[int, list[Tensor]] = {}
        self.arena = pool.arena
        self.flats: dict[str, Tensor] = {}
        self.codes: dict[int, Code] = {}
        self.unfused: dict[int, str] = {}
        self.grown = 0
        self.symbols = [s for s, _, _ in plan.symbols]

    def bind(self) -> None:
        """Binds arguments and takes memory."""
        self.bind_arguments()
        self.bind_memory()

    def forget_call(self) -> None:
        """Lets go of the arguments of the call that it was made with."""
        self.args = {}

    def bind_arguments(self) -> None:
        """Numbers of the key, and static tensors at their own addresses."""
        self.bound.update(self.numbers_at(self.key))
        for v in self.plan.values:
            if v.home == "static":
                given = self.args.get(v.name)
                self.bound[v.name] = memory.shared(
                    self.attribute(v.name) if given is None else given
                )

    def bind_memory(self) -> None:
        """Slots, bridges and scratch memory, and what is made from numbers alone."""
        for v in self.plan.values:
            if v.home in ("slot", "scratch", "bridge"):
                assert v.spec is not None
                slot = self.slot(v.memory or v.name, v.spec, v.name)
                self.bound[v.name] = memory.lazily(slot, v.lazy)
            elif v.home == "constant":
                self.bound[v.name] = self.lowering.call(v.name, self.resolve)
        for s in self.plan.number_slots:
            self.bound[s.name] = torch.zeros(
                (), dtype=getattr(torch, s.dtype), device=self.plan.device
            )

    def numbers_at(self, key: tuple[int, ...]) -> dict[str, Any]:
        """The plan's sizes by name, at some values of its symbols."""
        sizes = [v for v in self.plan.values if v.home == "size"]
        numbers = compiled((v.expr for v in sizes), self.symbols)(*key)
        return dict(zip((v.name for v in sizes), numbers, strict=True))

    def attribute(self, name: str) -> Any:
        """The tensor or object behind a ``get_attr`` node."""
        return operator.attrgetter(str(self.lowering.nodes[name].target))(self.lowering.gm)

    def slot(self, slot: str, spec: TensorSpec, like: str) -> Tensor:
        """Memory of the graph's slots, with the geometry of ``like``."""
        tensor, self.flats[slot] = self.slots.take(
            slot, spec, self.geometries[like], self.most[like]
        )
        return tensor

    def code(self, segment: Segment) -> Code:
        """The code of a segment, as it runs."""
        return self.codes.get(segment.index) or self.lowering.segment(segment)

    def recorded(self, v: Value) -> Tensor:
        """Memory for a result of a recorded segment, where the recorder takes none itself."""
        assert v.spec is not None
        return memory.lazily(self.pool.arena.take(v.spec, self.geometries[v.name]), v.lazy)

    def operands(self, segment: GraphSegment) -> dict[str, Any]:
        """What a recorded segment is bound to: fixed values, then number slots."""
        slots = dict.fromkeys(s for _, _, s in segment.number_slots)
        taken = {n: self.resolve(n) for n in segment.inputs}
        return taken | {s: self.bound[s] for s in slots}

    def keep(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Binds results of a recorded segment; they own their memory until `release`."""
        for name, t in zip(names, tensors, strict=True):
            self.held.setdefault(self.values[name].storage, []).append(t)
            # A replay writes it before anything reads it, so nobody has to own it between calls.
            self.bound[name] = memory.unowned(t)

    def release(self, index: int) -> None:
        """Gives up memory of recorded segments whose last reader came before segment ``index``."""
        last = {v.storage: v.last for v in self.plan.values}
        for storage in [s for s in self.held if last[s] < index]:
            del self.held[storage]

    def resolve(self, name: str) -> Any:
        """The fixed value of a node: bound, or made now from what is bound."""
        name = self.lowering.canonical.get(name, name)
        if name not in self.bound:
            v = self.values.get(name)
            if v is not None and v.home == "alias":
                assert v.spec is not None
                size, stride, offset = self.geometries[name]
                shifted = (size, stride, offset - self.geometries[v.base][2])
                view = memory.moved_view(self.resolve(v.base), v.spec.dtype, shifted)
                self.bound[name] = memory.shared(view)
            else:
                self.bound[name] = self.lowering.call(name, self.resolve)
        return self.bound[name]
