"""Where every value lives, who copies what, and what is returned."""

import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import torch_bcg
from graph.traced import homes, planned
from report.shown import shown
from torch_bcg.graph.ir import Plan
from twin import add_one_to, double_into, plus_one

MARK = {"mark": [torch.ops.aten.cos]}


def rows(*shape):
    return torch.randn(shape or (4, 6))


@torch_bcg.eager_on_graph(fake=lambda x, cache: torch.empty_like(x))
def attend(x: Tensor, cache: Tensor) -> Tensor:
    """Reads two tensors, returns new memory."""
    return x + cache.sum()


@torch_bcg.eager_on_graph(fake=lambda x, n: torch.empty_like(x))
def times(x: Tensor, n: int) -> Tensor:
    """A number as it is."""
    return x * n


@torch_bcg.eager_on_graph(fake=lambda x: (torch.empty_like(x), torch.empty_like(x)))
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results."""
    return x + 1, x + 2


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x):
        self.counter.add_(1)
        return plus_one(self.linear(x))


def far_apart(x, y):
    u = torch.cos(x)
    v = plus_one(y * 2) * 3
    return attend(u, v)


def into_scratch(x):
    out = torch.empty_like(x)
    double_into(x, out)
    return plus_one(out)


# name: (function, arguments, some homes by a part of the name)
HOMES = {
    "slot": (lambda x: x + 1, [rows()], {"l_x_": "slot", "add": "recorded"}),
    "passed_on": (lambda x: plus_one(x), [rows()], {"l_x_": "reference", "plus_one": "fresh"}),
    "bridge": (lambda x: plus_one(x) * 2, [rows()], {"l_x_": "reference", "plus_one": "bridge"}),
    "eager_to_eager": (
        far_apart,
        [rows(), rows()],
        {"l_x_": "reference", "l_y_": "slot", "u": "fresh", "plus_one": "bridge", "v": "recorded"},
    ),
    "static": (
        Buffered(),
        [rows()],
        {"weight": "static", "counter": "static", "plus_one": "fresh"},
    ),
    "scratch": (into_scratch, [rows()], {"out": "scratch", "l_x_": "reference"}),
    "read_by_both": (lambda x: plus_one(x) + x, [rows()], {"l_x_": "slot"}),
    "read_through_a_view": (lambda x: plus_one(x[1]) + x[2], [rows()], {"l_x_": "slot"}),
    "written_by_eager": (
        lambda x, y: (add_one_to(x), y * 2),
        [rows(), rows()],
        {"l_x_": "reference", "l_y_": "slot"},
    ),
    "returned_view": (lambda x: (x.add_(1), x[1:]), [rows()], {"l_x_": "slot", "getitem": "alias"}),
    "size": (lambda x, n: plus_one(x) + torch.arange(n).sum(), [rows(), 5], {"l_n_": "size"}),
    "number": (lambda x, n: plus_one(x) * n, [rows(), 3], {"l_n_": "number"}),
    "number_to_eager": (lambda x, n: times(x, n), [rows(), 3], {"l_n_": "number"}),
}


@pytest.mark.parametrize(("fn", "args", "expected"), HOMES.values(), ids=HOMES)
def test_homes(fn, args, expected):
    plan = planned(fn, *args, options=MARK, dynamic=True).plan
    found = homes(plan)
    for part, home in expected.items():
        places = {h for n, h in found.items() if n == part or (len(part) > 2 and part in n)}
        assert (part, places) == (part, {home})
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).render() == plan.render()


def test_a_view_before_a_marked_operation_copies_nothing():
    """Only the storages that recorded kernels touch are copied; a view touches nothing."""

    def fn(x, cache):
        return attend(x * 2, cache[1].view(-1)) * 3

    plan = planned(fn, rows(), rows(50, 60)).plan
    assert homes(plan)["l_cache_"] == "reference"
    first, _, last = plan.segments
    assert not any("cache" in n for n in (*first.inputs, *first.outputs, *last.inputs))


def test_homes_are_decided_for_the_storage_not_the_view():
    """One recorded read of one view: every reader, eager ones too, reads the slot."""

    def fn(x, cache):
        y = attend(x, cache[0])
        z = attend(y, cache[1])
        return z + cache[2].sum()

    plan = planned(fn, rows(), rows(5, 6)).plan
    assert homes(plan)["l_cache_"] == "slot"
    assert all(not s.carried or s.carried == ("l_x_",) for s in plan.segments[:1])


def test_copies_back_stand_with_the_segments_that_write():
    def fn(x, a, b, c):
        a.add_(x)
        y = plus_one(x)
        b.mul_(2)
        a[1].sub_(y[1])
        z = plus_one(y)
        c.view(-1).copy_(z.view(-1))
        add_one_to(b)
        return z * 2 + b

    plan = planned(fn, rows(), rows(), rows(), rows()).plan
    back = [(s.kind, s.copy_back) for s in plan.segments]
    assert back == [
        ("graph", ("l_a_",)),
        ("eager", ()),
        ("graph", ("l_a_", "l_b_")),
        ("eager", ()),
        ("graph", ("l_c_",)),
        ("eager", ("l_b_",)),
        ("graph", ()),
    ]


def test_only_what_others_read_leaves_a_segment():
    def fn(x):
        kept = x * 2
        inner = (kept + 1).relu()
        return plus_one(inner), kept

    plan = planned(fn, rows()).plan
    assert [s.outputs for s in plan.segments] == [("kept", "inner"), (plan.segments[1].nodes[0],)]


OUTPUTS = {
    "recorded": (lambda x: x * 2, ["clone"]),
    "eager": (lambda x: plus_one(x * 2), ["carried"]),
    "view_of_input": (lambda x: (x[1], x * 2), ["view", "clone"]),
    "view_of_recorded": (lambda x: (x * 2).t(), ["clone"]),
    "in_place": (lambda x: x.add_(1), ["view"]),
    "literal": (lambda x: (x * 2, None), ["clone"]),
}


@pytest.mark.parametrize(("fn", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_outputs(fn, expected):
    assert [o.how for o in planned(fn, rows()).plan.outputs] == expected


def test_what_an_eager_operation_returns_twice_has_one_home_a_storage():
    def fn(x):
        y, z = pair(x)
        return y * 2 + z, z

    plan = planned(fn, rows()).plan
    bridged = [v for v in plan.values if v.home == "bridge"]
    assert len(bridged) == len({v.storage for v in bridged}) == 2
    assert [s.kind for s in plan.segments] == ["eager", "graph"]


def test_render():
    def fn(x, cache):
        cache[0].add_(x)
        out = torch.empty_like(x)
        double_into(x, out)
        return attend(out, cache) * 2, cache[1], out

    assert_expected_inline(
        shown(planned(fn, rows(), rows(3, 4, 6)).plan.render()),
        """\
plan graph_N on cpu: 2 of 4 kernels recorded, in 2 segments; 1 eager

arguments: 2
  l_cache_  slot  f32[3, 4, 6]  288 bytes  copied in, and back where written
  l_x_      slot  f32[4, 6]     96 bytes   copied in

values: 4
  out                                   scratch   f32[4, 6]  96 bytes  allocated once a program, written
  tests_graph_test_plan_attend_default  bridge    f32[4, 6]  96 bytes  copied into its slot after the eager segment
  mul                                   recorded  f32[4, 6]  96 bytes  memory of a recorded segment
  getitem_1                             alias     f32[4, 6]  96 bytes  view of l_cache_

segments: 3
  0 graph, 1 kernel
      nodes       add_
      reads       l_x_ (slot), l_cache_ (slot)
      copies back l_cache_
  1 eager, 2 kernels
      reason      mark: torch_bcg::twin_double_into (twin_double_into_default, FILE:LINE)
      reason      mark: torch_bcg::tests_graph_test_plan_attend (tests_graph_test_plan_attend_default, FILE:LINE)
      nodes       twin_double_into_default, tests_graph_test_plan_attend_default
      reads       l_cache_ (slot), l_x_ (slot), out (scratch)
      makes       tests_graph_test_plan_attend_default f32[4, 6] (bridge)
      crosses     96 bytes: tests_graph_test_plan_attend_default
  2 graph, 1 kernel
      nodes       mul
      reads       tests_graph_test_plan_attend_default (bridge)
      makes       mul f32[4, 6] (recorded)

outputs: 3
  0  mul        f32[4, 6]  the caller's own copy
  1  getitem_1  f32[4, 6]  a view of l_cache_
  2  out        f32[4, 6]  the caller's own copy
""",
    )


def test_the_same_function_gives_the_same_plan():
    first = planned(far_apart, rows(), rows()).plan
    torch._dynamo.reset()
    second = planned(far_apart, rows(), rows()).plan
    assert first.name != second.name
    assert dataclasses.replace(first, name="") == dataclasses.replace(second, name="")
