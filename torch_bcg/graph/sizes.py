"""Expressions of a plan -> numbers, for the symbols of one call."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from torch_bcg.graph.ir import Plan, TensorSpec

Geometry = tuple[
    tuple[int, ...], tuple[int, ...], int
]  # sizes, strides in elements; offset in bytes


def compiled(
    expressions: Iterable[str], symbols: Sequence[str]
) -> Callable[..., tuple[object, ...]]:
    """One function of the symbols' values that gives every expression's value, in order."""
    body = "".join(e + "," for e in expressions)
    source = f"lambda {', '.join(symbols)}: ({body})"
    namespace = {"math": math, "torch": torch}
    function: Callable[..., tuple[object, ...]] = eval(
        compile(source, "<sizes of a plan>", "eval"), namespace
    )
    return function


def geometries(plan: Plan) -> Callable[..., Mapping[str, Geometry]]:
    """A function of the key that gives the geometry of every tensor that ``plan`` names."""
    cuts = [c for s in plan.segments for c in s.fronts]
    cuts += [o.front for o in plan.outputs if o.front is not None]
    specs = {c.name: c.spec for c in cuts}
    specs |= {v.name: v.spec for v in plan.values if v.spec is not None}
    function = compiled(map(_tuple, specs.values()), [s for s, _, _ in plan.symbols])

    def at(*key: int) -> Mapping[str, Geometry]:
        return cast("Mapping[str, Geometry]", dict(zip(specs, function(*key), strict=True)))

    return at


def at_sizes(
    specs: Mapping[Any, TensorSpec], symbols: Sequence[str], key: Sequence[int]
) -> Mapping[Any, Geometry]:
    """Geometries at one key."""
    values = compiled(map(_tuple, specs.values()), symbols)(*key)
    return cast("Mapping[Any, Geometry]", dict(zip(specs, values, strict=True)))


def _tuple(spec: TensorSpec) -> str:
    size = "".join(s + "," for s in spec.size)
    stride = "".join(s + "," for s in spec.stride)
    return f"(({size}), ({stride}), {spec.offset})"


def key_reader(plan: Plan) -> Callable[[Sequence[Any]], tuple[int, ...]]:
    """What reads the symbols' values from the arguments of a call."""
    place = {name: i for i, name in enumerate(plan.arguments)}
    reads = [(place[argument], dim) for _, argument, dim in plan.symbols]
    if not reads:
        return lambda args: ()
    if all(dim < 0 for _, dim in reads) and len(reads) > 1:
        return operator.itemgetter(*(i for i, _ in reads))
    return lambda args: tuple(args[i] if dim < 0 else args[i].shape[dim] for i, dim in reads)
