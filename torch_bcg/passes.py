"""The passes over a plan, in order: each takes a plan and what it follows from, and gives a plan.

``options={"passes": [...]}`` adds a project's own, which see what these have decided::

    def count(plan, context):
        print(plan, context.facts.device)
        return plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_bcg.errors import OptionError
from torch_bcg.graph.annotate import annotated
from torch_bcg.graph.ir import EagerSegment, Plan, Segment
from torch_bcg.graph.known import Facts
from torch_bcg.graph.lifetimes import with_lifetimes
from torch_bcg.graph.lower import Lowering
from torch_bcg.metadata.deriving import with_bindings
from torch_bcg.metadata.instances import Instance
from torch_bcg.rows import Rows

__all__ = ["PASSES", "Context", "Pass", "run"]


@dataclass(frozen=True)
class Context:
    """What a plan follows from.

    Attributes:
        facts: of the nodes of the graph.
        lowering: the graph, and what makes the code of its segments.
        rows: the size that is padded, and what trials have found.
        instances: the metadata objects that the graph was made for.
        ambient: (class, path) that marked functions read of them by themselves.
    """

    facts: Facts
    lowering: Lowering
    rows: Rows
    instances: tuple[Instance, ...]
    ambient: frozenset[tuple[type, str]]


Pass = Callable[[Plan, Context], Plan]


def lifetimes(plan: Plan, context: Context) -> Plan:
    """Until when each value is needed, and which of them share memory."""
    return with_lifetimes(plan, context.facts)


def padding(plan: Plan, context: Context) -> Plan:
    """What is padded, or why nothing is."""
    return context.rows.plan(plan, context.facts, context.lowering)


def bindings(plan: Plan, context: Context) -> Plan:
    """How the fields of metadata reach a call."""
    return with_bindings(plan, context.facts, context.lowering, context.instances, context.ambient)


def notes(plan: Plan, context: Context) -> Plan:
    """What only readers want to know."""
    return annotated(plan, context.lowering)


PASSES: tuple[Pass, ...] = (lifetimes, padding, bindings, notes)


def run(plan: Plan, context: Context, more: Iterable[Callable[..., object]] = ()) -> Plan:
    """All of `PASSES`, then ``more``.

    Raises:
        OptionError: one of ``more`` does not give a plan, or one of another program.
    """
    for one in PASSES:
        plan = one(plan, context)
    for one_more in more:
        made = one_more(plan, context)
        if not isinstance(made, Plan) or _fixed(made) != _fixed(plan):
            raise OptionError(
                f"The pass {getattr(one_more, '__name__', one_more)!s} gives another program.",
                where="options={'passes': [...]}",
                expected="a plan that differs in names, module paths and reasons alone",
                found=type(made).__name__ if not isinstance(made, Plan) else "others",
                fix="Return the plan it is given, or dataclasses.replace(plan, ...) of the rest.",
            )
        plan = made
    return plan


def _fixed(plan: Plan) -> Plan:
    """A plan without what only its readers look at: names, module paths, reasons."""
    segments: list[Segment] = []
    for segment in plan.segments:
        if isinstance(segment, EagerSegment):
            segment = dataclasses.replace(segment, reasons=())
        segments.append(dataclasses.replace(segment, module=""))
    return dataclasses.replace(plan, name="", segments=tuple(segments))
