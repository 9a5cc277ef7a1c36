"""Sparse attention in one launch: rows of pools gathered by index, an online softmax with a sink.

K = V, so a tile of keys is loaded once and takes part in both products. The keys of the window and
those of the extra branch are one sequence of blocks: no pipeline runs dry where one pool ends.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Config(NamedTuple):
    """How one program works.

    Attributes:
        heads: a program serves as many of one row, which read the same keys; at least 16, the
            smallest that matrix units take.
        keys: gathered and multiplied at a time.
        warps: of a program.
        stages: of the software pipeline: blocks of indices and of keys in flight.
    """

    heads: int
    keys: int
    warps: int
    stages: int


# For keys of 1 KB (512 elements of 16 bits) on an H200, which has 132 multiprocessors of 227 KB
# shared memory. 64 heads: q takes 64 KB, the float32 accumulator 128 registers a thread of 8 warps,
# and each of 3 tiles of 32 keys 32 KB, so that the next two are on their way while one is computed
# (168 KB in all, without spills; 2 tiles of 64 keys would be loaded and computed in turn). Few rows
# leave multiprocessors idle unless the heads of a row are spread over programs, which then gather
# the same keys, from the L2 cache; fewer heads than 64 use the matrix units of a warp.
CONFIGS = (
    Config(heads=64, keys=32, warps=8, stages=3),
    Config(heads=32, keys=64, warps=8, stages=3),
    Config(heads=16, keys=64, warps=8, stages=3),
)
ROW_BYTES = 1024
SMALL = Config(heads=16, keys=16, warps=4, stages=1)  # for larger keys: their tiles fit at least
PROGRAMS = 96  # fewer leave much of the device idle


def config_of(rows: int, heads: int, row_bytes: int) -> Config:
    """The config for a launch: as many heads a program as keep the device busy.

    Args:
        rows: query rows.
        heads: of each row.
        row_bytes: of one key, head_dim padded to a power of two.
    """
    if row_bytes > ROW_BYTES:
        return SMALL
    for config in CONFIGS:
        if config.heads < 2 * heads and rows * -(-heads // config.heads) >= PROGRAMS:
            return config
    return CONFIGS[-1]


@triton.jit
def _slots(
    block, swa_blocks, swa_indices, swa_length, extra_indices, extra_length,
    HAS_EXTRA: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slots of a block of keys: int32 [BLOCK_N], -1 is masked. Past the last block all are."""
    indices = swa_indices
    length = swa_length
    first = block * BLOCK_N
    if HAS_EXTRA:
        is_extra = block >= swa_blocks
        indices = tl.where(is_extra, extra_indices, swa_indices)
        length = tl.where(is_extra, extra_length, swa_length)
        first = tl.where(is_extra, block - swa_blocks, block) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    return tl.load(indices + n, mask=n < length, other=-1)


@triton.jit
def _attend(
    q, swa, swa_indices, swa_lengths, extra, extra_indices, extra_lengths, sinks, out, scale,
    q_row, q_head, out_row, out_head, swa_row, extra_row,
    swa_index_row, extra_index_row, swa_width, extra_width,
    HEADS: tl.constexpr, DIM: tl.constexpr, HAS_EXTRA: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some heads of one row. Programs of a row stand side by side: they read the same keys."""
    LOG2E: tl.constexpr = 1.4426950408889634
    blocks_h: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // blocks_h).to(tl.int64)
    h = (tl.program_id(0) % blocks_h) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
    tile_q = tl.load(q + row * q_row + h[:, None] * q_head + d[None, :], mask=inside, other=0.0)

    swa_indices += row * swa_index_row
    swa_length = tl.minimum(tl.load(swa_lengths + row), swa_width)
    swa_blocks = tl.cdiv(tl.maximum(swa_length, 0), BLOCK_N)
    blocks = swa_blocks
    extra_length = 0
    if HAS_EXTRA:
        extra_indices += row * extra_index_row
        extra_length = tl.minimum(tl.load(extra_lengths + row), extra_width)
        blocks += tl.cdiv(tl.maximum(extra_length, 0), BLOCK_N)

    # The sink is a key without a value. A finite floor: a sink of -inf is none, and -inf - -inf in
    # a block without keys would be NaN.
    sink = tl.load(sinks + h, mask=h < HEADS, other=0.0).to(tl.float32) * LOG2E
    top = tl.maximum(sink, -1.0e30)
    total = tl.exp2(sink - top)
    # Keys by column: added up at the end, since a sum in each turn would wait for all warps.
    totals = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    # Slots are carried from one turn to the next: keys that waited for the load of their own slots
    # would come a turn late.
    slots = _slots(
        0, swa_blocks, swa_indices, swa_length, extra_indices, extra_length, HAS_EXTRA, BLOCK_N
    )
    for block in range(blocks):
        pool = swa
        pool_row = swa_row
        if HAS_EXTRA:
            pool = tl.where(block >= swa_blocks, extra, swa)
            pool_row = tl.where(block >= swa_blocks, extra_row, swa_row)
        seen = slots >= 0
        at = pool + slots.to(tl.int64)[:, None] * pool_row + d[None, :]
        if BLOCK_D == DIM:
            keys = tl.load(at, mask=seen[:, None], other=0.0)
        else:
            keys = tl.load(at, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        slots = _slots(
            block + 1, swa_blocks, swa_indices, swa_length, extra_indices, extra_length,
            HAS_EXTRA, BLOCK_N,
        )  # fmt: skip
        weights = tl.zeros([BLOCK_H, BLOCK_N], dtype=keys.dtype)
        shrink = tl.zeros([BLOCK_H], dtype=tl.float32)
        # Always so. Of two products in a chain Triton gives every warp whole rows of the first,
        # and 8 warps would compute the scores of 64 heads twice. It sees no chain through an if.
        if block < blocks:
            scores = tl.dot(tile_q, tl.trans(keys), input_precision="ieee") * (scale * LOG2E)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            exact = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink
            totals = totals * shrink[:, None] + exact
            top = new_top
            weights = exact.to(keys.dtype)
        acc = tl.dot(weights, keys, acc * shrink[:, None], input_precision="ieee")
    total += tl.sum(totals, 1)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = out + row * out_row + h[:, None] * out_head + d[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


def sparse_attention(
    q: Tensor,
    swa: Tensor,
    swa_indices: Tensor,
    swa_lengths: Tensor,
    extra: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sinks: Tensor,
    scale: float,
    out: Tensor,
    config: tuple[int, int, int, int] | None = None,
) -> None:
    """Launches it; see `torch_bcg.dsv4.attention.sparse_attention_reference` for the formula.

    Deterministic; the config, and with it the rounding, depends on the number of rows.

    Args:
        q: [T, H, d], bf16, fp16 or fp32; any strides but the last one.
        swa: [slots, d] like q; any row stride.
        swa_indices: int32 [T, W], rows of any stride; -1 is masked.
        swa_lengths: int32 [T], columns that count.
        extra: the second pool, or None together with the two after it.
        extra_indices: see swa_indices, of any other width.
        extra_lengths: see swa_lengths.
        sinks: float32 [H]; -inf is no sink.
        scale: of the scores.
        out: [T, H, d] like q, written.
        config: of the launch, see `Config`; None: `config_of`.

    Raises:
        ValueError: dtypes differ, or the last dimension of something is not contiguous.
    """
    rows, heads, dim = q.shape
    second = swa if extra is None else extra
    if not q.dtype == swa.dtype == second.dtype == out.dtype:
        found = f"{q.dtype}, {swa.dtype}, {second.dtype}, {out.dtype}"
        raise ValueError(f"sparse_attention: q, pools, out of one dtype expected, found {found}")
    if not (q.stride(2) == out.stride(2) == swa.stride(1) == second.stride(1) == 1):
        raise ValueError("sparse_attention: the last dimension of q, pools, out is not contiguous")
    if rows == 0:
        return
    columns = swa_indices if extra_indices is None else extra_indices
    padded: int = triton.next_power_of_2(dim)
    if config is None:
        config = config_of(rows, heads, padded * q.element_size())
    block_h, block_n, warps, stages = config
    kernel: Any = _attend
    kernel[(rows * -(-heads // block_h),)](
        *(q, swa, swa_indices, swa_lengths),
        *(second, columns, swa_lengths if extra_lengths is None else extra_lengths),
        *(sinks, out, scale),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), swa.stride(0), second.stride(0)),
        *(swa_indices.stride(0), columns.stride(0), swa_indices.shape[1], columns.shape[1]),
        *(heads, dim, extra is not None, block_h, padded, block_n),
        num_warps=warps,
        num_stages=stages,
    )
