"""What one node dispatches to: kernels, what they read and write, what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.geometry import lies_within

# Operators whose schema claims fresh memory though they return their argument's.
_VIEWS_BY_NAME = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::lift"}
_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# Their schemas do not say that they write the running statistics.
_BATCH_NORMS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_update_stats",
}
# With a mask as index these look for the true elements on the host.
_MASKS = (torch.bool, torch.uint8)
_INDEX_PUT = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


@dataclass
class Dispatched(TorchDispatchMode):
    """Notes what one node dispatches to; ``follow`` is told of every operator, if given.

    ``around`` are views that may show memory that is none of the tensor they are made of.
    """

    follow: Callable[..., None] | None = None
    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    operators: list[torch._ops.OpOverload] = field(default_factory=list)
    kernels: int = 0
    allocations: int = 0
    masked: bool = False
    sent: bool = False
    around: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("prim", "prims_host"):
            return out
        self.operators.append(func)
        if self.follow is not None:
            self.follow(func, args, kwargs or {}, out)
        schema = func._schema
        given = {
            a.name: args[i] if i < len(args) else (kwargs or {}).get(a.name)
            for i, a in enumerate(schema.arguments)
        }
        written = [
            given[a.name]
            for a in schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if schema.name in _BATCH_NORMS and given.get("training", True):
            written += [given["running_mean"], given["running_var"]]
        returns_view = any(r.alias_info is not None for r in schema.returns)
        if schema.name == "aten::as_strided" and (
            given["storage_offset"] is not None  # from the first element of the storage on
            or not lies_within(out, args[0])
        ):
            self.around.append(out)
        if schema.name in _VIEWS_BY_NAME or (returns_view and not written):
            return out
        if schema.name in _ALLOCATIONS:
            self.allocations += 1
            return out
        if schema.name in _INDEX_PUT and any(i.dtype in _MASKS for i in tensors_of(args[1])):
            self.masked = True
        self.kernels += 1
        taken = tensors_of((args, kwargs))
        self.sent = self.sent or _sends(schema.name, taken, tensors_of(out))
        self.reads += taken
        self.writes += tensors_of(written)
        return out


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Tensor leaves with memory of their own; inside a functorch level values are wrapped."""
    return [
        x
        for x in tree_leaves(tree)
        if isinstance(x, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    ]


def _sends(operator: str, taken: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator moves data between host and device.

    Recorded, it would read host memory that is gone at replay. A 0-dim CPU operand of a pointwise
    kernel is not moved: its value goes along with the launch.
    """
    devices = {t.device.type for t in (*taken, *made)}
    if len(devices) < 2:
        return False
    copies = operator in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
    return copies or any(t.device.type == "cpu" and t.dim() > 0 for t in taken)
