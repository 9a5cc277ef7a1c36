"""Plan -> Plan: whether one size of a graph is padded, and what eager segments then see of a value.

A recorded segment of a padded program works on more rows than the call has, so it must not let one
row see another. Facts tell where it does; where they cannot, the plan says what has to be tried
(`runtime.trial`). An eager segment is given the rows of the call alone, so what it takes must be
one that can be cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_bcg.graph.buckets import RowDim
from torch_bcg.graph.ir import (
    EagerSegment,
    Front,
    GraphSegment,
    Output,
    Padding,
    Plan,
    Reason,
    Segment,
    TensorSpec,
    Value,
)
from torch_bcg.graph.known import COUNTED_THROUGH, TOP_K, WRITTEN, Facts, Mixing, TensorFact
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.sorting import where


@dataclass(frozen=True, slots=True)
class Request:
    """What the author asked for.

    Attributes:
        rows: the size that is padded, or why there is none.
        ladder: padded sizes, ascending.
        independent: the author vouches that no row sees a later one.
        fills: (placeholder, number) for padded rows of arguments that are not to be zero.
        refused: what a trial found, or None.
    """

    rows: RowDim | str
    ladder: tuple[int, ...]
    independent: bool
    fills: tuple[tuple[str, float], ...] = ()
    refused: Reason | None = None


def with_padding(plan: Plan, facts: Facts, lowering: Lowering, request: Request) -> Plan:
    """``plan`` with `Plan.padding`, and with `Segment.fronts` where it is padded."""
    if plan.unrecorded is not None:
        return plan
    if isinstance(request.rows, str):
        padding = Padding(refused=Reason("no padded size", "", detail=request.rows))
        return dataclasses.replace(plan, padding=padding)
    padder = _Padder(plan, facts, lowering, request)
    found = request.refused or padder.refused()
    padding = Padding(
        request.rows.symbol,
        request.rows.argument,
        request.rows.dim,
        request.ladder,
        found,
        () if found else padder.tried(),
        request.fills,
        () if found else padder.reserved(),
        not found and padder.each(),
    )
    plan = dataclasses.replace(plan, padding=padding)
    return plan if found else padder.with_fronts(plan)


class _Padder:
    def __init__(self, plan: Plan, facts: Facts, lowering: Lowering, request: Request) -> None:
        self.plan, self.facts, self.lowering, self.request = plan, facts, lowering, request
        self.eager = [s for s in plan.segments if isinstance(s, EagerSegment)]
        self.uncut = {s.index: self.cannot_cut(s) for s in self.eager}
        # What nobody marked may see all rows: it is eager only because it cannot be recorded.
        self.all_rows = {
            s.index
            for s in self.eager
            if self.uncut[s.index] and not any(r.kind == "mark" for r in s.reasons)
        }
        self.declared = dict(request.fills)
        self.maker = {n: s.index for s in self.eager for n in s.outputs}

    def tensors(self, name: str) -> tuple[TensorFact, ...]:
        return self.facts.nodes[name].tensors

    def holds_rows(self, name: str) -> bool:
        return any(t.row_dims or t.uncut for t in self.tensors(name))

    def reason(self, kind: str, name: str, detail: str) -> Reason:
        return Reason(kind, name, where(self.lowering.nodes[name]), detail)

    def row_dims(self, t: TensorFact) -> tuple[int, ...]:
        return row_dims(t, self.facts.rows)

    def uncut_reason(self, name: str) -> Reason | None:
        """Why a value cannot be given to somebody who is to see the rows of the call alone."""
        tensors = self.tensors(name)
        if not self.holds_rows(name):
            return None
        for t in tensors:
            if t.special or not (self.row_dims(t) or not t.uncut):
                return self.reason("rows cannot be cut", name, t.uncut or t.special)
        if not self.facts.nodes[name].is_tensor:
            return self.reason("rows cannot be cut", name, "a sequence of tensors")
        return None

    def cannot_cut(self, segment: Segment) -> Reason | None:
        names = (*segment.inputs, *segment.carried, *segment.outputs)
        return next(filter(None, map(self.uncut_reason, names)), None)

    # whether

    def refused(self) -> Reason | None:
        """Why the size is not padded, or None."""
        for s in self.eager:
            found = self.uncut[s.index]
            if found and s.index not in self.all_rows:
                return found
            for name in s.carried:
                mine, its = s.index in self.all_rows, self.maker.get(name, -1) in self.all_rows
                if self.holds_rows(name) and mine != its:
                    return self.reason("rows cannot be cut", name, "seen both whole and cut")
            if shared := self.copied_apart(s):
                return shared
        for v in self.plan.values:
            found = self.uncut_reason(v.name) if v.home == "slot" else None
            if found:
                return found
            if v.home == "static" and self.holds_rows(v.name):
                return self.reason("rows cannot be cut", v.name, "recorded where it is")
        for o in self.plan.outputs:
            if o.how == "clone" and (found := self.uncut_reason(o.name)):
                return found
            if o.how == "carried" and self.maker.get(o.name, -1) in self.all_rows:
                return self.reason("rows cannot be cut", o.name, "made of all rows and returned")
        collective = next(filter(self.is_collective, self.on_all_rows()), None)
        if collective is not None and self.tried():  # of which one rank alone must not run one more
            return self.reason("collective", collective, "a trial would call it")
        mixed = [m for m in self.mixing() if self.is_refused(m[1])]
        mixed.sort(key=lambda m: not m[1].kind.startswith("contraction"))
        return self.reason(mixed[0][1].kind, mixed[0][0], mixed[0][1].operator) if mixed else None

    def is_refused(self, m: Mixing) -> bool:
        if m.kind == WRITTEN and self.is_outer(m.storage):
            return m.index not in self.declared
        # Nobody's word makes equal numbers be chosen alike among more of them, or gives a row of
        # merged ones the number that it has in the call.
        certain = m.kind in (TOP_K, COUNTED_THROUGH)
        return m.decided and (certain or not self.request.independent)

    def is_outer(self, storage: int) -> bool:
        """Whether memory is the caller's, or of a parameter or buffer."""
        origin = self.facts.origin.get(storage, "")
        return origin in self.lowering.nodes and self.lowering.nodes[origin].op in (
            "placeholder", "get_attr",
        )  # fmt: skip

    def is_collective(self, name: str) -> bool:
        """Whether a node calls other ranks."""
        operators = self.facts.nodes[name].operators
        return any(o.namespace.startswith(("_c10d_functional", "c10d")) for o in operators)

    def tried(self) -> tuple[Reason, ...]:
        """What a trial has to show."""
        found = {
            (m.kind, m.operator): self.reason(m.kind, name, m.operator)
            for name, m in self.mixing()
            if not (m.kind == WRITTEN and m.index in self.declared)
        }
        for name in () if found else self.rearranged():
            found["", name] = self.reason("rows rearranged", name, self.tensors(name)[0].uncut)
        return tuple(found.values())

    def each(self) -> bool:
        """Whether a trial tells of its own number of rows alone."""
        return any(m.each for _, m in self.mixing()) or any(self.rearranged())

    def rearranged(self) -> Iterator[str]:
        """Values seen by others of which facts do not know where the rows are."""
        return (n for n in self.seen_by_others() if any(t.uncut for t in self.tensors(n)))

    def reserved(self) -> tuple[tuple[int, int], ...]:
        """(storage, row) of memory that padded rows may be written to."""
        found = {
            (m.storage, int(self.declared[m.index]))
            for _, m in self.mixing()
            if m.kind == WRITTEN and m.index in self.declared
        }
        return tuple(sorted(found))

    def seen_by_others(self) -> list[str]:
        """Values that somebody sees of whom only the rows of the call are there."""
        names = [o.name for o in self.plan.outputs if o.how == "clone"]
        return names + [n for s in self.eager for n in s.inputs if s.index not in self.all_rows]

    def mixing(self) -> Iterator[tuple[str, Mixing]]:
        """What is done to rows where all of them are worked on."""
        return ((n, m) for n in self.on_all_rows() for m in self.facts.nodes[n].mixing)

    def on_all_rows(self) -> list[str]:
        """Nodes that work on all rows, in order; views that only live segments remake are not."""
        todo = [o.name for o in self.plan.outputs if o.how == "clone"]
        todo += [v.name for v in self.plan.values if v.home in ("constant", "scratch")]
        for s in self.plan.segments:
            everything = isinstance(s, GraphSegment) or s.index in self.all_rows
            todo += s.nodes if everything else s.inputs
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen or name not in self.lowering.nodes:
                continue
            seen.add(name)
            taken = (p.name for p in self.lowering.nodes[name].all_input_nodes)
            todo += [n for n in taken if n in self.lowering.floats]
        live = {n for s in self.eager if s.index not in self.all_rows for n in s.nodes}
        return sorted(seen - live, key=self.lowering.order.__getitem__)

    def copied_apart(self, segment: EagerSegment) -> Reason | None:
        """Values of one storage, of which one is written, that would be copied each by itself."""
        fronts = self.fronts(segment)
        for c in fronts:
            others = [o for o in fronts if o.storage == c.storage and o.name != c.name]
            if others and c.written and any(o.copied for o in (c, *others)):
                return self.reason("rows cannot be cut", c.name, "written, and others share memory")
        return None

    # what is seen

    def fronts(self, segment: Segment) -> tuple[Front, ...]:
        """What a segment takes and makes that holds rows, as far as it can be cut."""
        if segment.index in self.all_rows:
            return ()
        made = segment.outputs if isinstance(segment, GraphSegment) else ()
        names = [n for n in (*segment.inputs, *made) if self.holds_rows(n)]
        cut = [n for n in names if self.uncut_reason(n) is None]
        return tuple(self.front_of(n, set(segment.writes)) for n in cut)

    def front_of(self, name: str, written: set[int]) -> Front:
        (t,) = self.tensors(name)
        return Front(
            name, t.spec, t.storage, self.row_dims(t), self.is_copied(t.spec), t.storage in written
        )

    def is_copied(self, spec: TensorSpec) -> bool:
        """Whether a stride of a dim longer than one follows the padded size."""
        pairs = zip(spec.size, spec.stride, strict=True)
        return any(self.follows(stride) for size, stride in pairs if size != "1")

    def follows(self, expression: str) -> bool:
        assert isinstance(self.request.rows, RowDim)
        return self.request.rows.symbol in names_in(expression)

    def with_fronts(self, plan: Plan) -> Plan:
        def segment(s: Segment) -> Segment:
            s = dataclasses.replace(s, fronts=self.fronts(s))
            if isinstance(s, EagerSegment):
                s = dataclasses.replace(s, live=s.index not in self.all_rows)
            return s

        # Whoever works on all rows fills the tail as well, which the next one there finds zero.
        written = {s for e in self.eager if e.index in self.all_rows for s in e.writes}
        made = {n for e in self.eager if e.index in self.all_rows for n in e.outputs}
        dirty = {v.memory or v.name for v in plan.values if v.name in made or v.storage in written}

        lain = {v.memory or v.name: set[tuple[int, ...]]() for v in plan.values}
        for v in plan.values:
            if v.spec is not None and self.facts.nodes[v.name].is_tensor:
                lain[v.memory or v.name].add(self.row_dims(self.tensors(v.name)[0]))
        dirty |= {slot for slot, dims in lain.items() if len(dims) > 1}  # tails in other places

        def value(v: Value) -> Value:
            if (v.memory or v.name) in dirty:
                v = dataclasses.replace(v, memory="")
            if v.spec is None or not self.facts.nodes[v.name].is_tensor:
                return v
            return dataclasses.replace(v, row_dims=self.row_dims(self.tensors(v.name)[0]))

        def output(o: Output) -> Output:
            return (
                dataclasses.replace(o, front=self.front_of(o.name, set()))
                if o.how == "clone"
                else o
            )

        return dataclasses.replace(
            plan,
            values=tuple(map(value, plan.values)),
            segments=tuple(map(segment, plan.segments)),
            outputs=tuple(map(output, plan.outputs)),
        )


def row_dims(t: TensorFact, symbol: str) -> tuple[int, ...]:
    """Dims of a tensor that are cut to the rows of a call.

    Where facts lost sight of the rows, a dim of their number is taken for them; a trial has to
    agree (`_Padder.tried`).
    """
    if not t.uncut:
        return t.row_dims
    if any(symbol in names_in(size) and size != symbol for size in t.spec.size):
        return ()
    return tuple(d for d, size in enumerate(t.spec.size) if size == symbol)


def names_in(expression: str) -> set[str]:
    """Symbols of an expression."""
    return set(compile(expression, "<size>", "eval").co_names)


def fills_of(
    pad: Mapping[str, float], names: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, float], ...]:
    """``pad`` by placeholder; ``names`` are those that the author knows each by."""
    found = {p: pad[k] for p, known in names.items() for k in reversed(known) if k in pad}
    return tuple(found.items())
