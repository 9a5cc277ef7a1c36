"""Sizes: a program per exact shape, recorded after the second call, at most `max_programs`."""

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from torch_bcg.errors import BCGWarning
from twin import assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@torch_bcg.eager_on_graph(fake=lambda x, n: torch.empty_like(x))
def divide(x: Tensor, n: int) -> Tensor:
    return x / n


def simple(x):
    return plus_one(x * 2) * 3


def of_sizes(device, sizes):
    return lambda i: (rows(device, sizes[i], 6),)


def test_a_graph_with_dynamic_shapes(device):
    """5: probe, replays. Any other size: warming twice, then replays."""
    sizes = (5, 5, 7, 7, 7, 5, 7, 9, 9, 9)
    with counted() as counts:
        check(simple, of_sizes(device, sizes), calls=10, replays=5, dynamic=True)
    assert (counts.probes, counts.warming, counts.captures) == (1, 4, 3)


def test_a_graph_that_becomes_dynamic(device):
    """The second size makes Dynamo compile again; the new graph has a probe of its own."""
    sizes = (5, 5, 7, 7, 9, 9, 9, 7)
    with counted() as counts:
        check(simple, of_sizes(device, sizes), calls=8, replays=4)
    assert (counts.probes, counts.warming, counts.captures) == (2, 2, 3)


def test_sizes_0_and_1(device):
    sizes = (5, 1, 0, 7, 1, 0, 5, 7, 7, 1, 0)
    check(simple, of_sizes(device, sizes), calls=11, replays=range(4, 11))


def test_two_dynamic_dimensions(device):
    shapes = ((2, 5), (3, 5), (3, 8), (2, 5), (3, 5), (3, 8), (2, 5), (3, 5), (3, 8))

    def fn(x):
        y = plus_one(x.view(-1, 6) * 2).view(x.shape)
        return y.transpose(0, 1).reshape(x.shape[1], -1), y.sum(1)

    check(
        fn,
        lambda i: (rows(device, *shapes[i], 6),),
        calls=9,
        replays=4,  # probe; two shapes warm twice
        dynamic=True,
    )


SIZE_USES = {
    "divide": lambda x: x / x.shape[0],
    "last_row": lambda x: x + x[x.shape[0] - 1],
    "half": lambda x: x[: x.shape[0] // 2] * 2,
    "arange": lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None],
    "full": lambda x: x + torch.full((x.shape[0], 1), x.shape[0], device=x.device),
    "tensor": lambda x: x * torch.tensor(x.shape[0], device=x.device),
    "merged": lambda x: x.view(-1) + x.shape[0] * x.shape[1],
    "split": lambda x: torch.cat(x.split((2, x.shape[0] - 2))) * 2,
    "pad": lambda x: torch.nn.functional.pad(x, (0, 0, 1, 2)),
    "expand": lambda x: x[:1].expand(x.shape[0], 6) + x,
    "number_out": lambda x: (x * 2, x.shape[0] + 3),
    "mask": lambda x: torch.ones(x.shape[0], x.shape[0], device=x.device).tril() @ x,
}


@pytest.mark.parametrize("use", SIZE_USES.values(), ids=SIZE_USES)
def test_sizes_used_as_values(device, use):
    sizes = (5, 7, 7, 5, 9, 9, 7, 9, 5)

    def fn(x):
        y = use(plus_one(x))
        return y, divide(x + 1, x.shape[0]) * 2

    check(fn, of_sizes(device, sizes), calls=9, replays=4, dynamic=True)


def test_sizes_of_an_eager_output(device):
    @torch_bcg.eager_on_graph(fake=lambda x: x.new_empty(x.shape[0] * 2, 6))
    def twice(x: Tensor) -> Tensor:
        return torch.cat([x, x])

    def fn(x):
        y = twice(x * 2) + 1
        out = torch.empty_like(y)
        double_into(y, out)
        return out * 3

    sizes = (5, 7, 7, 5, 7, 9, 9, 9)
    check(fn, of_sizes(device, sizes), calls=8, replays=3, dynamic=True)


def test_written_inputs_of_many_sizes(device):
    def fn(x, cache):
        n = x.shape[0]
        cache[:n].add_(x)
        double_into(x, cache[n : 2 * n])
        return plus_one(cache[: 2 * n]) + 1

    sizes = (5, 7, 7, 5, 7, 9, 9, 9)
    check(
        fn,
        lambda i: (rows(device, sizes[i], 6), rows(device, 40, 6)),
        calls=8,
        replays=3,
        dynamic=True,
    )


def test_another_instance_at_a_known_shape_warms_once(device):
    layers = [nn.Linear(6, 6, device=device) for _ in range(3)]
    compiled = torch.compile(lambda m, x: plus_one(m(x)) * 2, backend="bcg", dynamic=True)
    turns = [(0, 5), (0, 5), (1, 5), (1, 5), (2, 5), (0, 7), (0, 7), (1, 7), (1, 7), (2, 7), (2, 7)]
    with torch.no_grad(), counted() as counts:
        for which, size in turns:
            x = rows(device, size, 6)
            assert_same(compiled(layers[which], x), (layers[which](x) + 1) * 2)
    assert (counts.probes, counts.warming, counts.captures, counts.replays) == (1, 6, 6, 4)


def test_twenty_sizes(device):
    sizes = [n for n in range(2, 22) for _ in range(3)]
    sizes += list(range(2, 22))
    # The first size: a probe and two replays. The 19 others: one replay each. Then twenty more.
    check(simple, of_sizes(device, sizes), calls=80, replays=2 + 19 + 20, dynamic=True)


def test_more_shapes_than_programs_are_eager_calls_with_one_warning(device):
    sizes = (5, 5, 7, 7, 7, 9, 9, 9, 11, 5, 7, 9)
    compiled = torch.compile(simple, backend="bcg", dynamic=True, options={"max_programs": 2})
    with torch.no_grad(), counted() as counts, pytest.warns(BCGWarning, match="max_programs") as w:
        for n in sizes:
            x = rows(device, n, 6)
            assert_same(compiled(x), simple(x))
    assert len(w) == 1
    assert (counts.captures, counts.replays, counts.num_eager) == (2, 4, 5)
    assert len(torch_bcg.programs(compiled)) == 2


def test_programs_tell_their_replays(device):
    compiled = torch.compile(simple, backend="bcg", dynamic=True)
    with torch.no_grad():
        for n in (5, 5, 5, 7, 7, 7, 5):
            compiled(rows(device, n, 6))
    programs = torch_bcg.programs(compiled)
    assert sorted(program.replays for program in programs) == [1, 3]
    assert all(program.bytes > 0 for program in programs)
