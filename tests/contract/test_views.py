"""Views made before a cut and written after it; eager operations that return their argument."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate

import torch_bcg
from torch_bcg.errors import OutputError
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


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


AROUND = {
    "from_the_start_of_the_storage": lambda x: x.as_strided((2, 3), (3, 1), 0) * 2,
    "larger": lambda x: x.as_strided((5, 6), (6, 1)) * 2,
    "of_a_view": lambda x: x[1:].t().as_strided((3, 2), (1, 5), 2) * 2 + x.sum(),
    "turned_in_place": lambda x: x[1:].as_strided_((2, 3), (3, 1), 0) * 2,
    "returned": lambda x: (x.as_strided((2, 3), (3, 1), 1), x[1:], x * 2),
    "written": lambda x: (x.as_strided((2, 3), (3, 1), 1).mul_(2), x.add_(1) * 2),
    "seen_by_marked": lambda x: plus_one(x.as_strided((2, 3), (3, 1), 0)) + (x * 2)[:2, :3],
    "beside_a_view_of_several": lambda x: (
        x.as_strided((2, 3), (3, 1), 1) + 1,
        torch.broadcast_tensors(x, x[0] * 2)[1] * 2,
    ),
}


@pytest.mark.parametrize("view", AROUND.values(), ids=AROUND)
def test_a_view_of_memory_around_an_argument(device, view):
    """A copy of the argument would not hold it, and the next call's lies elsewhere."""
    fn = lambda x, z: (view(x), plus_one(z * 2) * 3)  # noqa: E731
    check(fn, lambda i: (rows(device, 8, 6)[1 + i % 3 : 5 + i % 3], rows(device)))


INSIDE = {
    "windows": lambda x, m: x.as_strided((len(x) - 1, 2 * x.shape[1]), (x.shape[1], 1)) * 2,
    "of_a_result": lambda x, m: (x * 2).as_strided((2, 3), (3, 1), 1) * 2,
    "of_a_buffer": lambda x, m: m.table.as_strided((2, 3), (3, 1), 1) * 2,
}


@pytest.mark.parametrize("view", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_by_strides_of_memory_that_stays_is_recorded(device, view, dynamic):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", rows(device, 8, 6)[1:])

        def forward(self, x):
            return view(x, self) + 1

    module = Owner()
    compiled = torch.compile(module, backend="bcg", dynamic=dynamic)
    with torch.no_grad(), counted() as counts:
        for i in range(4):
            x = rows(device, 8, 6)[i : i + 4]
            assert_same(compiled(x), module(x))
    assert counts.recorded_kernels == counts.kernels > 0


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


# Conjugate and negative bits: a view has its own, memory of the program those of its value.

LAZY = {
    "conjugate": lambda d: torch.complex(rows(d), rows(d)).conj(),
    "negative": lambda d: torch.complex(rows(d), rows(d)).conj().imag,
}
LAZY_VIEWS = {
    "conj": lambda x: x.conj(),
    "adjoint": lambda x: x.adjoint(),
    "part": lambda x: x[:, 1:].conj(),
    "negative": lambda x: torch._neg_view(x),
    "negative_part": lambda x: torch._neg_view(x[1:]),
    "imaginary_part": lambda x: (x.conj().imag if x.is_complex() else x)[1:],
    "several": lambda x: (x.conj(), torch._neg_view(x), x[1:], x.t(), x),
}


@pytest.mark.parametrize("view", LAZY_VIEWS.values(), ids=LAZY_VIEWS)
@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
def test_a_returned_view_of_a_conjugate_or_negative_argument(device, lazy, view):
    def fn(x, y):
        found = view(x)
        first = found[0] if isinstance(found, tuple) else found
        return found, first * 2, x * 2, plus_one(y * 2) * 2

    check(fn, lambda i: (lazy(device), rows(device)))


@pytest.mark.parametrize("view", LAZY_VIEWS.values(), ids=LAZY_VIEWS)
@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
def test_a_returned_view_of_a_conjugate_or_negative_buffer(device, lazy, view):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", lazy(device))

        def forward(self, y):
            return view(self.table), plus_one(y * 2) * 2

    owner, twin = Owner(), Owner()
    twin.table.copy_(owner.table)
    check(owner, lambda i: (rows(device),), twin=twin)


@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
def test_what_is_resolved_before_its_argument_is_written(device, lazy):
    """Of a tensor with a lazy bit it is a copy, of one without any it is the tensor itself."""

    def fn(x, y):
        copies = [z.resolve_conj().resolve_neg() for z in (x, y)]
        x.mul_(2)
        y.mul_(3)
        return copies, plus_one(x) * 2, y + 1

    check(fn, lambda i: (lazy(device), lazy(device)))


@pytest.mark.parametrize("lazy", LAZY.values(), ids=LAZY)
def test_conjugate_and_negative_rows_are_padded(device, lazy):
    def fn(x, y):
        z = x + y
        return plus_one(x * 2) * 2, plus_one(y) * z

    def make(i):
        made = [lazy(device)[: 2 + i % 3] for _ in range(2)]
        for t in made:
            torch._dynamo.mark_dynamic(t, 0)
        return tuple(made)

    options = {"buckets": [4]}
    check(fn, make, calls=7, replays=range(3, 7), exact=False, options=options)


# What autograd is told of a returned view.

FOLLOWED = {
    "itself": lambda x: x,
    "view": lambda x: x[1:3].t(),
    "same_shape": lambda x: x.view_as(x),
    "detached": lambda x: x.detach(),
    "view_of_detached": lambda x: x.detach()[1:],
    "detached_view": lambda x: x.t().detach(),
    "data": lambda x: x.data[1:],
    "another_dtype": lambda x: x.view(torch.int32),
    "complex": lambda x: torch.view_as_complex(x.unflatten(1, (3, 2))),
    "back_from_another_dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "back_from_complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(1, (3, 2)))
    ),
    "unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, [6, 4]),
    "not_copied": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", FOLLOWED.values(), ids=FOLLOWED)
def test_autograd_sees_a_returned_view_as_in_eager(device, view, mode):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(rows(device))

        def forward(self, x, unread):
            y = plus_one(x * 2 + self.weight)
            return view(x), view(unread), view(self.weight), y * 2

    def seen(owner, args, outputs):
        given = (*args, owner.weight)
        for out, source in zip(outputs[:3], given, strict=True):
            yield out.requires_grad, out.grad_fn is None, out.is_leaf, out.is_inference()
            yield out is source, out._base is source, out._is_view()

    owner = Owner()
    compiled = torch.compile(owner, backend="bcg")
    with counted() as counts:
        for _ in range(4):
            args = [rows(device, requires_grad=True) for _ in range(2)]
            with mode():
                got, want = compiled(*args), owner(*args)
            assert_same(got, want)
            assert list(seen(owner, args, got)) == list(seen(owner, args, want))
    assert counts.replays == 3


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
