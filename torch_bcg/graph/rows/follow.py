"""What the fake pass asks of the rows: nothing at all while no symbol counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from torch_bcg.graph.known import Mixing, NodeFacts, TensorFact
from torch_bcg.graph.rows.track import Tracker

# {placeholder: expressions of its sizes} -> the symbol of the rows, or "".
RowsOf = Callable[[Mapping[str, tuple[str, ...]]], str]


class Rows:
    """The rows of one graph, followed from its first operator on if they have a symbol."""

    def __init__(self, rows_of: RowsOf | None) -> None:
        self.rows_of = rows_of
        self.tracker: Tracker | None = None

    @property
    def symbol(self) -> str:
        """The symbol, or ""."""
        return "" if self.tracker is None else self.tracker.symbol.name

    def start(self, tensors: Mapping[str, torch.Tensor], nodes: dict[str, NodeFacts]) -> None:
        """Asks for the symbol, once, now that all placeholders are known, and adds their cuts."""
        rows_of, self.rows_of = self.rows_of, None
        if rows_of is None:
            return
        symbol = rows_of({name: nodes[name].tensors[0].spec.size for name in tensors})
        if not symbol:
            return
        self.tracker = Tracker(symbol)
        for name, x in tensors.items():
            self.tracker.given(x, name)
            fact = self.cut(nodes[name].tensors[0], x)
            nodes[name] = replace(nodes[name], tensors=(fact,))

    def constant(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the module: memory that is there before the graph runs."""
        if self.tracker is not None:
            self.tracker.given(x)
        return x

    @property
    def follow(self) -> Callable[..., None] | None:
        """What a dispatched operator is told to."""
        return None if self.tracker is None else self.tracker.saw

    def opaque(self, operator: str, leaves: Iterable[object]) -> None:
        """A higher-order operator, given its arguments and results."""
        if self.tracker is not None:
            self.tracker.opaque(operator, leaves)

    def looks_up(self, operator: str, index: torch.Tensor) -> None:
        """An operator that is dispatched as others here, and indexes a table where it runs."""
        if self.tracker is not None:
            self.tracker.looks_up(operator, index)

    def forget(self) -> None:
        """Nothing is known of the node under way."""
        if self.tracker is not None:
            self.tracker.found.clear()

    def cut(self, fact: TensorFact, x: torch.Tensor) -> TensorFact:
        """The fact with the dims by which the tensor is cut to its real rows."""
        if self.tracker is None:
            return fact
        dims, uncut = self.tracker.cut(x)
        return replace(fact, row_dims=dims, uncut=uncut) if dims or uncut else fact

    def taken(self, number: Callable[[torch.Tensor], int]) -> tuple[Mixing, ...]:
        """What the node under way did; ``number`` numbers storages."""
        return () if self.tracker is None else self.tracker.taken(number)


def in_place(a: tuple[TensorFact, ...], b: tuple[TensorFact, ...]) -> bool:
    """Whether facts name the same tensors: a write may change which rows one holds, not where."""
    return [replace(t, row_dims=(), uncut="") for t in a] == [
        replace(t, row_dims=(), uncut="") for t in b
    ]
