"""The indexer's picks in two launches: scores on tensor cores, then an exact selection by radix.

The grids follow from shapes alone, so that a CUDA graph can hold them; how far a row's loops run
follows from its length. Nothing depends on the order in which programs run, so that equal inputs
give equal outputs, ties included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # rows are shared among about as many: some for each of 132 multiprocessors
SCORED = 64  # entries that are multiplied at a time: M of one wgmma, a page of the usual layout
SCORED_FLOAT32 = 16  # there are no wgmma for these: a larger tile leaves the registers
SCORE_WARPS = 4  # one warpgroup
SCORE_STAGES = 3  # tiles of keys in flight, 16 KB each with 128 channels of 2 bytes
RANKED = 2048  # scores that the selection looks at at a time
RANK_WARPS = 8


@triton.jit
def _slot_of(table, entry, valid, PAGE: tl.constexpr):
    """Slots of a request's entries: where `valid`, else anything."""
    page = tl.load(table + entry // PAGE, mask=valid, other=0)
    return page * PAGE + entry % PAGE


@triton.jit
def _score(
    q, weights, keys, page_table, lengths, scores, scale, key_row, columns,
    PAGE: tl.constexpr, TOPK: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Scores of a row's entries, float32, by number of entry."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), columns * PAGE)
    # Nobody looks at the scores of a row that takes all of its entries.
    end = tl.where(length > TOPK, length, 0)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
    tile_q = tl.load(q + (row * HEADS + h[:, None]) * DIM + d[None, :], mask=inside, other=0.0)
    tile_q = tl.trans(tile_q)
    weight = tl.load(weights + row * HEADS + h, mask=h < HEADS, other=0.0)
    # Programs of one row take turns: a short row is spread over them too.
    step = tl.num_programs(1) * BLOCK_E
    for first in range(tl.program_id(1) * BLOCK_E, end, step):
        e = first + tl.arange(0, BLOCK_E)
        valid = e < length
        slot = _slot_of(page_table + row * columns, e, valid, PAGE).to(tl.int64)
        at = keys + slot[:, None] * key_row + d[None, :]
        tile = tl.load(at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        # Heads are the columns of the product: their sum stays within four lanes of a warp.
        logits = tl.dot(tile, tile_q, input_precision="ieee")
        score = tl.sum(tl.maximum(logits, 0.0) * weight[None, :], 1) * scale
        tl.store(scores + row * columns * PAGE + e, score, mask=valid)


@triton.jit
def _key_of(scores, e, valid):
    """Scores as uint32 that are ordered as they are.

    All zeros of a row have one sign: that of a sum of zeros, some of them positive or none.
    """
    bits = tl.load(scores + e, mask=valid, other=0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of negative numbers, all bits but the sign
    return ordered.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _select(
    scores, page_table, lengths, slots, entries, columns,
    PAGE: tl.constexpr, TOPK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A row's picks from its scores; the whole width of both results is written."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), columns * PAGE)
    all_taken = length <= TOPK
    table = page_table + row * columns
    slots += row * WIDTH
    entries += row * WIDTH
    for first in range(0, WIDTH, BLOCK_W):
        column = first + tl.arange(0, BLOCK_W)
        taken = column < tl.where(all_taken, length, 0)
        slot = _slot_of(table, column, taken, PAGE)
        # Elsewhere the picks below fill the first TOPK columns.
        written = (column < WIDTH) & (column >= tl.where(all_taken, 0, TOPK))
        tl.store(slots + column, tl.where(taken, slot, -1), mask=written)
        tl.store(entries + column, tl.where(taken, column, -1), mask=written)
    if all_taken:
        return
    scores += row * columns * PAGE
    # The TOPK-th largest key, 8 bits at a time: `threshold` holds the bits that are known, and
    # `missing` picks remain to be found among keys that share them.
    threshold = tl.zeros([], tl.uint32)
    missing = tl.full([], TOPK, tl.int32)
    bins = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros([256], tl.int32)
        for first in range(0, length, BLOCK):
            e = first + tl.arange(0, BLOCK)
            key = _key_of(scores, e, e < length)
            known = key & ((0xFFFFFFFF << (shift + 8)) & 0xFFFFFFFF)
            counted = (e < length) & (known == threshold)
            digit = ((key >> shift) & 0xFF).to(tl.int32)
            counts += tl.histogram(digit, 256, mask=counted)
        from_bin = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        last = tl.sum((from_bin >= missing).to(tl.int32), 0) - 1  # where the threshold lies
        missing -= tl.sum(tl.where(bins > last, counts, 0), 0)
        threshold |= last.to(tl.uint32) << shift
    # In order of entries: every larger key, and the first `missing` of those at the threshold.
    found = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int32)
    for first in range(0, length, BLOCK):
        e = first + tl.arange(0, BLOCK)
        valid = e < length
        key = _key_of(scores, e, valid)
        tied = (valid & (key == threshold)).to(tl.int32)
        tie = ties + tl.cumsum(tied, 0)
        picked = (valid & (key > threshold)) | ((tied > 0) & (tie <= missing))
        column = found + tl.cumsum(picked.to(tl.int32), 0) - 1
        tl.store(slots + column, _slot_of(table, e, picked, PAGE), mask=picked)
        tl.store(entries + column, e, mask=picked)
        ties += tl.sum(tied, 0)
        found += tl.sum(picked.to(tl.int32), 0)


def select(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    topk: int,
    page_size: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Launches both; see `torch_bcg.dsv4.indexer.select` for arguments and results.

    Scores lie in a temporary of float32 ``[P, W * page_size]``.
    """
    rows, heads, dim = q.shape
    columns = page_table.shape[1]
    slots, entries = (q.new_empty((rows, width), dtype=torch.int32) for _ in range(2))
    if not rows:
        return slots, entries
    scores = q.new_empty((rows, columns * page_size), dtype=torch.float32)
    page_table, lengths = page_table.contiguous(), lengths.contiguous()
    block = SCORED if keys.element_size() < 4 else SCORED_FLOAT32
    shares = min(triton.cdiv(PROGRAMS, rows), triton.cdiv(columns * page_size, block))
    _score[(rows, shares)](
        q.contiguous(),
        weights.contiguous(),
        keys,
        page_table,
        lengths,
        scores,
        dim**-0.5,
        keys.stride(0),
        columns,
        PAGE=page_size,
        TOPK=topk,
        HEADS=heads,
        DIM=dim,
        BLOCK_H=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_E=block,
        num_warps=SCORE_WARPS,
        num_stages=SCORE_STAGES,
    )
    _select[(rows,)](
        scores,
        page_table,
        lengths,
        slots,
        entries,
        columns,
        PAGE=page_size,
        TOPK=topk,
        WIDTH=width,
        BLOCK=RANKED,
        BLOCK_W=min(triton.next_power_of_2(width), RANKED),
        num_warps=RANK_WARPS,
    )
    return slots, entries
