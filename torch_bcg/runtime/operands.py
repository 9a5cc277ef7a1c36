"""The operands of a recorded segment as a compiler sees them, and others that look the same."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_bcg.runtime import memory
from torch_bcg.runtime.lanes import lanes_of

_ALIGNMENT = 16  # bytes that compilers ask about an address
_COPIED = 1 << 20  # bytes of a static tensor that may be copied to write a part of it


@dataclass(frozen=True)
class Operand:
    """What the compiler may rely on about one operand.

    Attributes:
        value: the operand: a tensor or a number.
        size, stride: expressions of the plan's symbols.
        expr: of a number.
        written: the segment writes it.
        storage, offset: address of its storage, and bytes from there.
        static: it lies in a static tensor.
    """

    value: Any
    size: tuple[str, ...] = ()
    stride: tuple[str, ...] = ()
    expr: str = ""
    written: bool = False
    storage: int = 0
    offset: int = 0
    static: bool = False

    @property
    def key(self) -> Hashable:
        """What makes another operand one that the same code can take."""
        if not isinstance(self.value, Tensor):
            return type(self.value), self.expr
        x = self.value
        at = x.data_ptr() % _ALIGNMENT
        return self.size, self.stride, x.dtype, x.device, x.is_conj(), self.written, at


def shared_places(given: Sequence[Operand]) -> dict[int, list[int]]:
    """Storages that are written and hold several operands -> the places of those."""
    written = {g.storage for g in given if g.written}
    places: dict[int, list[int]] = {}
    for i, g in enumerate(given):
        if g.storage in written:
            places.setdefault(g.storage, []).append(i)
    return {storage: several for storage, several in places.items() if len(several) > 1}


Layout = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def layout_of(given: Sequence[Operand]) -> Layout:
    """Which operands share memory that is written: bytes of the storage, (operand, offset)."""
    return tuple(
        (_room(given, places), tuple((i, given[i].offset) for i in places))
        for places in shared_places(given).values()
    )


def _room(given: Sequence[Operand], places: Sequence[int]) -> int:
    """Bytes of the storage of some operands; what somebody else owns may be known in part."""
    return max(int(given[i].value.untyped_storage().nbytes()) for i in places)


def unfit(code: fx.GraphModule, operands: Iterable[Any]) -> str | None:
    """Why a segment is not given to a compiler, or None."""
    if lanes_of(code):
        return "it works on side streams"
    attributes = [
        operator.attrgetter(str(n.target))(code) for n in code.graph.find_nodes(op="get_attr")
    ]
    if any(isinstance(a, Tensor) for a in attributes):
        return "it holds a tensor of its own"
    for x in operands:
        if isinstance(x, Tensor) and is_traceable_wrapper_subclass(x):
            return f"an operand is a {type(x).__name__}"
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            return f"an operand is {x.layout}"
        if isinstance(x, Tensor) and x.is_neg():  # Inductor reads what lies there, unnegated
            return "an operand is a negative view"
    return None


def crossing(given: Sequence[Operand]) -> str | None:
    """Why operands are not given to a compiler, to which storages are apart: these overlap.

    So do tensors over one buffer of NumPy's or another library's, each with a storage of its own.
    """
    rooms: dict[int, int] = {}
    for i, g in enumerate(given):
        if isinstance(g.value, Tensor):
            rooms[g.storage] = max(rooms.get(g.storage, 0), _room(given, [i]))
    for start in {g.storage for g in given if g.written}:
        for other, room in rooms.items():
            if other != start and other < start + rooms[start] and start < other + room:
                return "it writes memory that two storages share"
    return None


def copied(given: Sequence[Operand]) -> str | None:
    """Why operands are not given to a compiler, to which overlapping ones are views of one tensor.

    To write one it copies the whole tensor: a cache of which a call touches a few rows.
    """
    for places in shared_places(given).values():
        spans = ((given[i].offset, memory.extent(given[i].value)) for i in places)
        pairs = itertools.pairwise(sorted(spans))
        overlap = any(at + extent > after for (at, extent), (after, _) in pairs)
        if overlap and given[places[0]].static and _room(given, places) > _COPIED:
            return "it writes a large static tensor of which operands overlap"
    return None


def alike(given: Sequence[Operand], known: Sequence[Any], make: Callable[..., Tensor]) -> list[Any]:
    """Other operands in other memory, which those share that share memory that is written.

    Those are no views of another tensor, and all over one storage, as `_apart` gives them: of
    operands that share memory a compiler takes the tensor that they are views of, if there is one.

    Args:
        given: the operands.
        known: of each, sizes and strides to give it, or a number.
        make: makes memory from sizes, strides, dtype and device.
    """
    flats: dict[int, Tensor] = {}
    for storage, places in shared_places(given).items():
        x = given[places[0]].value
        room = _room(given, places) // x.itemsize
        flats[storage] = make((room,), (1,), dtype=x.dtype, device=x.device)
    made: list[Any] = []
    for g, form in zip(given, known, strict=True):
        x = g.value
        if not isinstance(x, Tensor):
            made.append(form)
            continue
        size, stride = form
        if g.storage in flats:
            own = torch.empty(0, dtype=x.dtype, device=x.device)
            place = g.offset // x.itemsize
            like = own.set_(flats[g.storage].untyped_storage(), place, size, stride)
        else:
            like = make(size, stride, dtype=x.dtype, device=x.device)
        made.append(torch._conj(like) if x.is_conj() else like)
    return made


def unshare(own: list[Any], grouped: Collection[int]) -> None:
    """Gives each operand that is only read a storage of its own, over the same memory.

    The examples had one each, and AOTAutograd (torch 2.11) orders operands by storage as soon as
    some that share one are written.
    """
    taken = set()
    for i, x in enumerate(own):
        if isinstance(x, Tensor) and i not in grouped:
            place = x.untyped_storage().data_ptr()
            own[i] = memory.unowned(x) if place in taken else x
            taken.add(place)
