"""Until when each value is needed, and which of them lie in one memory."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from graph.traced import planned
from torch_bcg.graph.ir import Plan
from twin import add_one_to, check, double_into, plus_one


def rows(*shape):
    return torch.randn(shape or (4, 6))


def dynamic(x, dim=0):
    torch._dynamo.mark_dynamic(x, dim)
    return x


def lives(plan):
    """Last segment of each value that has a place."""
    return {v.name: v.last for v in plan.values if v.spec is not None}


def sharing(plan):
    """Values and whose memory they lie in."""
    return {v.name: v.memory for v in plan.values if v.memory}


def apart(plan, home):
    """Number of memories for the values of one home."""
    return len({v.memory or v.name for v in plan.values if v.home == home})


@torch_bcg.eager_on_graph(mutates_args=("out",), name="lifetimes::turn_into")
def turn_into(x: Tensor, out: Tensor) -> None:
    """x from the last row to the first; wrong where out is x."""
    out.zero_()
    out.add_(x.flip(0))


class Layers(nn.Module):
    """A marked operation that fills a buffer in each of its layers."""

    def __init__(self, layers=6, width=6, between=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.between = between

    def forward(self, x):
        for layer in self.layers:
            out = torch.empty_like(x)
            turn_into(layer(x) if self.between else x, out)
            x = out
        return x * 2


def test_the_buffers_of_a_chain_lie_in_one_memory():
    """What a linear makes of one buffer is all that fills the next."""
    plan = planned(Layers(), rows()).plan
    assert [v.home for v in plan.values].count("scratch") == 6
    assert apart(plan, "scratch") == 1
    assert set(sharing(plan).values()) == {"out"}


def test_buffers_that_fill_each_other_lie_in_two():
    plan = planned(Layers(between=False), rows()).plan
    assert [s.kind for s in plan.segments] == ["eager", "graph"]
    assert apart(plan, "scratch") == 6  # one segment: all lives meet
    check(Layers(between=False), lambda i: (rows(),))

    def fn(x):
        for _ in range(6):
            out = torch.empty_like(x)
            turn_into(x, out)
            x = torch.relu(out) + out
            y = torch.empty_like(x)
            turn_into(out, y)
            x = x + y
        return x

    plan = planned(fn, rows()).plan
    assert [v.home for v in plan.values].count("scratch") == 12
    assert apart(plan, "scratch") == 2
    check(fn, lambda i: (rows(),))


def test_last_is_the_last_segment_that_has_to_do_with_a_value():
    def fn(x, unread):
        a = x * 2
        b = plus_one(a)
        c = b * a
        d = plus_one(c)
        return d * b, a.sum()

    plan = planned(fn, rows(), rows()).plan
    assert len(plan.segments) == 5
    b, d = (s.outputs[0] for s in plan.segments[1::2])
    expected = {"l_x_": 0, "a": 4, b: 4, "c": 3, d: 4, "mul_2": 5, "sum_1": 5}
    assert {n: i for n, i in lives(plan).items() if n in expected} == expected
    assert lives(plan).get("l_unread_", -1) == -1


def test_views_keep_their_base():
    def fn(x):
        a = x * 2
        row = a[1:]
        b = plus_one(x)
        c = b * 2
        d = plus_one(c)
        return d[1:] * row

    plan = planned(fn, rows()).plan
    assert lives(plan)["a"] == 4


def test_a_view_of_an_argument_keeps_it():
    def fn(x, y):
        z = plus_one(x * y)
        return plus_one(z * 2) * x[1:2]

    plan = planned(fn, rows(), rows()).plan
    assert (lives(plan)["l_x_"], lives(plan)["l_y_"]) == (4, 0)


def test_aliases_have_the_life_of_their_base():
    def fn(x):
        x.add_(1)
        z = plus_one(x)
        return x[1:], z * 2

    plan = planned(fn, rows()).plan
    (alias,) = (v for v in plan.values if v.home == "alias")
    assert alias.last == lives(plan)[alias.base] == len(plan.segments)
    assert not alias.memory


def two(second=torch.empty_like, first=None, between=lambda out: out * 2, then=None, last=None):
    """A function that fills one buffer, and from it another."""

    def fn(x):
        out, more = torch.empty_like(x), second(x)
        double_into(x, out)
        view = out[1:]
        if first is not None:
            first(out)
        y = between(out)
        double_into(y, more)
        if then is not None:
            then(more)
        return more * 2 if last is None else last(out, view, more)

    return fn


def test_two_buffers():
    assert apart(planned(two(), rows()).plan, "scratch") == 1


# name: a function whose second buffer does not lie in the memory of its first
APART = {
    "returned": two(last=lambda out, view, more: (more * 2, out)),
    "a view is returned": two(last=lambda out, view, more: (more * 2, view)),
    "a view is read": two(last=lambda out, view, more: more[1:] * view),
    "first written by a recorded segment": two(first=lambda out: out.mul_(2)),
    "second written by a recorded segment": two(then=lambda more: more[1].mul_(2)),
    "other sizes": two(lambda x: torch.empty_like(x[1:]), between=lambda out: out[1:] * 2),
    "other strides": two(lambda x: torch.empty_like(x.t()).t()),
    "other dtype": two(lambda x: torch.empty_like(x, dtype=torch.int32)),
}


@pytest.mark.parametrize("fn", APART.values(), ids=APART)
def test_what_does_not_share(fn):
    plan = planned(fn, rows()).plan
    assert sum(v.home == "scratch" for v in plan.values) == 2
    assert not sharing(plan)
    torch._dynamo.reset()
    check(fn, lambda i: (rows(),), options={"check": "poison"})


def test_bridges_share_too():
    def fn(x):
        return plus_one(plus_one(x) * 2) * 2

    plan = planned(fn, rows()).plan
    first, second = (v for v in plan.values if v.home == "bridge")
    assert (first.memory, second.memory) == ("", first.name)
    assert f"in the slot of {first.name}" in plan.render()
    check(fn, lambda i: (rows(),), options={"check": "poison"})


def test_a_buffer_that_an_eager_segment_writes_on_shares():
    """Only what recorded segments write has a padded tail that somebody else would find."""

    def fn(x):
        out, more = torch.empty_like(x), torch.empty_like(x)
        double_into(x, out)
        y = out * 2
        double_into(y, more)
        add_one_to(more)
        return more * 2

    assert apart(planned(fn, rows()).plan, "scratch") == 1


def test_arguments_keep_their_slots():
    """They are filled before the first segment, so no life of theirs is over by then."""

    def fn(x, y):
        z = plus_one(x * 2)
        return z + y, plus_one(z * 3) * 2

    plan = planned(fn, rows(), rows()).plan
    assert not [v for v in plan.values if v.home == "slot" and v.memory]


PLANS = {
    "chain": (Layers(), [rows()], {"buckets": "ladder"}),
    "copied": (
        lambda x: plus_one((x * 2).transpose(1, 2)) * 2,
        [dynamic(rows(2, 8, 4), 1)],
        {"buckets": [8, 16]},
    ),
    "tried": (
        lambda x, i: plus_one(x * 2)[i] + x,
        [dynamic(rows(8, 4)), dynamic(torch.arange(8))],
        {"buckets": [8], "pad": {"i": 3}},
    ),
    "refused": (lambda x: plus_one(x - x.mean(0)) * 2, [dynamic(rows(8, 4))], {"buckets": [8]}),
    "no size": (lambda x: plus_one(x) * 2, [rows(8, 4)], {"buckets": [8]}),
}


@pytest.mark.parametrize(("fn", "args", "options"), PLANS.values(), ids=PLANS)
def test_plans_go_through_json(fn, args, options):
    plan = planned(fn, *args, options=options).plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.render() == plan.render()
    assert plan.padding is not None
    assert dataclasses.replace(again, padding=None) != plan
