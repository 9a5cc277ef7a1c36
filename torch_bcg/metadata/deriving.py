"""The pass: plan and metadata objects of one graph -> how each field reaches a call.

A field that a recorded segment reads is read at a fixed address, whatever object a call brings;
one that no recorded segment touches may be another object at each call. Both follow from the plan,
so a declaration can be refused before it is silently wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

from torch import fx

from torch_bcg.errors import BindingError
from torch_bcg.graph.ir import Binding, EagerSegment, Field, GraphSegment, Plan, Segment, Value
from torch_bcg.graph.known import Facts, NodeFacts
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.sorting import where
from torch_bcg.graph.values import Kind, stronger
from torch_bcg.metadata.instances import Instance
from torch_bcg.metadata.registration import Declared, Shown, declared_of, same, unequal
from torch_bcg.metadata.schema import kind_at, unknown_field, within


def with_bindings(
    plan: Plan,
    facts: Facts,
    lowering: Lowering,
    instances: Sequence[Instance],
    ambient: frozenset[tuple[type, str]] = frozenset(),
) -> Plan:
    """``plan`` with `Plan.bindings`.

    Args:
        plan: of the graph.
        facts: of its nodes.
        lowering: its nodes.
        instances: the metadata objects that it was made for.
        ambient: (class, path) that marked functions read by themselves in the probe.

    Raises:
        BindingError: what is declared of a field would be silently wrong in this graph.
    """
    deriver = _Deriver(plan, facts, lowering, ambient)
    return dataclasses.replace(plan, bindings=tuple(map(deriver.binding, instances)))


def shown_by(plan: Plan, instances: Sequence[Instance]) -> Mapping[type, Shown]:
    """What a plan shows of each class, for `registration.remember`.

    Raises:
        BindingError: two objects of one class have other numbers where they are declared equal.
    """
    # Of what lies in another object numbers are compared there, each at its own place.
    inside = {cls for i in instances for path, cls in i.parts.items() if path}
    found: dict[type, Shown] = {}
    for instance, binding in zip(instances, plan.bindings, strict=True):
        before = found.get(instance.cls, Shown())
        kinds = dict(before.kinds)
        for f in binding.fields:
            kinds[f.name] = stronger(f.kind, kinds.get(f.name, f.kind))
        names = [n for n, kind in kinds.items() if kind == "EQUAL" and instance.cls not in inside]
        equal = {n: instance.numbers.get(n) for n in names}
        for n in names:
            if not same(before.equal.get(n, equal[n]), equal[n]):
                raise unequal(instance.cls, n, before.equal[n], equal[n])
        constants = {path: instance.numbers.get(path) for path in instance.constants}
        found[instance.cls] = Shown(
            kinds,
            {**before.equal, **equal},
            {**before.constants, **constants},
        )
    return found


# Operators that overwrite their first argument without reading it, and those that do so in part.
_WHOLE = {"aten::copy_", "aten::fill_", "aten::zero_"}
_PARTS = {
    *("aten::index_put_", "aten::_index_put_impl_", "aten::scatter_", "aten::index_copy_"),
    *("aten::index_fill_", "aten::masked_fill_", "aten::masked_scatter_"),
}


class _Deriver:
    """Kinds of the fields of one graph's metadata."""

    def __init__(
        self,
        plan: Plan,
        facts: Facts,
        lowering: Lowering,
        ambient: frozenset[tuple[type, str]],
    ) -> None:
        self.plan, self.facts, self.lowering, self.ambient = plan, facts, lowering, ambient
        self.values = {v.name: v for v in plan.values}

    def binding(self, instance: Instance) -> Binding:
        """One object's fields, each derived, then compared with what is declared."""
        declared = declared_of(instance.parts)
        for name in declared:
            _check_found(instance, name)
        derived = {path: self.derived(instance, path) for path in instance.what}
        for group in instance.sharing:
            kind = functools.reduce(stronger, (derived[path].kind for path in group))
            strongest = next(path for path in group if derived[path].kind == kind)
            for path in group:
                field = derived[path]
                why = field.why
                if field.kind != kind:
                    why = f"as {strongest}, whose tensor it holds: {derived[strongest].why}"
                others = tuple(p for p in group if p != path)
                derived[path] = dataclasses.replace(field, kind=kind, why=why, shares=others)
        fields = [
            self.compared(instance, field, kind_at(path, declared))
            for path, field in derived.items()
        ]
        return Binding(f"{instance.cls.__module__}.{instance.cls.__qualname__}", tuple(fields))

    def derived(self, instance: Instance, path: str) -> Field:
        """What the graph shows of one field."""
        argument = instance.arguments.get(path, "")
        ambient = (instance.cls, path) in self.ambient
        if instance.what[path] != "tensor":
            return self.number(instance, path, argument, ambient)
        kind, why = self.of_tensor(argument)
        if ambient and not why:
            why = "a marked function reads it by itself"
        return Field(path, kind, argument=argument, why=why)

    def number(self, instance: Instance, path: str, argument: str, ambient: bool) -> Field:
        """A number, None or another object: nothing of it lies at an address."""
        kind: Kind = "FOLLOWS" if instance.what[path] == "number" else "REBIND"
        why = ""
        if path in instance.constants:
            why = "traced code read it: a constant of this graph"
        elif argument and any(argument in s for s in self.plan.symbols):
            why = f"in the key, as {argument}: a program for each value"
        elif argument:
            why = f"argument {argument}"
        elif ambient:
            why = "a marked function reads it by itself"
        value = repr(instance.numbers[path]) if path in instance.numbers else ""
        return Field(path, kind, argument=argument, why=why, value=value)

    def of_tensor(self, argument: str) -> tuple[Kind, str]:
        """Kind of a tensor argument, and where that shows."""
        value = self.values.get(argument)
        if value is None:
            return "REBIND", ""
        recorded = [s for s in self.plan.segments if isinstance(s, GraphSegment)]
        writers = [s for s in recorded if value.storage in s.writes]
        if writers and self.begins(value) == "written":
            return "WRITTEN", self.spot(writers[0], value.storage, "writes")
        if writers and self.begins(value) != "read":
            return "COPY", self.spot(writers[0], value.storage, "writes")
        if value.home in ("slot", "static"):
            for s in recorded:
                spot = self.spot(s, value.storage, "reads")
                if spot:
                    return "COPY", spot
            return "COPY", "recorded"
        for eager in self.plan.segments:
            spot = self.spot(eager, value.storage, "reads")
            if isinstance(eager, EagerSegment) and spot:
                return "REBIND", spot
        return "REBIND", "passed on"

    def begins(self, value: Value) -> str:
        """What first happens to a tensor: ``read``, ``written`` whole, or ``unknown``.

        Only what is written whole before anybody reads it may come along with any values.
        """
        storage = value.storage
        for name in (n for s in self.plan.segments for n in s.nodes):
            f, node = self.facts.nodes[name], self.lowering.nodes[name]
            if storage not in f.reads | f.writes:
                continue
            if storage not in f.writes or storage in self.taken(node):
                return "read"
            kernels = {o._schema.name for o in f.operators if o._schema.is_mutable}
            if any(not k.startswith("aten::") for k in kernels):
                return "unknown"
            if any(o.name().endswith("out") for o in f.operators) or kernels <= _WHOLE:
                return "written" if self.is_whole(node, f, value) else "unknown"
            return "unknown" if kernels <= _WHOLE | _PARTS else "read"
        return "unknown"

    def taken(self, node: fx.Node) -> set[int]:
        """Storages of what a node takes beside the tensor that it overwrites."""
        others = node.args if "out" in node.kwargs else node.args[1:]
        more = {k: v for k, v in node.kwargs.items() if k != "out"}
        found: list[fx.Node] = []
        fx.node.map_arg((others, more), found.append)
        return {t.storage for p in found for t in self.facts.nodes[p.name].tensors}

    def is_whole(self, node: fx.Node, f: NodeFacts, value: Value) -> bool:
        """Whether a node that overwrites something overwrites all of a value."""
        if node.target is operator.setitem:
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            whole = all(i in (..., slice(None)) for i in index)
            return whole and isinstance(node.args[0], fx.Node) and node.args[0].name == value.name
        made = [t.spec for t in f.tensors if t.storage == value.storage]
        return [(t.size, t.stride) for t in made] == [
            (value.spec.size, value.spec.stride) for _ in made if value.spec is not None
        ] and bool(made)

    def spot(self, segment: Segment, storage: int, verb: str) -> str:
        """``segment 3 reads it, in add (model.py:12)``, or "" where it does not."""
        for name in segment.nodes:
            f = self.facts.nodes[name]
            if storage in (f.writes if verb == "writes" else f.reads | f.writes):
                place = where(self.lowering.nodes[name])
                return (
                    f"segment {segment.index} {verb} it, in {name}{f', {place}' if place else ''}"
                )
        return ""

    def compared(self, instance: Instance, field: Field, declared: Declared | None) -> Field:
        """The field as declared, where that is safe."""
        if declared is None or instance.what[field.name] == "none":
            return field
        tensor = instance.what[field.name] == "tensor"
        if declared == "EQUAL" and instance.what[field.name] != "number":
            raise _unsafe(instance, field, declared, "a number: to compare a tensor reads the host")
        if declared in ("COPY", "WRITTEN") and not tensor:
            raise _unsafe(instance, field, declared, "a tensor")
        if declared == "REBIND" and field.kind in ("COPY", "WRITTEN"):
            raise _unsafe(instance, field, declared, "a field that no recorded segment touches")
        if declared == "WRITTEN" and not self.is_written(field):
            raise _unsafe(
                instance, field, declared, "a field that this graph writes before it reads it"
            )
        kind: Kind = "FOLLOWS" if declared == "REBIND" and field.kind == "FOLLOWS" else declared
        return dataclasses.replace(field, kind=kind, declared=True)

    def is_written(self, field: Field) -> bool:
        """Whether the graph writes a field before it reads it, as far as it can tell."""
        value = self.values.get(field.argument)
        if value is None or field.kind == "WRITTEN":
            return True
        written = any(value.storage in s.writes for s in self.plan.segments)
        return written and self.begins(value) != "read"


def _check_found(instance: Instance, name: str) -> None:
    """Refuses a declared name that this object does not have."""
    there = name in instance.parts or any(
        within(path, name) or (what == "none" and within(name, path))
        for path, what in instance.what.items()
    )
    if not there:
        raise unknown_field(instance.cls, name, instance.what)


def _unsafe(instance: Instance, field: Field, declared: Declared, expected: str) -> BindingError:
    name = f"{instance.cls.__name__}.{field.name}"
    return BindingError(
        f"{name} is declared {declared}, which would be wrong in this graph.",
        where=f"{name}, {field.why}" if field.why else name,
        expected=expected,
        found=f"{field.kind}, as the graph shows" if field.why else instance.what[field.name],
        fix=f"Take it out of {declared.lower()}= of its class or of the one that inherits it; what "
        "is not declared is derived.",
    )
