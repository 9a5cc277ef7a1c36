"""Indices that would leave their table, found before an operator reads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfRange(Exception):  # noqa: N818 - it ends a trial, it is no error of anybody
    """An index lies outside; the text says of what."""


class InRange(TorchDispatchMode):
    """Looks at indices before an operator does, which on a GPU would end the process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "overloadpacket", func)).removeprefix("aten.").rstrip("_")
        if name in _INDEXED:
            for size, index in _INDEXED[name](*args):
                outside(name, size, index, -size if name in _FROM_THE_END else 0)
        return func(*args, **(kwargs or {}))


def _along(x: Tensor, dim: int, index: Tensor, *rest: Any) -> list[tuple[int, Tensor]]:
    return [(x.shape[dim], index)] if x.dim() else []


def _among(x: Tensor, indices: Sequence[Tensor | None], *rest: Any) -> list[tuple[int, Tensor]]:
    masks = (torch.bool, torch.uint8)
    if any(i is not None and i.dtype in masks for i in indices):
        return []
    return [(n, i) for n, i in zip(x.shape, indices, strict=False) if i is not None]


def _table(weight: Tensor, index: Tensor, *rest: Any) -> list[tuple[int, Tensor]]:
    return [(weight.shape[0], index)]


def _flat(x: Tensor, index: Tensor, *rest: Any) -> list[tuple[int, Tensor]]:
    return [(x.numel(), index)]


_FROM_THE_END = (
    "index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "take", "put",
)  # fmt: skip
_INDEXED: dict[str, Callable[..., list[tuple[int, Tensor]]]] = {
    **dict.fromkeys(("embedding", "embedding_bag", "_embedding_bag"), _table),
    **dict.fromkeys(("take", "put"), _flat),
    **dict.fromkeys(_FROM_THE_END[:5], _among),
    **dict.fromkeys(
        ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add",
         "index_copy", "index_fill", "index_reduce"), _along
    ),
}  # fmt: skip


def outside(operator: str, size: int, index: Tensor, least: int) -> None:
    """Ends the run where an index lies outside a dim of that size."""
    if index.numel() and not bool(((index < size) & (index >= least)).all()):
        raise OutOfRange(f"aten::{operator} of {size}")
