"""What the rows hold that a call does not have, where somebody looks at whether it matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_bcg.runtime import memory

LARGE = 1e3
# What facts refuse by themselves; everything else that is tried they only cannot tell.
VOUCHED = (
    "contraction over tokens", "softmax over tokens", "reduction over tokens",
    "convolution over tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filling:
    """What the rows hold that a call does not have.

    Attributes:
        number: of floating point.
        real_rows: integers are copies of the call's own rows, else zero, as in a replay.
    """

    number: float
    real_rows: bool = True

    @property
    def truth(self) -> bool:
        """Of truth values."""
        return self.number > 0


# As a replay has them first. What the author vouches for may multiply padded rows by zero, which
# NaN would show as use.
FILLINGS = (Filling(0.0, False), Filling(LARGE), Filling(-LARGE, False), Filling(float("nan")))
# Those that rows of largest numbers are tried with, and rows of least ones.
BEHIND_MOST, BEHIND_LEAST = (FILLINGS[0], FILLINGS[2]), FILLINGS[:2]


def alike(real: Tensor, dims: Sequence[int], most: bool, padded: float) -> Tensor:
    """Rows of which all are one: the largest numbers of each column, or the least.

    Whole numbers are others than padded rows hold, which then show in what only counts which
    numbers there are: real rows may hold all that padded ones do.
    """
    if not real.numel() or real.is_complex() or not dims:
        return real
    wide = real.to(torch.uint8) if real.dtype == torch.bool else real
    one = (wide.amax if most else wide.amin)(tuple(dims), keepdim=True).to(real.dtype)
    if not (real.is_floating_point() or real.dtype == torch.bool):
        other = (wide.amin if most else wide.amax)(tuple(dims), keepdim=True)
        one = torch.where(one == padded, other, one)
        one = torch.where(one == padded, padded + 1, one).to(real.dtype)
    return one.expand_as(real)


def fill(
    whole: Tensor, dims: Sequence[int], real: Tensor, filling: Filling, declared: bool = False
) -> Tensor:
    """Fills the rows that ``real`` does not have, and returns the front for those it has.

    ``declared`` is a number for every dtype.
    """
    front = whole
    for d in dims:
        have = real.shape[d]
        if front.shape[d] > have and front.stride(d):  # expanded rows are one row
            tail = front.narrow(d, have, front.shape[d] - have)
            once = memory.once(tail)
            tail = once(tail)
            if declared or whole.is_complex():
                tail.fill_(filling.number)
            elif whole.is_floating_point():
                tail.copy_(uneven(tail, filling.number))
            elif whole.dtype == torch.bool:
                tail.fill_(filling.truth)
            elif filling.real_rows and have:
                tail.copy_(once(_repeated(real, front.shape, dims, d, have)))
            else:
                tail.zero_()
        front = front.narrow(d, 0, have)
    return front


def uneven(like: Tensor, number: float) -> Tensor:
    """Numbers around ``number``, no two alike in a row: what is normalised shows them as well.

    A row of one number all along would be the same as one of zeros behind a layer norm.
    """
    most = torch.finfo(like.dtype).max / 4
    number = number if number != number else max(-most, min(number, most))
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return (number * (1 + places.sin() / 2)).to(like.dtype).view(like.shape)


def _repeated(real: Tensor, size: Sequence[int], dims: Sequence[int], d: int, have: int) -> Tensor:
    """Rows of ``real`` again and again, to fill what lies behind ``have`` in dim ``d``."""
    for e in dims:
        first = have if e == d else 0
        wanted = torch.arange(first, size[e], device=real.device) % real.shape[e]
        real = real.index_select(e, wanted)
    return real
