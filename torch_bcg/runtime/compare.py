"""Whether two tensors agree, but for the rounding of other kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# Of the largest value compared: a kernel for another size adds in another order.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
# The same, where the same kernels ran on the same sizes: only atomic sums differ at all.
SAME = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-4}
# Elements above which a dim is sampled: comparing must not take longer than computing.
SAMPLED = 1 << 24
_LAST = 64


def is_sampled(t: Tensor) -> bool:
    """Whether only some rows of a tensor are compared."""
    return t.numel() > SAMPLED and t.dim() > 0


def sampled(t: Tensor) -> Tensor:
    """Some positions of the largest dim, and its last ones, to which padding comes nearest."""
    dim = max(range(t.dim()), key=t.shape.__getitem__)
    size, every = t.shape[dim], -(-t.numel() // SAMPLED)
    some = torch.arange(0, size, every, device=t.device)
    last = torch.arange(max(0, size - _LAST), size, device=t.device)
    return t.index_select(dim, torch.cat([some, last]).unique())


def unreserved(t: Tensor, reserved: Iterable[int]) -> Tensor:
    """``t`` without the rows of its first dim that padding may write."""
    rows = [r for r in reserved if t.dim() and -t.shape[0] <= r < t.shape[0]]
    if not rows:
        return t
    keep = torch.ones(t.shape[0], dtype=torch.bool, device=t.device)
    keep[rows] = False
    return t[keep]


def difference(
    ours: Tensor, real: Tensor, tolerance: Mapping[torch.dtype, float] = TOLERANCE
) -> str:
    """What tells two tensors apart, in words; "" if they agree."""
    if ours.shape != real.shape or ours.dtype != real.dtype:
        return f"{ours.dtype}{list(ours.shape)} for {real.dtype}{list(real.shape)}"
    if not real.numel():
        return ""
    if is_sampled(real):
        ours, real = sampled(ours), sampled(real)
    if not (real.is_floating_point() or real.is_complex()):
        count = int((ours != real).sum())
        return f"{count} of {real.numel()} elements differ" if count else ""
    allowed = tolerance.get(real.dtype, 1e-1)
    a, b = (_wide(x.detach()) for x in (ours, real))
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not _alike(a[~finite], b[~finite]):
        return "infinite or not a number in other places"
    a, b = a[finite], b[finite]
    if not b.numel():
        return ""
    largest, apart = float(b.abs().max()), float((a - b).abs().max())
    if apart <= allowed * max(largest, 1e-6):
        return ""
    return f"off by {apart:.3g} where values go up to {largest:.3g}"


def _wide(t: Tensor) -> Tensor:
    """The same numbers as float64, real and imaginary parts apart; few operations know float8."""
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.to(torch.float64)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether infinities have the same sign, and what is no number is none in both."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
