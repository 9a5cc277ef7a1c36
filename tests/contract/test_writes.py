"""Memory of the caller that a call writes: as in eager, once a call, seen by all that overlaps."""

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


# Written inputs: the caller's tensor changes exactly as in eager, once a call.


def test_written_by_a_recorded_segment(device):
    def fn(x, cache):
        cache.add_(x)
        return plus_one(cache) * 2

    check(fn, lambda i: (rows(device), rows(device)))


def test_written_by_an_eager_operation(device):
    def fn(x, cache):
        double_into(x + 1, cache)
        return x * 3

    check(fn, lambda i: (rows(device), rows(device)))


def test_written_by_both_in_turn(device):
    def fn(x, cache):
        cache.mul_(2)
        add_one_to(cache)
        y = cache * x
        cache[0] = x[1]
        add_one_to(cache)
        cache[:, 1].sub_(y[:, 2])
        return y + cache

    check(fn, lambda i: (rows(device), rows(device)))


def test_a_counter_advances_once_a_call_from_the_first(device):
    def fn(counter, x):
        counter += 1
        y = plus_one(x * counter)
        counter += 1
        return y * counter

    counter = torch.zeros(1, device=device)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(1, 6):
            x = rows(device)
            assert_same(compiled(counter, x), (x * (2 * i - 1) + 1) * (2 * i))
            assert counter.item() == 2 * i
    assert counts.replays == 4


LEAVES = {"itself": lambda x: x.add_(1), "view": lambda x: x[1:].mul_(2)}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", LEAVES.values(), ids=LEAVES)
def test_a_returned_argument_that_requires_gradients_and_is_written(device, write, mode):
    """Facts of such a write may fail: what it returns is still the caller's, and stays so."""

    def fn(x, y):
        return write(x), plus_one(x * 2 + y), y * 3

    check(
        fn,
        lambda i: (rows(device, requires_grad=True), rows(device)),
        mode=mode,
        replays=range(4),
        eager_calls=None,
        options={"on_eager_call": "count"},
    )


@pytest.mark.parametrize("index", ["strided", "expanded_source", "transposed"])
def test_written_through_views_of_an_input(device, index):
    def fn(x, cache):
        if index == "strided":
            cache[::2, 1:4].add_(x[:2, :3])
        elif index == "expanded_source":
            cache.copy_(x[:1].expand(4, 6))
        else:
            cache.t()[1].mul_(3)
        double_into(cache[1:3], cache[2:4].clone())
        return plus_one(cache) + x

    check(fn, lambda i: (rows(device), rows(device)))


def test_written_non_contiguous_input_keeps_the_memory_between_its_rows(device):
    def fn(x):
        x.mul_(2)
        add_one_to(x)
        x.mul_(3)
        return x + 1

    wholes = []

    def make(i):
        whole = rows(device, 8, 10)
        wholes.append((whole, whole.clone()))
        return (whole[1:5, 2:8],)

    check(fn, make)
    for whole, before in wholes:
        expected = before.clone()
        expected[1:5, 2:8] = (before[1:5, 2:8] * 2 + 1) * 3
        assert_same(whole, expected)


def test_a_later_ambient_read_sees_a_recorded_write(device):
    """The marked function reads the caller's tensor from outside the graph, not the argument."""
    cache = torch.zeros(4, 6, device=device)

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def plus_cache(x: Tensor) -> Tensor:
        return x + cache

    def fn(x, written):
        written.add_(x)
        y = plus_cache(x)
        written.mul_(2)
        return plus_cache(y) + 1

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x, before = rows(device), cache.clone()
            assert_same(compiled(x, cache), x + (before + x) + (before + x) * 2 + 1)
            assert_same(cache, (before + x) * 2)
    assert counts.replays == 4


# Inputs that share memory.


def test_the_same_tensor_twice(device):
    def fn(x, y):
        return plus_one(x * 2) + y

    def make(i):
        x = rows(device)
        return (x, x) if i % 2 else (x, rows(device))

    check(fn, make, calls=6, replays=4)


def test_the_same_tensor_twice_is_written_once(device):
    def fn(x, y):
        x.add_(1)
        z = plus_one(y)
        y.mul_(2)
        add_one_to(x)
        return z + x + y

    def make(i):
        x = rows(device)
        return (x, x) if i % 2 else (x, rows(device))

    check(fn, make, calls=6, replays=4)


def overlapping(device, i):
    """Two views of one buffer: 0, apart; 1, the same; 2, half over each other; 3, row in matrix."""
    buffer = rows(device, 12, 6)
    return buffer[:4], (buffer[4:8], buffer[0:4], buffer[2:6], buffer[:8][-4:])[i % 4]


WRITES = {
    "recorded": lambda x, y: x.mul_(2),
    "eager": lambda x, y: add_one_to(x),
    "second_by_reference": lambda x, y: double_into(x, y),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_views_that_overlap_now_and_then(device, write):
    """Dynamo guards no overlap, so the call itself looks: unplanned ones are eager calls."""

    def fn(x, y):
        z = y * 2
        write(x, y)
        w = plus_one(y) * 2
        y.add_(1)
        return z, w + x

    check(
        fn,
        lambda i: overlapping(device, i),
        calls=12,
        replays=range(3, 12),  # those apart
        eager_calls=None,
        options={"on_eager_call": "count"},
    )


def test_overlapping_views_that_nobody_writes_are_replayed(device):
    def fn(x, y):
        return plus_one(x * 2) + y

    def make(i):
        buffer = rows(device, 12, 6)
        return buffer[:4], (buffer[2:6] if i % 2 else buffer[4:8])

    check(fn, make, calls=6, replays=5)


def test_an_input_that_is_a_view_of_a_written_buffer(device):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(8, 6, device=device))

        def forward(self, x, view):
            self.rows[2:6].add_(x)
            y = plus_one(view) * 2
            return y + view

    module, twin = Cache(), Cache()
    compiled = torch.compile(module, backend="bcg", options={"on_eager_call": "count"})
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            x, other = rows(device), rows(device)
            over = i % 2 == 1
            got = compiled(x, module.rows[3:7] if over else other)
            want = twin(x, twin.rows[3:7] if over else other)
            assert_same(got, want)
            assert_same(module.rows, twin.rows)
    assert counts.replays >= 3


def test_an_input_that_is_the_written_buffer_itself(device):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 6, device=device))

        def forward(self, x, view):
            self.rows.add_(x)
            return plus_one(view * 2) + self.rows

    module, twin = Cache(), Cache()
    compiled = torch.compile(module, backend="bcg", options={"on_eager_call": "count"})
    with torch.no_grad():
        for i in range(8):
            x, other = rows(device), rows(device)
            got = compiled(x, module.rows if i % 2 else other)
            want = twin(x, twin.rows if i % 2 else other)
            assert_same(got, want)
            assert_same(module.rows, twin.rows)
