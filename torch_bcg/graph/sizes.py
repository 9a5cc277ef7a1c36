"""Expressions of a plan -> numbers, for the symbols of one call."""

from __future__ import annotations

import math
import operator
import re
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
    """A function of the key that gives the geometry of every tensor that follows from the key."""
    cuts = [c for s in plan.segments for c in s.fronts]
    cuts += [o.front for o in plan.outputs if o.front is not None]
    specs = {c.name: c.spec for c in cuts}
    specs |= {v.name: v.spec for v in plan.values if v.spec is not None}
    symbols = [s for s, _, _ in plan.symbols]
    specs = {name: spec for name, spec in specs.items() if symbols_of(spec) <= set(symbols)}
    return geometries_of(specs, symbols)


def geometries_of(
    specs: Mapping[Any, TensorSpec], symbols: Sequence[str]
) -> Callable[..., Mapping[Any, Geometry]]:
    """A function of the symbols' values that gives the geometry of every tensor."""
    function = compiled(map(_tuple, specs.values()), symbols)

    def at(*values: int) -> Mapping[Any, Geometry]:
        return cast("Mapping[Any, Geometry]", dict(zip(specs, function(*values), strict=True)))

    return at


def at_sizes(
    specs: Mapping[Any, TensorSpec], symbols: Sequence[str], key: Sequence[int]
) -> Mapping[Any, Geometry]:
    """Geometries at one key."""
    return geometries_of(specs, symbols)(*key)


def symbols_of(spec: TensorSpec) -> set[str]:
    """The symbols in a geometry."""
    return set(re.findall(r"\b[su]\d+\b", _tuple(spec)))


def _tuple(spec: TensorSpec) -> str:
    size = "".join(s + "," for s in spec.size)
    stride = "".join(s + "," for s in spec.stride)
    return f"(({size}), ({stride}), {spec.offset})"


def call_sizes(plan: Plan, args: Sequence[Any]) -> dict[str, int]:
    """Values of the symbols that are in no key, of one call."""
    place = {name: i for i, name in enumerate(plan.arguments)}
    given = [(s, args[place[argument]], dim) for s, argument, dim in plan.call_symbols]
    return {s: x if dim < 0 else x.shape[dim] for s, x, dim in given}


def call_geometries(plan: Plan, key: Sequence[int], args: Sequence[Any]) -> Mapping[str, Geometry]:
    """Geometries of all tensors that ``plan`` names, in one call."""
    sizes = dict(zip((s for s, _, _ in plan.symbols), key, strict=True)) | call_sizes(plan, args)
    specs = {v.name: v.spec for v in plan.values if v.spec is not None}
    specs = {name: spec for name, spec in specs.items() if symbols_of(spec) <= sizes.keys()}
    return at_sizes(specs, list(sizes), list(sizes.values()))


def key_reader(plan: Plan) -> Callable[[Sequence[Any]], tuple[int, ...]]:
    """What reads the symbols' values from the arguments of a call."""
    place = {name: i for i, name in enumerate(plan.arguments)}
    reads = [(place[argument], dim) for _, argument, dim in plan.symbols]
    if not reads:
        return lambda args: ()
    if all(dim < 0 for _, dim in reads) and len(reads) > 1:
        return operator.itemgetter(*(i for i, _ in reads))
    return lambda args: tuple(args[i] if dim < 0 else args[i].shape[dim] for i, dim in reads)
