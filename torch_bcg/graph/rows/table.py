"""Which rule speaks for which operator, and which of its arguments are sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from torch_bcg.graph.known import TOP_K
from torch_bcg.graph.rows import compute, indexing, slices, views
from torch_bcg.graph.rows.compute import Rule


class Entry(NamedTuple):
    """A rule, and the arguments that may hold the size without being values."""

    rule: Rule
    sizes: frozenset[str] = frozenset()


# Pointwise operators that torch does not tag so.
_POINTWISE = """
    _to_copy clone copy where masked_fill clamp clamp_min clamp_max fill zero isnan
    conj resolve_conj resolve_neg polar complex prelu _prelu_kernel hardswish log_sigmoid_forward
    add sub mul pow lerp eq ne lt le gt ge logical_and logical_or logical_not bitwise_and
    bitwise_or bitwise_not __and__ __or__ silu gelu sigmoid tanh relu softplus elu mish
    _fused_dropout_scale threshold hardtanh relu6 _cast_Float real_if_close nan_to_num
"""
_DIVIDES = ("div", "floor_divide", "remainder", "fmod")
_REDUCTIONS = """
    sum mean amax amin max min argmax argmin any all prod logsumexp var std var_mean std_mean norm
    linalg_vector_norm median nanmedian nansum count_nonzero aminmax mode
"""
_FACTORIES = """
    zeros ones full empty empty_strided empty_permuted eye new_zeros new_ones new_full new_empty
    new_empty_strided scalar_tensor linspace logspace arange
"""
_PARTS = "split,unsafe_split,split_with_sizes,unsafe_split_with_sizes,chunk,unsafe_chunk".replace(
    ",", " "
)
_VIEWS: dict[str, Rule] = {
    "permute transpose t": views.permute,
    "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze,
    "expand": views.expand,
    "view": views.view,
    "_unsafe_view _reshape_alias reshape": views.reshape,
    "select": slices.select,
    "slice": slices.slice_,
    _PARTS: slices.parts,
    "unbind": slices.unbind,
    "cat": slices.cat,
    "stack": slices.stack,
    "constant_pad_nd": slices.pad,
    "repeat": views.repeat,
    "unfold as_strided diagonal": views.scattered_view,
    "view_as_real view_as_complex": views.complex_view,
    "detach alias lift lift_fresh real imag _conj _neg_view": views.same,
}
_COMPUTE: dict[str, Rule] = {
    _REDUCTIONS: compute.reduce,
    "histc bincount nonzero masked_select equal _unique2 unique_dim unique_consecutive trace": (
        compute.reduce_all
    ),
    "_softmax _log_softmax _safe_softmax": partial(compute.normalise, kind="softmax over tokens"),
    "glu": partial(compute.normalise, kind="reduction over tokens"),
    "sort argsort": partial(compute.order, kind="sort over tokens"),
    "topk kthvalue": partial(compute.order, kind=TOP_K),
    "bucketize searchsorted": compute.search,
    "cumsum cumprod cummax cummin logcumsumexp _logcumsumexp": compute.scan,
    "flip roll": compute.reorder,
    "native_layer_norm _fused_rms_norm": compute.layer_norm,
    "native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_no_training": compute.group_norm,
    "mm bmm addmm baddbmm mv dot vdot addmv addbmm": compute.contract,
    "linear": compute.linear,
    "convolution": compute.convolution,
    "avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d": compute.pool,
    " ".join(_DIVIDES): compute.divide,
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy": compute.loss,
    "renorm": compute.renorm,
    "tril triu": compute.triangle,
    "_assert_async _assert_tensor_metadata _assert_scalar sym_constrain_range "
    "sym_constrain_range_for_size": compute.nothing,
    "zeros_like ones_like full_like empty_like": compute.like,
}
_INDEXING: dict[str, Rule] = {
    "embedding": indexing.embedding,
    "index_select": indexing.index_select,
    "index _unsafe_index": indexing.index,
    "index_put _index_put_impl _unsafe_index_put": indexing.index_put,
    "gather": indexing.gather,
    "scatter scatter_add scatter_reduce": indexing.scatter,
    "index_add index_copy index_fill index_reduce": indexing.along,
    "masked_scatter": indexing.masked_scatter,
    "put": indexing.put,
    "take": indexing.take,
    "isin": indexing.isin,
}
# Arguments that are sizes and bounds; what a bound means for rows is its rule's business.
_SIZES = {
    "view _unsafe_view _reshape_alias reshape expand as_strided": "size stride storage_offset",
    "select": "index",
    "slice": "start end",
    _PARTS: "split_size,split_sizes".replace(",", " "),
    "constant_pad_nd": "pad",
    "repeat": "repeats",
    "arange": "end",
    "eye": "n m",
    "native_group_norm": "N HxW",
    "native_layer_norm _fused_rms_norm": "normalized_shape",
    "sym_constrain_range sym_constrain_range_for_size _assert_scalar": "size self",
    "_assert_tensor_metadata": "size stride",
    "zeros ones full empty empty_strided empty_permuted new_zeros new_ones new_full new_empty "
    "new_empty_strided": "size stride",
}


def _rules() -> Iterator[tuple[str, Rule]]:
    yield from ((name, compute.pointwise) for name in _POINTWISE.split())
    yield from ((name, compute.factory) for name in _FACTORIES.split())
    for group in (_VIEWS, _COMPUTE, _INDEXING):
        for names, rule in group.items():
            yield from ((name, rule) for name in names.split())


def _table() -> dict[str, Entry]:
    sizes = {name: frozenset(a.split()) for names, a in _SIZES.items() for name in names.split()}
    return {name: Entry(rule, sizes.get(name, frozenset())) for name, rule in _rules()}


TABLE = _table()
VIEWS = frozenset(
    name
    for names in _VIEWS
    for name in names.split()
    if name not in ("cat", "stack", "constant_pad_nd", "repeat")
)
_POINT = Entry(compute.pointwise)
_RANDOM = Entry(compute.random)
_ATTENTION = Entry(compute.attention)
_UNKNOWN = Entry(compute.unknown)
_ATTENTION_NAMES = ("scaled_dot_product", "flash_attention", "efficient_attention")


def base_name(operator: torch._ops.OpOverload) -> str:
    """``aten::index_put_`` -> ``index_put``."""
    name = operator._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def entry_for(operator: torch._ops.OpOverload, name: str) -> Entry:
    """The rule of an operator."""
    if torch.Tag.nondeterministic_seeded in operator.tags and "attention" not in name:
        return _RANDOM
    if any(a in name for a in _ATTENTION_NAMES):
        return _ATTENTION
    if operator.namespace != "aten":
        return _UNKNOWN
    pointwise = torch.Tag.pointwise in operator.tags and name != "equal"
    return _POINT if pointwise and name not in _DIVIDES else TABLE.get(name, _UNKNOWN)
