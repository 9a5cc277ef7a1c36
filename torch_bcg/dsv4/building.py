"""The metadata of a step in plain torch: what says what each field is, and serves CPUs.

Nothing is read on the host, so it runs on any device; `torch_bcg.dsv4.kernels.metadata` gives the
same on a GPU in one launch. Source: ``deepseek_v4_backend`` of SGLang (#25195).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_bcg.dsv4.fields import CompressorPrefillPlan, DSV4AttnMetadata, ExtendBatch
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, prepared


def build(
    batch: ExtendBatch, layout: Layout, rows: int, out: DSV4Metadata | None = None
) -> DSV4Metadata:
    """As `DSV4Metadata.create`, in plain torch on every device.

    Raises:
        ValueError: see there.
    """
    md = prepared(batch, layout, rows, out)
    build_into(md, batch, layout)
    return md


def build_into(md: DSV4Metadata, batch: ExtendBatch, layout: Layout) -> None:
    """Writes a step into the tensors of a metadata object; P is the number of rows that they have.

    What the indexer writes is left alone. Arguments are those of `prepared`, found to fit.
    """
    core, indexer = md.core_attn_metadata, md.indexer_metadata
    seq_lens, requests = _expand_prefill_casually_vectorized(batch, len(core.raw_out_loc))
    _build_core(core, batch, layout, seq_lens, requests)
    indexer.page_table.copy_(core.page_table)
    indexer.compressed_seq_lens.copy_(core.c4_topk_lengths_raw)
    _build_plan(md.c4_compress_metadata, batch, layout, seq_lens, requests, overlap=True)
    _build_plan(md.c128_compress_metadata, batch, layout, seq_lens, requests, overlap=False)


def _expand_prefill_casually_vectorized(batch: ExtendBatch, rows: int) -> tuple[Tensor, Tensor]:
    """From requests to query rows.

    Args:
        batch: the step; new positions of its requests add up to T, or this is undefined.
        rows: P.

    Returns:
        int32 ``[P]``, positions that each row sees, its own included, 1 in padded rows; and int64
        ``[P]``, its request slot. That of padded rows is the last real row's, 0 if there is none.
    """
    repeats, tokens = batch.extend_seq_lens.long(), batch.num_tokens
    first_lens = batch.seq_lens - batch.extend_seq_lens + 1 - batch.extend_start_loc
    # Without output_size the sum would be read on the host.
    by_row = torch.stack([first_lens.long(), batch.req_pool_indices.long()], dim=1)
    by_row = by_row.repeat_interleave(repeats, dim=0, output_size=tokens)
    seq_lens = by_row[:, 0] + torch.arange(tokens, device=by_row.device)
    last = by_row[-1:, 1] if tokens else by_row.new_zeros(1)
    requests = torch.cat([by_row[:, 1], last.expand(rows - tokens)])
    return F.pad(seq_lens.int(), (0, rows - tokens), value=1), requests


def _build_core(
    core: DSV4AttnMetadata, batch: ExtendBatch, layout: Layout, seq_lens: Tensor, requests: Tensor
) -> None:
    padding = (0, len(seq_lens) - batch.num_tokens)
    positions = seq_lens - 1
    out_loc = F.pad(batch.out_cache_loc, padding)
    core.raw_out_loc.copy_(out_loc)
    core.swa_out_cache_loc.copy_(F.pad(batch.full_to_swa[batch.out_cache_loc], padding))
    core.seq_lens_casual.copy_(seq_lens)
    core.positions_casual.copy_(positions)

    every_page = torch.arange(0, layout.context, layout.page_size, device=requests.device)
    slots = batch.req_to_token[requests[:, None], every_page]
    core.page_table.copy_(slots // layout.page_size)

    back = torch.arange(layout.window_width, device=requests.device)
    at = positions[:, None] - back
    swa = _swa_loc(batch, requests[:, None], at)
    core.swa_page_indices.copy_(swa.where((at >= 0) & (back < layout.window), -1))
    core.swa_topk_lengths.copy_(seq_lens.clamp(max=layout.window))

    c4_lens = seq_lens // layout.c4_ratio
    core.c4_out_loc.copy_(_closing(out_loc, seq_lens, layout.c4_ratio))
    core.c4_topk_lengths_raw.copy_(c4_lens)
    core.c4_topk_lengths_clamp1.copy_(c4_lens.clamp(min=1))
    core.c4_sparse_topk_lengths.copy_(c4_lens.clamp(1, layout.index_topk))

    c128_lens = seq_lens // layout.c128_ratio
    core.c128_out_loc.copy_(_closing(out_loc, seq_lens, layout.c128_ratio))
    core.c128_topk_lengths_clamp1.copy_(c128_lens.clamp(min=1))
    per_page = layout.page_size // layout.c128_ratio
    entries = torch.arange(layout.heavy_width, device=requests.device)
    # Columns that only fill up the width lie behind all lengths: any page will do.
    pages = core.page_table[:, (entries // per_page).clamp(max=layout.table_width - 1)]
    heavy = pages * per_page + entries % per_page
    core.c128_page_indices.copy_(heavy.where(entries < c128_lens[:, None], -1))


def _swa_loc(batch: ExtendBatch, requests: Tensor, positions: Tensor) -> Tensor:
    """Sliding-window slots of positions; of those before the first one, that of the first one."""
    return batch.full_to_swa[batch.req_to_token[requests, positions.clamp(min=0)]].int()


def _closing(out_loc: Tensor, seq_lens: Tensor, ratio: int) -> Tensor:
    return (out_loc // ratio).where(seq_lens % ratio == 0, 0)


def _build_plan(
    plan: CompressorPrefillPlan,
    batch: ExtendBatch,
    layout: Layout,
    seq_lens: Tensor,
    requests: Tensor,
    *,
    overlap: bool,
) -> None:
    """One branch: records of the rows that close a window, and of those that are kept.

    Kept are the positions that a later window reads: those behind the last one that has closed,
    and, where windows overlap, the ratio before.
    """
    ratio = plan.compress_ratio
    window = 2 * ratio if overlap else ratio
    tokens = batch.num_tokens
    lens, req = seq_lens[:tokens], requests[:tokens]
    positions, rows = lens - 1, torch.arange(tokens, device=lens.device)
    repeats = batch.extend_seq_lens.long()
    sizes = torch.stack([batch.seq_lens - batch.extend_seq_lens, batch.seq_lens], dim=1)
    sizes = sizes.repeat_interleave(repeats, dim=0, output_size=tokens)
    prefix, end = sizes.unbind(1)

    def state_row(at: Tensor) -> Tensor:
        if not overlap:  # a ring for each request slot
            return req * ratio + at % ratio
        swa = _swa_loc(batch, req, at)  # a ring for each page of the sliding window
        return swa // layout.page_size * layout.c4_ring + swa % layout.c4_ring

    closes = lens % ratio == 0
    from_state = (prefix - (lens - window)).clamp(0, window).long()
    pages = [state_row(lens - behind) // ratio for behind in (window, ratio)]
    _pack(plan.plan_c, closes, [lens, rows | from_state << 16, *pages])
    kept = positions >= end // ratio * ratio - (window - ratio)
    _pack(plan.plan_w, kept, [rows, state_row(positions)])


def _pack(records: Tensor, valid: Tensor, words: list[Tensor]) -> None:
    """Writes records of 32-bit words, valid ones first, in order; see `CompressorPrefillPlan`.

    Args:
        records: uint8 ``[P, 4 * words]``, written.
        valid: bool ``[T]``.
        words: each ``[T]``, of any integer type; their lower 32 bits count.
    """
    invalid = torch.full((len(records) + 1, len(words)), -1, device=valid.device).int()
    if len(words) == 4:
        invalid[:, 1] = 0  # ragged_id and buffer_len
    place = (valid.cumsum(0) - 1).where(valid, len(records))  # the row behind all of them is lost
    table = invalid.index_put((place,), torch.stack([w.int() for w in words], dim=1))
    records.copy_(table[:-1].view(torch.uint8))
