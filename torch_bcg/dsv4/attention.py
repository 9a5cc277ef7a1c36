"""Attention of DeepSeek-V4: over a sliding window, compressed entries and a sink, keys as values.

A row attends to the pool rows that its metadata lists. `deepseek_v4_attention_with_output` is the
marked operation: it runs between recorded segments, where T, the number of real rows, is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

import torch_bcg
from torch_bcg.dsv4.fields import DSV4AttnMetadata, match_num_queries
from torch_bcg.dsv4.metadata import DSV4Metadata

ROWS = 64
"""Rows that the reference takes at a time: its temporaries are ``[ROWS, keys, d]``."""

# Indices and lengths: of the window, and of the second pool of each branch that has one.
_FIELDS = {
    "swa": ("swa_page_indices", "swa_topk_lengths"),
    "c4": ("c4_sparse_page_indices", "c4_sparse_topk_lengths"),
    "c128": ("c128_page_indices", "c128_topk_lengths_clamp1"),
}


@torch_bcg.eager_on_graph(mutates_args=("out",), name="dsv4::attention_with_output")
def deepseek_v4_attention_with_output(
    q: Tensor,
    swa: Tensor,
    extra: Tensor | None,
    sinks: Tensor,
    out: Tensor,
    branch: str,
    scale: float,
) -> None:
    """Attention of one layer for the real rows of the current `DSV4Metadata`; marked.

    Where q has P rows of which T are real (``num_token_non_padded``), T rows of everything take
    part, as in SGLang #25195, and the rows of out behind them are zeroed. With T = 0 all of out is.

    Args:
        q: ``[P, H, d]``.
        swa: ``[slots, d]``, keys of the window, those of this step stored already.
        extra: ``[slots, d]``, entries of the branch, likewise; None for ``"swa"``.
        sinks: float32 ``[H]``.
        out: ``[P, H, d]`` of q's dtype, written whole.
        branch: ``"swa"``, ``"c4"`` or ``"c128"``: which indices and lengths count.
        scale: of the scores.

    Raises:
        ValueError: there is no such branch, or extra does not belong to it.
        BindingError: no `DSV4Metadata` is bound.
    """
    if branch not in _FIELDS or (extra is None) != (branch == "swa"):
        found = f"branch is {branch!r} and extra {'None' if extra is None else 'a tensor'}"
        raise ValueError(
            f"deepseek_v4_attention_with_output: {found}; expected 'swa' without a second pool, "
            "'c4' or 'c128' with one."
        )
    md = torch_bcg.current_metadata(DSV4Metadata)
    rows = min(md.num_token_non_padded, len(q))
    if rows < len(q):
        q, out[rows:] = q[:rows], 0
    if rows == 0:
        return
    core = md.core_attn_metadata
    window = _listed(core, _FIELDS["swa"], rows)
    entries = None if extra is None else _listed(core, _FIELDS[branch], rows)
    slots, lengths = entries or (None, None)
    sparse_attention(q, swa, *window, extra, slots, lengths, sinks, scale, out[:rows])


def _listed(core: DSV4AttnMetadata, names: tuple[str, str], rows: int) -> tuple[Tensor, Tensor]:
    """Indices and lengths of as many rows."""
    indices, lengths = (getattr(core, name) for name in names)
    return match_num_queries(indices, rows, -1), match_num_queries(lengths, rows, 1)


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
) -> None:
    """`sparse_attention_reference` into ``out`` ``[T, H, d]``: a Triton kernel on CUDA.

    The kernel takes bf16, fp16 and fp32, pools and out of q's dtype. It is launched on the current
    device. Rounding depends on T, since few rows are spread over the device in another way.

    Raises:
        ValueError: the kernel does not take these dtypes or strides.
    """
    args = (
        *(q, swa, swa_indices, swa_lengths),
        *(extra, extra_indices, extra_lengths),
        *(sinks, scale),
    )
    if q.is_cuda:
        from torch_bcg.dsv4.kernels import attention

        attention.sparse_attention(*args, out)
    else:
        out.copy_(sparse_attention_reference(*args))


def sparse_attention_reference(
    q: Tensor,
    swa: Tensor,
    swa_indices: Tensor,
    swa_lengths: Tensor,
    extra: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    sinks: Tensor,
    scale: float,
) -> Tensor:
    """Attention of every row over the pool rows that it lists.

    ``out[i, h] = sum_j p_j K_j``, where p is the softmax over ``scale * q[i, h] . K_j`` for the
    keys K_j of row i in both pools and ``sinks[h]``, whose own weight is dropped (DeepSeek-V4).

    Args:
        q: ``[T, H, d]``.
        swa: ``[slots, d]``. Rows that are not listed may hold anything.
        swa_indices: int32 ``[T, W]``, rows of swa; -1 is masked.
        swa_lengths: int32 ``[T]``: the first so many columns count, the others may hold anything.
        extra: a second pool ``[slots', d]``, or None together with the two after it.
        extra_indices: int32 ``[T, W']``.
        extra_lengths: int32 ``[T]``.
        sinks: ``[H]``; -inf is no sink.
        scale: of the scores.

    Returns:
        ``[T, H, d]`` in q's dtype, computed in float32, or float64 for float64. 0 in rows whose
        keys are all masked.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    given = [q, swa_indices, swa_lengths]
    if extra_indices is not None and extra_lengths is not None:
        given += [extra_indices, extra_lengths]
    out = torch.empty_like(q)
    for first in range(0, len(q), ROWS):
        rows = slice(first, first + ROWS)
        queries, *listed = (x[rows] for x in given)
        keys, seen = _gathered(swa, *listed[:2])
        if extra is not None:
            more, also = _gathered(extra, *listed[2:])
            keys, seen = torch.cat([keys, more], 1), torch.cat([seen, also], 1)
        keys = keys.to(exact)
        scores = torch.einsum("thd,tkd->thk", queries.to(exact), keys) * scale
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        sink = sinks.to(exact).expand(scores.shape[:2])[..., None]
        # Finite where there is neither a key nor a sink.
        top = torch.maximum(scores.amax(-1, keepdim=True), sink).clamp(min=-1e30)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True) + (sink - top).exp()
        mixed = torch.einsum("thk,tkd->thd", weights, keys)
        out[rows] = mixed / total.masked_fill(total == 0, 1)
    return out


def _gathered(pool: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[T, W, d]``, 0 where masked, and which are not: bool ``[T, W]``."""
    column = torch.arange(indices.shape[1], device=indices.device)
    seen = (indices >= 0) & (column < lengths[:, None])
    keys = pool[torch.where(seen, indices, 0).long()]
    return torch.where(seen[..., None], keys, 0), seen
