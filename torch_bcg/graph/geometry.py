"""Names, storages and geometry of fake tensors, asked for without adding a guard."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true


def plain(size: Any) -> Any:
    """A size as a number or an expression, comparable without a guard."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_number(x: object) -> bool:
    """Whether a leaf of a result is a number, or None."""
    return x is None or isinstance(
        x, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def dtype_name(x: torch.Tensor) -> str:
    """E.g. ``float32``."""
    return str(x.dtype).removeprefix("torch.")


def target_name(node: fx.Node) -> str:
    """What a node calls, as a person would write it."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    if isinstance(node.target, torch._ops.OperatorBase):
        return str(node.target.name()).removesuffix(".default")
    return str(
        getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", node.target)
    )


def storage_id(x: torch.Tensor) -> int:
    """Equal for tensors over one storage."""
    return x.untyped_storage()._cdata if has_memory(x) else id(x)


def has_memory(x: torch.Tensor) -> bool:
    """Whether the tensor has a storage of its own: neither sparse nor wrapped by functorch."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.layout == torch.strided and not wrapped


def version(x: torch.Tensor) -> int:
    """The version counter, which inference tensors do not have."""
    return 0 if x.is_inference() else x._version


def geometry(x: torch.Tensor) -> tuple[object, ...]:
    """Storage, sizes and strides, comparable without a guard."""
    if not has_memory(x):
        return (id(x),)
    return (storage_id(x), *(plain(s) for s in (*x.shape, *x.stride())))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices mean one address in a way that a stride of zero does not explain."""
    pairs = [(plain(st), plain(si)) for si, st in zip(x.shape, x.stride(), strict=True)]
    dims = [(st, si) for st, si in pairs if st != 0 and si != 1]
    if not all(isinstance(v, int) for d in pairs for v in d) or any(si == 0 for _, si in pairs):
        return False
    reach = 1
    for stride, size in sorted(dims):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def lies_within(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a view from the first element of ``base`` on is known to show nothing else of it."""
    dense: Any = 1
    for size, stride in zip(reversed(base.shape), reversed(base.stride()), strict=True):
        if not statically_known_true(stride == dense):
            return False
        dense = dense * size
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    return bool(statically_known_true(last < dense))


def has_static_address(x: torch.Tensor) -> bool:
    """Whether Dynamo was told that a tensor stays where it is, or says so of a module's."""
    return hasattr(x, "_dynamo_static_input_type")
