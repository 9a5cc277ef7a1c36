"""(Plan, key, static addresses) -> Program: allocates, records, binds. Runs no eager operation.

Everything was decided before: this module walks the plan once and turns each decision into memory
or a step. Slots and recordings are made outside inference mode, so that a call in any mode may
write them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_bcg.errors import CaptureError
from torch_bcg.graph import modes
from torch_bcg.graph.ir import GraphSegment, Output, Plan, Segment
from torch_bcg.graph.lower import Lowering, failed_node
from torch_bcg.graph.sizes import Geometry, compiled
from torch_bcg.runtime import memory, steps
from torch_bcg.runtime.device import Pool, no_collection
from torch_bcg.runtime.program import Program
from torch_bcg.runtime.recorders import recorder_for
from torch_bcg.runtime.statics import overlaps_of, statics_of
from torch_bcg.runtime.workspace import Workspace


def capture(
    plan: Plan,
    lowering: Lowering,
    geometries: Mapping[str, Geometry],
    key: tuple[int, ...],
    args: Sequence[Any],
    pool: Pool,
    unrecorded: Callable[[int], bool],
    aliases: memory.Aliases | None = None,
) -> Program:
    """Builds the program of one key and one set of static tensors.

    Args:
        plan: what to build.
        lowering: makes the code of its segments.
        geometries: of the plan's values at this key.
        key: values of the plan's symbols.
        args: arguments of a call; static tensors are bound, others only looked at.
        pool: of the plan's device.
        unrecorded: segments, by index, to run unrecorded from the same slots.
        aliases: hands out program memory itself as outputs; None: copies.

    Raises:
        CaptureError: a segment cannot be recorded; its ``node`` is the one that failed.
    """
    with torch.inference_mode(False), torch.no_grad(), no_collection():
        return _Builder(plan, lowering, geometries, key, args, pool, unrecorded, aliases).build()


class _Builder(Workspace):
    """Turns the decisions of a plan into steps, in order."""

    def build(self) -> Program:
        before = self.pool.reserved()
        self.bind_arguments()
        self.bind_memory()
        self.copy_in()
        self.numbers()
        if self.aliases is not None:  # an argument may be what the last call handed out
            self.steps.append(self.aliases.expire)
        for segment in self.plan.segments:
            if isinstance(segment, GraphSegment):
                self.record(segment)
            else:
                self.run_eagerly(segment)
            self.copy_back(segment)
        result = self.outputs()
        # A recording knows addresses and holds nothing: all it was bound to lives with the program.
        self.owners.append(list(self.bound.values()))
        self.cells[:] = self.template
        return Program(
            plan=self.plan,
            key=self.key,
            geometries=self.geometries,
            statics=statics_of(self.plan, self.given),
            overlaps=overlaps_of(self.plan, self.given),
            loads=[(self.cell[name], place) for name, place in self.loads.items()],
            steps=self.steps,
            cells=self.cells,
            template=self.template,
            result=result,
            copied_bytes=self.copied,
            recorded_kernels=self.recorded_kernels,
            bytes=self.bytes + max(0, self.pool.reserved() - before),
            owners=self.owners,
        )

    # steps

    def copy_in(self) -> None:
        groups: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        for v in self.plan.values:
            if v.home != "slot":
                continue
            slot, cell = self.bound[v.name], self.cell_of(v.name)
            self.copied += slot.numel() * slot.itemsize
            if memory.expanded_dims(slot):
                self.steps.append(steps.copy_expanded(self.cells, slot, cell))
            elif slot.numel():
                groups.setdefault(slot.dtype, []).append((slot, cell))
        for members in groups.values():
            slots, places = zip(*members, strict=True)
            self.steps.append(steps.copy_in(self.cells, slots, places))

    def numbers(self) -> None:
        slots = self.plan.number_slots
        if not slots:
            return
        for s in slots:
            self.bound[s.name] = torch.zeros(
                (), dtype=getattr(torch, s.dtype), device=self.plan.device
            )
        sources = list(dict.fromkeys(s.source for s in slots))
        forward, loads = self.remake("numbers", sources)
        fills = [(self.bound[s.name], sources.index(s.source)) for s in slots]
        self.steps.append(steps.fill_numbers(self.cells, forward, loads, fills))

    def record(self, segment: GraphSegment) -> None:
        code = self.lowering.segment(segment)
        operands = [self.resolve(n) for n in segment.inputs]
        numbers = dict.fromkeys(s for _, _, s in segment.number_slots)
        operands += [self.bound[s] for s in numbers]
        made = [lambda v=self.values[n]: self.allocate(v) for n in segment.outputs]
        unrecorded = self.unrecorded(segment.index)
        self.recorded_kernels += 0 if unrecorded else segment.kernels
        recorder = recorder_for(self.pool, unrecorded)
        try:
            recording = recorder.record(code, operands, made)
        except Exception as error:  # anybody's operator raises anything; it becomes a cut's reason
            raise capture_error(segment, failed_node(error), error) from error
        self.bound.update(zip(segment.outputs, recording.outputs, strict=True))
        self.owners.append(recording)
        self.steps.append(recording.replay)

    def run_eagerly(self, segment: Segment) -> None:
        code = self.lowering.segment(segment)
        bound = [self.resolve(n) for n in segment.inputs]
        loads = [self.cell_of(n) for n in segment.carried]
        forward = code.forward
        if modes.has_modes(code.graph):
            forward = steps.with_modes(forward)
        elif not loads and not segment.outputs and (call := only_call(code, bound)) is not None:
            self.steps.append(call)
            return
        stores: list[tuple[int, int]] = []
        bridges: list[tuple[int, Tensor, str, str]] = []
        for i, n in enumerate(segment.outputs):
            if self.values[n].home == "bridge":
                slot = self.bound[n]
                self.copied += slot.numel() * slot.itemsize
                bridges.append((i, slot, n, type(code).__name__))
            else:
                stores.append((i, self.cell_of(n)))
        self.steps.append(steps.eager(self.cells, forward, bound, loads, stores, bridges))

    def copy_back(self, segment: Segment) -> None:
        for name in segment.copy_back:
            slot = self.bound[name]
            self.copied += slot.numel() * slot.itemsize
            self.steps.append(steps.copy_back(self.cells, slot, self.cell_of(name)))

    # outputs

    def outputs(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        symbols = [s for s, _, _ in self.plan.symbols]
        (node,) = (n for n in self.lowering.gm.graph.nodes if n.op == "output")
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
                (self.template[cell],) = compiled([o.name], symbols)(*self.key)
            elif o.how == "clone":
                cloned[cell] = self.resolve(o.name)
            elif o.how == "view" and o.name == o.base and o.base not in self.place:
                self.template[cell] = operator.attrgetter(str(self.lowering.nodes[o.base].target))(
                    self.lowering.gm
                )
            elif o.how == "view" and o.delta:
                self.steps.append(self.view_out(cell, o))
            else:
                remade.append((o.base if o.name == o.base else o.name, cell))
        take = None if self.aliases is None else self.aliases.take
        for make, parts in memory.out_of(cloned, take):
            self.steps.append(steps.hand_out(self.cells, make, parts))
            if self.aliases is None:
                self.copied += sum(cloned[c].numel() * cloned[c].itemsize for c, _ in parts)
        if remade:
            self.remake_outputs(remade)
        if len(where) == 1:
            return lambda cells: (cells[where[0]],)
        return operator.itemgetter(*where) if where else lambda cells: ()

    def remake_outputs(self, remade: Sequence[tuple[str, int]]) -> None:
        forward, loads = self.remake("outputs", [n for n, _ in remade])
        self.steps.append(steps.remake_out(self.cells, forward, loads, [c for _, c in remade]))

    def view_out(self, cell: int, o: Output) -> steps.Step:
        spec = self.values[o.name].spec
        assert spec is not None
        size, stride, offset = self.geometries[o.name]
        geometry = (size, stride, offset - self.geometries[o.base][2])
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


def capture_error(segment: GraphSegment, node: str, error: BaseException) -> CaptureError:
    """The error for a segment that cannot be recorded; ``node`` is where it failed."""
    caught = CaptureError(
        f"Segment {segment.index} cannot be recorded.",
        where=f"segment {segment.index}, node '{node or '?'}'",
        expected="operations that the device does alone",
        found=f"{type(error).__name__}: {error}".splitlines()[0],
        fix="Mark the operation with torch_bcg.eager_on_graph.",
    )
    caught.segment, caught.node = segment.index, node
    caught.out_of_memory = isinstance(error, torch.OutOfMemoryError)
    return caught
