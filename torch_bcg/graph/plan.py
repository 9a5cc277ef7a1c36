"""Partition + facts -> Plan: where every value lives, who reads and writes it, what is returned.

One symbolic plan serves all sizes of a graph. The rules are those of the call contract: a static
tensor stays where it is, a user input that a kernel of a recorded segment reads or writes is copied
into a slot, whatever only eager segments touch is passed on, and what an eager segment makes for a
recorded one is bridged. All of it is decided per storage, so views never disagree with their base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.homes import FIXED, Homes
from torch_bcg.graph.ir import (
    EagerSegment,
    GraphSegment,
    NumberSlot,
    Output,
    Plan,
    Reason,
    Segment,
    Value,
)
from torch_bcg.graph.known import Facts, NodeFacts, TensorFact
from torch_bcg.graph.lower import Lowering, Needs
from torch_bcg.graph.openings import given_in, is_repeatable
from torch_bcg.graph.partition import Partition, Stretch
from torch_bcg.graph.sizes import symbols_of
from torch_bcg.graph.sorting import where

Places = tuple[tuple[str, str, int], ...]


def make_plan(
    name: str, gm: fx.GraphModule, facts: Facts, parts: Partition, static: Iterable[str]
) -> tuple[Plan, Lowering]:
    """The plan of one graph, and what lowers its segments.

    Args:
        name: name of the plan.
        gm: the graph.
        facts: of its nodes.
        parts: its stretches.
        static: names of the placeholders that keep their address between calls.
    """
    touched: frozenset[int] = frozenset()
    while True:
        planner = _Planner(name, gm, facts, parts, frozenset(static), touched)
        moving = planner.without_address()
        more = {t.storage for n in moving for t in facts.nodes[n].tensors} - touched
        if not moving:
            return planner.plan(), planner.lowering
        if not more:
            raise NoAddressError({n.name for stretch in moving.values() for n in stretch.nodes})
        # A view of several values needs them all, though a kernel reads only one of them.
        touched |= more


class NoAddressError(Exception):
    """A recorded segment needs what has no address; ``nodes`` are to be cut."""

    def __init__(self, nodes: set[str]) -> None:
        super().__init__(sorted(nodes))
        self.nodes = nodes


class _Planner(Homes):
    """Segments, values and outputs of one graph, from the homes of its storages."""

    @functools.cached_property
    def slots(self) -> Mapping[tuple[str, int], NumberSlot]:
        """Number slots by the operand that reads them."""
        found = {}
        for (node, index), number in self.parts.number_operands.items():
            if not self.stretch[node.name].reasons:
                dtype = self.facts.nodes[node.name].tensors[0].spec.dtype
                found[node.name, index] = NumberSlot(f"{number.name}_{dtype}", number.name, dtype)
        return found

    @functools.cached_property
    def is_given(self) -> Callable[[int], bool]:
        """Whether a storage is an argument's, or one that the graph holds."""
        return given_in(self.gm, self.facts)

    # segments

    def plan(self) -> Plan:
        symbols, others, missing = self.symbols()
        whole = self.facts.whole
        unrecorded = None
        if whole is not None:
            unrecorded = Reason(whole[0], whole[2], where(self.nodes[whole[2]]), whole[1])
        elif missing:
            unrecorded = Reason("size from no argument", missing, detail=missing)
        else:
            unrecorded = self.unknown()
        if unrecorded is not None:
            arguments = tuple(n.name for n in self.gm.graph.nodes if n.op == "placeholder")
            return Plan(self.name, self.facts.device, (), arguments, (), (), (), (), unrecorded)
        slots = self.slots
        needs = [self.needs(s, slots) for s in self.parts.stretches]
        outputs = tuple(self.output(leaf) for leaf in self.leaves())
        named = {n for need in needs for n in need.outside}
        named |= {n.name for n in self.gm.graph.nodes if n.op == "placeholder"}
        named |= {n.name for n in (*self.parts.scratch, *self.parts.constants)}
        named |= {p.name for n in self.parts.constants for p in n.all_input_nodes}
        named |= {o.name for o in outputs if o.how in ("carried", "clone", "view")}
        named |= {o.view for o in outputs if o.view}
        wanted = {source for name in named for source in self.sources(name)}
        segments = tuple(
            self.segment(i, s, n, slots, wanted)
            for i, (s, n) in enumerate(zip(self.parts.stretches, needs, strict=True))
        )
        return Plan(
            self.name,
            self.facts.device,
            symbols,
            tuple(n.name for n in self.gm.graph.nodes if n.op == "placeholder"),
            (*self.values(wanted), *self.views(outputs, wanted)),
            segments,
            tuple(dict.fromkeys(slots.values())),
            outputs,
            call_symbols=others,
        )

    def unknown(self) -> Reason | None:
        """Why nothing is recorded where a result of which nothing is known goes on.

        It may be any of the arguments: whose, and when its memory is free again, nobody can say.
        """
        for name, f in self.facts.nodes.items():
            users = {getattr(u.target, "__name__", "") for u in self.nodes[name].users}
            users.discard("_lower_version_count_by_1")  # Dynamo's, after it has set ``.data``
            if f.cause is not None and f.cause[0] == "no facts" and users:
                return Reason("no facts", name, where(self.nodes[name]), f.cause[1])
        return None

    def symbols(self) -> tuple[Places, Places, str]:
        """Where symbols of the key and others are read, and one that no argument gives ("")."""
        found: dict[str, tuple[str, str, int]] = {}
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        every = {s for n in self.facts.nodes.values() if n.tensors for s in n.symbols}
        for node in placeholders:
            f = self.facts.nodes[node.name]
            if not f.tensors and f.expr in every:
                found.setdefault(f.expr, (f.expr, node.name, -1))
        for node in placeholders:
            for t in self.facts.nodes[node.name].tensors:
                for dim, size in enumerate(t.spec.size):
                    if size in every:
                        found.setdefault(size, (size, node.name, dim))
        key = self.facts.key_symbols
        missing = sorted(key - set(found))
        return (
            tuple(found[s] for s in sorted(found) if s in key),
            tuple(found[s] for s in sorted(found) if s not in key),
            missing[0] if missing else "",
        )

    def needs(self, stretch: Stretch, slots: Mapping[tuple[str, int], NumberSlot]) -> Needs:
        own = {n.name for n in stretch.nodes}
        replaced = () if stretch.reasons else slots.keys()
        return self.lowering.needs((n.name for n in stretch.nodes), own, self.fixed, replaced)

    def without_address(self) -> dict[str, Stretch]:
        """Values that a recorded stretch needs and that move between calls, with the stretch."""
        return {
            name: stretch
            for stretch in self.parts.stretches
            if not stretch.reasons
            for name in self.needs(stretch, self.slots).outside
            if not self.fixed(name)
        }

    def segment(
        self,
        index: int,
        stretch: Stretch,
        needs: Needs,
        slots: Mapping[tuple[str, int], NumberSlot],
        wanted: set[str],
    ) -> Segment:
        names = tuple(n.name for n in stretch.nodes)
        written = {s for n in names for s in self.facts.nodes[n].writes}
        arguments = [n.name for n in self.gm.graph.nodes if n.op == "placeholder"]
        copy_back = tuple(
            a
            for a in arguments
            for t in self.facts.nodes[a].tensors
            if t.storage in written and self.home(a) == "slot"
        )
        common = {
            "index": index,
            "nodes": names,
            "inputs": tuple(n for n in needs.outside if self.fixed(n)),
            "carried": tuple(n for n in needs.outside if not self.fixed(n)),
            "outputs": tuple(
                n for n in names if n in wanted and self.home(n) in ("recorded", "bridge", "fresh")
            ),
            "copy_back": copy_back,
            "kernels": sum(self.facts.nodes[n].kernels for n in names),
            "module": module_path(stretch.nodes),
            "writes": tuple(sorted(written)),
            "unwritten": tuple(n for n in names if self.is_unwritten(n, written)),
            "random": any(self.facts.nodes[n].random for n in names),
        }
        if stretch.reasons:
            return EagerSegment(**common, reasons=tuple(stretch.reasons))  # type: ignore[arg-type]
        own = [(n, i, s.name) for (n, i), s in slots.items() if n in set(names)]
        repeatable = is_repeatable(stretch.nodes, self.facts, self.is_given)
        common |= {"number_slots": tuple(own), "repeatable": repeatable}
        return GraphSegment(**common)  # type: ignore[arg-type]

    def is_unwritten(self, name: str, written: set[int]) -> bool:
        """Whether a node of a segment allocates what the segment does not write."""
        f = self.facts.nodes[name]
        return f.kind == "alloc" and not any(t.storage in written for t in f.tensors)

    def sources(self, name: str) -> Iterable[str]:
        """The values with a home that a node is, or is remade from."""
        name = self.canonical.get(name, name)
        node = self.nodes[name]
        if name not in self.floats or (name in self.numbers and self.fixed(name)):
            yield name
            if name not in self.floats and self.home(name) == "alias":
                yield self.owner[self.facts.nodes[name].tensors[0].storage]
        elif node.op != "get_attr":
            for p in node.all_input_nodes:
                yield from self.sources(p.name)

    def values(self, wanted: set[str]) -> tuple[Value, ...]:
        order = self.lowering.order
        return tuple(self.value(n) for n in sorted(wanted, key=order.__getitem__))

    def views(self, outputs: Iterable[Output], wanted: set[str]) -> Iterable[Value]:
        """Outputs that are views of arguments, by geometry."""
        pairs = ((o.name, o.base) for o in outputs if o.delta or (o.how == "clone" and o.base))
        for name, base in dict.fromkeys(pairs):
            if name not in wanted:
                (t,) = self.facts.nodes[name].tensors
                yield Value(name, "alias", t.spec, t.storage, base)

    # outputs

    def leaves(self) -> Sequence[object]:
        (output,) = (n for n in self.gm.graph.nodes if n.op == "output")
        return tree_leaves(output.args[0])

    def output(self, leaf: object) -> Output:
        if not isinstance(leaf, fx.Node):
            return Output("literal", repr(leaf))
        name = self.canonical.get(leaf.name, leaf.name)
        f: NodeFacts = self.facts.nodes[name]
        if not f.tensors:
            if name in self.live or not f.expr or not f.symbols <= self.facts.key_symbols:
                return Output("carried", name)
            return Output("size", f.expr)
        if not f.is_tensor:
            return Output("carried", name)
        (t,) = f.tensors
        owner = self.owner.get(t.storage, name)
        home = self.home(owner)
        if home in ("static", "slot", "reference") and (name == owner or self.stands_in(name, t)):
            return Output("view", name, owner, "" if name == owner else t.spec.offset)
        if home in ("static", "slot"):
            return Output("view", name, owner)
        if home in FIXED and name in self.floats and not self.has_known_place(t):
            return Output("clone", owner, view=name)
        if home in FIXED:
            return Output("clone", name, "" if self.fixed(name) else owner)
        return Output("carried", name)

    def has_known_place(self, t: TensorFact) -> bool:
        """Whether geometry follows from the key: no number that a call reads is in it."""
        return symbols_of(t.spec) <= self.facts.key_symbols

    def stands_in(self, name: str, t: TensorFact) -> bool:
        """Whether geometry alone remakes the view from its base."""
        if not self.has_known_place(t):
            return False
        if name not in self.floats and self.home(name) != "alias":
            return False
        if t.storage in self.facts.around:  # whose views may lie elsewhere in the next call
            return False
        (base,) = self.facts.nodes[self.owner[t.storage]].tensors
        plain = not t.special and t.lazy == base.lazy == (False, False)
        return plain and t.spec.dtype == base.spec.dtype and self.is_followed(name, t.storage)

    def is_followed(self, name: str, storage: int) -> bool:
        """Whether autograd sees a view of its base in it: ``detach`` and the like end that."""
        if name == self.owner[storage]:
            return True
        facts = self.facts.nodes
        given = [self.canonical.get(p.name, p.name) for p in self.nodes[name].all_input_nodes]
        sources = [p for p in given if any(t.storage == storage for t in facts[p].tensors)]
        follows = all(map(keeps_gradients, facts[name].operators))
        return follows and any(self.is_followed(p, storage) for p in sources)


def keeps_gradients(view: OpOverload) -> bool:
    """Whether an operator that returns a view returns one to autograd as well."""
    returns_view = any(r.alias_info is not None for r in view._schema.returns)
    return returns_view and view is not torch.ops.aten.detach.default


def module_path(nodes: Sequence[fx.Node]) -> str:
    """Longest module path all nodes share, e.g. ``model.layers.0``; "" if none."""
    paths: list[list[str]] = []
    for node in nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:
            text = str(stack[-1][0]).replace("['", ".").replace("']", "").replace("[", ".")
            parts = text.replace("]", "").replace("(", "").replace(")", "").split(".")
            paths.append([p for p in parts if p not in ("L", "G", "self", "_modules", "")])
    if not paths:
        return ""
    shared = paths[0]
    for path in paths[1:]:
        same = [a == b for a, b in zip(shared, path, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return ".".join(shared)
