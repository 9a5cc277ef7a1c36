"""What the abstract pass knows of one dim of a tensor, and the symbol that counts the real rows.

`s` stands for that symbol. A graph padded at its tail runs with a larger `s`; its real rows are
right if every position of a dim depends on positions that both runs share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import sympy
import torch

from torch_bcg.graph.geometry import plain

NO_ROWS = math.inf  # the lag of what depends on no row: zeros, a table, positions


@dataclass(frozen=True, slots=True)
class Token:
    """A dim whose position ``p`` depends on rows ``<= p - lag`` and on nothing else that varies.

    Attributes:
        lag: in rows; positive after a shift towards the tail, negative after one to the head.
        start: rows by which a view starts after the memory it looks into.
        inside: the view looks into memory whose size does not hold ``s``.
        short: a view that ends before the last row of the memory it looks into.
    """

    lag: float = 0
    start: int = 0
    inside: bool = False
    short: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """A dim made by a view of ``(before, size, after)``, of which the middle one holds rows."""

    before: Any
    size: Any
    after: Any
    token: Token


@dataclass(frozen=True, slots=True)
class Odd:
    """A dim whose size holds ``s`` and of whose order nothing is known."""


ODD = Odd()
State = Union[Token, Merged, Odd, None]  # noqa: UP007  (an alias is evaluated: Python 3.10)
States = tuple[State, ...]


class Symbol:
    """The symbol of the rows, asked for in sizes and numbers without adding a guard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[Any, bool] = {}  # most sizes come by thousands of times

    def holds(self, value: object) -> bool:
        """Whether a number, or one of a sequence of numbers, depends on the symbol."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.within(value.node.expr)
        if isinstance(value, sympy.Basic):
            return self.within(value)
        return isinstance(value, (tuple, list)) and any(map(self.holds, value))

    def within(self, expression: Any) -> bool:
        """Whether an expression depends on the symbol."""
        if expression not in self.known:
            free = (str(s) for s in expression.free_symbols)
            self.known[expression] = self.name in free
        return self.known[expression]

    def exact(self, size: object) -> bool:
        """Whether a size is the symbol and nothing else."""
        expression = plain(size)
        return isinstance(expression, sympy.Symbol) and str(expression) == self.name

    def held_by(self, x: torch.Tensor) -> bool:
        """Whether the size of a tensor depends on the symbol."""
        return x._has_symbolic_sizes_strides and any(map(self.holds, x.shape))

    def given(self, shape: Iterable[object]) -> States:
        """States of a tensor of which only the size is known."""
        return tuple(
            (Token() if self.exact(size) else ODD) if self.holds(size) else None for size in shape
        )

    def constant(self, shape: Iterable[object]) -> States:
        """States of a tensor whose values depend on positions at most."""
        return tuple(Token(NO_ROWS) if self.holds(size) else None for size in shape)


def fresh(state: State, lag: float | None = None) -> State:
    """The same dim in memory of its own, with another lag if one is given."""
    if isinstance(state, Token):
        return Token(state.lag if lag is None else lag)
    if isinstance(state, Merged):
        token = Token(state.token.lag if lag is None else lag)
        return Merged(state.before, state.size, state.after, token)
    return state


def joined(states: Iterable[State]) -> tuple[State, bool]:
    """The state of what is computed position by position from several, and whether they agree."""
    result: State = None
    for state in map(fresh, states):
        if state is None or state == result:
            continue
        if result is None:
            result = state
            continue
        pair = _pair(result, state)
        if pair is None:
            return ODD, False
        result = pair
    return result, True


def _pair(a: State, b: State) -> State:
    """Two unlike states as one, or None where they do not agree."""
    if isinstance(a, Token) and isinstance(b, Token):
        return Token(min(a.lag, b.lag))
    if isinstance(a, Token):
        a, b = b, a
    if not isinstance(a, Merged):
        return None
    if isinstance(b, Merged):
        same = (a.before, a.size, a.after) == (b.before, b.size, b.after)
        return fresh(a, min(a.token.lag, b.token.lag)) if same else None
    # Positions along rows merged outermost count on; inside others they depend on the size.
    return a if isinstance(b, Token) and b.lag == NO_ROWS and a.before == 1 else None


def lag_of(state: State) -> float:
    """The lag of a dim that has one."""
    token = state.token if isinstance(state, Merged) else state
    return token.lag if isinstance(token, Token) else NO_ROWS


def cut_of(symbol: Symbol, states: States, shape: Sequence[object]) -> tuple[tuple[int, ...], str]:
    """The dims whose prefixes are the real rows; or none of them, and why it cannot be cut."""
    dims = []
    for dim, (state, size) in enumerate(zip(states, shape, strict=True)):
        if state is None:
            continue
        text = f"dim {dim} is {plain(size)}"
        if isinstance(state, Merged) and state.before != 1:
            return (), f"{text}, merged inside"
        if not symbol.exact(state.size if isinstance(state, Merged) else size):
            return (), text
        if isinstance(state, Odd):
            return (), f"{text}, rows rearranged"
        if lag_of(state) < 0:
            return (), f"{text}, shifted towards the head"
        dims.append(dim)
    return tuple(dims), ""
