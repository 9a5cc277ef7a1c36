"""Writes that no version counter shows: foreach, Library operators, `.data`, `out=`, statistics."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_bcg.errors import BCGWarning
from twin import assert_same, check, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def test_foreach_writes(device):
    def fn(x, a, b):
        made = x * 2
        torch._foreach_add_([a, made], 1.0)
        y = plus_one(made)
        torch._foreach_copy_([b[1:3], made[:2]], [x[:2], y[2:]])
        torch._foreach_mul_([a, b], 2.0)
        return plus_one(made) + a + b

    check(fn, lambda i: (rows(device), rows(device), rows(device)))


@pytest.fixture
def bump_ops():
    def write_one(x):
        x.add_(1)

    def write_all(xs):
        torch._foreach_add_(xs, 2.0)

    with torch.library._scoped_library("torch_bcg_contract", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x) -> ()")
        library.define("bump_all(Tensor(a!)[] xs) -> ()")
        library.impl("bump", write_one, "CompositeExplicitAutograd")
        library.impl("bump_all", write_all, "CompositeExplicitAutograd")
        torch.library.register_fake("torch_bcg_contract::bump", lambda x: None, lib=library)
        torch.library.register_fake("torch_bcg_contract::bump_all", lambda xs: None, lib=library)
        yield torch.ops.torch_bcg_contract


def test_writes_of_library_operators(device, bump_ops):
    def fn(x, a, b):
        made = x * 2
        bump_ops.bump(a[1:3])
        y = plus_one(made)
        bump_ops.bump_all([made, b])
        z = plus_one(y) + made
        bump_ops.bump(b)
        return z + a + b

    check(fn, lambda i: (rows(device), rows(device), rows(device)))


def test_data_and_setitem_writes(device):
    def fn(x, a):
        made = x * 2
        made.data.add_(1)
        y = plus_one(made)
        made[y > 1] = 0.0
        a[1:3, ::2] = y[:2, :3]
        torch.mul(x, 3, out=made)
        return plus_one(made) + a

    check(fn, lambda i: (rows(device), rows(device)))


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_are_arguments(device, training):
    """The schema of batch norm does not say that it writes them."""

    def fn(x, mean, var):
        return plus_one(F.batch_norm(x, mean, var, training=training)) * mean + var

    check(fn, lambda i: (rows(device), rows(device, 6), rows(device, 6).abs() + 1))


@pytest.mark.parametrize("options", [{}, {"check": "address,verify"}], ids=str)
def test_running_statistics_that_are_buffers(device, options):
    """They are brought up to date once a call, also where a segment runs twice to be checked."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Marked(), nn.Linear(6, 6)).to(device)
    model[1].num_batches_tracked = None  # a write that is said
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg", options=options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        for i in range(9):
            if i in (
                4,
                7,
            ):  # after the first segment ran its call turns out to be another program's
                model[3].weight.data = model[3].weight.data.clone()
            x = rows(device)
            assert_same(compiled(x), twin(x))
            assert_same(model.state_dict(), twin.state_dict())


class Marked(nn.Module):
    def forward(self, x):
        return plus_one(x)
