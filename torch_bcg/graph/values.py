"""What a plan is made of: reasons, geometries, values, segments, outputs. Frozen plain data.

Sizes are Python expressions over the graph's symbols (``"s0*64"``); `graph.sizes` evaluates them.
``str()`` of each is the text that reports show: no addresses, no ids, the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        target: what `eager_on_graph` takes to mark the operation, or "" if nothing can be marked.
    """

    kind: str
    node: str
    where: str = ""
    detail: str = ""
    unit: str = ""
    target: str = ""

    def __str__(self) -> str:
        text = f"{self.kind}: {self.detail}" if self.detail else self.kind
        place = ", ".join(part for part in (self.node, self.where) if part)
        return f"{text} ({place})" if place else text


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
        last: index of the last segment that reads or writes its storage, -1 if none does, the
            number of segments if it is returned.
        memory: the value in whose memory it lies, since their lives do not meet; "" for its own.
        row_dims: dims of which a padded program fills only the front with the rows of a call.
        lazy: conjugate and negative bits of the tensor.
        counted: a number is read from it, before anything of a call has run or when it is needed.
    """

    name: str
    home: Home
    spec: TensorSpec | None = None
    storage: int = -1
    base: str = ""
    expr: str = ""
    written: bool = False
    last: int = -1
    memory: str = ""
    row_dims: tuple[int, ...] = ()
    lazy: tuple[bool, bool] = (False, False)
    counted: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.spec}" if self.spec is not None else self.name


@dataclass(frozen=True, slots=True)
class Front:
    """What there is of a padded value without its padding: the rows of the call.

    Attributes:
        name: the value.
        spec: its geometry; at the sizes of the call it is that of an unpadded value.
        storage: of the value.
        row_dims: dims of which it is the first rows.
        copied: a view of the padded value would not have the strides of an unpadded one.
        written: the segment that takes it writes it.
    """

    name: str
    spec: TensorSpec
    storage: int
    row_dims: tuple[int, ...]
    copied: bool = False
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
        reads: values with a home that ``inputs`` and ``carried`` are, or are views of.
        writes: storages that it writes.
        fronts: in a padded program, the values it takes or makes that hold rows.
        random: it draws random numbers.
        unwritten: of what it makes, memory that it does not write.
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
    reads: tuple[str, ...] = ()
    writes: tuple[int, ...] = ()
    fronts: tuple[Front, ...] = ()
    random: bool = False
    unwritten: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``graph`` if it is recorded, ``eager`` if it runs at every call."""
        return "graph" if isinstance(self, GraphSegment) else "eager"

    def __str__(self) -> str:
        what = f"segment {self.index} {self.kind}, {counted(self.kernels, 'kernel')}"
        return f"{what}, {self.module}" if self.module else what


@dataclass(frozen=True, slots=True)
class GraphSegment(Segment):
    """Recorded once a program, replayed at every call.

    Attributes:
        repeatable: run twice it leaves what it leaves run once, and nobody else has noticed.
    """

    repeatable: bool = False


@dataclass(frozen=True, slots=True)
class Padding:
    """How one size of a graph is padded to the sizes of a ladder, or why it is not.

    Attributes:
        symbol: the size.
        argument, dim: where its value is read, an argument's name and dim.
        ladder: the padded sizes, ascending.
        refused: why calls are recorded at their own sizes, or None.
        tried: what facts cannot tell or the author vouches for: padded if one trial agrees.
        fills: (argument, number) of padded rows that are not zero.
        reserved: (storage, row) of memory that padded rows are written to, as was declared.
        each: every number of rows is tried, see `Mixing.each`; else until no group of rows could be
            whole in all calls tried.
    """

    symbol: str = ""
    argument: str = ""
    dim: int = -1
    ladder: tuple[int, ...] = ()
    refused: Reason | None = None
    tried: tuple[Reason, ...] = ()
    fills: tuple[tuple[str, float], ...] = ()
    reserved: tuple[tuple[int, int], ...] = ()
    each: bool = False


@dataclass(frozen=True, slots=True)
class EagerSegment(Segment):
    """Run at every call; `reasons` says why it is not recorded.

    Attributes:
        reasons: of its nodes.
        live: in a padded program it sees the rows of the call alone.
    """

    reasons: tuple[Reason, ...] = ()
    live: bool = True

    def __str__(self) -> str:
        return "; ".join([Segment.__str__(self), *map(str, self.reasons)])


@dataclass(frozen=True, slots=True)
class NumberSlot:
    """A 0-dim tensor that carries a changing number into recorded kernels.

    Attributes:
        name: slot name.
        source: node whose number (or 0-dim CPU tensor) it carries.
        dtype: dtype in which the reading kernel would compute with the number.
        given: arguments that the number follows from.
    """

    name: str
    source: str
    dtype: str
    given: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.source} from {', '.join(self.given)}" if self.given else self.source


Kind = Literal[
    "COPY",  # a tensor that recorded segments read: copied to its fixed address
    "WRITTEN",  # a tensor that recorded segments write
    "REBIND",  # a tensor or object that no recorded segment touches: each call's own
    "EQUAL",  # a number that is the same in all calls
    "FOLLOWS",  # any other number
]


_STRENGTH: tuple[Kind, ...] = ("EQUAL", "FOLLOWS", "REBIND", "COPY", "WRITTEN")


def stronger(a: Kind, b: Kind) -> Kind:
    """The kind that serves both where two graphs, or two names of one tensor, ask for another."""
    return max(a, b, key=_STRENGTH.index)


@dataclass(frozen=True, slots=True)
class Field:
    """How one field of a metadata object reaches a call.

    Attributes:
        name: its path in the object.
        kind: see `Kind`.
        declared: its author said so.
        argument: the placeholder that it is, or "".
        why: who reads or writes it: segment, node, ``file:line``; "": nobody.
        shares: paths that hold the same tensor.
        value: of what is no tensor.
    """

    name: str
    kind: Kind
    declared: bool = False
    argument: str = ""
    why: str = ""
    shares: tuple[str, ...] = ()
    value: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """How the fields of one metadata object reach a call.

    Attributes:
        cls: its class, with the module.
        fields: in the order of the class.
    """

    cls: str
    fields: tuple[Field, ...]

    @property
    def unread(self) -> tuple[str, ...]:
        """Fields that nobody in the graph reads."""
        return tuple(f.name for f in self.fields if not f.why)


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what the compiled function returns.

    Attributes:
        how: ``literal`` (text of a constant), ``size`` (an expression), ``clone`` (program memory,
            copied), ``view`` (remade from the caller's tensor), ``carried`` (made by this call).
        name: the node, or the text of the literal.
        base: for ``view``: the user input or static tensor it lies in.
        delta: for ``view`` by geometry: offset from the base's first element; "" if made by nodes.
        front: for ``clone`` in a padded program: the rows of the call.
        view: for ``clone``: what is made of the copy, at a place that only the call knows; or "".
    """

    how: Literal["literal", "size", "clone", "view", "carried"]
    name: str
    base: str = ""
    delta: str = ""
    front: Front | None = None
    view: str = ""


def counted(number: int, thing: str) -> str:
    """``1 kernel``, ``2 kernels``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
