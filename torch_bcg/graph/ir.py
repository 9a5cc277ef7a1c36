"""The plan as plain data: what is decided about one graph before anything is recorded.

Everything here is frozen, comparable, printable and JSON both ways. It names FX nodes and holds no
callable, tensor or address, so one plan serves every size and every set of parameters of its graph.
Sizes are Python expressions over the graph's symbols (``"s0*64"``); `graph.sizes` evaluates them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Home = Literal[
    "static",  # parameter, buffer or module tensor: recorded at its own address
    "slot",  # user input copied into fixed memory at each call
    "reference",  # user input passed on as it is
    "number",  # Python number that follows the call
    "size",  # number fixed by the key of a program
    "constant",  # made from numbers alone: made once a program
    "recorded",  # made by a recorded segment in its own memory
    "scratch",  # uninitialised memory no recorded segment allocates: allocated once a program
    "bridge",  # made by an eager segment, read by a recorded one: copied into fixed memory
    "fresh",  # made by an eager segment, read by eager segments or returned
    "alias",  # result of an operation that returned memory which already has a home
]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a node is not recorded.

    Attributes:
        kind: short stable word, the same for all nodes cut for the same cause.
        node: FX node name.
        where: ``file:line`` of the user's code, or "" if unknown.
        detail: the operator, class or error that caused it.
        unit: what one occurrence is; a marked module is one unit however many nodes it has.
    """

    kind: str
    node: str
    where: str = ""
    detail: str = ""
    unit: str = ""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.detail}" if self.detail else self.kind
        return f"{text} ({self.node}{', ' + self.where if self.where else ''})"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Geometry of a tensor as Python expressions over the symbols.

    Sizes and strides are in elements. The offset is in bytes, from the first element of the tensor
    that made the storage known: views move with the tensor they are views of.
    """

    dtype: str
    device: str
    size: tuple[str, ...]
    stride: tuple[str, ...]
    offset: str = "0"

    def __str__(self) -> str:
        short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
        name = self.dtype
        for long, brief in short.items():
            if name.startswith(long) and name[len(long) :].isdigit():
                name = brief + name[len(long) :]
        return f"{name}[{', '.join(self.size)}]"


@dataclass(frozen=True, slots=True)
class Value:
    """Something that has a home outside the segment that makes it.

    Attributes:
        name: FX node name.
        home: where it lives, see `Home`.
        spec: geometry; None for numbers and objects.
        storage: number of the storage it lies in; -1 for numbers.
        base: for ``alias``: the value that owns the storage.
        expr: for ``size``: its expression.
        written: something in the graph writes its storage.
    """

    name: str
    home: Home
    spec: TensorSpec | None = None
    storage: int = -1
    base: str = ""
    expr: str = ""
    written: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes between two cuts, in the order of the program.

    Attributes:
        index: place in the plan.
        nodes: names of the computing nodes.
        inputs: values it takes that have a fixed place: slots, statics, views of them, sizes.
        carried: values it takes that differ from call to call, or are made anew in it.
        outputs: values it makes that somebody else reads.
        copy_back: user inputs in slots that it writes; the caller's tensors are updated after it.
        number_slots: (node, argument index, slot name) of numbers read from memory.
        kernels: dispatched operations that are no view and no allocation.
        module: longest module path shared by its nodes.
    """

    index: int
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    carried: tuple[str, ...]
    outputs: tuple[str, ...]
    copy_back: tuple[str, ...] = ()
    number_slots: tuple[tuple[str, int, str], ...] = ()
    kernels: int = 0
    module: str = ""


@dataclass(frozen=True, slots=True)
class GraphSegment(Segment):
    """Recorded once a program, replayed at every call."""


@dataclass(frozen=True, slots=True)
class EagerSegment(Segment):
    """Run at every call; `reasons` says why it is not recorded."""

    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A 0-dim tensor that carries a changing number into recorded kernels.

    Attributes:
        name: slot name.
        source: node whose number (or 0-dim CPU tensor) it carries.
        dtype: dtype in which the reading kernel would compute with the number.
    """

    name: str
    source: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what the compiled function returns.

    Attributes:
        how: ``literal`` (text of a constant), ``size`` (an expression), ``clone`` (program memory,
            copied), ``view`` (remade from the caller's own tensor), ``carried`` (made by this call).
        name: the node, or the text of the literal.
        base: for ``view``: the user input or static tensor it lies in.
        delta: for ``view`` by geometry: offset from the base's first element; "" if remade by nodes.
    """

    how: Literal["literal", "size", "clone", "view", "carried"]
    name: str
    base: str = ""
    delta: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided about one graph.

    Attributes:
        name: ``graph_<n>``, numbered by compilation.
        device: device type and index of the recorder, e.g. ``cpu`` or ``cuda:0``.
        symbols: (symbol, placeholder, dim) that make the key of a program; dim -1: the number itself.
        arguments: names of the placeholders, in call order.
        values: all values with a home.
        segments: in the order of the program.
        number_slots: numbers read from memory by recorded segments.
        outputs: leaves of the result, in order.
        unrecorded: why nothing at all is recorded, or None.
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

    def value(self, name: str) -> Value:
        """The value of that name; KeyError if it has no home of its own."""
        for value in self.values:
            if value.name == name:
                return value
        raise KeyError(name)

    @property
    def graph_segments(self) -> tuple[GraphSegment, ...]:
        return tuple(s for s in self.segments if isinstance(s, GraphSegment))

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

    def to_json(self) -> str:
        """The plan as JSON; `from_json` gives an equal plan back."""
        return json.dumps(_pack(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote."""
        plan = _unpack(json.loads(text), Plan)
        assert isinstance(plan, Plan)
        return plan


_TYPES: Mapping[str, type] = {
    t.__name__: t
    for t in (Reason, TensorSpec, Value, GraphSegment, EagerSegment, NumberSlot, Output, Plan)
}


def _pack(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        fields = {f.name: _pack(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"type": type(x).__name__, **fields}
    return [_pack(i) for i in x] if isinstance(x, tuple) else x


def _unpack(x: Any, _kind: type | None = None) -> Any:
    if isinstance(x, dict):
        kind = _TYPES[x["type"]]
        return kind(**{k: _unpack(v) for k, v in x.items() if k != "type"})
    return tuple(_unpack(i) for i in x) if isinstance(x, list) else x

