"""What keeps two metadata objects apart, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind
from torch_bcg.metadata import schema
from torch_bcg.metadata.registration import same, unequal


def refuse_if_unlike(captured: object, live: object, kinds: Mapping[str, Kind]) -> None:
    """Refuses a pair that differs in more than what is bound anew.

    Args:
        captured: the object that is to be refreshed.
        live: the one with the new values.
        kinds: of every path of ``captured``; what lies in one that is bound as a whole has none.

    Raises:
        BindingError: the first difference that matters, by the name of its field.
    """
    cls = type(captured)
    todo: list[tuple[schema.Steps, Any, Any]] = [((), captured, live)]
    while todo:
        steps, mine, other = todo.pop(0)
        path = schema.text_of(steps)
        kind = kinds.get(path)
        if kind == "EQUAL" and not same(mine, other):
            raise unequal(cls, path, mine, other)
        if (mine is None) != (other is None):
            fix = "Give it on both sides or on neither: recorded code was made for one of them."
            raise unlike(cls, path, said(mine), said(other), fix)
        if kind == "COPY" and said(mine) != said(other):
            fix = "Build it at the sizes that were captured: widths from capacity, not the batch."
            if isinstance(other, Tensor) and isinstance(mine, Tensor) and mine.shape == other.shape:
                fix = f"Create it as {mine.dtype} on {mine.device}."
            raise unlike(cls, path, said(mine), said(other), fix)
        if kind is None:
            ours, theirs = list(schema.items(mine)), list(schema.items(other))
            if type(mine) is not type(other) or [s for s, _ in ours] != [s for s, _ in theirs]:
                fix = "Build both alike; a container that is copied keeps its length and keys."
                raise unlike(cls, path, said(mine), said(other), fix)
            todo += [((*steps, s), a, b) for (s, a), (_, b) in zip(ours, theirs, strict=True)]


def said(value: object) -> str:
    """What a value is, as far as a refresh compares it."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}".removeprefix("torch.")
    inside = ["".join(map(str, (step,))).removeprefix(".") for step, _ in schema.items(value)]
    return f"a {type(value).__name__} of {', '.join(inside)}" if inside else repr(value)


def unlike(cls: type, path: str, expected: str, found: str, fix: str) -> BindingError:
    """The error for a field that cannot be refreshed."""
    name = f"{cls.__name__}.{path}" if path else cls.__name__
    return BindingError(
        f"{name} cannot be refreshed.",
        where=f"refresh of {name}",
        expected=expected,
        found=found,
        fix=fix,
    )


def same_geometry(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What says yes only of tensors with the same shapes, strides, dtypes and devices.

    Dynamo's check of all of them in C++, where torch has it: ten times as fast as Python. It also
    says no of tensors that differ in what does not matter here.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    check = getattr(guards, "TensorGuards", None)
    if check is None or any(type(t) is not Tensor for t in tensors):
        return lambda *others: False
    same: Callable[..., bool] = check(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check
    return same
