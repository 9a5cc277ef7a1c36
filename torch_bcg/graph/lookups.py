"""Whether what padded rows hold may be an index: shown by bounds, by trials of each size, or not.

Facts give bounds of it, and what it follows from, for operators that work on all rows. What a live
eager segment makes is not theirs to tell: it sees the rows of a call alone; behind them is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import sympy
from torch import fx

from torch_bcg.graph.ir import EagerSegment, Plan
from torch_bcg.graph.known import CONSTANT, Facts, Mixing
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.rows.integers import least_of, most_of


class Lookups:
    """Those of one plan.

    Args:
        live: segments that see the rows of a call alone.
        declared: what padded rows of placeholders hold, where it is not zero.
        constants: sources that hold the same at every call if the graph does not write them, with
            the least and the largest number of integers.
    """

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        lowering: Lowering,
        live: Collection[EagerSegment],
        declared: Mapping[str, float],
        constants: Mapping[str, tuple[int, int] | None],
    ) -> None:
        self.facts, self.lowering, self.declared = facts, lowering, declared
        self.symbols = {s for s, _, _ in plan.symbols}
        self.padded = [n for n, f in facts.nodes.items() if f.kind == "input" and f.tensors]
        self.live = {n for s in live for n in s.nodes}
        self.written = {w for n in self.live for w in facts.nodes[n].writes}
        origins = {facts.origin.get(s, "") for f in facts.nodes.values() for s in f.writes}
        inner = any(n in lowering.nodes and lowering.nodes[n].op == "get_attr" for n in origins)
        ends = {n: both for n, both in constants.items() if both is not None and n not in origins}
        self.ends = {least_of(n): low for n, (low, _) in ends.items()}
        self.ends |= {most_of(n): high for n, (_, high) in ends.items()}
        self.settled = self.symbols | (set(constants) - origins - ({CONSTANT} if inner else set()))

    def condition(self, name: str, m: Mixing) -> sympy.Basic | None:
        """When an index lies inside, in symbols of the key; a truth value, or None if not known."""
        behind = self.behind(name, floats=False)
        if behind == "zero":
            return sympy.true
        if m.inside is None or behind:
            return None
        held = {p: int(self.declared.get(p, 0)) for p in self.padded} | self.ends
        values = {s: held[str(s)] for s in free_of(m) if str(s) in held}
        found = sympy.sympify(m.inside).subs(values)
        known = {str(s) for s in found.free_symbols} <= self.symbols
        return found if known else None

    def is_safe(self, name: str, m: Mixing) -> bool:
        """Whether no call leads outside, at the sizes that are allowed and tried."""
        condition = self.condition(name, m)
        if condition is not None:
            return condition is not sympy.false
        return m.sources <= self.settled and not self.behind(name, floats=True)

    def behind(self, name: str, floats: bool) -> str:
        """What live segments have to do with what a node takes: ``zero`` if they made its index.

        Else ``more`` if it follows from what they made, or "". Floating point, which has no bounds,
        is looked at if ``floats``.
        """
        node = self.lowering.nodes[name]
        indices = [n for n in node.all_input_nodes if self.counts(n, floats) and self.has_rows(n)]
        if len(indices) == 1 and self.is_padded_with_zero(indices[0]):
            return "zero"
        seen, todo = set[fx.Node](), [n for n in node.all_input_nodes if self.counts(n, floats)]
        while todo:
            n = todo.pop()
            if n in seen:
                continue
            seen.add(n)
            storages = {t.storage for t in self.facts.nodes[n.name].tensors}
            if n.name in self.live or storages & self.written:
                return "more"
            todo += [p for p in n.all_input_nodes if self.counts(p, floats)]
        return ""

    def counts(self, n: fx.Node, floats: bool) -> bool:
        """Whether a node gives tensors whose bounds facts know."""
        tensors = self.facts.nodes[n.name].tensors if n.name in self.facts.nodes else ()
        return any(floats or not t.spec.dtype.startswith(("float", "bfloat")) for t in tensors)

    def has_rows(self, n: fx.Node) -> bool:
        """Whether a node gives tensors with rows."""
        return any(t.row_dims or t.uncut for t in self.facts.nodes[n.name].tensors)

    def is_padded_with_zero(self, n: fx.Node) -> bool:
        """Whether a value, or what it is a view of, is the result of a live segment."""
        while self.facts.nodes[n.name].kind == "view" and len(n.all_input_nodes) == 1:
            (n,) = n.all_input_nodes
        f = self.facts.nodes[n.name]
        made = all(self.facts.origin.get(t.storage) == n.name for t in f.tensors)
        again = any(
            t.storage in g.writes
            for t in f.tensors
            for other, g in self.facts.nodes.items()
            if other != n.name
        )
        return n.name in self.live and made and not again


def free_of(m: Mixing) -> set[Any]:
    """Symbols in the condition of a lookup."""
    return set(m.inside.free_symbols) if m.inside is not None else set()
