"""Rotary positions on the last channels of a head, in consecutive pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Turns(NamedTuple):
    """Cosines and sines of positions, [P, rope_dim / 2] each."""

    cos: Tensor
    sin: Tensor


class Rotary(nn.Module):
    """The turns of positions.

    Args:
        inv_freq: float32 [rope_dim / 2], radians per position.
        scaling: both are multiplied with it (YaRN's attention factor; 1 without).
    """

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.scaling = scaling

    @classmethod
    def of(cls, theta: float, rope_dim: int) -> Rotary:
        """Plain: channel pair i turns by ``theta ** (-2 i / rope_dim)`` a position."""
        return cls(theta ** -(torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """Of integers [P], rounded to ``dtype``."""
        cos, sin = turns_of(positions, self.inv_freq, self.scaling)
        return Turns(cos.to(dtype), sin.to(dtype))


def turns_of(positions: Tensor, inv_freq: Tensor, scaling: float) -> Turns:
    """Of integers [P], in float32; `Rotary` says what the others are."""
    angles = positions[:, None].float() * inv_freq
    return Turns(angles.cos() * scaling, angles.sin() * scaling)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the last channels in place: ``(a, b) -> (a cos - b sin, b cos + a sin)``, in float32.

    In place since most of a head does not rotate. Minus ``sin`` turns back.

    Args:
        x: [P, ..., head_dim] of any float dtype, written; nobody else's.
        cos: [P, rope_dim / 2].
        sin: [P, rope_dim / 2].

    Returns:
        ``x``.
    """
    rope = x[..., -2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = rope.float().unbind(-1)
    rope.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1))
    return x
