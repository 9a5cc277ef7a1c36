"""Parts of a plan -> lines of text, stable to the character. `Plan.render` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_bcg.graph.amounts import bytes_of
from torch_bcg.graph.flow import Flow
from torch_bcg.graph.values import (
    Binding,
    EagerSegment,
    GraphSegment,
    NumberSlot,
    Output,
    Padding,
    Segment,
    Value,
    counted,
)

WIDTH = 100
_HOMES = {
    "static": "recorded where it is",
    "slot": "copied in",
    "reference": "passed on as it is",
    "number": "follows the call",
    "size": "of the key",
    "constant": "made once a program",
    "recorded": "memory of a recorded segment",
    "scratch": "allocated once a program",
    "bridge": "copied into its slot after the eager segment",
    "fresh": "new at each call",
}


def argument_lines(values: Iterable[Value], arguments: Sequence[str]) -> list[str]:
    """Arguments with homes. Static tensors nobody writes are many: counted, not listed."""
    listed = {v.name: v for v in values}
    plain = [v for v in listed.values() if v.home == "static" and not v.written]
    rows = [
        _row(listed[name]) if name in listed else (name, "unused", "", "")
        for name in arguments
        if name not in {v.name for v in plain}
    ]
    head = [f"arguments: {len(arguments)}"]
    if plain:
        many = counted(len(plain), "static tensor")
        head.append(f"  {many} that nothing writes, {bytes_of(plain)}: recorded where they are")
    return head + columns(rows)


def padding_lines(padding: Padding | None) -> list[str]:
    """How a size is padded, or why not; none where nobody asked."""
    if padding is None:
        return []
    if padding.refused is not None:
        return ["padding: none", *wrapped("reason", [str(padding.refused)], 2, 12), ""]
    ladder = padding.ladder
    sizes = ", ".join(map(str, ladder))
    if len(ladder) > 8:
        sizes = f"{', '.join(map(str, ladder[:3]))} .. {ladder[-1]}, {len(ladder)} sizes"
    lines = [
        f"padding: {padding.symbol}, that is {padding.argument}.shape[{padding.dim}], to {sizes}"
    ]
    lines += wrapped("tried", list(map(str, padding.tried)), 2, 12)
    lines += wrapped("rows hold", [f"{a}: {n:g}" for a, n in padding.fills], 2, 12)
    return [*lines, ""]


def binding_lines(bindings: Iterable[Binding]) -> list[str]:
    """Per metadata class the kind of each field and why, then the fields that nobody reads."""
    lines = []
    for b in bindings:
        lines.append(f"metadata {b.cls}")
        lines += columns(
            (f.name, f.kind + " (declared)" * f.declared, f.value, f.why)
            for f in b.fields
            if f.why or f.declared
        )
        lines += wrapped("unread", b.unread, 2, 10)
    return lines


def memory_lines(values: Iterable[Value], arguments: Sequence[str]) -> list[str]:
    """Values that are no arguments and live outside the segment that makes them."""
    own = [
        v for v in values if v.name not in arguments and not (v.home == "static" and not v.written)
    ]
    return [f"values: {len(own)}", *columns([_row(v) for v in own])] if own else []


def _row(v: Value) -> tuple[str, ...]:
    what = f"view of {v.base}" if v.home == "alias" else _HOMES[v.home]
    if v.home == "slot" and v.written:
        what = "copied in, and back where written"
    if v.memory:
        what = f"in the slot of {v.memory}"
    if v.home == "size" and v.expr != v.name:
        what = f"{v.expr}, of the key"
    flag = "written" if v.written and v.home != "slot" else ""
    amount = "" if v.spec is None else str(bytes_of([v]))
    text = "" if v.spec is None else str(v.spec)
    return v.name, v.home, text, amount, ", ".join(filter(None, (what, flag)))


def segment_lines(segment: Segment, flow: Flow, numbers: Sequence[NumberSlot]) -> list[str]:
    """One segment: what it runs, why it is not recorded, what it reads, makes and copies."""
    head = f"  {segment.index} {segment.kind}, {counted(segment.kernels, 'kernel')}"
    lines = [f"{head}, {segment.module}" if segment.module else head]
    for reason in segment.reasons if isinstance(segment, EagerSegment) else ():
        lines += wrapped("reason", [str(reason)])
    lines += wrapped("nodes", segment.nodes)
    lines += wrapped("reads", _read(segment, flow))
    lines += wrapped("makes", [_made(flow.values[n]) for n in segment.outputs])
    source = {n.name: n.source for n in numbers}
    read = [f"{node} reads {source[slot]} from {slot}" for node, _, slot in segment.number_slots]
    lines += wrapped("numbers", read)
    lines += wrapped("copies back", segment.copy_back)
    if isinstance(segment, EagerSegment):
        lines += wrapped("sees", _seen(segment))
    crossing = flow.crossing(segment.index)
    if crossing:
        names = [v.name for v in crossing]
        lines += wrapped("crosses", [f"{bytes_of(crossing)}: {names[0]}", *names[1:]])
    return lines


def opening_lines(
    opening: GraphSegment, values: Iterable[Value], arguments: Sequence[str]
) -> list[str]:
    """What a call compares with ``check="address"`` only once its opening runs."""
    static = [v for v in values if v.home == "static" and v.name in arguments]
    read = {v.storage for v in static if v.name in opening.reads}
    late = sum(v.storage not in read for v in static)
    if not late:
        return []
    return wrapped("compares", [f"{counted(late, 'static tensor')} once it runs"])


def _read(segment: Segment, flow: Flow) -> list[str]:
    read = flow.reads(segment)
    plain = [v for v in read if v.home == "static" and not v.written]
    named = [f"{v.name} ({v.home})" for v in read if v not in plain]
    return named + ([counted(len(plain), "static tensor")] if plain else [])


def _seen(segment: EagerSegment) -> list[str]:
    """What an eager segment of a padded program is given of padded values."""
    if not segment.live:
        return ["all rows, padded ones too"]
    copied = [c for c in segment.fronts if c.copied]
    return [f"the rows of the call of {c.name}, copied{' and back' * c.written}" for c in copied]


def _made(value: Value) -> str:
    return f"{value} ({value.home})"


def output_lines(outputs: Sequence[Output], values: Iterable[Value]) -> list[str]:
    """Outputs and how each is returned."""
    known = {v.name: v for v in values}
    rows = []
    for i, o in enumerate(outputs):
        spec = known[o.name].spec if o.name in known else None
        rows.append((f"{i}", o.name, "" if spec is None else str(spec), returned(o)))
    return [f"outputs: {len(outputs)}", *columns(rows)]


def returned(o: Output) -> str:
    """How one output reaches the caller."""
    if o.how == "view":
        return f"{o.base} itself" if o.name == o.base else f"a view of {o.base}"
    return {
        "literal": "always this",
        "size": "follows from the key",
        "clone": "the caller's own copy",
        "carried": "as this call made it",
    }[o.how]


def columns(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Aligned columns, two spaces apart, nothing at the end of a line."""
    rows = list(rows)
    count = max((len(r) for r in rows), default=0)
    rows = [[*r, *[""] * (count - len(r))] for r in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(f"{c:<{w}}" for c, w in zip(r, widths, strict=True) if w).rstrip()
        for r in rows
    ]


def wrapped(name: str, items: Sequence[str], indent: int = 6, hang: int = 12) -> list[str]:
    """``name  a, b, c`` over as many lines as needed; none without items."""
    lines: list[str] = []
    current, fresh = f"{'':<{indent}}{name:<{hang}}", True
    for i, item in enumerate(items):
        text = item if i == len(items) - 1 else f"{item},"
        if not fresh and len(current) + 1 + len(text) > WIDTH:
            lines.append(current)
            current, fresh = " " * (indent + hang), True
        current += text if fresh else f" {text}"
        fresh = False
    return [*lines, current] if items else []
