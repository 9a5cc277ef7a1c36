"""Where each value of a graph lives: per storage, so views never disagree with their base."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from torch_bcg.graph.ir import Home, Value
from torch_bcg.graph.known import Facts
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.partition import Partition

# Homes at an address that stays for the life of a program.
FIXED: frozenset[str] = frozenset(
    ("static", "slot", "size", "constant", "recorded", "scratch", "bridge", "alias")
)


class Homes:
    """Answers for one graph, its partition and its static arguments."""

    def __init__(
        self,
        name: str,
        gm: fx.GraphModule,
        facts: Facts,
        parts: Partition,
        static: frozenset[str],
        touched_also: frozenset[int] = frozenset(),
    ) -> None:
        self.name, self.gm, self.facts, self.parts = name, gm, facts, parts
        self.nodes: dict[str, fx.Node] = {n.name: n for n in gm.graph.nodes}
        self.static = static
        self.stretch = {n.name: s for s in parts.stretches for n in s.nodes}
        apart = {n.name for n in (*parts.scratch, *parts.constants)}
        self.canonical = {n: f.same_as for n, f in facts.nodes.items() if f.same_as}
        self.floats = {
            n.name
            for n in gm.graph.nodes
            if n.op not in ("placeholder", "output")
            and n.name not in self.stretch
            and n.name not in apart
            and not (n.op == "get_attr" and facts.nodes[n.name].tensors)
            and facts.nodes[n.name].kind != "mode"
        }
        self.lowering = Lowering(gm, self.canonical, self.floats)
        self.touched = (self.touched_storages() | touched_also) - self.facts.around.keys()
        self.live = {n.name for n in parts.live}
        self.numbers = {n.name for n in parts.numbers}
        self.counted = self.counted_storages()
        self.owner = self.owners()
        self.bound: dict[str, bool] = {}

    def touched_storages(self) -> frozenset[int]:
        """Storages that kernels of recorded segments read or write."""
        touched: set[int] = set()
        for stretch in self.parts.stretches:
            for node in stretch.nodes if not stretch.reasons else ():
                f = self.facts.nodes[node.name]
                numbers = {
                    t.storage
                    for (n, _), number in self.parts.number_operands.items()
                    if n is node
                    for t in self.facts.nodes[number.name].tensors
                }
                touched |= (f.reads | f.writes) - numbers
        return frozenset(touched)

    def counted_storages(self) -> frozenset[int]:
        """Storages of arguments that numbers are read from out of the order of the program."""
        read = {n for n in self.parts.numbers if self.facts.nodes[n.name].kernels}  # x.item()
        sources = {p for n in read for p in n.all_input_nodes}
        sources |= set(self.parts.number_operands.values())
        return frozenset(t.storage for n in sources for t in self.facts.nodes[n.name].tensors)

    def owners(self) -> Mapping[int, str]:
        """Storage -> the value that has it: its maker, or the first item a node returned."""
        owner: dict[int, str] = {}
        for node in self.gm.graph.nodes:
            f = self.facts.nodes[node.name]
            for t in f.tensors:
                if t.storage in owner or not f.is_tensor:
                    continue
                if node.name in self.floats or node.name in self.canonical:
                    continue
                owner[t.storage] = node.name
        return owner

    # homes

    def home(self, name: str) -> Home:
        """Where a node's value lives."""
        node, f = self.nodes[name], self.facts.nodes[name]
        if node.op == "placeholder":
            if not f.tensors:
                return "number" if name in self.live else "size"
            if name in self.static:
                return "static"
            (t,) = f.tensors
            return "slot" if t.storage in self.touched and not t.special else "reference"
        if node.op == "get_attr":
            return "static"
        if node in self.parts.constants:
            return "constant"
        if node in self.parts.scratch:
            return "scratch"
        if name in self.floats:
            return "size"
        eager = bool(self.stretch[name].reasons)
        if not f.is_tensor or f.tensors[0].special:
            return "fresh"
        owner = self.owner.get(f.tensors[0].storage, name)
        if owner != name:
            known = f.symbols <= self.facts.key_symbols
            return "alias" if known and self.home(owner) in FIXED else "fresh"
        if not eager:
            return "recorded"
        return "bridge" if f.tensors[0].storage in self.touched else "fresh"

    def fixed(self, name: str) -> bool:
        """Whether a node's value can be bound when a program is built."""
        name = self.canonical.get(name, name)
        if name not in self.bound:
            if name not in self.floats:
                self.bound[name] = self.home(name) in FIXED
            elif name in self.numbers:
                f = self.facts.nodes[name]
                self.bound[name] = name not in self.live and f.symbols <= self.facts.key_symbols
            else:
                inputs = self.nodes[name].all_input_nodes
                self.bound[name] = name not in self.live and all(self.fixed(p.name) for p in inputs)
        return self.bound[name]

    def value(self, name: str) -> Value:
        """A node's value as the plan says it."""
        f = self.facts.nodes[name]
        home = self.home(name)
        if home == "size":
            return Value(name, home, expr=f.expr)
        if not f.is_tensor:
            return Value(name, home)
        (t,) = f.tensors
        owner = self.owner.get(t.storage, name)
        known = not t.unbacked and not t.special
        return Value(
            name,
            home,
            t.spec if known else None,
            t.storage,
            owner if home == "alias" else "",
            written=t.storage in self.facts.written,
            lazy=t.lazy,
            counted=t.storage in self.counted,
        )
