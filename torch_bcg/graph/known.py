"""The shape of facts: what is known of a tensor, of a node, of a graph. See `graph.facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from torch_bcg.graph.ir import TensorSpec

Kind = Literal["input", "constant", "number", "view", "mode", "alloc", "kernel", "object", "output"]


# Kinds of `Mixing` that others ask for.
WRITTEN = "padded rows are written"
LOOKED_UP = "padded rows as an index"
DIVIDED_BY = "padded rows as a divisor"
OF_SIZE = (LOOKED_UP, DIVIDED_BY)  # what one padded size does and another may not
TOP_K = "top-k over tokens"
COUNTED_THROUGH = "rows counted through"


@dataclass(frozen=True, slots=True)
class Mixing:
    """What one dispatched operator does that lets a row hold something of a padded one.

    Attributes:
        kind: what it does, for people: "reduction over tokens", "view", "operator", …
        operator: its qualified name.
        decided: whether it does so for certain; if not, only a trial can tell.
        storage: the memory written, for "padded rows are written"; else -1.
        index: the placeholder whose values say where that write goes, if it is one; else "".
        each: a trial tells of its own number of rows alone. Where the order of rows is lost, a
            place counted from the first may lie in front of all that padding moves, and behind it
            when there are fewer rows.
    """

    kind: str
    operator: str
    decided: bool
    storage: int = -1
    index: str = ""
    each: bool = False


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor a node returns: its storage, its geometry, and why it cannot be in a slot ("").

    With a symbol for rows (`Facts.rows`), ``row_dims`` are the dims whose first elements, as many
    as the size is at the real number of rows, are the real rows; ``uncut`` says why a tensor whose
    size holds the symbol cannot be cut so, or is "".
    """

    storage: int
    spec: TensorSpec
    special: str = ""
    unbacked: bool = False
    overlapping: bool = False
    lazy: tuple[bool, bool] = (False, False)  # conjugate and negative bits
    row_dims: tuple[int, ...] = ()
    uncut: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node does.

    Attributes:
        kind: see `Kind`; ``view`` and ``number`` nodes do no work and belong to no segment.
        tensors: leaves of the result that are tensors, in order.
        reads: storages its kernels read.
        writes: storages its kernels write.
        kernels: dispatched operations that are no view and no allocation.
        operators: what it dispatched.
        cause: (kind, detail) of an automatic cut, or None.
        symbols: backed symbols in the sizes and strides of the result, or in a number.
        expr: expression of a number.
        same_as: the earlier node whose very tensor it returns, or "".
        random: draws random numbers.
        given: an argument that is a plain number, of which Dynamo guarded nothing.
        is_tensor: the result is one tensor, not a sequence of them.
        mixing: what its operators do that may mix rows.
    """

    kind: Kind
    tensors: tuple[TensorFact, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    kernels: int = 0
    operators: tuple[torch._ops.OpOverload, ...] = ()
    cause: tuple[str, str] | None = None
    symbols: frozenset[str] = frozenset()
    expr: str = ""
    same_as: str = ""
    random: bool = False
    is_tensor: bool = False
    given: bool = False
    mixing: tuple[Mixing, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one graph.

    Attributes:
        nodes: by node name.
        origin: storage -> name of the node that made it or brought it in.
        device: the device whose kernels are recorded.
        key_symbols: symbols that occur in a tensor's geometry; they make the key of a program.
        whole: (kind, detail, node) that keeps the whole graph from being recorded, or None.
        written: storages written by another node than the one that made them.
        rows: the symbol whose rows were followed, or "".
        around: storages of arguments that come and go of which a view may show memory around the
            argument, or at a place that does not follow it -> the node that makes the view. They
            are left where they are: a copy of the argument does not hold that memory.
        shared: storages that a tensor subclass wraps, while plain tensors lie in them too -> the
            node that made it. Nobody sees how long it keeps them, and who writes them through it.
    """

    nodes: Mapping[str, NodeFacts]
    origin: Mapping[int, str]
    device: str
    key_symbols: frozenset[str]
    whole: tuple[str, str, str] | None
    written: frozenset[int]
    rows: str = ""
    shared: Mapping[int, str] = field(default_factory=dict)
    around: Mapping[int, str] = field(default_factory=dict)
