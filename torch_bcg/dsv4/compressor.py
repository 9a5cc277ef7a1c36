"""What the compressors compute: entries of closed windows, and the state between two calls.

``compress_`` is the operator ``dsv4::compress_``: a Triton kernel on CUDA, `compress_reference`
elsewhere. In one step it comes before `write_state`, which overwrites what it reads. Neither looks
at a value on the host, so that both can be recorded.

d is the width of an entry, m the ratio. The sparse branch overlaps (c = 2): a window is the last 2m
positions, the older half of which gives its Ca channels, the newer one its Cb channels. The heavy
branch does not (c = 1). A row of projections is ``| kv (c * d) | score (c * d) |``, each of them
``| Ca (d) | Cb (d) |`` for c = 2.

Source: the DeepSeek-V4 report, sections 2.3.1 (equations 9 to 12) and 2.3.2 (20 to 23).
"""

from typing import Any

import torch
from torch import Tensor

from torch_bcg.dsv4.rotary import rotate_, turns_of

RECORDS = 64
"""Records that the reference takes at a time; temporaries are ``[RECORDS, c * m, 2 * c * d]``."""


@torch.library.custom_op("dsv4::compress_", mutates_args=("entries",))
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
    """Stores the entry of every window that closes in this step.

    A record closes a window at position ``p = seq_len - 1``. Its item o is position
    ``q = p - w + 1 + o`` (w = c * m); there is none before position 0. Items ``o < buffer_len``
    come from the ring: row ``read_page_1 * m + o``, for c = 2 row ``read_page_0 * m + o`` and, from
    item m on, ``read_page_1 * m + o - m``. The others are rows ``ragged_id - w + 1 + o`` of
    ``projected``. Then, in float32 and as in DeepSeek-V4: softmax of score + bias over the items,
    for each channel; the sum of kv weighted by it; RMSNorm; rotation of the last channels, in
    neighbouring pairs, by position ``seq_len - m``.

    Args:
        entries: ``[slots, d]``, the pool, written. Slot 0 is reserved: no record closes there.
        projected: float32 ``[P, 2 * c * d]``, of this step's tokens.
        ring: float32 ``[state rows, 2 * c * d]``, of tokens of earlier steps.
        plan: uint8 ``[P, 16]``, records ``{u32 seq_len, u16 ragged_id, u16 buffer_len,
            i32 read_page_0, i32 read_page_1}`` in any order. Those whose seq_len is 0xFFFFFFFF are
            none and write nothing.
        out_loc: int64 ``[P]``, slot of the entry that closes in a row.
        bias: float32 ``[m, c * d]``, by place in the ratio.
        norm_weight: float32 ``[d]``.
        inv_freq: float32 ``[rope_dim / 2]``.
        ratio: m.
        scaling: of cosines and sines, see `Rotary`.
        eps: of the norm.
    """
    compress_reference(
        entries, projected, ring, plan, out_loc, bias, norm_weight, inv_freq, ratio, scaling, eps
    )


@compress_.register_kernel("cuda")
def _(*args: Any) -> None:
    from torch_bcg.dsv4.kernels import compressor

    compressor.compress_(*args)


@compress_.register_fake
def _(*args: Any) -> None:
    return None


def compress_reference(
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
    """`compress_` in plain torch, dense: every record is computed, what is none goes nowhere."""
    for records in plan.view(torch.int32).split(RECORDS):
        seq_len, rows = records[:, 0], records[:, 1] & 0xFFFF
        pooled = _pooled(records, projected, ring, bias, ratio, entries.shape[1])
        normed = pooled * (pooled.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight
        turned = rotate_(normed, *turns_of(seq_len - ratio, inv_freq, scaling))
        # To slot 0 goes what is there: an index_put of fixed shape has to write something.
        valid = (seq_len >= 0)[:, None]
        slots = torch.where(valid[:, 0], out_loc[rows.long()], 0)
        entries[slots] = torch.where(valid, turned.to(entries.dtype), entries[:1])


def _pooled(
    records: Tensor, projected: Tensor, ring: Tensor, bias: Tensor, ratio: int, dim: int
) -> Tensor:
    """The kv of each record's window, averaged by the softmax of its scores: [records, d]."""
    seq_len, packed, page_0, page_1 = records.long()[:, :, None].unbind(1)
    halves = bias.shape[1] // dim
    window = halves * ratio
    item = torch.arange(window, device=records.device)
    page = torch.where(item < window - ratio, page_0, page_1)
    in_ring = page * ratio + item % ratio
    in_step = (packed & 0xFFFF) - window + 1 + item
    read = (seq_len >= 0) & (seq_len - window + item >= 0)
    buffered = item < (packed >> 16 & 0xFFFF)
    # Where nothing is read an index may be none, and what it finds a NaN: both are replaced.
    x = torch.where(
        buffered[:, :, None],
        ring[torch.where(read & buffered, in_ring, 0)],
        projected[torch.where(read & ~buffered, in_step, 0)],
    )
    kv, score = x.chunk(2, -1)
    score = score + bias.repeat(halves, 1)
    if halves == 2:
        older = (item < ratio)[:, None]
        kv = torch.where(older, kv[..., :dim], kv[..., dim:])
        score = torch.where(older, score[..., :dim], score[..., dim:])
    weights = torch.where(read[:, :, None], score, -torch.inf).softmax(1)
    return (weights * torch.where(read[:, :, None], kv, 0)).sum(1)


def write_state(ring: Tensor, projected: Tensor, plan: Tensor) -> None:
    """Keeps the projections that windows of later steps will read.

    Args:
        ring: float32 ``[state rows, 2 * c * d]``, written. Row 0 is reserved: what is no record
            writes there.
        projected: float32 ``[P, 2 * c * d]``.
        plan: uint8 ``[P, 8]``, records ``{u32 ragged_id, i32 write_loc}``, none where write_loc is
            -1. No two write one row.
    """
    rows, places = plan.view(torch.int32).long().unbind(-1)
    valid = places >= 0
    ring[torch.where(valid, places, 0)] = projected[torch.where(valid, rows, 0)]
