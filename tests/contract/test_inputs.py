"""Tensors that the caller passes: copied or by reference, of any form, written or not."""

from collections import namedtuple

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import torch_bcg
from twin import assert_same, call, check, counted, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@torch_bcg.eager_on_graph(fake=lambda x, cache: torch.empty_like(x))
def add_sum(x: Tensor, cache: Tensor) -> Tensor:
    """x + sum of cache"""
    return x + cache.sum()


def recorded_eager_recorded(x):
    return plus_one(x * 2) * 3 + x


# Forms of one input.


FORMS = {
    "plain": lambda d: rows(d),
    "transposed": lambda d: rows(d, 6, 4).t(),
    "slice_with_offset": lambda d: rows(d, 8, 10)[2:6, 3:9],
    "step": lambda d: rows(d, 8, 6)[::2],
    "expanded": lambda d: rows(d, 1, 6).expand(4, 6),
    "channels_last": lambda d: rows(d, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "no_rows": lambda d: rows(d, 0, 6),
    "one_element": lambda d: rows(d, 1),
    "0_dim": lambda d: rows(d).sum(),
    "half": lambda d: rows(d).half(),
    "bfloat16": lambda d: rows(d).bfloat16(),
    "double": lambda d: rows(d).double(),
    "complex": lambda d: rows(d, 4, 6, dtype=torch.complex64),
    "conjugated": lambda d: rows(d, 4, 6, dtype=torch.complex64).conj(),
    "integers": lambda d: torch.randint(-9, 9, (4, 6), device=d),
    "bytes": lambda d: torch.randint(0, 99, (4, 6), device=d, dtype=torch.uint8),
    "leaf_that_requires_grad": lambda d: rows(d).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_input_is_replayed(device, form):
    check(recorded_eager_recorded, lambda i: (form(device),))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_input_goes_by_reference_to_eager_operations(device, form):
    check(lambda x, y: (plus_one(x), y * 2), lambda i: (form(device), rows(device)))


def test_masks(device):
    def fn(x, mask):
        return plus_one(x.masked_fill(mask, 0)), ~mask, mask.any(1), mask & (x > 0)

    check(fn, lambda i: (rows(device), rows(device) > 0))


def test_strides_that_change_under_one_shape(device):
    forms = ("plain", "square_t", "plain", "square_t", "step", "step")

    def make(i):
        x = rows(device, 8, 4)[::2] if forms[i] == "step" else rows(device, 4, 4)
        return (x.t() if forms[i] == "square_t" else x,)

    check(recorded_eager_recorded, make, calls=6, replays=range(3, 6))


def test_the_caller_may_refill_its_own_tensor(device):
    x = rows(device)
    compiled = torch.compile(recorded_eager_recorded, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(4):
            x.fill_(i + 1)
            got = compiled(x)
            want = recorded_eager_recorded(x)
            x.fill_(-1)  # what was returned does not depend on it
            assert_same(got, want)
    assert counts.replays == 3


def test_keywords_defaults_and_containers(device):
    Pair = namedtuple("Pair", ["a", "b"])

    def fn(x, *, scale, extra=None, tables=(), named=None):
        y = plus_one(x * scale["row"])
        for table in tables:
            y = y + table
        if extra is not None:
            y = y * extra
        return y + named.a * named.b

    def make(i):
        return call(
            rows(device),
            scale={"row": rows(device, 6), "unused": 3},
            extra=rows(device),
            tables=[rows(device), rows(device, 1, 6)],
            named=Pair(rows(device), b=rows(device)),
        )

    check(fn, make)


def test_an_optional_input_that_comes_and_goes(device):
    def fn(x, bias=None):
        y = plus_one(x * 2)
        return y if bias is None else y + bias

    check(
        fn, lambda i: (rows(device), rows(device)) if i % 2 else (rows(device),), calls=6, replays=4
    )


def test_many_inputs_of_several_dtypes(device):
    dtypes = (torch.float32, torch.float16, torch.int64, torch.bool)

    def fn(xs):
        return plus_one(sum(x.float() for x in xs[::2])), [x.float() * 2 for x in xs]

    check(fn, lambda i: ([(rows(device) * 3).to(dtypes[k % 4]) for k in range(60)],))


# Copied or by reference.


def test_an_input_that_only_eager_operations_read_is_passed_itself(device):
    seen = []

    @torch_bcg.eager_on_graph(fake=lambda x, cache: torch.empty_like(x))
    def look(x: Tensor, cache: Tensor) -> Tensor:
        seen.append(cache.data_ptr())
        return x + cache[0]

    def fn(x, cache):
        return look(x * 2, cache) * 3

    passed = []

    def make(i):
        cache = rows(device, 1000, 6)
        passed.append(cache)  # eager's and the compiled one's, in turn
        return rows(device), cache

    check(fn, make)
    assert seen == [cache.data_ptr() for cache in passed]


def test_a_view_before_a_marked_operation_copies_nothing(device):
    """The view node stands in a recorded segment, yet it reads no memory."""

    def fn(x, caches):
        y = x * 2
        for layer in range(4):
            y = add_sum(y, caches[layer]) * 2
        return y

    compiled = torch.compile(fn, backend="bcg")
    caches = rows(device, 4, 50, 1000)
    with torch.no_grad():
        compiled(rows(device), caches)
        with counted() as counts:
            for _ in range(3):
                x, caches = rows(device), rows(device, 4, 50, 1000)
                assert_same(compiled(x, caches), fn(x, caches))
    assert counts.replays == 3
    assert counts.copied_bytes < caches.nbytes / 10


# Inputs of another kind.


def test_a_cpu_tensor_in_and_out(device):
    def fn(x, table):
        y = plus_one(x * table.to(device))
        z = (y * 2).cpu()
        return z + table, y * 3

    check(fn, lambda i: (rows(device), rows("cpu")))


def test_wrapper_subclasses(device):
    def fn(x, w):
        return plus_one(x * 2) + 1, w * 2 + 1, x.sum()

    check(fn, lambda i: (rows(device), TwoTensor(rows(device), rows(device))))


def wrapped_late(x, y, offsets):
    n = torch.nested.nested_tensor_from_jagged(x * 2, offsets)
    z = plus_one(plus_one(y * 2) * 2)  # takes memory that nobody needs any more
    return (n * 2).values(), z + 1


def wrapped_and_returned(x, y, offsets):
    n = torch.nested.nested_tensor_from_jagged(x * 2, offsets)
    return n, plus_one(y * 2) + 1


@pytest.mark.parametrize("fn", [wrapped_late, wrapped_and_returned])
def test_a_wrapper_subclass_keeps_the_memory_that_it_is_given(device, fn):
    offsets = torch.tensor([0, 2, 5], device=device)
    compiled, kept = torch.compile(fn, backend="bcg"), []
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x, y = rows(device, 5, 6), rows(device)
            kept.append((compiled(x, y, offsets), fn(x, y, offsets)))
    assert counts.replays == 3
    for (got, other), (want, same) in kept:
        assert_same(
            got.values() if got.is_nested else got, want.values() if want.is_nested else want
        )
        assert_same(other, same)


def inner_read(t, x):
    t.add_(1)
    return plus_one(t.a * 2) * x


def inner_written(t, x):
    t.a.add_(1)
    return t * 2, plus_one(x * 2)


def inner_of_a_result_written(t, x):
    u = t * 2
    u.a.add_(1)
    return u, plus_one(u.a * x) + 1


@pytest.mark.parametrize("fn", [inner_read, inner_written, inner_of_a_result_written])
def test_a_wrapper_subclass_and_its_inner_tensor_are_one_memory(device, fn):
    check(fn, lambda i: (TwoTensor(rows(device), rows(device)), rows(device)))


def test_metadata_of_an_input_changed_in_place(device):
    def fn(x, y):
        x.t_()
        y.unsqueeze_(0)
        return plus_one(x * 2), y + 1

    check(fn, lambda i: (rows(device, 4, 4), rows(device)), replays=range(8), eager_calls=None)


def test_storage_of_an_input_changed(device):
    def fn(x, y):
        z = plus_one(y * 2)
        x.set_(z)
        x.add_(1)
        return x * 2, y + 1

    check(fn, lambda i: (rows(device), rows(device)), replays=range(8), eager_calls=None)
