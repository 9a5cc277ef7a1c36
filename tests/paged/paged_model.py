"""A small Llama whose keys and values lie in pages, and the metadata it is called with.

A step runs the new tokens of several requests as one flat batch of T tokens, R requests. Recorded
segments read `Paged.core` (where to store, which position) and `Paged.sharpness`. Everything else
is read by `paged_attention` alone, which runs eagerly: it reads lengths on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg

RESERVED = 0
"""The slot that padded rows are stored to. No request is given its page."""
WHOLE = 1_000_000
"""A window that hides nothing."""


@dataclass
class Tokens:
    """What every token needs by itself: one row a token.

    Attributes:
        slots: int64 [T], where its keys and values are stored: ``page * page_size + offset``.
        positions: int64 [T], its place in its request.
    """

    slots: Tensor
    positions: Tensor


@dataclass
class Paged:
    """One step: which tokens of which requests it holds, and where their past lies.

    Attributes:
        core: rows of tokens.
        query_positions: int64 [T], the same tensor as ``core.positions``.
        page_table: int32 [R, W], pages of each request in order, then the last one again; W from
            the capacity, the same in all steps.
        block_counts: int32 [R], how many pages of each row are in use.
        seq_lens: int32 [R], tokens of each request, those of this step included.
        query_starts: int32 [R + 1], the first token of each request in the batch, and the end.
        window: int32 [R], how many tokens back each request sees; None: as far as there are.
        page_size: tokens of a page; the pools are made for it.
        decodes: how many requests, the first ones, have exactly one token in this step.
        sharpness: the logits are multiplied with it; the inverse of a temperature.
    """

    core: Tokens
    query_positions: Tensor
    page_table: Tensor
    block_counts: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    window: Tensor | None
    page_size: int
    decodes: int
    sharpness: float

    def padded(self, tokens: int, requests: int) -> Paged:
        """The same step with T and R as given: the rows added belong to nobody."""
        at = lengthened(self.core.positions, tokens)
        starts, window = self.query_starts, self.window
        if window is None:
            window = torch.full_like(self.seq_lens, WHOLE)
        return replace(
            self,
            core=Tokens(slots=lengthened(self.core.slots, tokens, RESERVED), positions=at),
            query_positions=at,
            page_table=lengthened(self.page_table, requests, RESERVED),
            block_counts=lengthened(self.block_counts, requests),
            seq_lens=lengthened(self.seq_lens, requests),
            query_starts=torch.cat([starts, starts[-1:].expand(requests + 1 - len(starts))]),
            window=lengthened(window, requests),
        )


def lengthened(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """[n, ...] -> [rows, ...], the new ones filled."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)), value=value)


@torch_bcg.eager_on_graph(mutates_args=("out",), name="paged::attention")
def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, out: Tensor
) -> None:
    """Every token sees the tokens of its own request up to itself.

    Args:
        q: float32 [T, heads, head_dim].
        keys: float32 [slots, kv_heads, head_dim], those of this step stored already; values alike.
        values: see keys.
        positions: int64 [T], `Paged.query_positions`.
        out: float32 [T, heads, head_dim], written.
    """
    step = torch_bcg.current_metadata(Paged)
    starts = step.query_starts.tolist()
    groups = [(0, step.decodes)] if step.decodes else []  # decodes at once, prefills one by one
    groups += [
        (r, r + 1) for r in range(step.decodes, len(starts) - 1) if starts[r] < starts[r + 1]
    ]
    for first, last in groups:
        rows, requests = slice(starts[first], starts[last]), slice(first, last)
        slots = slots_of(step, requests)
        seen = visible(step, requests, positions[rows].view(last - first, -1), slots.shape[-1])
        # [requests, tokens, heads, head_dim] -> heads before tokens, as SDPA takes them
        batch = q[rows].unflatten(0, (last - first, -1)).transpose(1, 2)
        k, v = keys[slots].transpose(1, 2), values[slots].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(batch, k, v, attn_mask=seen, enable_gqa=True)
        out[rows] = mixed.transpose(1, 2).flatten(0, 1)


def slots_of(step: Paged, requests: slice) -> Tensor:
    """Slots of the pages of some requests: int64 [requests, pages * page_size]."""
    pages = int(step.block_counts[requests].max())
    table = step.page_table[requests, :pages].long()
    offsets = torch.arange(step.page_size, device=table.device)
    return (table[:, :, None] * step.page_size + offsets).flatten(1)


def visible(step: Paged, requests: slice, positions: Tensor, slots: int) -> Tensor:
    """Which of their slots the tokens see: bool [requests, 1, tokens, slots].

    Args:
        positions: int64 [requests, tokens].
    """
    at = torch.arange(slots, device=positions.device)
    back = positions[:, :, None] - at
    seen = (back >= 0) & (at < step.seq_lens[requests, None, None])
    if step.window is not None:
        seen &= back < step.window[requests, None, None]
    return seen[:, None]


@dataclass(frozen=True)
class Sizes:
    """Of model and pools."""

    vocabulary: int = 48
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 48
    layers: int = 2
    pages: int = 113
    page_size: int = 4


class Attention(nn.Module):
    """Grouped queries, rotary positions, and the layer's own pools."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        d, kv = sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.qkv = nn.Linear(sizes.width, sizes.heads * d + 2 * kv, bias=False)
        self.out = nn.Linear(sizes.heads * d, sizes.width, bias=False)
        for name in ("keys", "values"):
            pool = torch.zeros(sizes.pages * sizes.page_size, sizes.kv_heads, d)
            pool[: sizes.page_size] = torch.nan  # the reserved page: whoever reads it shows
            self.register_buffer(name, pool, persistent=False)
        frequencies = 100.0 ** -(torch.arange(0, d, 2) / d)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, width] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        s = self.sizes
        heads = self.qkv(x).unflatten(-1, (-1, s.head_dim))
        q, k, v = heads.tensor_split((s.heads, s.heads + s.kv_heads), dim=1)
        angles = positions[:, None, None] * self.frequencies
        return rotated(q, angles), rotated(k, angles), v

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]"""
        step = torch_bcg.current_metadata(Paged)
        q, k, v = self.projected(x, step.core.positions)
        self.keys[step.core.slots] = k
        self.values[step.core.slots] = v
        out = torch.zeros_like(q)
        paged_attention(q, self.keys, self.values, step.query_positions, out)
        return self.out(out.flatten(1))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of [T, heads, head_dim] turned by angles [T, 1, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.attention = Attention(sizes)
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]"""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    def mlp(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Tokens of one step -> logits; the rest of the step is the current `Paged`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.randn(sizes.vocabulary, sizes.width))
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, vocabulary]"""
        x = F.embedding(input_ids, self.embedding)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * torch_bcg.current_metadata(Paged).sharpness

    def pools(self) -> list[Tensor]:
        """Keys and values of every layer without the reserved page: [slots, kv_heads, head_dim]."""
        attention = [layer.attention for layer in self.layers]
        return [pool[self.sizes.page_size :] for a in attention for pool in (a.keys, a.values)]
