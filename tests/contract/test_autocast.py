"""Autocast around, between and inside segments: each step runs under what is in force there."""

import contextlib

import pytest
import torch
from torch import Tensor

import torch_bcg
from twin import assert_same, check, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


# Fakes run outside autocast, so the result's dtype must not depend on it; its rounding does.
@torch_bcg.eager_on_graph(fake=lambda x, w: torch.empty_like(x, dtype=torch.float32))
def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x @ w for a square w, computed in the dtype that autocast says"""
    return (x.float() @ w.float()).float()


@pytest.mark.parametrize("outside", [False, True])
def test_autocast_around_a_mark(device, outside):
    def fn(x, w):
        before = x @ w
        with torch.autocast(device, dtype=torch.bfloat16):
            y = x @ w
            z = matmul(y, w)
            u = z @ w
        return before, y, z, u, u.float() @ w

    def mode():
        both = contextlib.ExitStack()
        both.enter_context(torch.no_grad())
        if outside:
            both.enter_context(torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False))
        return both

    check(fn, lambda i: (rows(device, 6, 6), rows(device, 6, 6)), mode=mode)


def test_autocast_entered_and_left_between_marks(device):
    def fn(x, w):
        y = matmul(x, w)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = matmul(y, w) + y @ w
            with torch.autocast(device, enabled=False):
                z = matmul(y, w)
            z = z @ w
        return matmul(z, w), y @ w

    check(fn, lambda i: (rows(device, 6, 6), rows(device, 6, 6)))
    assert not torch.is_autocast_enabled(device)


def test_autocast_of_the_caller_comes_and_goes(device):
    compiled = torch.compile(lambda x, w: plus_one(x @ w) * 2, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            x, w = rows(device, 6, 6), rows(device, 6, 6)
            with torch.autocast(device, torch.bfloat16, enabled=i % 2 == 1, cache_enabled=False):
                assert_same(compiled(x, w), (x @ w + 1) * 2)
    assert counts.replays == 6


@pytest.mark.parametrize("failing_call", [0, 2])
def test_an_exception_inside_autocast_leaves_none_on(device, failing_call):
    calls = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def fail_once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == failing_call + 1:
            raise ValueError("on demand")
        return x + 1

    def fn(x, w):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fail_once(x @ w) @ w

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(6):
            x, w = rows(device, 6, 6), rows(device, 6, 6)
            if i == failing_call:
                with pytest.raises(ValueError, match="on demand"):
                    compiled(x, w)
            else:
                with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
                    want = (x @ w + 1) @ w
                assert_same(compiled(x, w), want)
            assert not torch.is_autocast_enabled(device)
            assert not torch.is_grad_enabled()
    assert counts.replays >= 3
