"""Views made before a cut and written after it; eager operations that return their argument."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.traceback import annotate

import torch_bcg
from torch_bcg.errors import OutputError
from twin import add_one_to, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@torch_bcg.eager_on_graph(mutates_args=("outs",))
def fill_rows(x: Tensor, outs: list[Tensor]) -> None:
    """outs[i] = x[i]"""
    for row, out in zip(x, outs, strict=False):
        out.copy_(row)


THROUGH = {
    "view_written_by_eager": lambda base, view: add_one_to(view),
    "base_written_by_eager": lambda base, view: add_one_to(base),
    "view_written_by_recorded": lambda base, view: view.mul_(2),
    "base_written_by_recorded": lambda base, view: base.mul_(2),
    "both": lambda base, view: (add_one_to(view), base.mul_(2), add_one_to(base), view.sub_(1)),
    "into_each_other": lambda base, view: double_into(view.clone(), view),
}
MAKE = {
    "row": lambda b: b[1],
    "slice": lambda b: b[1:3, 2:],
    "transposed": lambda b: b.t(),
    "reshaped": lambda b: b.view(-1),
    "diagonal": lambda b: b.diagonal(),
    "chunk": lambda b: b.chunk(2, 1)[1],
    "as_strided": lambda b: b.as_strided((3, 3), (6, 2), 1),
    "view_of_view": lambda b: b[1:].unsqueeze(0).transpose(1, 2)[:, ::2],
}


@pytest.mark.parametrize("write", THROUGH.values(), ids=THROUGH)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_view_of_an_intermediate_crosses_a_cut(device, make, write):
    def fn(x):
        base = x * 2
        view = make(base)
        y = plus_one(x)
        write(base, view)
        z = plus_one(y)
        return base + z, view * 2, view.sum(), base

    check(fn, lambda i: (rows(device),))


@pytest.mark.parametrize("write", THROUGH.values(), ids=THROUGH)
def test_a_view_of_an_input_crosses_a_cut(device, write):
    def fn(x, base):
        view = base[1:3]
        y = plus_one(x * 2)
        write(base, view)
        return plus_one(y) + base, view * 2, view

    check(fn, lambda i: (rows(device), rows(device)))


@pytest.mark.parametrize("write", THROUGH.values(), ids=THROUGH)
def test_a_view_of_an_eager_output_crosses_a_cut(device, write):
    def fn(x):
        base = plus_one(x)
        view = base[1:3]
        y = plus_one(base * 2)
        write(base, view)
        return y + base, view * 2, base

    check(fn, lambda i: (rows(device),))


def test_fresh_outputs_of_eager_operations_feed_recorded_ones(device):
    def fn(x):
        for _ in range(5):
            x = plus_one(x * 2).relu() - 1
        return x

    check(fn, lambda i: (rows(device),))


def test_adjacent_eager_operations_and_ends(device):
    def fn(x):
        y = plus_one(plus_one(x))
        z = torch.empty_like(y)
        double_into(y * 3, z)
        add_one_to(z)
        return plus_one(z)

    check(fn, lambda i: (rows(device),))


def test_an_eager_operation_that_fills_views_of_an_unwritten_buffer(device):
    def fn(x):
        out = torch.empty(6, 6, device=device)
        out[4:].zero_()
        fill_rows(x * 2, [out[0], out[1], out[2], out[3]])
        return out * 2

    check(fn, lambda i: (rows(device),))


def test_a_partly_written_buffer_starts_anew_at_each_call(device):
    def fn(x):
        out = torch.zeros(4, 6, device=device)
        add_one_to(out[1:3])
        out[0].add_(x[0])
        return plus_one(out), out

    check(fn, lambda i: (rows(device),))


INTERMEDIATES = {
    "t_": lambda y: y.t_(),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.unsqueeze(0).squeeze_(0),
    "transpose_": lambda y: y.transpose_(0, 1),
    "as_strided_": lambda y: y.as_strided_((3, 2), (2, 1)),
    "resize_": lambda y: y.resize_(2, 6),
    "set_": lambda y: y.set_(y[1:3].clone()),
}


@pytest.mark.parametrize("change", INTERMEDIATES.values(), ids=INTERMEDIATES)
def test_metadata_of_an_intermediate_changed_in_place(device, change):
    def fn(x):
        y = x * 2
        z = plus_one(y)
        change(y)
        return plus_one(y) * 2, z, y + 1

    check(fn, lambda i: (rows(device),), replays=range(3, 7))  # set_ breaks the graph in two


# Eager operations that return their argument: a copy would lose the later write.

MAYBE_VIEWS = {
    "contiguous": lambda y: y.contiguous(),
    "to": lambda y: y.to(torch.float32),
    "dropout_in_evaluation": lambda y: F.dropout(y, 0.5, training=False),
    "reshape": lambda y: y.reshape(6, 4),
    "broadcast": lambda y: torch.broadcast_tensors(y, y[:1])[0],
    "identity": lambda y: torch.nn.Identity()(y),
    "real": lambda y: y.real,
}


@pytest.mark.parametrize("maybe", MAYBE_VIEWS.values(), ids=MAYBE_VIEWS)
@pytest.mark.parametrize("source", ["intermediate", "input"])
def test_an_eager_operation_that_returns_its_argument(device, maybe, source):
    def fn(x):
        y = x * 2 if source == "intermediate" else x
        with annotate({"bcg": "eager"}):
            z = maybe(y)
        z.add_(1)
        y.mul_(3)
        return plus_one(z), y, z

    check(fn, lambda i: (rows(device),))


def test_a_marked_function_that_returns_its_argument_against_its_fake_is_named(device):
    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def sometimes_itself(x: Tensor) -> Tensor:
        return x

    def fn(x):
        y = x * 2
        z = sometimes_itself(y)
        z.add_(1)
        return y + z

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), pytest.raises(OutputError, match="sometimes_itself"):
        compiled(rows(device))


def test_a_marked_function_whose_shape_differs_from_its_fake_is_named(device):
    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def one_row_less(x: Tensor) -> Tensor:
        return x[1:].clone()

    compiled = torch.compile(lambda x: one_row_less(x * 2).sum(0) + 1, backend="bcg")
    with torch.no_grad(), pytest.raises(OutputError, match="one_row_less"):
        compiled(rows(device))


def test_values_are_not_overwritten_while_a_later_segment_reads_them(device):
    """Many values live across many cuts: memory is taken again only where the plan allows it."""

    def fn(x):
        kept = []
        for k in range(8):
            x = plus_one(x * 1.5 + k)
            kept.append(x.relu() + k)
        return sum(kept), kept[2] * kept[5]

    compiled = check(fn, lambda i: (rows(device),), calls=6, replays=5)
    with torch.no_grad(), counted() as counts:
        compiled(rows(device))
    assert counts.captures == 0
