"""Which nodes work, which are remade where needed or made once, and why one is not recorded.

`Sorter` reads facts, marks and what the probe found, in the order of the program. It decides about
nodes; `graph.partition` makes stretches of them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torch_bcg.graph.ir import Reason
from torch_bcg.graph.known import Facts, NodeFacts
from torch_bcg.graph.modes import is_mode, level_change
from torch_bcg.marking import Mark

# A changing number may be read from a 0-dim slot only where the kernel then computes the same bits:
# not pow (another algorithm for a tensor exponent), not div (CUDA multiplies by a reciprocal).
_SLOT_TARGETS = {
    operator.add, operator.sub, operator.mul, operator.iadd, operator.isub, operator.imul,
    torch.add, torch.sub, torch.mul, "add", "sub", "mul", "add_", "sub_", "mul_",
}  # fmt: skip
_SLOT_DTYPES = ("float32", "float64", "int64", "int32")
_CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl", "associative_scan", "switch")


_PACKAGE = str(Path(__file__).parents[1])


def where(node: fx.Node) -> str:
    """``file:line`` of the innermost user frame that made the node, or ""."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    found = [f for f in frames if not f[0].startswith(_PACKAGE)]
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


class Sorter:
    """Sorts nodes into constants, live numbers, and computing items with their reasons."""

    def __init__(
        self,
        gm: fx.GraphModule,
        facts: Facts,
        mark_of: Callable[[fx.Node], Mark | None],
        found: Mapping[str, Reason],
    ) -> None:
        self.graph = gm.graph
        self.facts = facts
        self.mark_of = mark_of
        self.found = found
        self.constants: list[fx.Node] = []
        self.fixed: set[fx.Node] = set()  # constants, and views and numbers of them alone
        self.live: set[fx.Node] = set()
        self.numbers: set[fx.Node] = set()
        self.inside_levels: set[fx.Node] = set()
        self.number_operands: dict[tuple[fx.Node, int], fx.Node] = {}

    def items(self) -> list[tuple[list[fx.Node], list[Reason]]]:
        """Computing nodes in order, as items that no cut divides, with their reasons."""
        items: list[tuple[list[fx.Node], list[Reason]]] = []
        place: dict[fx.Node, int] = {}
        depth, unit = 0, -1
        effects = [n for n in self.graph.nodes if self.is_effect(n)]
        span = {effects[0], effects[-1]} if len(effects) > 1 else set()
        inside = False
        for node in self.graph.nodes:
            f = self.facts.nodes[node.name]
            if f.kind == "mode" and not is_mode(node):
                continue  # an order of streams, which recorders follow by notes
            depth += level_change(node)
            inside ^= node in span
            if depth or level_change(node) or inside or node in span:
                if unit < 0:
                    unit = len(items)
                    items.append(([], []))
                self.inside_levels.add(node)
                items[unit][0].append(node)
                items[unit][1].extend(self.reasons(node, f))
                place[node] = unit
                if depth == 0 and not inside:
                    unit = -1
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if isinstance(source, fx.Node) and source in place and not self.is_tensor(source):
                items[place[source]][0].append(node)
                place[node] = place[source]
            elif self.is_work(node, f):
                place[node] = len(items)
                items.append(([node], self.reasons(node, f)))
        return items

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node returns one tensor."""
        return self.facts.nodes[node.name].is_tensor

    def is_like(self, nodes: list[fx.Node]) -> bool:
        """Memory shaped like a value: it needs the shape alone, and no segment to make it."""
        return (
            len(nodes) == 1
            and self.facts.nodes[nodes[0].name].kind == "alloc"
            and any(self.facts.nodes[p.name].tensors for p in nodes[0].all_input_nodes)
        )

    def is_effect(self, node: fx.Node) -> bool:
        """A call for its effect on the host that nobody here knows how to repeat."""
        f = self.facts.nodes[node.name]
        name = str(getattr(node.target, "__name__", node.target))
        known = name.startswith(
            ("lazy_load", "_check", "_assert", "_lower_version", "sym_constrain")
        )
        return (
            node.op == "call_function" and f.kind == "number" and f.expr == "None"
            and not known and not level_change(node)
        )  # fmt: skip

    def is_work(self, node: fx.Node, f: NodeFacts) -> bool:
        """Whether the node must run in its place, in exactly one segment."""
        sources = node.all_input_nodes
        if f.kind in ("input", "constant", "mode", "output"):
            return False
        if f.kind == "object" and node.users and all(is_mode(u) for u in node.users):
            return False  # an argument of a mode, copied with it
        if f.kind == "number" or self.is_argument_read(node, f):
            self.numbers.add(node)
            given = f.given
            if (
                given
                or not f.symbols <= self.facts.key_symbols
                or any(p in self.live for p in sources)
            ):
                self.live.add(node)
                return f.expr == "None"  # a check of a number that changes must run
            return False
        if f.kind == "view":
            if sources and all(p in self.fixed for p in sources):
                self.fixed.add(node)
            return False
        if self.is_constant(node, f):
            self.constants.append(node)
            self.fixed.add(node)
            return False
        if not f.tensors:
            self.live.add(node)  # a number read on the host in its place
        return True

    def is_argument_read(self, node: fx.Node, f: NodeFacts) -> bool:
        """``x.item()`` of a 0-dim CPU argument that nothing writes: known before the call."""
        if f.cause is None or f.cause[0] != "host read" or f.tensors or f.kernels != 1:
            return False
        (source,) = node.all_input_nodes if len(node.all_input_nodes) == 1 else (None,)
        if source is None or self.facts.nodes[source.name].kind != "input":
            return False
        (t,) = self.facts.nodes[source.name].tensors
        return not t.spec.size and t.spec.device == "cpu" and t.storage not in self.facts.written

    def is_constant(self, node: fx.Node, f: NodeFacts) -> bool:
        """Made from numbers alone, and better made once: it lies on the host or must be sent."""
        on_host = self.facts.device != "cpu" and any(
            t.spec.device == "cpu"
            for n in (f, *(self.facts.nodes[p.name] for p in node.all_input_nodes))
            for t in n.tensors
        )
        synchronises = node.name in self.found and self.found[node.name].kind == "host read"
        return (
            (on_host or synchronises)
            and bool(f.tensors)
            and not f.random
            and (f.cause is None or f.cause[0] == "CPU tensor")
            and self.mark_of(node) is None
            and all(
                p in self.fixed
                or (self.facts.nodes[p.name].kind == "number" and p not in self.live)
                for p in node.all_input_nodes
            )
            and not any(t.storage in self.facts.written for t in f.tensors)
        )

    def reasons(self, node: fx.Node, f: NodeFacts) -> list[Reason]:
        """Why a node is not recorded; empty: it is."""
        mark = self.mark_of(node)
        if mark is not None:
            return [Reason("mark", node.name, where(node), mark.name, mark.unit)]
        if node.name in self.found:
            return [self.found[node.name]]
        cause = f.cause or self.cause(node, f)
        return [Reason(cause[0], node.name, where(node), cause[1])] if cause else []

    def cause(self, node: fx.Node, f: NodeFacts) -> tuple[str, str] | None:
        """An automatic cut: (kind, detail), or None."""
        target: Any = node.target
        name = str(getattr(target, "__name__", target))
        if isinstance(target, torch._ops.HigherOrderOperator):
            if target.name() in _CONTROL_FLOW:
                return "control flow", target.name()
            bodies = [
                p
                for p in node.all_input_nodes
                if p.op == "get_attr" and not self.facts.nodes[p.name].tensors
            ]
            if bodies and not target.name().startswith("flex_attention"):
                return "higher-order operator", target.name()
        if f.kind == "object" and node not in self.inside_levels:
            return "object result", name
        operands = [(p, t) for p in node.all_input_nodes for t in self.facts.nodes[p.name].tensors]
        for t in (*(t for _, t in operands), *f.tensors):
            if t.storage in self.facts.shared:
                return "special tensor", f"{self.facts.shared[t.storage]} wraps its memory"
        for p, t in operands:
            owner = self.origin(t.storage).tensors
            if owner and owner[0].overlapping and t.storage in f.reads | f.writes:
                return "overlapping memory", p.name
            if t.storage in self.facts.around and t.storage in f.reads | f.writes:
                return "storage access", self.facts.around[t.storage]
        numbers = [p for p in node.all_input_nodes if p in self.live]
        for p in dict.fromkeys(numbers):
            if not self.as_slot(node, p, f):
                return "number", f"{name} uses {p.name}"
        return self.device_cause(node, f, operands)

    def origin(self, storage: int) -> NodeFacts:
        """The facts of the node that made a storage."""
        return self.facts.nodes[self.facts.origin[storage]]

    def device_cause(
        self, node: fx.Node, f: NodeFacts, operands: list[Any]
    ) -> tuple[str, str] | None:
        """A cut for memory that is not on the recorded device."""
        here = self.facts.device
        if here == "cpu":
            return None
        for p, t in operands:
            if t.spec.device == "cpu":
                scalar = not t.spec.size and not t.special
                if scalar and (p in self.fixed or self.as_slot(node, p, f)):
                    continue
                return "CPU tensor", p.name
        for t in f.tensors:
            if t.spec.device == "cpu":
                return "CPU tensor", node.name
        for t in (*(t for _, t in operands), *f.tensors):
            if t.spec.device != here:
                return "several devices", t.spec.device
        return None

    def as_slot(self, node: fx.Node, number: fx.Node, f: NodeFacts) -> bool:
        """Lets ``node`` read ``number`` from a 0-dim slot, if it then computes the same bits."""
        source = self.facts.nodes[number.name]
        given = not source.tensors or source.kind == "input"
        if (
            node.target not in _SLOT_TARGETS or len(node.args) != 2 or node.kwargs or not given
            or len(f.tensors) != 1 or f.tensors[0].spec.dtype not in _SLOT_DTYPES
            or any(t.storage in self.facts.written for t in source.tensors)
            or not self.known_before_the_call(number)
        ):  # fmt: skip
            return False
        other = node.args[1] if node.args[0] is number else node.args[0]
        if not isinstance(other, fx.Node) or other is number:
            return False
        operand = self.facts.nodes[other.name].tensors
        if len(operand) != 1 or operand[0].spec.device != self.facts.device:
            return False
        dtype = getattr(torch, f.tensors[0].spec.dtype)
        dims = 1 if operand[0].spec.size else 0
        like = torch.empty((1,) * dims, dtype=getattr(torch, operand[0].spec.dtype))
        if torch.result_type(like, torch.empty((), dtype=dtype)) != dtype:
            return False
        self.number_operands[node, 0 if node.args[0] is number else 1] = number
        return True

    def known_before_the_call(self, number: fx.Node) -> bool:
        """Whether the number follows from arguments alone, not from an eager segment."""
        f = self.facts.nodes[number.name]
        if f.kind == "input" or (f.kind == "number" and number.op == "placeholder"):
            return True
        return (f.kind == "number" or self.is_argument_read(number, f)) and all(
            self.known_before_the_call(p) for p in number.all_input_nodes
        )
