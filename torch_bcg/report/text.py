"""Plans -> the text of `explain`: what is recorded, what is not and why, what it costs a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_bcg.graph.amounts import bytes_of
from torch_bcg.graph.flow import Flow
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import EagerSegment, Plan, Segment, Value
from torch_bcg.graph.render import binding_lines, columns, padding_lines, returned, wrapped
from torch_bcg.graph.values import counted
from torch_bcg.report.advice import Cause, causes
from torch_bcg.report.fold import folded
from torch_bcg.report.fused import NOT_RECORDED, TITLE, outcomes

NO_GRAPH = (
    "No graph was planned: nothing was compiled and called yet, or all calls needed gradients\n"
    "(call under torch.inference_mode()).\n"
)
NOT_PROBED = (
    "Not probed: marks, schemas and fake tensors say this. An operation that reads the host and",
    "does not say so is found by the first real call, which adds a cut for it, and so is metadata",
    "that a marked function reads by itself; explain(compiled) after that call shows both.",
)
PROBED = (
    "Probed: the first call looked for operations that read the host, wait for the device or keep",
    "memory and do not say so; what it found is a cut above. What they would do with other values",
    "was not tried.",
)


def explanation(
    plans: Sequence[Plan],
    probed: bool,
    fusings: Mapping[str, Sequence[Fusing] | None] | None = None,
) -> str:
    """The text of all graphs of one function.

    Args:
        plans: annotated plans, in the order in which Dynamo made them.
        probed: whether each graph ran once under the probe.
        fusings: by the name of a plan, what is fused of each program; None: nothing is to be.
    """
    if not plans:
        return NO_GRAPH
    parts = [explained(plan, (fusings or {}).get(plan.name)) for plan in plans]
    if len(plans) > 1:
        parts.insert(0, f"{len(plans)} graphs, in the order in which Dynamo made them.\n")
    parts.append("\n".join(PROBED if probed else NOT_PROBED) + "\n")
    return "\n".join(parts)


def explained(plan: Plan, fusings: Sequence[Fusing] | None = None) -> str:
    """One plan, its alike neighbours folded; `Plan.render` lists everything."""
    if plan.unrecorded is not None:
        (cause,) = causes([plan.unrecorded])
        advice = [f"  {cause.advice}"] if cause.advice else []
        return "\n".join([str(plan), *advice]) + "\n"
    sections = [
        [str(plan)],
        segments(plan),
        cuts(plan),
        fused(plan, fusings),
        memory(plan),
        binding_lines(plan.bindings),
        padding(plan),
        numbers(plan),
        outputs(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def segments(plan: Plan) -> list[str]:
    """Segments in the order of a call, and the bytes that cross from each to later ones."""
    flow = plan.flow
    lines = ["segments, in the order of a call"]
    for run in folded(plan):
        for segment in run.shown:
            lines += _segment(segment, flow)
        if run.again:
            lines.append(f"  .. {run}")
    return lines


def _segment(segment: Segment, flow: Flow) -> list[str]:
    head = f"  {segment.index:>3} {segment.kind}  {counted(segment.kernels, 'kernel'):<10}"
    lines = [f"{head}  {segment.module}".rstrip()]
    if isinstance(segment, EagerSegment):
        lines += [f"{'':13}{reason}" for reason in segment.reasons]
    crossing = flow.crossing(segment.index)
    if crossing:
        names = [f"{bytes_of(crossing)}: {crossing[0]}", *map(str, crossing[1:])]
        lines += wrapped("|", names, indent=10, hang=2)
    return lines


def cuts(plan: Plan) -> list[str]:
    """The causes of the cuts, and what to mark where nobody did."""
    found = causes(plan.reasons)
    return ["cuts", *(line for cause in found for line in cut(cause))] if found else []


def cut(cause: Cause) -> list[str]:
    """One cause: how often, where, and what to do."""
    lines = [f"  {counted(len(cause.reasons), 'time')} {cause.title} ({cause.places})"]
    return [*lines, f"      {cause.advice}"] if cause.advice else lines


def fused(plan: Plan, fusings: Sequence[Fusing] | None) -> list[str]:
    """What was recorded of segments, apart for programs in which it differs; nothing if not asked.

    Args:
        plan: of the programs.
        fusings: one a program; None: nothing is to be fused.
    """
    if fusings is None or not plan.graph_segments:
        return []
    lines = [TITLE]
    for o in outcomes(fusings):
        lines.append(f"  {o.title}, in {o.many}")
        for name, items in (("sizes", o.sizes), *o.notes):
            lines += wrapped(name, items, 6, 9)
    return lines if fusings else [*lines, f"  {NOT_RECORDED}"]


def memory(plan: Plan) -> list[str]:
    """Slots, and what copies into and out of them cost a call."""
    slots = [v for v in plan.values if v.home == "slot"]
    bridges = [v for v in plan.values if v.home == "bridge"]
    static = [v for v in plan.values if v.home == "static"]
    backs: dict[str, list[int]] = {}
    for s in plan.segments:
        for name in s.copy_back:
            backs.setdefault(name, []).append(s.index)
    rows = [(str(v), str(bytes_of([v])), _slot(v, backs)) for v in slots]
    rows += [(str(v), str(bytes_of([v])), "copied once its eager segment made it") for v in bridges]
    lines = ["slots: memory at a fixed address", *columns(rows)] if rows else []
    if static:
        many = counted(len(static), "static tensor")
        lines.append(f"  {many}, {bytes_of(static)}: recorded where they are, never copied")
    if slots:
        lines += [
            "  A caller's tensor that stays where it is needs no slot:",
            "      torch._dynamo.mark_static_address(tensor)",
        ]
    return lines


def _slot(v: Value, backs: dict[str, list[int]]) -> str:
    if v.name not in backs:
        return "copied in"
    after = ", ".join(map(str, backs[v.name]))
    return f"copied in, and back after segment {after}"


def padding(plan: Plan) -> list[str]:
    """The size that is padded, what is copied for it, or why it is not; nothing if not asked."""
    p = plan.padding
    if p is None:
        return []
    if p.refused is not None:
        return ["padding", f"  none: {p.refused}", "  Calls are recorded at their own sizes."]
    first, *more = padding_lines(p)[:-1]
    lines = ["padding", f"  {first.removeprefix('padding: ')}", *(f"  {line}" for line in more)]
    for s in plan.segments:
        copied = [c for c in s.fronts if c.copied] if isinstance(s, EagerSegment) else []
        for c in copied:
            back = ", and back" if c.written else ""
            amount = bytes_of([Value(c.name, "slot", c.spec)])
            lines.append(
                f"  {c.name} {c.spec} is copied for segment {s.index}{back}, {amount}: "
                "its strides follow the size"
            )
    return lines


def numbers(plan: Plan) -> list[str]:
    """Numbers that specialise a program, and numbers that follow the call."""
    padded = plan.padding.symbol if plan.padding and not plan.padding.refused else ""
    each = "each value records a program"
    rows = [(s, plan.read_at(s), "padded" if s == padded else each) for s, _, _ in plan.symbols]
    rows += [(s, plan.read_at(s), "follows the call") for s, _, _ in plan.call_symbols]
    rows += [(str(n), n.dtype, "follows the call") for n in plan.number_slots]
    rows += [(v.name, "", "follows the call") for v in plan.values if v.home == "number"]
    rest = "  Any other number is a constant of the graph: Dynamo compares it at each call."
    return ["numbers", *columns(rows), rest]


def outputs(plan: Plan) -> list[str]:
    """How each output reaches the caller, and what clones cost."""
    known = {v.name: v for v in plan.values}
    rows = []
    for o in plan.outputs:
        value = known.get(o.name)
        cost = str(bytes_of([value])) if value is not None and o.how == "clone" else ""
        rows.append((str(value or o.name), returned(o), cost))
    return ["outputs", *columns(rows)] if rows else []
