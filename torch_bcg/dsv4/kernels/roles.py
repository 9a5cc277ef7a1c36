"""What the programs of the metadata kernel do: the requests of rows, and a role for each.

Nothing scans rows: a block finds the requests of its rows by binary search over
``extend_start_loc``, which stays in cache, and the number of its first record as a sum over
requests. So no block waits for another, and records come out in the order of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(512)  # of a table at a time, at most
REQUESTS = tl.constexpr(512)  # at a time, in sums over all of them


@triton.jit
def _floor(x, d: tl.constexpr):
    """As torch divides: slots that belong to nobody may be -1."""
    return tl.where(x < 0, x - (d - 1), x) // d


@triton.jit
def requests_of(index, req_pool, seq_lens, extends, starts, rows, tokens, requests):  # noqa: ANN201
    """Request slot and length of all rows; prefix and end of the request of real ones."""
    real = (index < tokens) & (index < rows)
    row = tl.maximum(tl.minimum(index, tokens - 1), 0)
    r = tl.zeros_like(index)
    left = requests
    while left > 1:  # the last request that starts at or before the row is in [r, r + left)
        half = left // 2
        r = tl.where(tl.load(starts + r + half) <= row, r + half, r)
        left -= half
    req = tl.load(req_pool + r, mask=row < tokens, other=0)
    end = tl.load(seq_lens + r, mask=real, other=0)
    prefix = end - tl.load(extends + r, mask=real, other=0)
    length = prefix + 1 + row - tl.load(starts + r, mask=real, other=0)
    return real, req, tl.where(real, length, 1), prefix, end


@triton.jit
def write_numbers(  # noqa: ANN201
    out, index, rows, real, length, out_loc, to_swa,
    WINDOW: tl.constexpr, C4: tl.constexpr, C128: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Fields with one number a row."""
    keep = index < rows
    loc = tl.load(out_loc + index, mask=real, other=0)
    swa = tl.load(to_swa + loc, mask=real & (loc >= 0), other=-1).to(tl.int32)
    c4_len, c128_len = length // C4, length // C128
    tl.store(out.raw_out_loc + index, loc, mask=keep)
    tl.store(out.swa_out_cache_loc + index, tl.where(real, swa, 0), mask=keep)
    tl.store(out.seq_lens_casual + index, length, mask=keep)
    tl.store(out.positions_casual + index, length - 1, mask=keep)
    tl.store(out.swa_topk_lengths + index, tl.minimum(length, WINDOW), mask=keep)
    closed = tl.where(length % C4 == 0, _floor(loc, C4), 0)
    tl.store(out.c4_out_loc + index, closed, mask=keep)
    tl.store(out.c4_topk_lengths_raw + index, c4_len, mask=keep)
    tl.store(out.compressed_seq_lens + index, c4_len, mask=keep)
    tl.store(out.c4_topk_lengths_clamp1 + index, tl.maximum(c4_len, 1), mask=keep)
    picked = tl.minimum(tl.maximum(c4_len, 1), TOPK)
    tl.store(out.c4_sparse_topk_lengths + index, picked, mask=keep)
    closed = tl.where(length % C128 == 0, _floor(loc, C128), 0)
    tl.store(out.c128_out_loc + index, closed, mask=keep)
    tl.store(out.c128_topk_lengths_clamp1 + index, tl.maximum(c128_len, 1), mask=keep)


@triton.jit
def write_window(  # noqa: ANN201
    swa_page_indices, index, rows, length, tokens_of, to_swa, WINDOW: tl.constexpr
):  # fmt: skip
    """Sliding-window slots, newest first: the longest chain of loads."""
    WIDTH: tl.constexpr = (WINDOW + 63) // 64 * 64
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH) if WIDTH < COLUMNS else COLUMNS
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        at = length[:, None] - 1 - column
        valid = (at >= 0) & (column < WINDOW)
        slot = tl.load(tokens_of[:, None] + at, mask=valid, other=-1)
        swa = tl.load(to_swa + slot, mask=valid & (slot >= 0), other=-1).to(tl.int32)
        to = swa_page_indices + index.to(tl.int64)[:, None] * WIDTH + column
        tl.store(to, swa, mask=(index < rows)[:, None] & (column < WIDTH))


@triton.jit
def write_heavy(  # noqa: ANN201
    c128_page_indices, index, rows, length, tokens_of,
    PAGE: tl.constexpr, C128: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Slots of heavy entries, oldest first."""
    EACH: tl.constexpr = PAGE // C128
    ALIGNED: tl.constexpr = (WIDTH * EACH + 63) // 64 * 64
    BLOCK: tl.constexpr = triton.next_power_of_2(ALIGNED) if ALIGNED < COLUMNS else COLUMNS
    for start in range(0, ALIGNED, BLOCK):
        entry = start + tl.arange(0, BLOCK)[None, :]
        valid = entry < (length // C128)[:, None]
        slot = tl.load(tokens_of[:, None] + entry // EACH * PAGE, mask=valid, other=0)
        value = tl.where(valid, _floor(slot, PAGE) * EACH + entry % EACH, -1)
        to = c128_page_indices + index.to(tl.int64)[:, None] * ALIGNED + entry
        tl.store(to, value, mask=(index < rows)[:, None] & (entry < ALIGNED))


@triton.jit
def write_pages(  # noqa: ANN201
    page_table, indexer_page_table, index, rows, tokens_of,
    PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Both page tables."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH) if WIDTH < COLUMNS else COLUMNS
    for start in range(0, WIDTH, BLOCK):
        page = start + tl.arange(0, BLOCK)[None, :]
        slot = tl.load(tokens_of[:, None] + page * PAGE, mask=page < WIDTH, other=0)
        at = index.to(tl.int64)[:, None] * WIDTH + page
        keep = (index < rows)[:, None] & (page < WIDTH)
        tl.store(page_table + at, _floor(slot, PAGE), mask=keep)
        tl.store(indexer_page_table + at, _floor(slot, PAGE), mask=keep)


@triton.jit
def _state(
    at, valid, req, tokens_of, to_swa,
    PAGE: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """State row of a position: in the ring of its sliding-window page, or of its request."""
    if OVERLAP:
        slot = tl.load(tokens_of + tl.maximum(at, 0), mask=valid, other=0)
        swa = tl.load(to_swa + slot, mask=valid & (slot >= 0), other=-1)
        RING: tl.constexpr = 2 * RATIO
        return _floor(swa, PAGE) * RING + swa - _floor(swa, RING) * RING
    else:  # noqa: RET505  # one of the two is compiled
        return req * RATIO + at % RATIO


@triton.jit
def count_records(  # noqa: ANN201
    first, seq_lens, extends, starts, requests, RATIO: tl.constexpr, BEHIND: tl.constexpr
):
    """Compress records of rows before `first` and of all rows; write records likewise."""
    c_before = tl.zeros([REQUESTS], tl.int32)
    c_all, w_before, w_all = c_before, c_before, c_before
    at = 0
    while at < requests:
        r = at + tl.arange(0, REQUESTS)
        end = tl.load(seq_lens + r, mask=r < requests, other=0)
        extend = tl.load(extends + r, mask=r < requests, other=0)
        start = tl.load(starts + r, mask=r < requests, other=0)
        prefix = end - extend
        until = prefix + tl.minimum(tl.maximum(first - start, 0), extend)
        kept = tl.maximum(end // RATIO * RATIO - BEHIND, prefix)
        c_before += until // RATIO - prefix // RATIO
        c_all += end // RATIO - prefix // RATIO
        w_before += tl.maximum(until - kept, 0)
        w_all += end - kept
        at += REQUESTS
    return tl.sum(c_before, 0), tl.sum(c_all, 0), tl.sum(w_before, 0), tl.sum(w_all, 0)


@triton.jit
def write_plan(  # noqa: ANN201
    plan_c, plan_w, index, rows, real, req, length, prefix, end, counts,
    tokens_of, to_swa, PAGE: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Records of one branch, 32-bit words."""
    c_before, c_all, w_before, w_all = counts
    SPAN: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    word_c = plan_c.to(tl.pointer_type(tl.int32), bitcast=True)
    word_w = plan_w.to(tl.pointer_type(tl.int32), bitcast=True)

    valid = real & (length % RATIO == 0)
    from_state = tl.minimum(tl.maximum(prefix - (length - SPAN), 0), SPAN)
    page_0 = _state(length - SPAN, valid, req, tokens_of, to_swa, PAGE, RATIO, OVERLAP)
    page_1 = _state(length - RATIO, valid, req, tokens_of, to_swa, PAGE, RATIO, OVERLAP)
    to = word_c + (c_before + tl.cumsum(valid.to(tl.int32), 0) - 1) * 4
    tl.store(to, length, mask=valid)
    tl.store(to + 1, index | from_state << 16, mask=valid)
    tl.store(to + 2, _floor(page_0, RATIO).to(tl.int32), mask=valid)
    tl.store(to + 3, _floor(page_1, RATIO).to(tl.int32), mask=valid)
    empty, to = (index >= c_all) & (index < rows), word_c + index * 4
    tl.store(to, -1, mask=empty)
    tl.store(to + 1, 0, mask=empty)
    tl.store(to + 2, -1, mask=empty)
    tl.store(to + 3, -1, mask=empty)

    valid = real & (length - 1 >= end // RATIO * RATIO - (SPAN - RATIO))
    row = _state(length - 1, valid, req, tokens_of, to_swa, PAGE, RATIO, OVERLAP)
    to = word_w + (w_before + tl.cumsum(valid.to(tl.int32), 0) - 1) * 2
    tl.store(to, index, mask=valid)
    tl.store(to + 1, row.to(tl.int32), mask=valid)
    empty, to = (index >= w_all) & (index < rows), word_w + index * 2
    tl.store(to, -1, mask=empty)
    tl.store(to + 1, -1, mask=empty)
