"""Higher-order operators and function transforms, with marks around and inside them."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import torch_bcg
from twin import assert_same, check, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def test_marks_inside_checkpoint(device):
    def part(x):
        return plus_one(x * 2) * 3

    check(
        lambda x: checkpoint(part, x + 1, use_reentrant=False) - 1,
        lambda i: (rows(device),),
    )


def test_marks_inside_nested_compile_region(device):
    seen = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def look(x: Tensor) -> Tensor:
        seen.append(float(x[0, 0]))
        return x + 1

    @torch.compiler.nested_compile_region
    def part(x):
        return look(x * 2) * 3

    compiled = torch.compile(lambda x: part(part(x + 1)) - 1, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(4):
            x = torch.full((4, 6), float(i), device=device)
            assert_same(compiled(x), ((((x + 1) * 2 + 1) * 3) * 2 + 1) * 3 - 1)
    assert seen[-2:] == [8.0, 54.0]
    assert (counts.replays, len(seen)) == (3, 8)


def test_control_flow_with_a_mark_inside(device):
    def fn(x):
        y = x * 2
        z = torch.cond(y.sum() > 0, lambda y: plus_one(y), lambda y: y - 1, (y,))
        return z * 3

    check(fn, lambda i: (rows(device).abs() * (-1) ** i,))


def test_vmap_between_marks(device):
    def fn(x, w):
        y = plus_one(x)
        z = torch.vmap(lambda row, v: (row * v).cumsum(0) - row.sum(), in_dims=(0, None))(y, w)
        u = torch.vmap(torch.vmap(lambda a: a * 2 + 1))(plus_one(z))
        return plus_one(u) * 2

    check(fn, lambda i: (rows(device), rows(device, 6)))


def test_grad_transform_between_marks(device):
    def fn(x):
        y = torch.func.grad(lambda v: (v**3).sum())(plus_one(x))
        return plus_one(y) * 2

    check(fn, lambda i: (rows(device),), replays=range(4), eager_calls=None)


def test_a_level_of_forward_mode_inside(device):
    def fn(x, t):
        y = plus_one(x * 2)
        with forward_ad.dual_level():
            z = forward_ad.unpack_dual(forward_ad.make_dual(y, t).sin() * 2)
        return plus_one(z.tangent) * 2, z.primal + y

    check(fn, lambda i: (rows(device), rows(device)))
