"""The metadata of a step in one launch: every field but those that the indexer writes.

Programs have roles: blocks of rows with one number or one record a row, and tiles of tables. The
roles of the longest chains of loads come first. `torch_bcg.dsv4.building` says what each field is.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_bcg.dsv4.fields import ExtendBatch
from torch_bcg.dsv4.kernels.roles import (
    count_records,
    requests_of,
    write_heavy,
    write_numbers,
    write_pages,
    write_plan,
    write_window,
)
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, empty

__all__ = ["build_into"]

LINE = tl.constexpr(128)  # rows of a program with one number or record a row
ROWS = tl.constexpr(4)  # rows of a program that fills a table: one a warp, 16 bytes a thread


class _Out(NamedTuple):
    """What is written: tensors, in a launch their addresses, in kernels pointers."""

    raw_out_loc: Any
    seq_lens_casual: Any
    positions_casual: Any
    page_table: Any
    swa_page_indices: Any
    swa_topk_lengths: Any
    c4_out_loc: Any
    c4_topk_lengths_raw: Any
    c4_topk_lengths_clamp1: Any
    c4_sparse_topk_lengths: Any
    c128_out_loc: Any
    c128_topk_lengths_clamp1: Any
    c128_page_indices: Any
    swa_out_cache_loc: Any
    indexer_page_table: Any
    compressed_seq_lens: Any
    c4_plan_c: Any
    c4_plan_w: Any
    c128_plan_c: Any
    c128_plan_w: Any


_written: Callable[[DSV4Metadata], tuple[Tensor, ...]] = operator.attrgetter(
    *(f"core_attn_metadata.{name}" for name in _Out._fields[:14]),
    *(f"indexer_metadata.{name}" for name in ("page_table", "compressed_seq_lens")),
    *(f"c{n}_compress_metadata.plan_{kind}" for n in (4, 128) for kind in "cw"),
)
_given: Callable[[ExtendBatch], tuple[Tensor, ...]] = operator.attrgetter(
    *("req_pool_indices", "seq_lens", "extend_seq_lens", "extend_start_loc", "out_cache_loc"),
    *("req_to_token", "full_to_swa"),
)
_DTYPES = (torch.int64, *[torch.int32] * 3, torch.int64, torch.int32, torch.int64)
_BY_BATCH = (
    *("req_pool", "seq_lens", "extends", "starts", "out_loc", "req_to_token", "to_swa"),
    *("rows", "tokens", "requests", "stride"),
)


# Nothing is compiled again for other addresses or numbers of a step: specialised are only the
# tensors that are written, for stores of 16 bytes.
@triton.jit(do_not_specialize=_BY_BATCH)
def _build(
    out,
    req_pool,
    seq_lens,
    extends,
    starts,
    out_loc,
    req_to_token,
    to_swa,
    rows,
    tokens,
    requests,
    stride,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    C4: tl.constexpr,
    C128: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    blocks, tiles = tl.cdiv(rows, LINE), tl.cdiv(rows, ROWS)
    pid = tl.program_id(0)
    if pid < 3 * blocks:
        role, first = pid // blocks, pid % blocks * LINE
        index = first + tl.arange(0, LINE)
        real, req, length, prefix, end = requests_of(
            index, req_pool, seq_lens, extends, starts, rows, tokens, requests
        )
        tokens_of = req_to_token + req * stride
        if role == 0:
            counts = count_records(first, seq_lens, extends, starts, requests, C4, C4)
            write_plan(
                *(out.c4_plan_c, out.c4_plan_w, index, rows, real, req, length, prefix, end),
                *(counts, tokens_of, to_swa, PAGE, C4, True),
            )
        elif role == 1:
            counts = count_records(first, seq_lens, extends, starts, requests, C128, 0)
            write_plan(
                *(out.c128_plan_c, out.c128_plan_w, index, rows, real, req, length, prefix, end),
                *(counts, tokens_of, to_swa, PAGE, C128, False),
            )
        else:
            write_numbers(out, index, rows, real, length, out_loc, to_swa, WINDOW, C4, C128, TOPK)
    else:
        pid -= 3 * blocks
        role, tile = pid // tiles, pid % tiles * ROWS + tl.arange(0, ROWS)
        _, slot, seen, _, _ = requests_of(
            tile, req_pool, seq_lens, extends, starts, rows, tokens, requests
        )
        row = req_to_token + slot * stride
        if role == 0:
            write_window(out.swa_page_indices, tile, rows, seen, row, to_swa, WINDOW)
        elif role == 1:
            write_heavy(out.c128_page_indices, tile, rows, seen, row, PAGE, C128, WIDTH)
        else:
            write_pages(out.page_table, out.indexer_page_table, tile, rows, row, PAGE, WIDTH)


class _Bound(NamedTuple):
    """What was found to be right for one metadata object.

    Attributes:
        layout: sizes that it has.
        tensors: what is written; held, so that no other tensor takes the place of one.
        addresses: of ``tensors``.
        launch: takes addresses, tensors, what is given, and sizes.
    """

    layout: Layout
    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    launch: Callable[..., None]


# A launch through Triton's own front costs tens of microseconds with as many arguments: for each it
# looks up type and alignment, and asks the driver about its address. The kernel that one such
# launch gives back is called directly afterwards, with addresses. It relies on device, layout, rows
# and on which tensors that are written are aligned: those are its key. It relies on dtypes and
# strides too. They are checked at each call for the batch, and for the object when it is new, or
# when another tensor or another address is found in it.
_launches: dict[tuple[object, ...], Callable[..., None]] = {}
_bounds: weakref.WeakKeyDictionary[DSV4Metadata, _Bound] = weakref.WeakKeyDictionary()


def build_into(md: DSV4Metadata, batch: ExtendBatch, layout: Layout) -> None:
    """Writes a step into the tensors of a metadata object, in one launch on the current stream.

    P is the number of rows that they have. What the indexer writes is left alone. The host waits
    for nothing; the batch must stay as it is until the stream has come to it.

    Args:
        md: as `torch_bcg.dsv4.metadata.empty` makes it: contiguous tensors.
        batch: the step, found to fit rows and layout by `torch_bcg.dsv4.metadata.prepared`.
        layout: sizes of the engine.

    Raises:
        ValueError: ``md`` was made for another layout, or tensors have other dtypes, devices or
            strides than they should.
    """
    table, given = batch.req_to_token, _given(batch)
    _check_given(given)
    rows, requests = md.core_attn_metadata.raw_out_loc.shape[0], batch.seq_lens.shape[0]
    sizes = (rows, batch.num_tokens, requests, table.stride(0))
    index = table.get_device()
    other = index >= 0 and index != torch.accelerator.current_device_index()
    with torch.accelerator.device_index(index) if other else contextlib.nullcontext():
        tensors = _written(md)
        addresses = tuple(map(Tensor.data_ptr, tensors))
        bound = _bounds.get(md)
        if (
            bound is None
            or addresses != bound.addresses
            or any(map(operator.is_not, tensors, bound.tensors))
            or layout != bound.layout
        ):
            _check_written(tensors, rows, table.device, layout)
            launch = _launch_for(tensors, given, sizes, layout)
            bound = _bounds[md] = _Bound(layout, tensors, addresses, launch)
        bound.launch(addresses, tensors, given, sizes)
    md.num_token_non_padded = batch.num_tokens


def _launch_for(
    tensors: tuple[Tensor, ...], given: tuple[Tensor, ...], sizes: tuple[int, ...], layout: Layout
) -> Callable[..., None]:
    """What launches for these sizes and alignments; compiles it at the first time."""
    rows, device = sizes[0], given[0].device
    key = (device, layout, rows, *(x.data_ptr() % 16 == 0 for x in tensors))
    if key not in _launches:
        constants = (
            *(layout.page_size, layout.window, layout.c4_ratio, layout.c128_ratio),
            *(layout.index_topk, layout.table_width),
        )
        # As many programs as `_build` tells apart: three roles by blocks, three by tiles.
        grid = (3 * -(-rows // LINE.value) + 3 * -(-rows // ROWS.value), 1, 1)
        kernel = _build.warmup(_Out(*tensors), *given, *sizes, *constants, grid=grid, num_warps=4)
        if kernel is None:  # the interpreter, which goes by tensors
            return lambda _, to, by, sizes: _build[grid](_Out(*to), *by, *sizes, *constants)
        launch, address = kernel[grid], Tensor.data_ptr
        _launches[key] = lambda to, _, by, sizes: launch(to, *map(address, by), *sizes, *constants)
    return _launches[key]


@functools.cache
def _fitting(layout: Layout, rows: int) -> tuple[object, ...]:
    made = _written(empty(layout, rows, "meta"))
    return tuple((x.dtype, x.shape, x.stride()) for x in made)


def _check_written(
    tensors: tuple[Tensor, ...], rows: int, device: torch.device, layout: Layout
) -> None:
    """Refuses an object that the kernel would write wrongly."""
    for name, x, fits in zip(_Out._fields, tensors, _fitting(layout, rows), strict=True):
        found = (x.dtype, x.shape, x.stride())
        if found != fits or x.device != device or x.data_ptr() % 4:
            raise ValueError(
                f"build_into: dtype, shape and strides of {name} are {found} on {x.device}; "
                f"expected {fits} on {device}, at a multiple of 4 bytes. Make the object with "
                f"torch_bcg.dsv4.metadata.empty."
            )


def _check_given(given: tuple[Tensor, ...]) -> None:
    """Refuses a batch that the kernel would read wrongly; written out, since every step is here."""
    req, seq, extend, start, out, table, swa = given
    device = req.get_device()
    if (
        req.dtype is out.dtype is swa.dtype is torch.int64
        and seq.dtype is extend.dtype is start.dtype is table.dtype is torch.int32
        and device == seq.get_device() == extend.get_device() == start.get_device()
        and device == out.get_device() == table.get_device() == swa.get_device()
        and all(map(Tensor.is_contiguous, (req, seq, extend, start, out, swa)))
        and table.stride()[-1] == 1
    ):
        return
    for x, dtype in zip(given, _DTYPES, strict=True):
        if x.dtype is not dtype or x.get_device() != device or x.stride(-1) != 1:
            raise ValueError(
                f"build_into: a tensor of the batch is {x.dtype} on {x.device} with strides "
                f"{x.stride()}; expected {dtype} on {req.device}, the last stride 1."
            )
