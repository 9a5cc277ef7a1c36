"""Behaviour drawn from public reports on compiled functions and CUDA graphs."""

import contextlib
import copy
import functools
import gc
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_bcg
from twin import assert_same, check, double_into, plus_one

ANY = {"replays": range(1, 99), "eager_calls": None}


def rows(device, *size):
    return torch.randn(*(size or (4, 6)), device=device)


OPERATIONS = {
    "unique": lambda x: torch.unique((x * 3).int()),
    "masked_select": lambda x: x.masked_select(x > 0) * 2,
    "where of one argument": lambda x: torch.where(x > 0)[0] + 1,
    "bincount": lambda x: torch.bincount((x.abs() * 3).long().flatten()),
    "one_hot": lambda x: F.one_hot((x.abs() * 3).long().clamp(0, 5), 6),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, (x.abs() * 2).long().clamp(0, 5), x),
    "cumsum": lambda x: x.cumsum(0).cumprod(1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative": lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))).conj().imag,
    "interpolate": lambda x: F.interpolate(x[None, None], size=(7, 9), mode="bilinear"),
    "causal attention": lambda x: F.scaled_dot_product_attention(
        *[x[None, None]] * 3, is_causal=True
    ),
    "sort": lambda x: x.sort(stable=True),
    "quantile": lambda x: x.quantile(0.3),
    "view as int32": lambda x: x.view(torch.int32) + 1,
    "embedding_bag": lambda x: F.embedding_bag((x.abs() * 2).long().clamp(0, 3), x),
    "bfloat16": lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
    "no rows": lambda x: (x[:0] * 2, x[:0]),
    "item": lambda x: x * x[0, 0].item(),
    "vmap": lambda x: torch.vmap(lambda r: r.sum() * r)(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    "grad": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_between_cuts(device, operation):
    def fn(x):
        y = plus_one(x)
        return operation(y), plus_one(y) * 2

    check(fn, lambda i: (rows(device),), **ANY)


CONSTANTS = {
    "returned": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "returned beside": lambda x: (plus_one(x), torch.tensor(3.0, device=x.device)),
    "an index": lambda x: plus_one(x)[torch.tensor([0, 1], device=x.device)],
    "an index before a cut": lambda x, i=None: (torch.tensor([0, 2], device=x.device), plus_one(x)),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1], device=x.device), 0),
}


@pytest.mark.parametrize("fn", CONSTANTS.values(), ids=CONSTANTS)
def test_a_tensor_made_from_a_list_keeps_its_values(device, fn):
    check(fn, lambda i: (rows(device),), replays=range(99), eager_calls=None)


MEMORY_LIKE = {"empty_like": torch.empty_like, "new_empty": lambda x: x.new_empty(x.shape)}


@pytest.mark.parametrize("empty", MEMORY_LIKE.values(), ids=MEMORY_LIKE)
@pytest.mark.parametrize("made", [True, False], ids=["of an eager output", "of an input"])
def test_memory_like_a_value_that_only_eager_operations_read(device, empty, made):
    def fn(x, y):
        a = plus_one(x) if made else x
        z = y * 2
        out = empty(a)
        double_into(a, out)
        return z

    check(fn, lambda i: (rows(device), rows(device)))


def test_memory_like_a_value_is_written_and_returned(device):
    def fn(x, y):
        a = plus_one(x)
        z = y * 2
        out = torch.empty_like(a)
        double_into(a, out)
        return out + 1, z

    check(fn, lambda i: (rows(device), rows(device)))


ALIASED_FIRST = {
    "views": lambda x, y: (x.sum(), x[0], y[1:], y.t()),
    "written": lambda x, y: (x.add_(1)[0], y * 2),
    "both written": lambda x, y: (x.add_(1).sum(), y.mul_(2)[1:], plus_one(x)),
}


@pytest.mark.parametrize("fn", ALIASED_FIRST.values(), ids=ALIASED_FIRST)
@pytest.mark.parametrize("strided", [True, False], ids=["chunks", "overlapping"])
def test_inputs_of_one_storage_at_the_first_call_only(device, fn, strided):
    # Dynamo guards neither: a graph traced on q, k of one projection serves separate tensors.
    def make(i):
        base = rows(device, 40)
        if strided:
            x, y = base.view(5, 8).chunk(2, 1)
            parts = (x, y) if i == 0 else (rows(device, 5, 8)[:, :4], rows(device, 5, 8)[:, 4:])
        else:
            far = rows(device, 40)
            parts = base[4:16].view(3, 4), (base if i == 0 else far)[8:20].view(3, 4)
        return parts

    check(fn, make, calls=5, replays=range(99), eager_calls=None)


def test_an_input_that_is_a_view_of_a_buffer_at_the_first_call_only(device):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.zeros(6, 2, device=device))

        def forward(self, x):
            self.b.add_(1)
            return x * 2, x[0], x.t()

    m = Counter()
    twin, compiled = (
        copy.deepcopy(m),
        torch.compile(m, backend="bcg", options={"on_eager_call": "count"}),
    )
    for i in range(5):
        x = torch.full((3, 2), float(i), device=device)
        with torch.no_grad():
            got = compiled(m.b[:3] if i == 0 else x)
            want = twin(twin.b[:3] if i == 0 else x)
        assert_same(got, want)
        assert_same(m.b, twin.b)


SPECIALISED = {
    "unbind": lambda x, n: (x + x)[:n].unbind(0)[0],
    "unbind of an input": lambda x, n: x[:n].unbind(0)[0] + 1,
    "written": lambda x, n: x[:n].neg_() + 1,
}


@pytest.mark.parametrize("fn", SPECIALISED.values(), ids=SPECIALISED)
@pytest.mark.parametrize("numbers", [(3, 2, 3, 2), (2, 3, 1, 1, 1)], ids=["2", "1"])
def test_a_changing_int_that_a_graph_takes_for_a_constant(device, fn, numbers):
    check(
        fn,
        lambda i: (rows(device), numbers[i]),
        calls=len(numbers),
        replays=range(99),
        eager_calls=None,
    )


@pytest.mark.parametrize("several", ["broadcast", "meshgrid"])
def test_views_of_several_values_at_once(device, several):
    def fn(x, y):
        a, b = x[0], (y * 2)[0]
        views = (
            torch.broadcast_tensors(a, b)
            if several == "broadcast"
            else torch.meshgrid(a, b, indexing="ij")
        )
        return views[1]

    check(fn, lambda i: (rows(device), rows(device)))


@pytest.mark.parametrize("reader", [plus_one, lambda x: x * 2], ids=["eager", "recorded"])
def test_no_storage_of_a_call_outlives_it(device, reader):
    def fn(x, y):
        y.add_(x)
        return reader(y), y[0]

    compiled = torch.compile(fn, backend="bcg")
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x, y = rows(device), rows(device)
            with torch.no_grad():
                out = compiled(x, y)
            kept = [StorageWeakRef(t.untyped_storage()) for t in (x, y, *out)]
            del x, y, out
            assert all(ref.expired() for ref in kept)
    finally:
        gc.enable()


def test_a_cache_returned_and_fed_back(device):
    def step(x, k, v):
        k, v = torch.cat([k, x[:, None]], 1), torch.cat([v, x[:, None] * 2], 1)
        return (torch.softmax((k * x[:, None]).sum(-1), -1)[..., None] * v).sum(1), k, v

    compiled = torch.compile(step, backend="bcg")
    want = got = (None, torch.zeros(2, 1, 6, device=device), torch.zeros(2, 1, 6, device=device))
    for _ in range(8):
        x = rows(device, 2, 6)
        with torch.no_grad():
            want, got = step(x, *want[1:]), compiled(x, *got[1:])
        assert_same(got, want)


@pytest.mark.parametrize("how", ["partial", "nested", "fork", "pool"])
def test_ways_to_call(device, how):
    def fn(w, x):
        return plus_one(x @ w) * 2

    w = rows(device, 6, 6)
    if how == "partial":
        check(functools.partial(fn, w), lambda i: (rows(device),))
        return
    compiled = torch.compile(fn, backend="bcg")
    if how == "nested":
        check(
            lambda x: compiled(w, x) + 1,
            lambda i: (rows(device),),
            twin=lambda x: fn(w, x) + 1,
            **ANY,
        )
        return
    with torch.no_grad():
        for _ in range(3):
            compiled(w, rows(device))

    def right(i):
        x = torch.full((4, 6), float(i), device=device)
        with torch.no_grad():
            return torch.equal(compiled(w, x), fn(w, x))

    if how == "pool":
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(right, range(40)))
    elif device == "cpu":
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os._exit(0 if right(1) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0


def test_collection_in_the_middle_of_a_call(device):
    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def collect(x: Tensor) -> Tensor:
        gc.collect()
        return x + 1

    check(lambda x: collect(x * 2) * 3, lambda i: (rows(device),))
