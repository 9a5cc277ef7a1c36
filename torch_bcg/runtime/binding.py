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
from torch_bcg.graph.ir import Cut, EagerSegment, GraphSegment, Output, Segment, Value
from torch_bcg.graph.sizes import Geometry, compiled, geometries
from torch_bcg.runtime import memory, steps
from torch_bcg.runtime.checks import Again, spoil, verified, without_padding
from torch_bcg.runtime.memory import Aliases
from torch_bcg.runtime.recorders import Recording
from torch_bcg.runtime.statics import Overlaps, overlaps_of
from torch_bcg.runtime.trial import LARGE, VOUCHED, fitting
from torch_bcg.runtime.workspace import Workspace


@dataclass(slots=True)
class Bound:
    """The steps of a program for calls of one key.

    Attributes:
        loads: (cell, place of the argument).
        steps: in order; the last ones make the outputs.
        cells, template: values of one call, and what is put back afterwards.
        result: the output leaves, from the cells.
        copied_bytes: bytes copied in, back, across cuts and out in one call.
        rows: rows of the call in a padded graph, else 0.
        pad_rows: rows that are replayed though the call does not have them.
        overlaps: the check before a call, or None if nothing can go wrong.
        geometries: of the plan's tensors in such a call.
    """

    loads: list[tuple[int, int]]
    steps: list[steps.Step]
    cells: list[Any]
    template: list[Any]
    result: Callable[[list[Any]], tuple[Any, ...]]
    copied_bytes: int
    rows: int
    pad_rows: int
    overlaps: Overlaps | None
    geometries: Mapping[str, Geometry]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a program was recorded into: memory, recordings by segment, outputs, checks."""

    space: Workspace
    recordings: Mapping[int, Recording]
    aliases: Aliases | None
    checks: tuple[str, ...] = ()


def bind(scene: Scene, key: tuple[int, ...]) -> Bound:
    """The steps for calls whose symbols have the values ``key``."""
    return _Binder(scene, key).bind()


class _Binder:
    def __init__(self, scene: Scene, key: tuple[int, ...]) -> None:
        self.space, self.recordings, self.aliases = scene.space, scene.recordings, scene.aliases
        self.checks = scene.checks
        self.plan, self.key = scene.space.plan, key
        self.padded = key != scene.space.key
        self.live = geometries(self.plan)(*key) if self.padded else scene.space.geometries
        self.numbers = scene.space.numbers_at(key)
        self.values = scene.space.values
        self.place = {name: i for i, name in enumerate(self.plan.arguments)}
        self.cell: dict[str, int] = {}
        self.cells: list[Any] = []  # the object the steps hold; as long as the template in the end
        self.template: list[Any] = []
        self.loads: dict[str, int] = {}
        self.steps: list[steps.Step] = []
        self.fronts: dict[str, Tensor] = {}  # what eager segments are given of padded values
        self.current: set[str] = set()  # copied fronts that agree with their values
        self.copied = 0
        self.fills = dict(self.plan.padding.fills) if self.plan.padding else {}

    def bind(self) -> Bound:
        self.copy_in()
        self.fill_tails()
        self.fill_numbers()
        if self.aliases is not None:  # an argument may be what the last call handed out
            self.steps.append(self.aliases.expire)
        for segment in self.plan.segments:
            if isinstance(segment, GraphSegment):
                self.steps.append(self.checked(segment, self.recordings[segment.index].replay))
                self.written(segment)
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
            loads, self.steps, self.cells, self.template, result, self.copied, rows,
            self.rows(self.space.key) - rows, overlaps, self.live,
        )  # fmt: skip

    def checked(self, segment: GraphSegment, replay: steps.Step) -> steps.Step:
        """A recorded segment's step, with the checks around it."""
        if "verify" in self.checks:
            replay = verified(Again(self.space, segment), replay)
        if "poison" in self.checks and self.padded:
            again = Again(self.space, segment)
            replay = without_padding(again, replay, self.narrowed, self.fills, self.rowless)
        return replay

    def rowless(self, name: str) -> bool:
        """Whether a value is as large in the call as in the program."""
        whole = self.space.geometries.get(name)
        return whole is not None and whole == self.live[name]

    def dead_after(self, index: int) -> list[Tensor]:
        """Memory made in this replay whose last reader is the segment of that index."""
        dead = [
            v
            for v in self.plan.values
            if v.last == index and v.home in ("recorded", "bridge", "scratch")
        ]
        # The rows of the call alone of a slot: the tail is filled once, for all who lie there.
        return [self.space.bound[v.name] if v.home == "recorded" else self.front(v) for v in dead]

    # rows of the call

    def rows(self, key: tuple[int, ...]) -> int:
        """Rows at a key, 0 where none are padded."""
        padding = self.plan.padding
        if padding is None or padding.refused is not None:
            return 0
        return key[self.space.symbols.index(padding.symbol)]

    def front(self, v: Value) -> Tensor:
        """The rows of the call of a value in program memory, where they are."""
        whole: Tensor = self.space.resolve(v.name)
        return self.narrowed(whole, v.name, v.row_dims)

    def narrowed(self, whole: Tensor, name: str, dims: Sequence[int]) -> Tensor:
        """The first rows of a padded tensor, as many as the call has."""
        for d in dims if self.padded else ():
            whole = whole.narrow(d, 0, self.live[name][0][d])
        return whole

    def operand(self, name: str, segment: EagerSegment, cuts: Mapping[str, Cut]) -> Any:
        """What an eager segment is given of a fixed value."""
        if segment.live and name in self.numbers:
            return self.numbers[name]
        if not self.padded or name not in cuts:
            return self.space.resolve(name)
        if name not in self.fronts:
            cut = cuts[name]
            whole = self.space.resolve(name)
            size, stride, _ = self.live[name]
            if cut.copied:
                self.fronts[name] = self.space.slot(f"{name}, copied", cut.spec, name).as_strided(
                    size, stride
                )
            else:
                self.fronts[name] = whole.as_strided(size, stride, whole.storage_offset())
        return self.fronts[name]

    def copy_fronts(self, segment: EagerSegment, back: bool) -> None:
        """Copies of fronts to what an eager segment is given, or back what it wrote there."""
        for cut in segment.cuts if self.padded else ():
            if (
                not cut.copied
                or (back and not cut.written)
                or (not back and cut.name in self.current)
            ):
                continue
            copy = self.fronts[cut.name]
            there = self.narrowed(self.space.resolve(cut.name), cut.name, cut.row_dims)
            target, source = (there, copy) if back else (copy, there)
            self.copied += copy.numel() * copy.itemsize
            self.steps.append(functools.partial(target.copy_, source))
            self.current.add(cut.name)

    def written(self, segment: Segment) -> None:
        """Copied fronts of what a segment wrote are out of date."""
        made = {self.values[n].storage for n in segment.outputs} | set(segment.writes)
        for s in self.plan.segments if self.padded else ():
            if isinstance(s, EagerSegment):
                self.current -= {c.name for c in s.cuts if c.storage in made}

    def fill_tails(self) -> None:
        """Rows of slots, bridges and scratch memory that the call does not have."""
        if not self.padded:
            return
        zeros: list[Tensor] = []
        for v in self.plan.values:
            if v.home not in ("slot", "bridge", "scratch") or v.memory:
                continue
            tails = self.tails(v)
            if v.name in self.fills:
                self.steps += [functools.partial(t.fill_, self.fills[v.name]) for t in tails]
            elif (
                "poison" in self.checks and v.spec and v.spec.dtype.startswith(("float", "bfloat"))
            ):
                self.steps += [
                    functools.partial(t.fill_, fitting(self.poison(), t.dtype)) for t in tails
                ]
            else:
                zeros += tails
        if zeros:
            self.steps.append(functools.partial(torch._foreach_zero_, zeros))

    def poison(self) -> float:
        """What padded rows hold under ``check="poison"``.

        Zero times it must be zero where the author vouches for masks, or declares memory that
        padded rows are written to.
        """
        padding = self.plan.padding
        vouched = padding is not None and any(r.kind in VOUCHED for r in padding.tried)
        return LARGE if vouched or self.fills else float("nan")

    def tails(self, v: Value) -> list[Tensor]:
        """What is left of a padded value beside its front, without overlap."""
        rest: Tensor = self.space.resolve(v.name)
        found = []
        for d in v.row_dims:
            have, want = rest.shape[d], self.live[v.name][0][d]
            if have > want and rest.stride(d):  # expanded rows are one row
                found.append(rest.narrow(d, want, have - want))
            rest = rest.narrow(d, 0, want)
        return [t for t in found if t.numel()]

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
                self.template[cell] = bound[n]
        return code.forward, cells

    # steps

    def copy_in(self) -> None:
        groups: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        for v in self.plan.values:
            if v.home != "slot":
                continue
            slot, cell = self.front(v), self.cell_of(v.name)
            self.copied += slot.numel() * slot.itemsize
            if memory.expanded_dims(slot):
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
        cuts = {c.name: c for c in segment.cuts}
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
                cloned[cell] = self.space.resolve(o.name)
            elif o.how == "view" and o.name == o.base and o.base not in self.place:
                self.template[cell] = self.space.attribute(o.base)
            elif o.how == "view" and o.delta:
                self.steps.append(self.view_out(cell, o))
            else:
                remade.append((o.base if o.name == o.base else o.name, cell))
        self.hand_out(cloned, dict(zip(where, self.plan.outputs, strict=True)))
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
        assert o.cut is not None
        whole = self.space.resolve(o.name)
        return self.narrowed(whole, o.name, o.cut.row_dims), self.live[o.name]

    def remake_outputs(self, remade: Sequence[tuple[str, int]]) -> None:
        forward, loads = self.remake("outputs", [n for n, _ in remade])
        self.steps.append(steps.remake_out(self.cells, forward, loads, [c for _, c in remade]))

    def view_out(self, cell: int, o: Output) -> steps.Step:
        spec = self.values[o.name].spec
        assert spec is not None
        size, stride, offset = self.live[o.name]
        geometry = (size, stride, offset - self.live[o.base][2])
        return steps.view_out(self.cells, cell, self.cell_of(o.base), spec.dtype, geometry)


def only_call(code: fx.GraphModule, bound: Sequence[Any]) -> steps.Step | None:
    """The one call a segment makes, with its bound operands; None if it does anything else."""
    placeholders = code.graph.find_nodes(op="placeholder")
    inner = [n for n in code.graph.nodes if n.op not in ("placeholder", "output")]
    if len(inner) != 1 or inner[0].op != "call_function":
        return None
    values = dict(zip(placeholders, bound, strict=True))
    args, kwargs = fx.node.map_arg((inner[0].args, inner[0].kwargs), values.__getitem__)
    return functools.partial(inner[0].target, *args, **kwargs)
