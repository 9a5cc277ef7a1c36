"""The indexer's choice: which compressed entries of the sparse branch a token attends to.

``select`` is the operator ``dsv4::select``: a Triton kernel on CUDA, `select_reference` elsewhere.
Neither looks at a value on the host, so that both can be recorded.

Source: the DeepSeek-V4 report, section 2.3.1 (equations 13 to 17).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_bcg.dsv4.layout import ALIGNED

ROWS = 64
"""Rows that the reference takes at a time: its temporaries are ``[ROWS, capacity, di]``."""


@torch.library.custom_op("dsv4::select", mutates_args=())
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
    """The best entries of each row, lowest first, as pool slots and as numbers of entries.

    Entry e of row i is ``keys[page_table[i, e // page_size] * page_size + e % page_size]``. Its
    score is ``di**-0.5 * sum_h weights[i, h] * relu(q[i, h] . key)`` in float32. Of entries
    with one score the lower wins. A row that sees at most ``topk`` takes them all, whatever their
    scores.

    Args:
        q: ``[P, Hi, di]``, heads of the indexer.
        weights: float32 ``[P, Hi]``, may be negative.
        keys: ``[slots, di]``, the pool, of q's dtype. Slots that no row sees may hold anything.
        page_table: int32 ``[P, W]``; columns past a row's length may hold anything.
        lengths: int32 ``[P]``, entries that a row sees, 0 to ``W * page_size``.
        topk: most entries of a row.
        page_size: entries of a page.
        width: columns of the results: at least topk, a multiple of 64.

    Returns:
        Slots and entries, both int32 ``[P, width]``: the picks, then -1 to the end of the row.

    Raises:
        ValueError: ``width`` is too small or no multiple of 64, or dtypes differ.
    """
    _check(q, keys, topk, width)
    return select_reference(q, weights, keys, page_table, lengths, topk, page_size, width)


@select.register_kernel("cuda")
def _(*args: Any) -> tuple[Tensor, Tensor]:
    from torch_bcg.dsv4.kernels import indexer

    q, _, keys, _, _, topk, _, width = args
    _check(q, keys, topk, width)
    return indexer.select(*args)


@select.register_fake
def _(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    topk: int,
    page_size: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    _check(q, keys, topk, width)
    slots = q.new_empty((q.shape[0], width), dtype=torch.int32)
    return slots, torch.empty_like(slots)


def _check(q: Tensor, keys: Tensor, topk: int, width: int) -> None:
    """Refuses arguments of `select` that its results or its kernel cannot follow."""
    if width < topk or width % ALIGNED:
        raise ValueError(
            f"select: width is {width}; expected a multiple of {ALIGNED} that is at least topk "
            f"({topk}). Use Layout.sparse_width."
        )
    if q.dtype != keys.dtype:
        raise ValueError(
            f"select: q is {q.dtype} and keys are {keys.dtype}; expected one dtype. Cast q."
        )


def select_reference(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    topk: int,
    page_size: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """`select` in plain torch, dense: every column of the page table is scored, then masked."""
    by_row = (x.split(ROWS) for x in (q, weights, page_table, lengths))
    blocks = [
        _select_rows(*rows, keys=keys, topk=topk, page_size=page_size, width=width)
        for rows in zip(*by_row, strict=True)
    ]
    return torch.cat([slots for slots, _ in blocks]), torch.cat([entries for _, entries in blocks])


def _select_rows(
    q: Tensor,
    weights: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    keys: Tensor,
    topk: int,
    page_size: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    capacity = page_table.shape[1] * page_size
    entry = torch.arange(capacity, device=q.device)
    visible = entry < lengths[:, None]
    slot = page_table.long().repeat_interleave(page_size, 1) * page_size + entry % page_size
    # What is not visible may be no slot at all.
    read = keys[torch.where(visible, slot, 0)].float()
    logits = torch.einsum("phd,ped->phe", q.float(), read).relu()
    scores = (weights[:, :, None] * logits).sum(1) * q.shape[-1] ** -0.5
    scores = torch.where(visible, scores, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, entry.expand_as(order))
    picked = visible & (rank < topk)  # what is not visible ranks last, whatever the scores
    # Sorted, those picked stand in front; `capacity` is behind every entry.
    entries = torch.where(picked, entry, capacity).sort(dim=1).values
    entries = F.pad(entries, (0, max(0, width - capacity)), value=capacity)[:, :width]
    taken = entries < capacity
    slots = slot.gather(1, torch.where(taken, entries, 0))
    return torch.where(taken, slots, -1).int(), torch.where(taken, entries, -1).int()
