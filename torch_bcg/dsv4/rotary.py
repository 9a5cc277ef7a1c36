"""Rotary positions on the last channels of a head, in consecutive pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Cosines and sines of positions.

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

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Integers [P] -> cosines and sines, [P, rope_dim / 2] each, rounded to ``dtype``."""
        angles = positions[:, None].float() * self.inv_freq
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the last channels in place: ``(a, b) -> (a cos - b sin, b cos + a sin)``, in float32.

    In place since most of a head does not rotate. Minus ``sin`` turns back.

    Args:
        x: [P, ..., head_dim], nobody else's.
        cos: [P, rope_dim / 2].
        sin: [P, rope_dim / 2].
    """
    rope = x[..., -2 * cos.shape[-1] :].unflatten(-1, (-1, 2))
    for _ in range(x.dim() - 2):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = rope.float().unbind(-1)
    rope.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1))
    return x
