"""Attention metadata of one step: built on the device, brought to where recorded segments read."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torch_bcg
from torch_bcg.dsv4.fields import (
    CompressorPrefillPlan,
    DSV4AttnMetadata,
    ExtendBatch,
    PagedIndexerMetadata,
    match_num_queries,
)
from torch_bcg.dsv4.layout import Layout
from torch_bcg.errors import BindingError
from torch_bcg.metadata import refresh

__all__ = [
    "CompressorPrefillPlan",
    "DSV4AttnMetadata",
    "DSV4Metadata",
    "ExtendBatch",
    "OnlineDSV4Metadata",
    "PagedIndexerMetadata",
    "empty",
    "match_num_queries",
    "maybe_copy_inplace",
]

MOST_ROWS = 1 << 16  # a plan numbers them in 16 bits

# Who builds on which device. Both modules import this one, and the second one Triton as well.
_BUILDERS = {"cpu": "torch_bcg.dsv4.building", "cuda": "torch_bcg.dsv4.kernels.metadata"}


@dataclass(eq=False)
class DSV4Metadata:
    """One step, as the model and its marked functions see it.

    Attributes:
        core_attn_metadata: of attention.
        indexer_metadata: of the indexer.
        c4_compress_metadata: plan of the sparse branch.
        c128_compress_metadata: plan of the heavy branch.
        sparse_prefill_cache: what attention keeps from layer to layer; None at each new step.
        num_token_non_padded: T; marked functions alone read it.
    """

    core_attn_metadata: DSV4AttnMetadata
    indexer_metadata: PagedIndexerMetadata
    c4_compress_metadata: CompressorPrefillPlan
    c128_compress_metadata: CompressorPrefillPlan
    sparse_prefill_cache: Any = None
    num_token_non_padded: int = 0

    @staticmethod
    def create(
        batch: ExtendBatch, layout: Layout, rows: int, out: DSV4Metadata | None = None
    ) -> DSV4Metadata:
        """Builds the metadata of a step where its tensors are; nothing is read on the host.

        Args:
            batch: the step.
            layout: sizes of the engine; all widths follow from it, none from the batch.
            rows: P.
            out: an object made for as many rows, whose tensors get the values in place, all but
                those that the indexer writes.

        Returns:
            ``out``, or a new object: an `OnlineDSV4Metadata` where `Layout.online_compress`.

        Raises:
            ValueError: T or the layout does not fit rows, tables or ``out``.
        """
        md = prepared(batch, layout, rows, out)
        on = batch.req_to_token.device.type
        builder = importlib.import_module(_BUILDERS.get(on, _BUILDERS["cpu"]))
        builder.build_into(md, batch, layout)
        return md

    def refresh_for_breakable_cuda_graph_replay_(self, other: DSV4Metadata) -> None:
        """Brings the values of a step into this captured object; caches of a step start anew.

        Raises:
            BindingError: the two differ in more than values; the first field that does.
        """
        _forget_step(self)
        if other.sparse_prefill_cache is not None:
            other = replace(other, sparse_prefill_cache=None)
        if other.indexer_metadata.nonpaged_plan is not None:
            indexer = replace(other.indexer_metadata, nonpaged_plan=None)
            other = replace(other, indexer_metadata=indexer)
        refresh(self, other)


@dataclass(eq=False)
class OnlineDSV4Metadata(DSV4Metadata):
    """A step replaces the plan of the heavy branch whole, see `Layout.online_compress`."""


torch_bcg.register_metadata_binding(DSV4Metadata, rebind=("sparse_prefill_cache",))
# What is declared of the plan's own class would keep it in place: it is declared again from here.
torch_bcg.register_metadata_binding(
    OnlineDSV4Metadata,
    rebind=(
        "c128_compress_metadata",
        *(f"c128_compress_metadata.{f.name}" for f in fields(CompressorPrefillPlan)),
    ),
)


def empty(layout: Layout, rows: int, device: torch.device | str) -> DSV4Metadata:
    """Metadata with every tensor allocated, for a builder to fill.

    Args:
        layout: sizes of the engine.
        rows: P.
        device: of the tensors.

    Returns:
        An object whose values are undefined, except what the indexer writes, which is -1.
    """

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    def plan(ratio: int) -> CompressorPrefillPlan:
        return CompressorPrefillPlan(ratio, new(16, dtype=torch.uint8), new(8, dtype=torch.uint8))

    core = DSV4AttnMetadata(
        page_size=layout.page_size,
        index_topk=layout.index_topk,
        raw_out_loc=new(dtype=torch.int64),
        seq_lens_casual=new(),
        positions_casual=new(),
        page_table=new(layout.table_width),
        swa_page_indices=new(layout.window_width),
        swa_topk_lengths=new(),
        c4_out_loc=new(dtype=torch.int64),
        c4_topk_lengths_raw=new(),
        c4_topk_lengths_clamp1=new(),
        c4_sparse_topk_lengths=new(),
        c4_sparse_page_indices=new(layout.sparse_width).fill_(-1),
        c4_sparse_raw_indices=new(layout.sparse_width).fill_(-1),
        c128_out_loc=new(dtype=torch.int64),
        c128_topk_lengths_clamp1=new(),
        c128_page_indices=new(layout.heavy_width),
        swa_out_cache_loc=new(),
    )
    indexer = PagedIndexerMetadata(
        page_size=layout.page_size,
        compressed_page_size=layout.c4_page,
        compress_ratio=layout.c4_ratio,
        use_prefill_cuda_graph=True,
        page_table=new(layout.table_width),
        compressed_seq_lens=new(),
    )
    made = OnlineDSV4Metadata if layout.online_compress else DSV4Metadata
    return made(core, indexer, plan(layout.c4_ratio), plan(layout.c128_ratio))


def maybe_copy_inplace(dst: object, *, src: object) -> None:
    """Brings values into a tensor or a metadata object, or nothing into None.

    Raises:
        BindingError: the two are not of one class, or differ in more than values.
    """
    # copy_ would broadcast, and round.
    if type(src) is not type(dst) or _described(dst) != _described(src):
        raise BindingError(
            f"A {type(dst).__name__} cannot be given the values of another object.",
            where="maybe_copy_inplace",
            expected=f"{type(dst).__name__} {_described(dst)}".strip(),
            found=f"{type(src).__name__} {_described(src)}".strip(),
            fix="Build both with DSV4Metadata.create, of one Layout and one number of rows.",
        )
    if isinstance(dst, Tensor) and isinstance(src, Tensor):
        dst.copy_(src)
    elif dst is not None:
        refresh(dst, src)


def _described(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else ""


def prepared(
    batch: ExtendBatch, layout: Layout, rows: int, out: DSV4Metadata | None
) -> DSV4Metadata:
    """What a builder is to fill with a step: ``out``, or a new object.

    Raises:
        ValueError: see `DSV4Metadata.create`.
    """
    tokens, given, width = batch.num_tokens, len(batch.out_cache_loc), batch.req_to_token.shape[1]
    if not tokens == given <= rows <= MOST_ROWS:
        raise ValueError(
            f"DSV4Metadata.create: num_tokens is {tokens}, len(out_cache_loc) {given} and rows "
            f"{rows}; expected the first two to agree, and at most {MOST_ROWS} rows to hold them."
        )
    if width < layout.context:
        raise ValueError(
            f"DSV4Metadata.create: req_to_token has {width} columns; expected one for each of the "
            f"{layout.context} positions of Layout.context."
        )
    device = batch.req_to_token.device
    if out is None:
        out = empty(layout, rows, device)
    else:
        _check_made_for(out, layout, rows, device)
    out.num_token_non_padded = tokens
    _forget_step(out)
    return out


def _forget_step(md: DSV4Metadata) -> None:
    """What is kept within a step starts anew."""
    md.sparse_prefill_cache = None
    md.indexer_metadata.nonpaged_plan = None


def _check_made_for(md: DSV4Metadata, layout: Layout, rows: int, device: torch.device) -> None:
    """In few operations, since a step that is built in place comes by here."""
    paths, look, expected = _made_for(layout, rows)
    made = _sizes((type(md), *look(md)))
    lies = md.core_attn_metadata.page_table.device
    if made != expected or lies != device:
        pairs = zip(paths, made, expected, strict=True)
        what = next((f"{p} is {m}, not {e}" for p, m, e in pairs if m != e), f"it is on {lies}")
        raise ValueError(
            f"DSV4Metadata.create: out was made for others: {what}. Expected one for {rows} rows, "
            f"on {device}: keep one object for each Layout, number of rows and device."
        )


def _sizes(values: Iterable[object]) -> list[object]:
    return [(x.dtype, x.shape) if isinstance(x, Tensor) else x for x in values]


@functools.cache
def _made_for(
    layout: Layout, rows: int
) -> tuple[list[str], Callable[[object], tuple[Any, ...]], list[object]]:
    """What builders do not change: paths, what looks there, and what it has to find."""
    md = empty(layout, rows, "meta")
    parts = [f.name for f in fields(md) if is_dataclass(getattr(md, f.name))]
    paths = [f"{part}.{f.name}" for part in parts for f in fields(getattr(md, part))]
    held = {path: operator.attrgetter(path)(md) for path in paths}
    paths = [path for path in paths if isinstance(held[path], (int, Tensor))]
    look = operator.attrgetter(*paths)
    return ["class", *paths], look, _sizes((type(md), *look(md)))
