"""Calls in all orders: nested, re-entrant, after a reset, refused."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import torch_bcg
from torch_bcg.errors import BCGError
from twin import assert_same, check, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def simple(x):
    return plus_one(x * 2) * 3


@pytest.mark.parametrize("outputs", ["clone", "alias"])
def test_f_of_f_and_g_of_f(device, outputs):
    def other(x):
        x.add_(1)
        return plus_one(x) - x * 2

    f, g = (
        torch.compile(fn, backend="bcg", options={"outputs": outputs}) for fn in (simple, other)
    )
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(f(f(x)), simple(simple(x)))
            assert_same(g(f(f(x))), other(simple(simple(x))))
            assert_same(f(g(f(x))), simple(other(simple(x))))
    assert (counts.replays, counts.num_eager) == (4 * 8 - 2, 0)


def test_the_output_of_a_call_as_input_of_the_next(device):
    compiled = torch.compile(lambda x, y: (plus_one(x) * y, x + y), backend="bcg")
    x, y = rows(device), rows(device)
    got = want = (x, y)
    with torch.no_grad(), counted() as counts:
        for _ in range(6):
            got = compiled(*got)
            want = (want[0] + 1) * want[1], want[0] + want[1]
            assert_same(got, want)
    assert counts.replays == 5


def test_a_re_entrant_call_is_an_eager_call(device):
    depth = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def again(x: Tensor) -> Tensor:
        if len(depth) == 2:
            return x + 100
        depth.append(1)
        y = compiled(x * 2)
        depth.pop()
        return y + x

    def fn(x):
        y = x + 1
        z = again(y)
        return z * 3 + y

    def want(x, level=0):
        y = x + 1
        z = y + 100 if level == 2 else want(y * 2, level + 1) + y
        return z * 3 + y

    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), want(x))
    assert (counts.replays, counts.num_eager) == (3, 8)


def test_one_marked_function_in_two_compiled_functions(device):
    seen = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def look(x: Tensor) -> Tensor:
        seen.append(1)
        return x + 1

    f = torch.compile(lambda x: look(x * 2) * 3, backend="bcg")
    g = torch.compile(lambda x: look(look(x) - 1) * 2, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(f(x), (x * 2 + 1) * 3)
            assert_same(g(x), ((x + 1) - 1 + 1) * 2)
    assert (counts.replays, len(seen)) == (6, 12)


def test_graph_breaks_make_several_graphs(device):
    def fn(x):
        y = plus_one(x * 2)
        torch._dynamo.graph_break()
        return plus_one(y * 3) + x

    compiled = check(fn, lambda i: (rows(device),), replays=6)
    assert len(torch_bcg.programs(compiled)) == 2


# Reset.


def test_dynamo_reset_frees_programs_and_what_they_hold(device):
    held = torch_bcg.stats().pool_bytes

    def compile_call_and_reset():
        model = nn.Linear(600, 600, device=device)
        compiled = torch.compile(lambda x: plus_one(model(x)) * 2, backend="bcg")
        for _ in range(2):
            with torch.no_grad(), counted() as counts:
                for _ in range(3):
                    x = rows(device, 100, 600)
                    assert_same(compiled(x), (model(x) + 1) * 2)
            assert (counts.captures, counts.replays) == (1, 2)
            assert torch_bcg.stats().pool_bytes > held
            assert len(torch_bcg.programs(compiled)) == 1
            torch._dynamo.reset()
            assert torch_bcg.stats().pool_bytes == held
            assert len(torch_bcg.programs(compiled)) == 0
        return weakref.ref(model.weight)

    weight = compile_call_and_reset()
    gc.collect()
    assert weight() is None


@pytest.mark.cuda
def test_dynamo_reset_gives_device_memory_back():
    compiled = torch.compile(lambda x: plus_one(x * 2) * 3, backend="bcg")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(3):
            compiled(rows("cuda", 1000, 1000))
    assert torch.cuda.memory_allocated() > before
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_reset_of_one_compiled_function_leaves_the_other(device):
    f, g = (torch.compile(fn, backend="bcg") for fn in (simple, lambda x: plus_one(x) + x))
    x = rows(device)
    with torch.no_grad():
        for _ in range(2):
            f(x), g(x)
        torch_bcg.reset(f)
        assert (len(torch_bcg.programs(f)), len(torch_bcg.programs(g))) == (0, 1)
        with counted() as counts:
            for _ in range(3):
                assert_same(f(x), simple(x))
                assert_same(g(x), x + 1 + x)
    assert (counts.captures, counts.replays) == (1, 5)


# Refused before anything is captured.

REFUSED = {
    "mode": ({"mode": "reduce-overhead"}, "mode"),
    "unknown option": ({"options": {"chek": "off"}}, "check"),
    "value of outputs": ({"options": {"outputs": "clones"}}, "clone"),
    "value of max_programs": ({"options": {"max_programs": 0}}, "max_programs"),
    "value of execute": ({"options": {"execute": "graph"}}, "graphs"),
}


@pytest.mark.parametrize(("kwargs", "names"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_option_is_refused(device, kwargs, names):
    before = torch_bcg.stats().captures
    with torch.no_grad(), pytest.raises((BCGError, BackendCompilerFailed), match=names):
        torch.compile(simple, backend="bcg", **kwargs)(rows(device))
    assert torch_bcg.stats().captures == before
