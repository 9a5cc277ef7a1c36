"""Compressed entries in one launch: pooling, norm and rotation of a window by one program.

A window is read once, some items at a time, from the ring and from this call's projections alike;
its softmax is kept for each channel as it goes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ITEMS = 16  # of a window, read at a time: 64 KB in flight with 512 channels
CHANNELS_A_WARP = 64


@triton.jit
def _pool(
    projected, ring, bias, projected_row, ring_row,
    seq_len, ragged_id, buffer_len, page_0, page_1, d,
    RATIO: tl.constexpr, DIM: tl.constexpr, OVERLAPPING: tl.constexpr,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The window's kv, each channel averaged by the softmax of its scores: [BLOCK_D]."""
    WINDOW: tl.constexpr = 2 * RATIO if OVERLAPPING else RATIO
    HALF: tl.constexpr = 2 * DIM if OVERLAPPING else DIM  # channels of kv, and of scores
    top = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, WINDOW, ITEMS):
        o = first + tl.arange(0, ITEMS)
        place = o  # in its own ratio of positions
        page = page_1
        part = tl.zeros_like(o)  # first channel
        if OVERLAPPING:
            place = tl.where(o < RATIO, o, o - RATIO)
            page = tl.where(o < RATIO, page_0, page_1)
            part = tl.where(o < RATIO, 0, DIM)
        buffered = (page * RATIO + place).to(tl.int64) * ring_row
        fresh = (ragged_id - WINDOW + 1 + o).to(tl.int64) * projected_row
        source = tl.where(o < buffer_len, ring + buffered, projected + fresh)
        at = source[:, None] + (part[:, None] + d[None, :])
        # Positions before 0 are never read: whatever lies there has no part in the sums.
        read = ((o < WINDOW) & (seq_len - WINDOW + o >= 0))[:, None] & (d < DIM)[None, :]
        kv = tl.load(at, mask=read, other=0.0)
        score = tl.load(at + HALF, mask=read, other=0.0)
        offset = place[:, None] * HALF + part[:, None] + d[None, :]
        score += tl.load(bias + offset, mask=read, other=0.0)
        score = tl.where(read, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        # Nothing read so far: -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - base[None, :])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight * kv, 0)
        top = new_top
    return tl.where(d < DIM, acc / total, 0.0)


@triton.jit
def _compress(
    entries, projected, ring, plan, out_loc, bias, norm_weight, inv_freq, scaling, eps,
    entry_row, projected_row, ring_row,
    RATIO: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, OVERLAPPING: tl.constexpr,
    ITEMS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The entry of one record."""
    record = plan + tl.program_id(0) * 4
    seq_len = tl.load(record)
    if seq_len < 0:  # no record: 0xFFFFFFFF
        return
    packed = tl.load(record + 1)
    ragged_id = packed & 0xFFFF
    buffer_len = (packed >> 16) & 0xFFFF
    page_0 = tl.load(record + 2)
    page_1 = tl.load(record + 3)
    d = tl.arange(0, BLOCK_D)
    pooled = _pool(
        projected, ring, bias, projected_row, ring_row,
        seq_len, ragged_id, buffer_len, page_0, page_1, d,
        RATIO, DIM, OVERLAPPING, ITEMS, BLOCK_D,
    )  # fmt: skip
    variance = tl.sum(pooled * pooled, 0) / DIM
    normed = pooled * (1.0 / tl.sqrt(variance + eps))
    normed *= tl.load(norm_weight + d, mask=d < DIM, other=0.0)
    # Channels in pairs; those before the last ROPE turn by no angle.
    x, y = tl.split(tl.reshape(normed, [BLOCK_D // 2, 2]))
    pair = tl.arange(0, BLOCK_D // 2) - (DIM - ROPE) // 2
    turns = (pair >= 0) & (pair < ROPE // 2)
    angle = (seq_len - RATIO).to(tl.float32) * tl.load(inv_freq + pair, mask=turns, other=0.0)
    cos = tl.where(turns, tl.cos(angle) * scaling, 1.0)
    sin = tl.where(turns, tl.sin(angle) * scaling, 0.0)
    turned = tl.interleave(x * cos - y * sin, y * cos + x * sin)
    slot = tl.load(out_loc + ragged_id)
    at = entries + slot * entry_row + d
    tl.store(at, turned.to(entries.dtype.element_ty), mask=d < DIM)


def compress_(
    entries: Tensor,
    projected: Tensor,
    ring: Tensor,
    plan: Tensor,
    out_loc: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    ratio: int,
    scaling: float,
    eps: float,
) -> None:
    """Launches it; see `torch_bcg.dsv4.compressor.compress_` for arguments."""
    if not len(plan):
        return
    dim = entries.shape[1]
    overlapping = projected.shape[1] == 4 * dim
    window = 2 * ratio if overlapping else ratio
    block = triton.next_power_of_2(dim)
    _compress[(len(plan),)](
        entries,
        projected,
        ring,
        plan.view(torch.int32),
        out_loc,
        bias,
        norm_weight,
        inv_freq,
        scaling,
        eps,
        entries.stride(0),
        projected.stride(0),
        ring.stride(0),
        RATIO=ratio,
        DIM=dim,
        ROPE=2 * len(inv_freq),
        OVERLAPPING=overlapping,
        ITEMS=min(ITEMS, triton.next_power_of_2(window)),
        BLOCK_D=block,
        num_warps=min(8, max(1, block // CHANNELS_A_WARP)),
    )
