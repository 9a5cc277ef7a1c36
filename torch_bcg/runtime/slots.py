"""Memory that programs share: flat slots of one graph, and what recordings on the host are made in.

Only one program of a pool replays at a time and each fills its memory anew, so programs of all
sizes lie in the same bytes: a value of a smaller size is in the first bytes of its slot, with the
strides of its own size.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from torch_bcg.counters import counters
from torch_bcg.graph.ir import TensorSpec
from torch_bcg.graph.sizes import Geometry
from torch_bcg.runtime import memory


class Slots:
    """The slots of one graph by name; they live as long as a program that was given them.

    Attributes:
        taken: bytes allocated so far, freed ones included.
        tails: which size of a call the padded rows were filled for last.
        lent: somebody else writes slots as well.
    """

    def __init__(self) -> None:
        self.flat: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self.taken = 0
        self.tails: object = None
        self.lent = False

    def take(
        self, name: str, spec: TensorSpec, geometry: Geometry, most: Geometry
    ) -> tuple[Tensor, Tensor]:
        """Memory for one value at one size.

        Args:
            name: of the slot.
            spec: dtype and device.
            geometry: sizes and strides to give it.
            most: those of the largest size that is expected, for which memory is taken at once.

        Returns:
            The value's tensor, uninitialised, and the flat bytes that the program has to keep.
        """
        dtype = getattr(torch, spec.dtype)
        needed = memory.reach(*geometry[:2]) * dtype.itemsize
        flat = self.flat.get(name)
        if flat is None or flat.numel() < needed:
            flat = self.taken_for(spec.device, needed, memory.reach(*most[:2]) * dtype.itemsize)
            room = flat.numel()
            self.flat[name] = flat
            self.taken += room
            counters.pool_bytes += room
            weakref.finalize(flat, _returned, room)
        return memory.over(flat.untyped_storage(), dtype, 0, geometry), flat

    def taken_for(self, device: str, needed: int, most: int) -> Tensor:
        """Flat bytes for the largest size expected, or for this one where that is too much."""
        flat = TensorSpec("uint8", device, (), ())
        if most > needed:
            with contextlib.suppress(torch.OutOfMemoryError):
                return memory.allocate(flat, ((most,), (1,), 0))
        return memory.allocate(flat, ((needed,), (1,), 0))


def _returned(room: int) -> None:
    counters.pool_bytes -= room


class Arena:
    """Memory of recordings that the host replays, reused like that of a pool of CUDA graphs.

    A block is free again as soon as the tensor it was given out as is gone. Whatever still reads it
    then finds somebody else's data, as on a GPU.

    Attributes:
        bytes: of all blocks.
    """

    def __init__(self) -> None:
        self.free: list[Tensor] = []
        self.bytes = 0

    def take(self, spec: TensorSpec, geometry: Geometry) -> Tensor:
        """Memory in the smallest free block that is large enough, or in a new one."""
        dtype = getattr(torch, spec.dtype)
        needed = memory.reach(*geometry[:2]) * dtype.itemsize
        device = torch.device(spec.device)
        able = [
            (b.numel(), i)
            for i, b in enumerate(self.free)
            if b.numel() >= needed and b.device == device
        ]
        if able:
            block = self.free.pop(min(able)[1])
        else:
            block = torch.empty(needed, dtype=torch.uint8, device=device)
            self.bytes += needed
        taken = memory.over(block.untyped_storage(), dtype, 0, geometry)
        weakref.finalize(taken, self.free.append, block)
        return taken
