"""One dispatched operator as the rules see it: arguments by name, states, what they found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from torch_bcg.graph.geometry import plain
from torch_bcg.graph.known import LOOKED_UP
from torch_bcg.graph.rows.states import ODD, State, States, Symbol, joined

# In place of a placeholder's name:
POSITIONS = "arange()"  # every value is its own position
CHOSEN = "chosen of "  # and a size: every value is a position in a dim of it
LOOKED_AT = "of a table"  # every value is one of a table's, at positions that have a name


class Known(Protocol):
    """Where the states of tensors are kept."""

    symbol: Symbol

    def states(self, x: torch.Tensor) -> States:
        """States of a tensor, dim by dim."""

    def name(self, x: object) -> str:
        """The placeholder whose values these are, or what else is known of them, or ""."""


@dataclass(frozen=True)
class Found:
    """A `Mixing` before its storage has a number; ``result`` is the tensor that shows it."""

    kind: str
    operator: str
    decided: bool
    memory: torch.Tensor | None = None
    index: str = ""
    each: bool = False
    result: torch.Tensor | None = None


@dataclass
class Call:
    """One dispatched operator.

    Attributes:
        name: without namespace, overload and the underscore of in-place variants.
        operator: qualified name, for people.
        arguments: every argument of the schema by name, defaults filled in.
        out: tensors that it returned.
        known: states of all tensors.
        found: what it does to rows.
        outward: writes its first argument, which has no rows itself; that is noted as such.
        index: tensors whose values say where it writes.
    """

    name: str
    operator: str
    arguments: dict[str, Any]
    out: Sequence[torch.Tensor]
    known: Known
    outward: bool = False
    found: list[Found] = field(default_factory=list)
    index: Sequence[torch.Tensor] = ()

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self.arguments.values()))

    def states(self, x: object) -> States:
        """States of a tensor argument; a number has no dims."""
        return self.known.states(x) if isinstance(x, torch.Tensor) else ()

    def holds(self, value: object) -> bool:
        """Whether a size or number depends on the number of rows."""
        return self.known.symbol.holds(value)

    def mixes(self, kind: str, decided: bool = True, each: bool = False) -> None:
        """Notes what the operator does to rows."""
        result = self.out[0] if self.out else None
        self.found.append(Found(kind, self.operator, decided, each=each, result=result))

    def looks_up(self, index: Any, size: object = None) -> None:
        """Notes that ``size`` positions without rows are indexed with what padded rows hold.

        Of an argument they hold zero, or what the author declares; anything else may lie outside.
        """
        name = self.known.name(index)
        others = name in ("", POSITIONS) or name.startswith(CHOSEN)
        inside = name == f"{CHOSEN}{plain(size)}"
        if self.known.symbol.held_by(index) and others and not inside:
            self.mixes(LOOKED_UP, decided=False)

    def undecided(self) -> None:
        """Notes that only a trial can tell; the operator's name is the kind."""
        self.mixes(self.name, decided=False)

    def rearranged(self, kind: str = "") -> None:
        """Notes that the order of rows is lost, of which a trial can tell for each number of them.

        The kind is the operator's name if none is given.
        """
        self.mixes(kind or self.name, decided=False, each=True)

    def join(self, *states: State) -> State:
        """The state of what is computed position by position from several."""
        state, agree = joined(states)
        if not agree:
            self.rearranged("unlike rows")
        return state

    def broadcast(self, several: Iterable[States], rank: int | None = None) -> States:
        """`join` dim by dim, aligned at the last."""
        rows = list(several)
        rank = max((len(r) for r in rows), default=0) if rank is None else rank
        padded = [(None,) * (rank - len(r)) + tuple(r) for r in rows]
        return tuple(self.join(*column) for column in zip(*padded, strict=True))

    def unknown(self) -> list[States]:
        """States of results of which nothing but the size is known."""
        return [self.known.symbol.given(x.shape) for x in self.out]

    def lost(self, shape: Iterable[object]) -> States:
        """States of a result whose order of rows is lost."""
        return tuple(ODD if self.holds(size) else None for size in shape)


def dims_of(dim: Any, rank: int) -> tuple[int, ...]:
    """A ``dim`` argument as positive dims; None and an empty list mean all."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    listed = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(int(d) % rank if rank else 0 for d in listed)
