"""Modes of the caller: gradients, inference mode, training, the switch that records nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import torch_bcg
from torch_bcg.errors import BCGWarning, EagerCallError, MisfitError
from twin import assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def simple(x):
    return plus_one(x * 2) * 3


# Gradients and inference.


def test_inference_mode(device):
    check(simple, lambda i: (rows(device),), mode=torch.inference_mode)


def test_no_grad_and_inference_mode_in_turn(device):
    modes = (torch.no_grad, torch.inference_mode)

    def fn(x, cache):
        cache.add_(x)
        return simple(x) + cache

    compiled = torch.compile(fn, backend="bcg")
    caches = [torch.zeros(4, 6, device=device) for _ in range(2)]
    with counted() as counts:
        for i in range(8):
            with modes[i % 2]():
                x = rows(device)
                got, want = compiled(x, caches[0]), fn(x, caches[1])
                assert got.is_inference() == want.is_inference()
            assert_same(got, want)
            assert_same(*caches)
    assert (counts.replays, counts.num_eager) == (6, 0)


def test_inputs_made_in_inference_mode_under_no_grad(device):
    with torch.inference_mode():
        inputs = [rows(device) for _ in range(8)]
    compiled = torch.compile(simple, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            x = inputs[i] if i % 2 else inputs[i].clone()
            assert_same(compiled(x), simple(x))
    assert counts.replays >= 4


def test_calls_that_need_gradients_are_eager_calls_with_one_warning(device):
    model, twin = (nn.Linear(6, 6, device=device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(lambda m, x: plus_one(m(x)) * 3, backend="bcg")
    with counted() as counts, pytest.warns(BCGWarning, match="inference_mode") as caught:
        for _ in range(3):
            x = rows(device)
            compiled(model, x).pow(2).sum().backward()
            ((twin(x) + 1) * 3).pow(2).sum().backward()
    assert len(caught) == 1
    assert_same(model.weight.grad, twin.weight.grad)
    assert_same(model.bias.grad, twin.bias.grad)
    assert (counts.replays, counts.num_eager) == (0, 3)
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(model, x), (twin(x) + 1) * 3)
    assert counts.replays == 3


def test_gradients_reach_through_a_marked_function_with_an_out_argument(device):
    def fn(x, w):
        out = torch.empty_like(x)
        double_into(x @ w, out)
        return (out * x).sum()

    x, w = rows(device, 6, 6, requires_grad=True), rows(device, 6, 6, requires_grad=True)
    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    got = torch.autograd.grad(compiled(x, w), (x, w))
    assert_same(got, torch.autograd.grad((x @ w * 2 * x).sum(), (x, w)))


def test_eager_calls_can_be_errors(device):
    compiled = torch.compile(simple, backend="bcg", options={"on_eager_call": "error"})
    with torch.no_grad(), counted() as counts:
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), simple(x))
    assert counts.replays == 2
    with pytest.raises(EagerCallError):
        compiled(rows(device, requires_grad=True))


class Scaled(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("scale", torch.ones(6, device=device))

    def forward(self, x):
        return simple(x * self.scale).sin()


@pytest.mark.parametrize("dual", ["argument", "buffer"])
def test_tangents_are_followed_by_eager_calls_with_one_warning(device, dual):
    """Dynamo does not guard on levels: calls of one graph carry tangents or none, in turn."""
    model, twin = Scaled(device), Scaled(device)
    model.compile(backend="bcg")

    def tangent(module, fn, x):
        if dual == "argument":
            x = forward_ad.make_dual(x, torch.ones_like(x))
        else:
            module.scale.copy_(forward_ad.make_dual(module.scale.clone(), module.scale.clone()))
        return forward_ad.unpack_dual(fn(x)).tangent

    with torch.no_grad(), counted() as counts, pytest.warns(BCGWarning, match="tangents") as caught:
        for _ in range(4):
            x = rows(device)
            assert_same(model(x), twin(x))
            with forward_ad.dual_level():
                assert_same(model(x), twin(x))  # nothing carries a tangent
                assert_same(tangent(model, model, x), tangent(twin, twin, x))
    assert sum(w.category is BCGWarning for w in caught) == 1
    assert (counts.replays, counts.eager_calls) == (7, {"tangents": 4})
    (program,) = torch_bcg.programs(model)
    with torch.no_grad(), forward_ad.dual_level():
        x = rows(device)
        assert_same(program(x), (twin(x),))
        with pytest.raises(MisfitError, match="tangents"):
            tangent(model, program, x)


def test_a_first_call_with_tangents(device):
    compiled = torch.compile(simple, backend="bcg", options={"on_eager_call": "count"})
    with torch.no_grad(), counted() as counts:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(rows(device), rows(device))
            got, want = forward_ad.unpack_dual(compiled(x)), forward_ad.unpack_dual(simple(x))
            assert_same((*got,), (*want,))
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), simple(x))
    assert (counts.replays, counts.eager_calls) in (
        (2, {"tangents": 1}),
        (0, {}),  # Dynamo of 2.14 gives no backend a function that is first called so
    )


def test_gradients_switched_on_and_off_inside(device):
    def fn(x, w):
        y = plus_one(x @ w)
        with torch.enable_grad():
            z = y * w
        with torch.no_grad():
            u = z * 2
        return y, z, u

    w = rows(device, 6, 6, requires_grad=True)
    check(
        fn,
        lambda i: (rows(device, 6, 6), w),
        replays=range(4),
        eager_calls=None,
        options={"on_eager_call": "count"},
    )
    assert torch.is_grad_enabled()


# Random numbers, training.


def test_a_recorded_dropout_draws_anew_and_obeys_the_seed(device):
    def fn(x):
        return F.dropout(plus_one(x), 0.5, training=True) * 3

    compiled = torch.compile(fn, backend="bcg")
    x = torch.zeros(40, 50, device=device)
    with torch.no_grad(), counted() as counts:
        drawn = [compiled(x) for _ in range(5)]
        torch.manual_seed(7)
        first = compiled(x)
        torch.manual_seed(7)
        assert_same(compiled(x), first)
    assert counts.replays == 6
    for i, y in enumerate(drawn):
        assert set(y.unique().tolist()) == {0.0, 6.0}
        assert 0.4 < (y == 0).float().mean() < 0.6
        assert all(not torch.equal(y, other) for other in drawn[:i])


def test_train_and_eval_in_turn(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6, device=device)

        def forward(self, x):
            return plus_one(self.norm(x)) * 2

    model, twin = Model(), Model()
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            model.train(i % 2 == 0)
            twin.train(i % 2 == 0)
            x = rows(device)
            assert_same(compiled(x), twin(x))
            assert_same(model.state_dict(), twin.state_dict())
    assert counts.replays == 6


# Switches.


def test_execute_segments_runs_the_steps_of_a_program_unrecorded(device):
    with counted() as counts:
        check(simple, lambda i: (rows(device),), options={"execute": "segments"})
    assert counts.kernels > 0
    assert counts.recorded_kernels == 0


def test_execute_off_runs_the_graph_as_it_came(device):
    options = {"execute": "off", "on_eager_call": "count"}
    with counted() as counts:
        check(simple, lambda i: (rows(device),), replays=0, eager_calls=4, options=options)
    assert counts.captures == 0


def test_the_environment_switches_off_whatever_the_options_say(device, monkeypatch):
    monkeypatch.setenv("TORCH_BCG_EXECUTE", "off")
    check(
        simple,
        lambda i: (rows(device),),
        replays=0,
        eager_calls=None,
        options={"execute": "graphs", "on_eager_call": "count"},
    )
