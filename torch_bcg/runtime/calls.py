"""Recordings + the key of a call -> the steps of a replay, each bound to what it works on.

In a padded program recorded segments work on all rows, everything else on those of the call: slots
are filled at their front, eager segments are given that front with the strides an unpadded value
has, and outputs are taken from it. Views are made here, once for each size, never in a replay.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_bcg.graph import modes
from torch_bcg.graph.ir import (
    EagerSegment,
    GraphSegment,
    Output,
    Segment,
    TensorSpec,
)
from torch_bcg.graph.lower import Fused
from torch_bcg.graph.sizes import Geometry, compiled
from torch_bcg.runtime import memory, steps
from torch_bcg.runtime.checks import Again, spoil, verified, without_padding
from torch_bcg.runtime.compare import SAME, TOLERANCE
from torch_bcg.runtime.fronts import Fronts, Scene
from torch_bcg.runtime.statics import Overlaps, overlaps_of


@dataclass(slots=True)
class Bound:
    """The steps of a program for calls of one key.

    Attributes:
        loads: (cell, place of the argument).
        steps: in order; the last ones make the outputs.
        early: how many of them run before `Statics.late` is compared; 0: nothing is compared in a
            replay.
        cells, template: values of one call, and what is put back afterwards.
        result: the output leaves, from the cells.
        copied_bytes: bytes copied in, back, across cuts and out in one call.
        rows: rows of the call in a padded graph, else 0.
        pad_rows: rows that are replayed though the call does not have them.
        overlaps: the check before a call, or None if nothing can go wrong.
        geometries: of the plan's tensors in such a call.
        in_place: (place, bytes or -1 for all, may be a copy) of arguments that a replay uses where
            they are.
    """

    loads: list[tuple[int, int]]
    steps: list[steps.Step]
    early: int
    cells: list[Any]
    template: list[Any]
    result: Callable[[list[Any]], tuple[Any, ...]]
    copied_bytes: int
    rows: int
    pad_rows: int
    overlaps: Overlaps | None
    geometries: Mapping[str, Geometry]
    in_place: list[tuple[int, int, bool]]


def bind(scene: Scene, key: tuple[int, ...]) -> Bound:
    """The steps for calls whose symbols have the values ``key``."""
    return _Binder(scene, key).bind()


class _Binder(Fronts):
    """Makes the steps in the order of the plan."""

    def __init__(self, scene: Scene, key: tuple[int, ...]) -> None:
        super().__init__(scene, key)
        self.recordings, self.aliases = scene.recordings, scene.aliases
        self.opening = scene.opening
        self.place = {name: i for i, name in enumerate(self.plan.arguments)}
        self.cell: dict[str, int] = {}
        self.cells: list[Any] = []  # the object the steps hold; as long as the template in the end
        self.template: list[Any] = []
        self.loads: dict[str, int] = {}

    def bind(self) -> Bound:
        # First: a call that is interrupted while it copies in has said that it has another size.
        self.fill_tails()
        self.copy_in()
        self.fill_numbers()
        if self.aliases is not None:  # an argument may be what the last call handed out
            self.steps.append(self.aliases.expire)
        early = 0
        for segment in self.plan.segments:
            if isinstance(segment, GraphSegment):
                self.steps.append(self.checked(segment, self.recordings[segment.index].replay))
                self.written(segment)
                if segment is self.opening:
                    early = len(self.steps)
            elif isinstance(segment, EagerSegment):
                self.run_eagerly(segment)
            self.copy_back(segment)
            if "poison" in self.checks:
                self.steps.append(spoil(self.dead_after(segment.index)))
        result = self.outputs()
        self.cells[:] = self.template
        loads = [(self.cell[name], place) for name, place in self.loads.items()]
        rows = self.rows(self.key)
        overlaps = overlaps_of(self.plan, self.live, self.space.bound)
        return Bound(
            loads, self.steps, early, self.cells, self.template, result, self.copied, rows,
            self.rows(self.space.key) - rows, overlaps, self.live, self.in_place(),
        )  # fmt: skip

    def checked(self, segment: GraphSegment, replay: steps.Step) -> steps.Step:
        """A recorded segment's step, with the checks around it."""
        if "verify" in self.checks:
            plain = Again(self.space, segment, self.space.lowering.segment(segment))
            fused = isinstance(self.space.code(segment), Fused)
            replay = verified(plain, replay, TOLERANCE if fused else SAME)
        if "poison" in self.checks and self.padded:
            again = Again(self.space, segment, self.space.code(segment))
            replay = without_padding(again, replay, self.narrowed, self.fills, self.rowless)
        return replay

    def in_place(self) -> list[tuple[int, int, bool]]:
        """Arguments that a replay reads or writes where the caller has them, after it began."""
        returned = {name for o in self.plan.outputs for name in (o.name, o.base)}
        found = []
        for v in self.plan.values:
            if v.name not in self.place or v.spec is None:
                continue
            if v.home == "reference" or (v.home == "slot" and v.written):
                size = -1
                if v.name in self.live:
                    size = memory.reach(*self.live[v.name][:2]) * dtype_of(v.spec).itemsize
                copied = not v.written and v.name not in returned
                found.append((self.place[v.name], size, copied))
        return found

    # cells

    def cell_of(self, name: str) -> int:
        """The cell a value of a call goes through; an argument's is loaded at each call."""
        if name not in self.cell:
            self.cell[name] = len(self.template)
            self.template.append(None)
            if name in self.place:
                self.loads[name] = self.place[name]
        return self.cell[name]

    def remake(self, name: str, wanted: Sequence[str]) -> tuple[Callable[..., Any], list[int]]:
        """Code that remakes per-call values, and the cells it takes."""
        lowering = self.space.lowering
        floats = [n for n in wanted if n in lowering.floats]
        needs = lowering.needs(floats, set(floats), self.numbers.__contains__)
        outside = list(dict.fromkeys([*needs.outside, *(n for n in wanted if n not in floats)]))
        inside = needs.inside | set(floats)
        code = lowering.lower(name, (), inside, outside, wanted)
        cells = [self.cell_of(n) for n in outside]
        bound = {**self.space.bound, **self.numbers}
        for n, cell in zip(outside, cells, strict=True):
            if n in bound and n not in self.place:
                padded = n in self.values and self.values[n].row_dims
                self.template[cell] = self.front(self.values[n]) if padded else bound[n]
        return code.forward, cells

    # steps

    def copy_in(self) -> None:
        groups: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        for v in self.plan.values:
            if v.home != "slot":
                continue
            slot, cell = self.front(v), self.cell_of(v.name)
            self.copied += slot.numel() * slot.itemsize
            if memory.expanded_dims(slot) or any(v.lazy):  # no foreach operation writes lazy bits
                self.steps.append(steps.copy_expanded(self.cells, slot, cell))
            elif slot.numel():
                groups.setdefault(slot.dtype, []).append((slot, cell))
        for members in groups.values():
            slots, places = zip(*members, strict=True)
            self.steps.append(steps.copy_in(self.cells, slots, places))

    def fill_numbers(self) -> None:
        slots = self.plan.number_slots
        if slots:
            sources = list(dict.fromkeys(s.source for s in slots))
            forward, loads = self.remake("numbers", sources)
            fills = [(self.space.bound[s.name], sources.index(s.source)) for s in slots]
            self.steps.append(steps.fill_numbers(self.cells, forward, loads, fills))

    def run_eagerly(self, segment: EagerSegment) -> None:
        code = self.space.lowering.segment(segment)
        cuts = {c.name: c for c in segment.fronts}
        bound = [self.operand(n, segment, cuts) for n in segment.inputs]
        self.copy_fronts(segment, back=False)
        loads = [self.cell_of(n) for n in segment.carried]
        forward = code.forward
        call = None
        if modes.has_modes(code.graph):
            forward = steps.with_modes(forward)
        elif not loads and not segment.outputs:
            call = only_call(code, bound)
        if call is not None:
            self.steps.append(call)
        else:
            self.steps.append(self.eager(segment, forward, bound, loads, type(code).__name__))
        self.written(segment)
        self.copy_fronts(segment, back=True)

    def eager(
        self,
        segment: EagerSegment,
        forward: Callable[..., Any],
        bound: Sequence[Any],
        loads: Sequence[int],
        name: str,
    ) -> steps.Step:
        stores: list[tuple[int, int]] = []
        bridges: list[tuple[int, Tensor, str, str]] = []
        for i, n in enumerate(segment.outputs):
            v = self.values[n]
            if v.home == "bridge":
                slot = self.front(v) if segment.live else self.space.resolve(n)
                self.copied += slot.numel() * slot.itemsize
                bridges.append((i, slot, n, name))
            else:
                stores.append((i, self.cell_of(n)))
        return steps.eager(self.cells, forward, bound, loads, stores, bridges)

    def copy_back(self, segment: Segment) -> None:
        for name in segment.copy_back:
            slot = self.front(self.values[name])
            self.copied += slot.numel() * slot.itemsize
            self.steps.append(steps.copy_back(self.cells, slot, self.cell_of(name)))

    # outputs

    def outputs(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        (node,) = (n for n in self.space.lowering.gm.graph.nodes if n.op == "output")
        literals = torch.utils._pytree.tree_leaves(node.args[0])
        where: list[int] = []
        cloned: dict[int, Tensor] = {}
        shown: dict[int, Output] = {}
        remade: list[tuple[str, int]] = []
        for i, o in enumerate(self.plan.outputs):
            cell = len(self.template)
            self.template.append(None)
            where.append(cell)
            if o.how == "literal":
                self.template[cell] = literals[i]
            elif o.how == "size":
                (self.template[cell],) = compiled([o.name], self.space.symbols)(*self.key)
            elif o.how == "clone":
                copied = self.cell_of(o.name) if o.view else cell
                cloned[copied], shown[copied] = self.space.resolve(o.name), o
                if o.view:  # remade below, from the copy that lies in the cell of its base by then
                    remade.append((o.view, cell))
            elif o.how == "view" and o.name == o.base and o.base not in self.place:
                self.template[cell] = self.space.attribute(o.base)
            elif o.how == "view" and o.delta:
                self.steps.append(self.view_out(cell, o))
            else:
                remade.append((o.base if o.name == o.base else o.name, cell))
        self.hand_out(cloned, shown)
        if remade:
            self.remake_outputs(remade)
        if len(where) == 1:
            return lambda cells: (cells[where[0]],)
        return operator.itemgetter(*where) if where else lambda cells: ()

    def hand_out(self, cloned: Mapping[int, Tensor], outputs: Mapping[int, Output]) -> None:
        take = None if self.aliases is None else self.aliases.take
        if self.padded:
            plans = memory.fronts_out_of({c: self.front_out(outputs[c]) for c in cloned})
        else:
            plans = memory.out_of(cloned, take)
        for make, parts in plans:
            self.steps.append(steps.hand_out(self.cells, make, parts))
            if self.aliases is None or self.padded:
                self.copied += sum(cloned[c].numel() * cloned[c].itemsize for c, _ in parts)

    def front_out(self, o: Output) -> tuple[Tensor, Geometry]:
        """The rows of the call of an output, and the geometry that eager's output has."""
        assert o.front is not None
        whole = self.space.resolve(o.name)
        return self.narrowed(whole, o.name, o.front.row_dims), self.live[o.name]

    def remake_outputs(self, remade: Sequence[tuple[str, int]]) -> None:
        forward, loads = self.remake("outputs", [n for n, _ in remade])
        self.steps.append(steps.remake_out(self.cells, forward, loads, [c for _, c in remade]))

    def view_out(self, cell: int, o: Output) -> steps.Step:
        spec = self.values[o.name].spec
        assert spec is not None
        size, stride, offset = self.live[o.name]
        first = self.live[o.base][2] if o.base in self.live else 0  # else it is an argument's
        geometry = (size, stride, offset - first)
        return steps.view_out(self.cells, cell, self.cell_of(o.base), spec.dtype, geometry)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype of a spec."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def only_call(code: fx.GraphModule, bound: Sequence[Any]) -> steps.Step | None:
    """The one call a segment makes, with its bound operands; None if it does anything else."""
    placeholders = code.graph.find_nodes(op="placeholder")
    inner = [n for n in code.graph.nodes if n.op not in ("placeholder", "output")]
    if len(inner) != 1 or inner[0].op != "call_function":
        return None
    values = dict(zip(placeholders, bound, strict=True))
    args, kwargs = fx.node.map_arg((inner[0].args, inner[0].kwargs), values.__getitem__)
    return functools.partial(inner[0].target, *args, **kwargs)
