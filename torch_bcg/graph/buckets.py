"""Padded sizes: which size of a graph is padded, to what, and what the graph itself allows.

A bucket is a number of rows that a call with fewer rows is padded to. Here it is only found; what
padding does to the values of a graph is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

__all__ = ["LADDER", "RowDim", "SizeGuards", "find", "row_dim"]

# First, last and step of each stretch: SGLang's sizes.
_STEPS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 2048, 256))
LADDER: tuple[int, ...] = tuple(n for a, b, step in _STEPS for n in range(a, b + 1, step))

# Few rows cost little, however many of them are padding.
_TINY = 32


@dataclass(frozen=True, slots=True)
class RowDim:
    """What is padded.

    Attributes:
        symbol: the size that is padded, wherever it occurs.
        argument: a tensor placeholder that has it.
        dim: where it has it: a call's rows are ``argument.shape[dim]``.
    """

    symbol: str
    argument: str
    dim: int


def row_dim(
    sizes: Mapping[str, tuple[str, ...]],
    names: Mapping[str, str],
    wanted: tuple[str, int] | None,
) -> RowDim | str:
    """Which size of a graph is padded: one that varies, that is, a symbol of its own.

    The batch of ``[batch, tokens]`` gives way to the tokens.

    Args:
        sizes: by tensor placeholder, the expressions of its sizes.
        names: what the user calls a placeholder; one that is missing goes by its own name.
        wanted: name of an argument or placeholder, and its dim; from the end if negative.

    Returns:
        The size, or the reason why there is none, which names those that there are.
    """
    places = [
        RowDim(size, argument, dim)
        for argument, shape in sizes.items()
        for dim, size in enumerate(shape)
        if size.isidentifier()
    ]
    if wanted is not None:
        return _wanted(wanted, places, sizes, names)
    rows = _rows(places)
    if not rows:
        return "no size varies"
    if len({p.symbol for p in rows}) > 1:
        return f"several sizes vary: {_shown(rows, names)}; name one with bucket_dim"
    return rows[0]


def _wanted(
    wanted: tuple[str, int],
    places: list[RowDim],
    sizes: Mapping[str, tuple[str, ...]],
    names: Mapping[str, str],
) -> RowDim | str:
    name, dim = wanted
    there = _shown(places, names)
    exist = f"those that vary: {there}" if there else "no size varies"
    # A placeholder's own name counts where no argument has it.
    called = [a for a in sizes if names.get(a, a) == name] or [a for a in sizes if a == name]
    if not called:
        return f"bucket_dim: no tensor argument is called {name}; {exist}"
    for argument in called:
        for place in places:
            if place.argument == argument and place.dim in (dim, dim + len(sizes[argument])):
                return place
    shape = sizes[called[0]]
    if not -len(shape) <= dim < len(shape):
        return f"bucket_dim: {name} has {len(shape)} dims, not a dim {dim}; {exist}"
    return f"bucket_dim: dim {dim} of {name} is {shape[dim]}, which is no size to vary; {exist}"


def _rows(places: list[RowDim]) -> list[RowDim]:
    """Places of the symbols that are not just the batch of tensors with another varying size."""
    last: dict[str, int] = {}  # by tensor, the last dim that varies
    for p in places:
        last[p.argument] = max(p.dim, last.get(p.argument, 0))
    rows = {p.symbol for p in places if p.dim > 0 or last[p.argument] == 0}
    return [p for p in places if p.symbol in rows]


def _shown(places: Iterable[RowDim], names: Mapping[str, str]) -> str:
    """``s0 is dim 0 of x and of mask, s1 is dim 1 of x``."""
    found: dict[str, list[str]] = {}
    for p in places:
        where = f"dim {p.dim} of {names.get(p.argument, p.argument)}"
        found.setdefault(p.symbol, []).append(where)
    return ", ".join(f"{symbol} is {' and '.join(where)}" for symbol, where in found.items())


def find(
    live: int, sizes: tuple[int, ...], max_padding: float, usable: Callable[[int], bool]
) -> int | str:
    """The smallest size that takes a call.

    Args:
        live: rows of the call.
        sizes: the buckets in ascending order.
        max_padding: most that a bucket may be, as a multiple of ``live``; the smallest buckets, up
            to 32 rows, may be more.
        usable: whether the graph allows a bucket.

    Returns:
        The size, or the reason why none is taken: ``above the ladder``, ``guard`` (the graph allows
        none), ``max_padding``.
    """
    if not sizes or live > sizes[-1]:
        return "above the ladder"
    size = next((s for s in sizes if s >= live and usable(s)), None)
    if size is None:
        return "guard"
    return "max_padding" if size > max(_TINY, max_padding * live) else size


_MOST_ANSWERS = 4096


class SizeGuards:
    """What sizes a graph of Dynamo's is for: beyond them its operations may mean something else.

    Dynamo adds guards until it has finished with the frame, which is after the backend was called:
    they are read at the first question and then kept without the rest of what Dynamo knew.

    Args:
        shapes: the `ShapeEnv` of the graph: ``TracingContext.get().fake_mode.shape_env`` while the
            backend is called.
    """

    def __init__(self, shapes: Any) -> None:
        self._shapes = shapes
        self._symbols: dict[str, sympy.Symbol] = {}
        self._equal: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
        self._guards: tuple[sympy.Basic, ...] = ()
        self._answers: dict[frozenset[tuple[str, int]], bool] = {}

    def allows(self, values: Mapping[str, int]) -> bool:
        """Whether these values of symbols satisfy every guard that they decide.

        Args:
            values: by the name of the symbol. A guard that also needs a symbol that is not here
                says nothing.
        """
        if self._shapes is not None:
            self._read()
        asked = frozenset(values.items())
        if len(self._answers) > _MOST_ANSWERS:
            self._answers.clear()
        if asked not in self._answers:
            self._answers[asked] = self._decide(values)
        return self._answers[asked]

    def _decide(self, values: Mapping[str, int]) -> bool:
        try:
            known = self._known(values)
            return known is not None and all(_holds(g, known) for g in self._guards)
        except ZeroDivisionError:  # what a guard divides by is 0: the graph is not for that
            return False

    def _read(self) -> None:
        shapes, self._shapes = self._shapes, None
        found: dict[sympy.Basic, None] = {guard.expr: None for guard in shapes.guards}
        asserted = getattr(shapes, "deferred_runtime_asserts", {})
        found.update((a.expr, None) for asserts in asserted.values() for a in asserts)
        for symbol, span in shapes.var_to_range.items():
            for bound, relation in ((span.lower, sympy.Ge), (span.upper, sympy.Le)):
                if isinstance(bound, sympy.Integer):  # not for infinity and truth values
                    found[relation(symbol, bound)] = None
        self._guards = tuple(g for g in found if g != sympy.true)
        self._equal = tuple(shapes.replacements.items())
        free = {s for g in self._guards for s in g.free_symbols}
        free |= {s for symbol, e in self._equal for s in (symbol, *e.free_symbols)}
        self._symbols = {s.name: s for s in free}

    def _known(self, values: Mapping[str, int]) -> dict[sympy.Basic, sympy.Basic] | None:
        """Values of symbols, with those that follow from equalities; None if they contradict."""
        known = {s: sympy.Integer(values[n]) for n, s in self._symbols.items() if n in values}
        before = -1
        while before < len(known):
            before = len(known)
            for symbol, expression in self._equal:
                value = expression.xreplace(known)
                if value.is_number and known.setdefault(symbol, value) != value:
                    return None
                if expression.is_Symbol and symbol in known:
                    known.setdefault(expression, known[symbol])
        return known


def _holds(guard: sympy.Basic, known: Mapping[sympy.Basic, sympy.Basic]) -> bool:
    return bool(guard.xreplace(known) != sympy.false)
