"""What a call returns: the caller's own, with the aliases, strides and containers of eager."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from twin import assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@torch_bcg.eager_on_graph(fake=lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))
def split_result(x: Tensor) -> tuple[Tensor, Tensor]:
    """x + 1 and the row sums"""
    return x + 1, x.sum(1)


Pair = namedtuple("Pair", ["first", "second"])

SHAPES = {
    "permuted": lambda y: y.t(),
    "expanded": lambda y: y[:1].expand(5, 6),
    "slice": lambda y: y[1:3, 2:4],
    "step": lambda y: y[::2],
    "padded_rows": lambda y: torch.cat([y, y], 1)[:, :6],
    "no_rows": lambda y: y[:0],
    "0_dim": lambda y: y.sum(),
    "complex": lambda y: torch.complex(y, y).conj(),
    "half": lambda y: y.half(),
    "mask": lambda y: y > 0,
    "integers": lambda y: y.argmax(1),
    "same_twice": lambda y: (y, y),
    "views_of_one": lambda y: (y[0], y[1:3], y.t(), y),
    "dict": lambda y: {"b": y, "a": [y + 1, None, 3]},
    "named": lambda y: Pair(y, second=(y * 2, "text")),
    "nothing": lambda y: None,
    "number_only": lambda y: 7,
    "one_element_list": lambda y: [y],
    "chunks": lambda y: y.chunk(3, 1),
    "sorted": lambda y: y.sort(1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_recorded_values_of_every_shape(device, shape):
    check(lambda x: shape(plus_one(x) * 2), lambda i: (rows(device),))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eager_values_of_every_shape(device, shape):
    check(lambda x: (x * 2, shape(plus_one(x * 2))), lambda i: (rows(device),))


def test_a_dataclass(device):
    @dataclass
    class Result:
        value: Tensor
        rest: dict

    def fn(x):
        return Result(plus_one(x * 2), {"mean": x.mean(), "none": None})

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            got, want = compiled(x), fn(x)
            assert isinstance(got, Result)
            assert_same((got.value, got.rest), (want.value, want.rest))
    assert counts.replays == 3


def test_hundreds_of_outputs(device):
    def fn(x):
        many = [x * k for k in range(150)]
        y = plus_one(many[-1])
        return many, [y + k for k in range(150)]

    check(fn, lambda i: (rows(device),))


def test_several_outputs_of_a_marked_function(device):
    def fn(x):
        y, sums = split_result(x * 2)
        return y * sums[:, None], sums, y

    check(fn, lambda i: (rows(device),))


def test_kept_outputs_stay_what_they_were(device):
    compiled = torch.compile(lambda x: (plus_one(x) * 2, plus_one(x)), backend="bcg")
    inputs = [rows(device) for _ in range(6)]
    with torch.no_grad(), counted() as counts:
        kept = [compiled(x) for x in inputs]
    assert counts.replays == 5
    for x, got in zip(inputs, kept, strict=True):
        assert_same(got, ((x + 1) * 2, x + 1))


def test_writing_into_an_output_reaches_no_later_call(device):
    def fn(x):
        y = plus_one(x * 2)
        return y * 3, y

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x = rows(device)
            got = compiled(x)
            assert_same(got, fn(x))
            for tensor in got:
                tensor.fill_(float("nan"))
    assert counts.replays == 4


ALIASES = {
    "input_itself": lambda x, w: x,
    "view": lambda x, w: x[1:3],
    "transposed": lambda x, w: x.t(),
    "reshaped": lambda x, w: x.view(6, 4),
    "detached": lambda x, w: x.detach(),
    "view_of_view": lambda x, w: x[1:][:, 2:].t(),
    "two_views": lambda x, w: (x[0], x[0:2], x),
    "as_strided": lambda x, w: x.as_strided((3, 2), (1, 5), 2),
    "dtype_view": lambda x, w: x.view(torch.int32),
    "contiguous": lambda x, w: x.contiguous(),
    "written": lambda x, w: w.mul_(2),
    "view_of_written": lambda x, w: w.add_(x)[1:],
    "written_by_eager": lambda x, w: (double_into(x, w), w[:2])[1],
    "every_kind": lambda x, w: (x, w, x[0], w.mul_(2).t(), x + w),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_outputs_that_alias_inputs(device, alias):
    def fn(x, w):
        y = plus_one(x * 2)
        return alias(x, w), y * 2

    check(fn, lambda i: (rows(device), rows(device)))


STATICS = {
    "parameter": lambda m: m.weight,
    "buffer": lambda m: m.table,
    "view_of_parameter": lambda m: m.weight.t(),
    "view_of_buffer": lambda m: m.table[1:],
    "written_buffer": lambda m: m.table.add_(1),
    "both": lambda m: (m.table, m.weight[0], m.table[0]),
}


@pytest.mark.parametrize("static", STATICS.values(), ids=STATICS)
def test_outputs_that_are_static_tensors(device, static):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(rows(device, 6, 6))
            self.register_buffer("table", rows(device))

        def forward(self, x):
            y = plus_one(x @ self.weight)
            return static(self), y * 2

    check(Owner(), lambda i: (rows(device),))


def test_a_tensor_made_from_no_input(device):
    def fn(x):
        return torch.arange(5, device=device), torch.zeros(3, device=device), plus_one(x)

    check(fn, lambda i: (rows(device),))


PLACES = {
    "row": lambda y, i: y[i],
    "rows": lambda y, i: y[:i],
    "view_of_view": lambda y, i: y[:i].t()[1:],
    "beside_others": lambda y, i: (y[i], y, y[:i], y[1:], i),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("of", ["recorded", "eager", "argument"])
def test_views_at_places_that_only_the_call_knows(device, of, place):
    make = {"recorded": lambda x: x * 2, "eager": plus_one, "argument": lambda x: x}[of]

    def fn(x, m):
        i = m[0].item()
        torch._check(i >= 0)
        torch._check(i < x.shape[0])
        y = make(x)
        return place(y, i), y * 3

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(fn, lambda i: (rows(device), torch.tensor([i % 4])))


# outputs="alias"


def test_alias_outputs_are_right_until_the_next_replay(device):
    def fn(x):
        return plus_one(x * 2) * 3

    compiled = torch.compile(fn, backend="bcg", options={"outputs": "alias"})
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x = rows(device)
            assert_same(compiled(x), fn(x))
    assert counts.replays == 4


@pytest.mark.cuda
def test_reading_a_stale_alias_output_raises():
    compiled = torch.compile(
        lambda x: plus_one(x * 2) * 3, backend="bcg", options={"outputs": "alias"}
    )
    with torch.no_grad():
        compiled(rows("cuda"))
        stale = compiled(rows("cuda"))
        compiled(rows("cuda"))
        with pytest.raises(RuntimeError, match="replay"):
            stale + 1


def test_outputs_of_one_storage_and_several_dtypes(device):
    """Parts that begin where a wider number may not."""

    def fn(x):
        y = plus_one(x) * 2
        return y[:, 1:], y.view(torch.float64)[:, 1:], torch.view_as_complex(y.view(-1, 2))[1:]

    check(fn, lambda i: (rows(device, 4, 4),))


def test_alias_outputs_that_are_given_back(device):
    """What a replay writes over, or reads late, is not an argument of the same replay."""
    state = {"on_eager_call": "count", "outputs": "alias"}

    def stepped(x, y):
        x.add_(1)
        return plus_one(x * y) * 2

    def mixed(x, h):
        return double_of(plus_one(x * 2) * 3, h) * 2

    for fn in (stepped, mixed):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="bcg", options=state)
        got = want = rows(device, 4, 4)
        want = want.clone()
        with torch.no_grad():
            for _ in range(8):
                y = rows(device, 4, 4)
                pair = (got, y) if fn is stepped else (y, got)
                got = compiled(*pair)
                want = fn(*((want, y) if fn is stepped else (y, want)))
                assert_same(got, want)


@torch_bcg.eager_on_graph(fake=lambda x, h: torch.empty_like(x))
def double_of(x: Tensor, h: Tensor) -> Tensor:
    """x + 2 h"""
    return x + 2 * h
