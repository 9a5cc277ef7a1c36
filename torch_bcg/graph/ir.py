"""The plan as plain data: what is decided about one graph before anything is recorded.

Everything here is frozen, comparable, printable and JSON both ways. It names FX nodes and holds no
callable, tensor or address, so one plan serves every size and every set of parameters of its graph.
What it is made of is in `graph.values`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_bcg.graph import packing, render
from torch_bcg.graph.flow import Flow
from torch_bcg.graph.values import (
    Binding,
    EagerSegment,
    Field,
    Front,
    GraphSegment,
    Home,
    NumberSlot,
    Output,
    Padding,
    Reason,
    Segment,
    TensorSpec,
    Value,
    counted,
)

__all__ = [
    "Binding",
    "EagerSegment",
    "Field",
    "Front",
    "GraphSegment",
    "Home",
    "NumberSlot",
    "Output",
    "Padding",
    "Plan",
    "Reason",
    "Segment",
    "TensorSpec",
    "Value",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided about one graph.

    Attributes:
        name: ``graph_<n>``, numbered by compilation.
        device: device type and index of the recorder, e.g. ``cpu`` or ``cuda:0``.
        symbols: (symbol, placeholder, dim) that make a program's key; dim -1: the number itself.
        arguments: names of the placeholders, in call order.
        values: all values with a home.
        segments: in the order of the program.
        number_slots: numbers read from memory by recorded segments.
        outputs: leaves of the result, in order.
        unrecorded: why nothing at all is recorded, or None.
        padding: how a size is padded, or why not; None if nobody asked.
        bindings: how fields of metadata objects reach a call.
        call_symbols: as ``symbols``, of sizes that only eager segments see: in no key.
    """

    name: str
    device: str
    symbols: tuple[tuple[str, str, int], ...]
    arguments: tuple[str, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    number_slots: tuple[NumberSlot, ...]
    outputs: tuple[Output, ...]
    unrecorded: Reason | None = None
    padding: Padding | None = None
    bindings: tuple[Binding, ...] = ()
    call_symbols: tuple[tuple[str, str, int], ...] = ()

    def value(self, name: str) -> Value:
        """The value of that name; KeyError if it has no home of its own."""
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(name)

    @property
    def graph_segments(self) -> tuple[GraphSegment, ...]:
        """The recorded segments, in order."""
        return tuple(s for s in self.segments if isinstance(s, GraphSegment))

    @property
    def opening(self) -> GraphSegment | None:
        """The first segment, if a call may begin with it and then be another program's."""
        first = self.segments[0] if self.segments else None
        return first if isinstance(first, GraphSegment) and first.repeatable else None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason of every cut, in the order of the program."""
        return tuple(r for s in self.segments if isinstance(s, EagerSegment) for r in s.reasons)

    @property
    def kernels(self) -> int:
        """Kernels of one call."""
        return sum(s.kernels for s in self.segments)

    @property
    def recorded_kernels(self) -> int:
        """Kernels of one call that a replay launches from recordings."""
        return sum(s.kernels for s in self.graph_segments)

    @property
    def flow(self) -> Flow:
        """Who makes and who reads each value."""
        return Flow(self.values, self.segments)

    def read_at(self, symbol: str) -> str:
        """Where a symbol's value comes from, e.g. ``l_x_.shape[0]``."""
        every = (*self.symbols, *self.call_symbols)
        (argument, dim) = next((a, d) for s, a, d in every if s == symbol)
        if dim >= 0:
            return f"{argument}.shape[{dim}]"
        for value in self.values:
            if value.name in self.arguments and value.spec and symbol in value.spec.size:
                size = f"{value.name}.shape[{value.spec.size.index(symbol)}]"
                return f"{size}, given as argument {argument}"
        return f"argument {argument}"

    def __str__(self) -> str:
        eager = len(self.segments) - len(self.graph_segments)
        if self.unrecorded is not None:
            return f"{self.name} on {self.device}: nothing is recorded, {self.unrecorded}"
        return (
            f"{self.name} on {self.device}: {self.recorded_kernels} of {self.kernels} kernels "
            f"recorded, in {counted(len(self.graph_segments), 'segment')}; {eager} eager"
        )

    def render(self) -> str:
        """The whole plan as text, the same to the character for equal plans."""
        lines = [f"plan {self}", ""]
        if self.symbols:
            padded = self.padding.symbol if self.padding and not self.padding.refused else ""
            rows = [
                (s, self.read_at(s), "padded" if s == padded else "fixed in a program")
                for s, _, _ in self.symbols
            ]
            lines += ["key: a program for each", *render.columns(rows), ""]
        lines += render.padding_lines(self.padding)
        if self.number_slots:
            slots = [(str(s), s.dtype, f"read from {s.name}") for s in self.number_slots]
            lines += ["numbers that follow the call", *render.columns(slots), ""]
        lines += render.argument_lines(self.values, self.arguments)
        bindings = render.binding_lines(self.bindings)
        lines += ["", *bindings] if bindings else []
        memory = render.memory_lines(self.values, self.arguments)
        lines += ["", *memory] if memory else []
        if self.segments:
            lines += ["", f"segments: {len(self.segments)}"]
        flow = self.flow
        for segment in self.segments:
            lines += render.segment_lines(segment, flow, self.number_slots)
            if segment is self.opening:
                lines += render.opening_lines(segment, self.values, self.arguments)
        if self.unrecorded is None:
            lines += ["", *render.output_lines(self.outputs, self.values)]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """The plan as JSON; `from_json` gives an equal plan back."""
        return packing.to_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote."""
        plan = packing.from_json(text, _TYPES)
        assert isinstance(plan, Plan)
        return plan


_TYPES: Mapping[str, type] = {
    t.__name__: t
    for t in (
        Reason,
        TensorSpec,
        Value,
        Front,
        Padding,
        GraphSegment,
        EagerSegment,
        NumberSlot,
        Output,
        Field,
        Binding,
        Plan,
    )
}
