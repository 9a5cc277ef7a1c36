"""Manifold-constrained hyper-connections: parallel residual streams, mixed by learned weights.

Source: the DeepSeek-V4 report, section 2.2, as ``modeling_deepseek_v4`` of transformers has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_bcg.dsv4.configuration import DSV4Config


class HyperConnection(nn.Module):
    """What goes into a block, and how its output and the streams become the next streams.

    All of it float32, whatever the model's dtype.
    """

    def __init__(self, config: DSV4Config) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * config.hidden_size))
        self.base = nn.Parameter(torch.empty((2 + n) * n))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [P, n, D] -> post [P, n], mix [P, n, n] (float32), input of the block [P, D]."""
        c, n = self.config, self.config.hc_mult
        weights = F.linear(normed(streams.flatten(1).float(), c.rms_norm_eps), self.fn)
        pre, post, mix = weights.split([n, n, n * n], dim=-1)
        pre_base, post_base, mix_base = self.base.split([n, n, n * n])
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + c.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        mix = (mix * self.scale[2] + mix_base).unflatten(-1, (n, n)).softmax(-1) + c.hc_eps
        return post, _sinkhorn(mix, c.hc_sinkhorn_iters, c.hc_eps), _collapsed(streams, pre)


def _sinkhorn(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """Positive matrices [P, n, n] -> nearly doubly stochastic ones: columns first, columns last."""
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def expanded(block: Tensor, streams: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """The next streams [P, n, D] of the old ones and the block's output [P, D].

    Stream j takes ``post[:, j]`` of the block, ``mix[:, i, j]`` of stream i; both are float32, and
    so is the sum. Stream by stream: a product of matrices as small as ``mix`` leaves most of a GPU
    idle, and no compiler fuses it.
    """
    out = post.unsqueeze(-1) * block.unsqueeze(1)
    for old, shares in zip(streams.unbind(1), mix.unbind(1), strict=True):
        out = torch.addcmul(out, shares.unsqueeze(-1), old.unsqueeze(1))
    return out.to(streams.dtype)


class HyperHead(nn.Module):
    """The streams become one, after the last layer."""

    def __init__(self, config: DSV4Config) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        self.fn = nn.Parameter(torch.empty(n, n * config.hidden_size))
        self.base = nn.Parameter(torch.empty(n))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, streams: Tensor) -> Tensor:
        """[P, n, D] -> [P, D]."""
        weights = F.linear(normed(streams.flatten(1).float(), self.config.rms_norm_eps), self.fn)
        pre = torch.sigmoid(weights * self.scale + self.base) + self.config.hc_eps
        return _collapsed(streams, pre)


def _collapsed(streams: Tensor, pre: Tensor) -> Tensor:
    """[P, n, D], weighted by float32 [P, n], summed -> [P, D]."""
    return (pre.unsqueeze(-1) * streams).sum(dim=1).to(streams.dtype)


def normed(x: Tensor, eps: float) -> Tensor:
    """Divided by the root of its mean square over the last dimension; no weight."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)
