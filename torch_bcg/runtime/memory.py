"""Memory at fixed addresses: allocation from geometry, views by byte offset, copies between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_bcg.graph.ir import TensorSpec
from torch_bcg.graph.sizes import Geometry

Range = tuple[int, int]


def allocate(spec: TensorSpec, geometry: Geometry) -> Tensor:
    """Uninitialised memory with the sizes and strides of ``geometry``, on the spec's device."""
    size, stride, _ = geometry
    return torch.empty_strided(size, stride, dtype=getattr(torch, spec.dtype), device=spec.device)


def empty_like(t: Tensor) -> Tensor:
    """Uninitialised memory: a storage as large as that of ``t``, and the same place in it."""
    room = t.untyped_storage().nbytes()
    flat = torch.empty(room, dtype=torch.uint8, device=t.device)
    return in_storage(flat.untyped_storage(), t)


def over(storage: torch.UntypedStorage, dtype: torch.dtype, start: int, like: Geometry) -> Tensor:
    """A tensor over ``storage`` from byte ``start`` on; it shares memory and nothing else."""
    size, stride, _ = like
    assert start % dtype.itemsize == 0, "an address that this dtype cannot have"
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, start // dtype.itemsize, size, stride)


def first_byte(t: Tensor) -> int:
    """Offset of the first element in its storage, in bytes."""
    return int(t.storage_offset()) * t.itemsize


def shared(t: Tensor) -> Tensor:
    """The same memory and geometry without the object: the caller's tensor may die."""
    if is_traceable_wrapper_subclass(t):
        return t.detach()
    return in_storage(t.untyped_storage(), t)


def in_storage(storage: torch.UntypedStorage, t: Tensor) -> Tensor:
    """What ``t`` is in its own storage, over another one."""
    alias = over(storage, t.dtype, first_byte(t), (tuple(t.shape), t.stride(), 0))
    return lazily(alias, (t.is_conj(), t.is_neg()))


def lazily(t: Tensor, bits: tuple[bool, bool]) -> Tensor:
    """A plain tensor with these conjugate and negative bits; without any it is ``t`` itself."""
    t = torch._conj(t) if bits[0] else t
    return torch._neg_view(t) if bits[1] else t


def unowned(t: Tensor) -> Tensor:
    """The same memory and geometry, not kept alive: its owner must see to that."""
    storage = t.untyped_storage()
    if not storage.nbytes():
        return t
    return in_storage(_foreign(storage.data_ptr(), storage.nbytes(), t.device), t)


def _foreign(pointer: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage object over memory that it does not own."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(pointer, device, nbytes)
    return storage


def moved_view(base: Tensor, dtype: str, geometry: Geometry) -> Tensor:
    """A view by geometry: ``geometry``'s offset counts bytes from the first element of ``base``."""
    kind = getattr(torch, dtype)
    if kind == base.dtype and geometry[2] % base.itemsize == 0:
        offset = base.storage_offset() + geometry[2] // base.itemsize
        return base.as_strided(geometry[0], geometry[1], offset)
    return over(base.untyped_storage(), kind, first_byte(base) + geometry[2], geometry)


def extent(t: Tensor) -> int:
    """Bytes from the first element to the end of the last one; 0 if empty."""
    return reach(t.shape, t.stride()) * t.itemsize


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one; 0 if there is none."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def addresses(t: Tensor) -> tuple[int, ...]:
    """Where the memory is; of a wrapper subclass, where that of its inner tensors is."""
    if is_traceable_wrapper_subclass(t):
        names, _ = t.__tensor_flatten__()
        return tuple(a for n in names for a in addresses(getattr(t, n)))
    return (t.data_ptr(),)


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Sorted disjoint ranges that cover the same bytes."""
    out: list[Range] = []
    for low, high in sorted(r for r in ranges if r[0] < r[1]):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def once(t: Tensor) -> Callable[[Tensor], Tensor]:
    """What narrows the expanded dims of ``t`` to one index, so that each address is met once."""
    dims = expanded_dims(t)
    if not dims:
        return _itself

    def narrowed(x: Tensor) -> Tensor:
        for d in dims:
            x = x.narrow(d, 0, 1)
        return x

    return narrowed


def expanded_dims(t: Tensor) -> list[int]:
    """Dims of stride 0 in which every index means the same memory."""
    return [d for d, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)) if s == 0 and n > 1]


Part = tuple[int, Callable[[Tensor], Tensor]]


def out_of(
    tensors: Mapping[int, Tensor], take: Callable[[Tensor], Tensor] | None = None
) -> list[tuple[Callable[[], Tensor], tuple[Part, ...]]]:
    """How to hand out tensors of program memory, one storage at a time, with strides kept.

    Args:
        tensors: by any number, what is handed out.
        take: makes of a tensor over a whole storage what is handed out of it; None: a copy.

    Returns:
        For each storage: what makes the copy, and what makes each tensor from the copy.
    """
    groups: dict[int, list[int]] = {}
    for i, t in tensors.items():
        groups.setdefault(t.untyped_storage().data_ptr() or -1 - i, []).append(i)
    plans: list[tuple[Callable[[], Tensor], tuple[Part, ...]]] = []
    for members in groups.values():
        first = tensors[members[0]]
        if take is None and len(members) == 1 and _dense(first):
            plans.append((first.clone, ((members[0], _itself),)))
            continue
        align = max(tensors[i].itemsize for i in members)
        low = min(first_byte(tensors[i]) for i in members) // align * align
        high = max(first_byte(tensors[i]) + extent(tensors[i]) for i in members)
        flat = over(first.untyped_storage(), torch.uint8, low, ((high - low,), (1,), 0))
        parts = tuple((i, _part(tensors[i], low)) for i in members)
        plans.append((flat.clone if take is None else functools.partial(take, flat), parts))
    return plans


def fronts_out_of(
    fronts: Mapping[int, tuple[Tensor, Geometry]],
) -> list[tuple[Callable[[], Tensor], tuple[Part, ...]]]:
    """How to hand out the front rows of tensors of program memory, as if they had no others.

    Args:
        fronts: by any number, the front of a tensor, and the geometry that it is handed out with.

    Returns:
        As `out_of` does; tensors of one storage share one again.
    """
    groups: dict[int, list[int]] = {}
    for i, (t, _) in fronts.items():
        groups.setdefault(t.untyped_storage().data_ptr() or -1 - i, []).append(i)
    plans: list[tuple[Callable[[], Tensor], tuple[Part, ...]]] = []
    for members in groups.values():
        chosen = [fronts[i] for i in members]
        front, like = chosen[0]
        if len(members) == 1 and _dense(front) and (tuple(front.shape), front.stride()) == like[:2]:
            plans.append((shared(front).clone, ((members[0], _itself),)))
            continue
        low = _aligned([(like[2], t.itemsize) for t, like in chosen])
        high = max(like[2] + reach(*like[:2]) * t.itemsize for t, like in chosen)
        device = fronts[members[0]][0].device
        make = functools.partial(torch.empty, high - low, dtype=torch.uint8, device=device)
        plans.append((make, tuple((i, _filled(*fronts[i], low)) for i in members)))
    return plans


def _aligned(starts: Sequence[tuple[int, int]]) -> int:
    """The highest byte from which all (start, itemsize) lie at multiples of their size."""
    low = min(start for start, _ in starts)
    while any((start - low) % itemsize for start, itemsize in starts):
        low -= 1
    return low


def _filled(front: Tensor, like: Geometry, low: int) -> Callable[[Tensor], Tensor]:
    place, narrowed = _placed(front, like, like[2] - low), once(front)

    def part(flat: Tensor) -> Tensor:
        view = place(flat)
        narrowed(view).copy_(narrowed(front))
        return view

    return part


def _itself(t: Tensor) -> Tensor:
    return t


def _part(t: Tensor, low: int) -> Callable[[Tensor], Tensor]:
    return _placed(t, (tuple(t.shape), t.stride(), 0), first_byte(t) - low)


def _placed(t: Tensor, like: Geometry, start: int) -> Callable[[Tensor], Tensor]:
    """What makes a tensor like ``t`` of flat bytes, with another geometry."""
    dtype, bits = t.dtype, (t.is_conj(), t.is_neg())

    def part(copy: Tensor) -> Tensor:
        return lazily(over(copy.untyped_storage(), dtype, start, like), bits)

    return part


def _dense(t: Tensor) -> bool:
    """Whether ``clone`` keeps the strides: no gaps, no two indices at one address."""
    if t.is_conj() or t.is_neg() or t.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class Aliases:
    """Outputs that are program memory itself, each until the next replay of its graph.

    Every call hands out a storage object of its own over the same memory. On CUDA the one of an
    earlier call then raises when it is read; builds without CUDA cannot make a storage raise.
    """

    def __init__(self) -> None:
        self.out: list[Tensor] = []  # they own no memory

    def take(self, flat: Tensor) -> Tensor:
        """A tensor over the memory of ``flat`` that `expire` can end."""
        storage = _foreign(flat.data_ptr(), flat.numel(), flat.device)
        taken = over(storage, torch.uint8, 0, ((flat.numel(),), (1,), 0))
        self.out.append(taken)
        return taken

    def apart(
        self, args: Sequence[Any], places: Sequence[tuple[int, int, bool]]
    ) -> Sequence[Any] | None:
        """Arguments of which none lies in what was handed out, which a replay writes over.

        Args:
            args: of a call.
            places: (place, bytes or -1 for all, whether a copy will do) of those that are used
                where they are.

        Returns:
            The arguments, with copies where needed; None if a copy will not do.
        """
        ranges = [(t.data_ptr(), t.data_ptr() + t.numel()) for t in self.out]
        for place, size, copied in places:
            low = args[place].data_ptr()
            end = low + (extent(args[place]) if size < 0 else size)
            if any(low < high and start < end for start, high in ranges):
                if not copied:
                    return None
                args = [*args[:place], args[place].clone(), *args[place + 1 :]]
        return args

    def expire(self) -> None:
        """Ends what was handed out."""
        end = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
        for taken in self.out:
            if end is not None and taken.is_cuda:
                end(taken.untyped_storage()._cdata, _STALE)
        self.out.clear()


_STALE = (
    "This output of a compiled function was overwritten by a later call: outputs='alias' hands out "
    "program memory, valid until the next replay of the graph. Clone it, or use outputs='clone'."
)
