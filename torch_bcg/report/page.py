"""A plan -> one self-contained HTML page that draws it: nothing is loaded, no script runs.

The flow runs down the page: a card a segment, and between two cards what crosses. Alike neighbours
are drawn once and the others fold out, as does the code of each segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from torch_bcg.graph.amounts import bytes_of
from torch_bcg.graph.flow import Flow
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import EagerSegment, Plan, Segment, Value
from torch_bcg.graph.render import returned
from torch_bcg.graph.values import counted
from torch_bcg.report.advice import causes
from torch_bcg.report.fold import Run, folded
from torch_bcg.report.fused import NOT_RECORDED, TITLE, outcomes
from torch_bcg.report.style import STYLE


def page(
    plan: Plan, segments_code: Mapping[int, str], fusings: Sequence[Fusing] | None = None
) -> str:
    """The page of one plan.

    Args:
        plan: what is drawn.
        segments_code: code of segments, by index; a segment without any has nothing to fold out.
        fusings: what is fused of each program; None: nothing is to be.
    """
    flow = plan.flow
    body = [
        _head(plan),
        _cuts(plan),
        _fused(plan, fusings),
        "<h2>The flow of one call</h2>",
        _arguments(plan),
        *(_run(run, flow, segments_code) for run in folded(plan)),
        _outputs(plan),
        "<h2>The plan in full</h2>",
        _text(plan),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.name)}</title><style>{STYLE}</style></head>\n"
        "<body><main>\n" + "\n".join(filter(None, body)) + "\n</main></body></html>\n"
    )


def _text(plan: Plan) -> str:
    text = escape(plan.render())
    return f'<details class="full"><summary>as text</summary><pre>{text}</pre></details>'


def _head(plan: Plan) -> str:
    share = 100 * plan.recorded_kernels / plan.kernels if plan.kernels else 0.0
    eager = len(plan.segments) - len(plan.graph_segments)
    copied = bytes_of(v for v in plan.values if v.home in ("slot", "bridge"))
    figures = [
        (f"{plan.recorded_kernels:,} of {plan.kernels:,}", "kernels recorded"),
        (f"{len(plan.graph_segments):,}", "recorded segments"),
        (f"{eager:,}", "eager segments"),
        (str(copied), "copied into slots a call"),
    ]
    tiles = "".join(f"<div><b>{escape(n)}</b><span>{what}</span></div>" for n, what in figures)
    read = [(escape(s), escape(plan.read_at(s))) for s, _, _ in plan.symbols]
    key = ", ".join(f"<code>{s}</code> = {at}" for s, at in read)
    held = f"A program is recorded for each value of {key}." if key else "One program fits all."
    if plan.unrecorded is not None:
        held = f"Nothing is recorded: {escape(str(plan.unrecorded))}."
    return (
        f"<header><h1>{escape(plan.name)} <small>on {escape(plan.device)}</small></h1>"
        f'<div class="figures">{tiles}</div>'
        f'<div class="bar" title="{share:.0f}% of kernels are recorded">'
        f'<i style="width:{share:.2f}%"></i></div>'
        f'<p>{held}</p><p class="legend"><span class="graph">recorded once, replayed</span>'
        '<span class="eager">run at every call</span></p></header>'
    )


def _cuts(plan: Plan) -> str:
    rows = []
    for cause in causes(plan.reasons):
        advice = f"<br><small>{_coded(cause.advice)}</small>" if cause.advice else ""
        rows.append(
            f"<tr><td>{len(cause.reasons)}</td><td><b>{escape(cause.kind)}</b> "
            f"<code>{escape(cause.detail)}</code>{advice}</td><td>{escape(cause.places)}</td></tr>"
        )
    head = "<tr><th>times</th><th>why it is cut</th><th>where</th></tr>"
    return f"<h2>Cuts</h2><table>{head}{''.join(rows)}</table>" if rows else ""


def _fused(plan: Plan, fusings: Sequence[Fusing] | None) -> str:
    if fusings is None or not plan.graph_segments:
        return ""
    rows = []
    for o in outcomes(fusings):
        notes = [f"<br><small>{name} {escape(', '.join(items))}</small>" for name, items in o.notes]
        rows.append(
            f"<tr><td>{len(o.programs)}</td><td><b>{o.title}</b>{''.join(notes)}</td>"
            f"<td>{escape(', '.join(o.sizes))}</td></tr>"
        )
    head = "<tr><th>programs</th><th>what is fused</th><th>sizes</th></tr>"
    table = f"<table>{head}{''.join(rows)}</table>" if rows else f"<p>{NOT_RECORDED}</p>"
    return f"<h2>{TITLE.capitalize()}</h2>{table}"


def _coded(advice: str) -> str:
    said, colon, call = advice.partition(": torch")
    return f"{escape(said)}: <code>torch{escape(call)}</code>" if colon else escape(advice)


def _arguments(plan: Plan) -> str:
    values = {v.name: v for v in plan.values}
    given = [values[a] for a in plan.arguments if a in values]
    static = [v for v in given if v.home == "static"]
    chips = [_chip(v, v.home) for v in given if v not in static]
    if static:
        what = f"{counted(len(static), 'static tensor')}, {bytes_of(static)}"
        chips.append(f'<span class="chip">{escape(what)}<em>never copied</em></span>')
    return f'<section class="end"><h3>arguments</h3>{"".join(chips) or "none"}</section>'


def _outputs(plan: Plan) -> str:
    values = {v.name: v for v in plan.values}
    chips = [_chip(values.get(o.name, o.name), returned(o)) for o in plan.outputs]
    return f'{_arrow([])}<section class="end"><h3>outputs</h3>{"".join(chips) or "none"}</section>'


def _chip(value: Value | str, note: str) -> str:
    return f'<span class="chip">{escape(str(value))}<em>{escape(note)}</em></span>'


def _run(run: Run, flow: Flow, code: Mapping[int, str]) -> str:
    shown = _cards(run.shown, flow, code)
    if not run.again:
        return shown
    return (
        f'{shown}<details class="again"><summary>{escape(str(run))}</summary>'
        f"{_cards(run.again, flow, code)}</details>"
    )


def _cards(segments: Iterable[Segment], flow: Flow, code: Mapping[int, str]) -> str:
    parts = []
    for s in segments:
        parts.append(_arrow(flow.crossing(s.index - 1)))
        parts.append(_card(s, flow, code.get(s.index, "")))
    return "".join(parts)


def _arrow(crossing: Sequence[Value]) -> str:
    if not crossing:
        return '<div class="arrow"></div>'
    named = ", ".join(map(str, crossing))
    return (
        f'<div class="arrow"><b>{escape(str(bytes_of(crossing)))}</b> '
        f"<span>{escape(named)}</span></div>"
    )


def _card(segment: Segment, flow: Flow, code: str) -> str:
    reasons = segment.reasons if isinstance(segment, EagerSegment) else ()
    why = "".join(f"<p>{escape(str(r))}</p>" for r in reasons)
    notes = [
        ("copied to a slot", flow.bridged(segment)),
        ("copied back to the caller", segment.copy_back),
        ("number read from memory", [slot for _, _, slot in segment.number_slots]),
    ]
    why += "".join(
        f'<p class="note">{what}: {escape(", ".join(map(str, items)))}</p>'
        for what, items in notes
        if items
    )
    head = (
        f"<b>{segment.index} {segment.kind}</b><span>{escape(segment.module)}</span>"
        f"<small>{counted(segment.kernels, 'kernel')}</small>"
    )
    reads = ", ".join(f"{v.name} ({v.home})" for v in flow.reads(segment) if v.home != "static")
    nodes = f"nodes: {', '.join(segment.nodes)}\nreads: {reads or 'static tensors only'}"
    inside = f"<pre>{escape(nodes)}</pre>" + (f"<pre>{escape(code)}</pre>" if code else "")
    return (
        f'<details class="card {segment.kind}" id="segment-{segment.index}">'
        f'<summary><div class="line">{head}</div>{why}</summary>{inside}</details>'
    )
