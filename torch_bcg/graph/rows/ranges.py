"""Bounds of integers through operators: whether an index may be negative, or leave its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from torch_bcg.graph.geometry import plain


@dataclass(frozen=True, slots=True)
class Range:
    """The least and the largest value, numbers or expressions; None where nothing is known."""

    low: Any = None
    high: Any = None

    @property
    def natural(self) -> bool:
        """Whether no value is negative, whatever the sizes are."""
        return self.low is not None and sympy.sympify(self.low).is_nonnegative is True


UNKNOWN, TRUTH = Range(), Range(0, 1)
NOTHING = Range(sympy.oo, -sympy.oo)  # memory that nobody has written to


def of_number(x: object) -> Range:
    """Bounds of a number."""
    if isinstance(x, torch.SymInt):
        return Range(plain(x), plain(x))
    whole = isinstance(x, int) or (isinstance(x, float) and x.is_integer())
    return Range(int(x), int(x)) if whole else UNKNOWN  # type: ignore[call-overload]


def hull(*several: Range) -> Range:
    """Bounds of what is in one of several ranges, nobody knows which."""
    return Range(
        _all(sympy.Min, [r.low for r in several]), _all(sympy.Max, [r.high for r in several])
    )


def _all(function: Any, several: Sequence[Any]) -> Any:
    return None if any(b is None for b in several) else function(*several)


def _any(function: Any, several: Sequence[Any]) -> Any:
    known = [b for b in several if b is not None]
    return function(*known) if known else None


def largest(*several: Range) -> Range:
    """Of the largest of several numbers."""
    return Range(
        _any(sympy.Max, [r.low for r in several]), _all(sympy.Max, [r.high for r in several])
    )


def least(*several: Range) -> Range:
    """Of the least of several numbers."""
    return Range(
        _all(sympy.Min, [r.low for r in several]), _any(sympy.Min, [r.high for r in several])
    )


def plus(a: Range, b: Range) -> Range:
    """Of sums."""
    return Range(_all(sympy.Add, [a.low, b.low]), _all(sympy.Add, [a.high, b.high]))


def minus(a: Range) -> Range:
    """Of numbers with the other sign."""
    return Range(*(None if b is None else -b for b in (a.high, a.low)))


def times(a: Range, b: Range) -> Range:
    """Of products."""
    if NOTHING in (a, b):
        return NOTHING
    if a.natural and b.natural:
        return Range(a.low * b.low, _all(sympy.Mul, [a.high, b.high]))
    corners = [None if None in (x, y) else x * y for x in _ends(a) for y in _ends(b)]
    return Range(_all(sympy.Min, corners), _all(sympy.Max, corners))


def _ends(a: Range) -> tuple[Any, Any]:
    return a.low, a.high


def below(size: Any) -> Range:
    """Of places in a dim."""
    return Range(0, plain(size) - 1)


Bounds = Callable[[object], Range]
Rule = Callable[[Mapping[str, Any], Bounds], Range]


def _first(a: Mapping[str, Any]) -> Any:
    return next(iter(a.values()))


def _same(a: Mapping[str, Any], of: Bounds) -> Range:
    return of(_first(a))


def _add(a: Mapping[str, Any], of: Bounds) -> Range:
    return plus(of(a["self"]), times(of(a["other"]), of(a.get("alpha", 1))))


def _sub(a: Mapping[str, Any], of: Bounds) -> Range:
    return plus(of(a["self"]), minus(times(of(a["other"]), of(a.get("alpha", 1)))))


def _rsub(a: Mapping[str, Any], of: Bounds) -> Range:
    return plus(of(a["other"]), minus(times(of(a["self"]), of(a.get("alpha", 1)))))


def _abs(a: Mapping[str, Any], of: Bounds) -> Range:
    one = of(a["self"])
    return largest(Range(0, 0), one, minus(one))


def _clamp(a: Mapping[str, Any], of: Bounds) -> Range:
    found = of(a["self"])
    if a.get("min") is not None:
        found = largest(found, of(a["min"]))
    return found if a.get("max") is None else least(found, of(a["max"]))


def _divided(a: Mapping[str, Any], of: Bounds) -> Range:
    """By a number from 1 up, rounded down."""
    one, by = of(a["self"]), of(a["other"])
    rounded = a.get("rounding_mode", "floor") is not None
    fixed = by.low is not None and by.low == by.high and plus(by, Range(-1, -1)).natural
    if not (one.natural and rounded and fixed):
        return UNKNOWN
    return Range(*(b if b is None else sympy.floor(sympy.sympify(b) / by.low) for b in _ends(one)))


def _remainder(a: Mapping[str, Any], of: Bounds) -> Range:
    by = of(a["other"])
    return Range(0, by.high - 1) if by.natural and by.high is not None else UNKNOWN


def _and(a: Mapping[str, Any], of: Bounds) -> Range:
    natural = [r for r in (of(a["self"]), of(a["other"])) if r.natural]
    return Range(0, _any(sympy.Min, [r.high for r in natural])) if natural else UNKNOWN


def _filled(a: Mapping[str, Any], of: Bounds) -> Range:
    return of(a["fill_value"] if "fill_value" in a else a.get("value", a.get("s")))


def _steps(a: Mapping[str, Any], of: Bounds) -> Range:
    """``arange``."""
    start, step = of(a.get("start") or 0), of(1 if a.get("step") is None else a["step"])
    end = of(a["end"])
    upwards = step.natural and end.high is not None
    return Range(start.low, end.high - 1) if upwards else UNKNOWN


def _places(a: Mapping[str, Any], of: Bounds) -> Range:
    """Where in a dim something is; in all of them where none is given."""
    x = _first(a)
    if not x.dim():
        return Range(0, 0)
    if a.get("dim", -1) is None:
        return below(math.prod(map(plain, x.shape)))
    return below(x.shape[a.get("dim", -1)])


def _searched(a: Mapping[str, Any], of: Bounds) -> Range:
    ordered = a["boundaries"] if "boundaries" in a else a["sorted_sequence"]
    return Range(0, plain(ordered.shape[-1]))


def _sum(a: Mapping[str, Any], of: Bounds) -> Range:
    """Of natural numbers, as many as the dims have, or fewer."""
    x, dim = _first(a), a.get("dim")
    dims = range(x.dim()) if dim is None or dim == [] else dim if isinstance(dim, list) else [dim]
    count = math.prod(plain(x.shape[d]) for d in dims) if x.dim() else 1
    one = of(x)
    return Range(0, None if one.high is None else one.high * count) if one.natural else UNKNOWN


def _hull(*names: str) -> Rule:
    def rule(a: Mapping[str, Any], of: Bounds) -> Range:
        given = [a[n] for n in names if n in a]
        return hull(*(of(x) for g in given for x in (g if isinstance(g, (list, tuple)) else [g])))

    return rule


_RULES: dict[str, Rule] = {
    "_to_copy clone lift_fresh expand repeat flip roll select slice view reshape index "
    "index_select gather embedding _unsafe_index take amax amin": _same,
    "tril triu": lambda a, of: hull(of(_first(a)), Range(0, 0)),
    "relu": lambda a, of: largest(of(_first(a)), Range(0, 0)),
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "neg": lambda a, of: minus(of(a["self"])),
    "mul": lambda a, of: times(of(a["self"]), of(a["other"])),
    "abs": _abs,
    "clamp clamp_min clamp_max": _clamp,
    "maximum": lambda a, of: largest(of(a["self"]), of(a["other"])),
    "minimum": lambda a, of: least(of(a["self"]), of(a["other"])),
    "div floor_divide": _divided,
    "remainder": _remainder,
    "bitwise_and __and__": _and,
    "fill full new_full full_like scalar_tensor": _filled,
    "zeros new_zeros zeros_like zero": lambda a, of: Range(0, 0),
    "ones new_ones ones_like": lambda a, of: Range(1, 1),
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided": (
        lambda a, of: NOTHING
    ),
    "arange": _steps,
    "argmax argmin argsort": _places,
    "bucketize searchsorted": _searched,
    "sum cumsum": _sum,
    "where": _hull("self", "other"),
    "masked_fill constant_pad_nd": _hull("self", "value"),
    "index_put": _hull("self", "values"),
    "scatter": _hull("self", "src", "value"),
    "copy": lambda a, of: of(a["src"]),
    "cat stack": _hull("tensors"),
}
_TABLE = {name: rule for names, rule in _RULES.items() for name in names.split()}
# Of which the second result says places in a dim.
_SECOND = frozenset(
    {"sort", "topk", "max", "min", "kthvalue", "mode", "median", "nanmedian", "cummax", "cummin"}
)


def bounds_of(name: str, arguments: Mapping[str, Any], of: Bounds, result: int) -> Range:
    """Bounds of one result of an operator, by those of what it takes."""
    if name in _SECOND:
        return _places(arguments, of) if result else UNKNOWN
    rule = _TABLE.get(name)
    return UNKNOWN if rule is None else rule(arguments, of)


def inside(index: Range, size: Any, signed: bool) -> Any:
    """The condition under which an index is in a dim: an expression, or a truth value; or None.

    ``signed``: negative indices count from the end.
    """
    if index.low is None or index.high is None:
        return None
    low, high, size = map(sympy.sympify, (index.low, index.high, plain(size)))
    return sympy.And(low >= (-size if signed else 0), high < size)
