"""What readers of a plan want to know, added to it; programs depend on `Segment.reads` alone.

Which values stand behind the views a segment takes, which arguments behind a number, and what to
write to mark what was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch_bcg.graph.ir import EagerSegment, Plan, Reason, Segment, Value
from torch_bcg.graph.lower import Lowering
from torch_bcg.marking.names import find_named, spelled

# Cuts that a mark at the operation would say as well; others are about values, not operations.
_MARKABLE = (
    "host read",
    "keeps memory",
    "data-dependent size",
    "cudagraph_unsafe",
    "cannot be recorded",
    "control flow",
    "higher-order operator",
    "no facts",
    "object result",
)


def annotated(plan: Plan, lowering: Lowering) -> Plan:
    """``plan`` with `Segment.reads`, `NumberSlot.given`, `Reason.target`; again changes nothing."""
    values = {v.name: v for v in plan.values}
    segments = tuple(_segment(s, values, lowering) for s in plan.segments)
    numbers = tuple(
        dataclasses.replace(n, given=tuple(dict.fromkeys(_arguments(n.source, lowering))))
        for n in plan.number_slots
    )
    return dataclasses.replace(plan, segments=segments, number_slots=numbers)


def _segment(segment: Segment, values: Mapping[str, Value], lowering: Lowering) -> Segment:
    found = [
        source
        for name in (*segment.inputs, *segment.carried)
        for source in _sources(name, values, lowering)
    ]
    segment = dataclasses.replace(segment, reads=tuple(dict.fromkeys(found)))
    if not isinstance(segment, EagerSegment):
        return segment
    reasons = [dataclasses.replace(r, target=target_of(r, lowering)) for r in segment.reasons]
    return dataclasses.replace(segment, reasons=tuple(reasons))


def _sources(name: str, values: Mapping[str, Value], lowering: Lowering) -> Iterator[str]:
    """The values that a node is, or is remade from."""
    name = lowering.canonical.get(name, name)
    if name in values:
        yield values[name].base or name
    elif name in lowering.floats:
        for p in lowering.nodes[name].all_input_nodes:
            yield from _sources(p.name, values, lowering)


def _arguments(name: str, lowering: Lowering) -> Iterator[str]:
    node = lowering.nodes[name]
    if node.op == "placeholder":
        yield name
    for p in node.all_input_nodes:
        yield from _arguments(p.name, lowering)


def target_of(reason: Reason, lowering: Lowering) -> str:
    """The name that marks the operation behind a cut nobody marked, or ""."""
    node = lowering.nodes.get(reason.node)
    spelling = spelled(node.target) if node is not None and reason.kind in _MARKABLE else None
    if spelling is None:
        return ""
    return spelling[0] if find_named(spelling[0]) is not None else ""
