"""Fields of the attention metadata of one step, and formats of its records: SGLang #25195's.

P rows (a bucket), of which T are real, R requests. Row i belongs to query token i; padded rows have
length 1, write to slot 0 of every pool, and are never used. Fields that hold the same numbers are
separate tensors: a tracer takes one tensor in two fields for one. How fields reach recorded
segments is said by the registrations below, which are checked when a graph is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

import torch_bcg
from torch_bcg.metadata import refresh

OptionalTensor = TypeVar("OptionalTensor", Tensor, None)


@dataclass(frozen=True)
class ExtendBatch:
    """What a step is built from, all tensors on the device. A decoding request extends by 1.

    Attributes:
        req_pool_indices: int64 ``[R]``, request slots.
        seq_lens: int32 ``[R]``, positions of each request after this step.
        extend_seq_lens: int32 ``[R]``, its new ones, 0 included; their sum is T.
        extend_start_loc: int32 ``[R]``, row of its first new token (exclusive sum of the former).
        out_cache_loc: int64 ``[T]``, full slots of the new tokens.
        req_to_token: int32 ``[request slots, >= context]``, full slot of a position.
        full_to_swa: int64 ``[slots + 1]``, sliding-window slot of a full one; 0 where there is
            none, and -1 at the end, so that index -1 gives -1.
        num_tokens: T, as the host knows it.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    extend_seq_lens: Tensor
    extend_start_loc: Tensor
    out_cache_loc: Tensor
    req_to_token: Tensor
    full_to_swa: Tensor
    num_tokens: int


@dataclass(eq=False)
class DSV4AttnMetadata:
    """What attention reads; ``casual`` is the field's word for causal. Tensors are int32 ``[P]``.

    Attributes:
        page_size: tokens of a page.
        index_topk: entries that the indexer picks.
        raw_out_loc: int64, full slot of each row, 0 in padded rows.
        seq_lens_casual: positions that a row sees, its own included.
        positions_casual: its position.
        page_table: ``[P, table_width]``, full pages of the row's request. Columns past its last
            page hold anything.
        swa_page_indices: ``[P, window_width]``, sliding-window slots, newest first, then -1.
        swa_topk_lengths: how many of them.
        c4_out_loc: int64, slot of the sparse entry that closes in a row, 0 where none does.
        c4_topk_lengths_raw: entries that a row sees.
        c4_topk_lengths_clamp1: the same, at least 1.
        c4_sparse_topk_lengths: that, at most `index_topk`.
        c4_sparse_page_indices: ``[P, sparse_width]``, slots of the entries picked, -1 behind them;
            -1 as built, then written by the indexer of each layer.
        c4_sparse_raw_indices: the same, as numbers of entries in the request.
        c128_out_loc: int64, slot of the heavy entry that closes in a row, 0 where none does.
        c128_topk_lengths_clamp1: heavy entries that a row sees, at least 1.
        c128_page_indices: ``[P, heavy_width]``, their slots, oldest first, then -1.
        swa_out_cache_loc: sliding-window slot of each row, 0 in padded rows.
        c1_flashmla_metadata: scheduler object of the kernel of layers with the window alone.
        c4_flashmla_metadata: of those with the sparse branch.
        c128_flashmla_metadata: of those with the heavy branch.
    """

    page_size: int
    index_topk: int
    raw_out_loc: Tensor
    seq_lens_casual: Tensor
    positions_casual: Tensor
    page_table: Tensor
    swa_page_indices: Tensor
    swa_topk_lengths: Tensor
    c4_out_loc: Tensor
    c4_topk_lengths_raw: Tensor
    c4_topk_lengths_clamp1: Tensor
    c4_sparse_topk_lengths: Tensor
    c4_sparse_page_indices: Tensor
    c4_sparse_raw_indices: Tensor
    c128_out_loc: Tensor
    c128_topk_lengths_clamp1: Tensor
    c128_page_indices: Tensor
    swa_out_cache_loc: Tensor
    c1_flashmla_metadata: Any = None
    c4_flashmla_metadata: Any = None
    c128_flashmla_metadata: Any = None

    def refresh_for_breakable_cuda_graph_replay_(self, other: DSV4AttnMetadata) -> None:
        """Brings the values of ``other`` into this captured object, see `torch_bcg.metadata`.

        Raises:
            BindingError: the two differ in more than values; the first field that does.
        """
        refresh(self, other)


@dataclass(eq=False)
class PagedIndexerMetadata:
    """What the indexer of the sparse branch reads.

    Attributes:
        page_size: tokens of a page.
        compressed_page_size: entries of a page.
        compress_ratio: tokens of an entry.
        use_prefill_cuda_graph: built at the sizes of a bucket.
        page_table: int32 ``[P, table_width]``, as in `DSV4AttnMetadata`.
        compressed_seq_lens: int32 ``[P]``, entries that a row sees, 0 included.
        deep_gemm_metadata: schedule of the kernel that scores, where it has one.
        topk_metadata: plan of the kernel that picks, where it has one.
        nonpaged_plan: of eager steps alone.
    """

    page_size: int
    compressed_page_size: int
    compress_ratio: int
    use_prefill_cuda_graph: bool
    page_table: Tensor
    compressed_seq_lens: Tensor
    deep_gemm_metadata: Tensor | None = None
    topk_metadata: Tensor | None = None
    nonpaged_plan: Any = None


@dataclass(eq=False)
class CompressorPrefillPlan:
    """Which entries of one branch close in a step, and which rows its state keeps.

    Little-endian records, exactly P of each: valid ones first, in order of rows. The window of an
    entry that closes at position p is the ``w`` positions up to p: the first ``buffer_len`` of them
    lie in the state, the others in this step's rows.

    Attributes:
        compress_ratio: tokens of an entry.
        plan_c: uint8 ``[P, 16]``: ``{u32 seq_len, u16 ragged_id, u16 buffer_len, i32 read_page_0,
            i32 read_page_1}``: positions up to the end of the window, row of its last one, and the
            pages of ``compress_ratio`` state rows each in which the window lies. Invalid ones are
            ``{0xFFFFFFFF, 0, 0, -1, -1}``.
        plan_w: uint8 ``[P, 8]``: ``{u32 ragged_id, i32 write_loc}``, a row and the state row that
            keeps it. Invalid ones are ``{0xFFFFFFFF, -1}``.
    """

    compress_ratio: int
    plan_c: Tensor
    plan_w: Tensor


torch_bcg.register_metadata_binding(
    DSV4AttnMetadata,
    equal=("page_size", "index_topk"),
    copy=(
        "raw_out_loc",
        "seq_lens_casual",
        "positions_casual",
        "c4_out_loc",
        "c128_out_loc",
        "c4_topk_lengths_raw",
        "c4_topk_lengths_clamp1",
        "c4_sparse_topk_lengths",
        "swa_out_cache_loc",  # there by itself, behind the others
    ),
    rebind=(
        "page_table",
        "swa_page_indices",
        "swa_topk_lengths",
        "c128_page_indices",
        "c128_topk_lengths_clamp1",
        "c1_flashmla_metadata",
        "c4_flashmla_metadata",
        "c128_flashmla_metadata",
    ),
    written=("c4_sparse_page_indices", "c4_sparse_raw_indices"),
)
torch_bcg.register_metadata_binding(
    PagedIndexerMetadata,
    equal=("page_size", "compressed_page_size", "compress_ratio", "use_prefill_cuda_graph"),
    copy=("page_table", "compressed_seq_lens", "deep_gemm_metadata", "topk_metadata"),
    rebind=("nonpaged_plan",),
)
torch_bcg.register_metadata_binding(
    CompressorPrefillPlan, equal=("compress_ratio",), copy=("plan_c", "plan_w")
)


def match_num_queries(x: OptionalTensor, num_queries: int, value: int) -> OptionalTensor:
    """A field with one row a query, for another number of queries.

    Args:
        x: ``[rows, ...]``, or None, as fields that not every kernel has may be.
        num_queries: how many rows are wanted.
        value: of rows that are added.

    Returns:
        None of None; the field itself where it fits; a view of its first rows where it is longer.
        Where it is shorter another tensor: what is written must have rows enough.
    """
    if x is None:
        return None
    if len(x) == num_queries:
        return x
    if len(x) > num_queries:
        return x[:num_queries]
    return torch.cat([x, x.new_full((num_queries - len(x), *x.shape[1:]), value)])
