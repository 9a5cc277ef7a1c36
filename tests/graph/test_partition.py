"""Where a graph is cut, and that cutting changes no order."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.traceback import annotate

import torch_bcg
from graph.traced import planned, stretches
from torch_bcg.graph import modes
from torch_bcg.graph.facts import facts_of
from torch_bcg.graph.ir import Reason
from torch_bcg.graph.partition import partition
from torch_bcg.marking import Mark
from twin import double_into, plus_one


def rows(*shape):
    return torch.randn(shape or (4, 6))


def cut(fn, *args, eager=(), found=(), least=1):
    """A plain FX graph of ``fn``, cut at nodes by name; the nodes of each stretch, and its reasons."""
    gm = fx.symbolic_trace(fn)
    facts = facts_of(gm, args)

    def mark_of(node):
        return Mark("marked", "") if node.name in eager else None

    parts = partition(gm, facts, mark_of, {r.node: r for r in found}, least)
    shown = [([n.name for n in s.nodes], [r.kind for r in s.reasons]) for s in parts.stretches]
    return shown, parts


def test_no_cut_is_one_stretch():
    shown, _ = cut(lambda x: ((x + 1).relu() * 2)[1:], rows())
    assert shown == [(["add", "relu", "mul"], [])]


def test_adjacent_eager_nodes_join_and_views_belong_to_nobody():
    def fn(x):
        y = torch.sin(x[1:]).t()
        return torch.cos(y) * 2 + torch.tan(y)

    shown, _ = cut(fn, rows(), eager=("sin", "cos"))
    assert shown == [(["sin", "cos"], ["mark", "mark"]), (["mul", "tan", "add"], [])]


def test_the_order_of_in_place_operations_is_kept():
    """No stretch takes a node from behind a cut, however independent it looks."""

    def fn(x, y):
        x.add_(1)
        y.add_(2)
        torch.sin(x)
        x.mul_(3)
        y.mul_(4)
        torch.cos(y)
        x.sub_(5)
        y.sub_(6)
        return x, y

    shown, parts = cut(fn, rows(), rows(), eager=("sin", "cos"))
    assert [len(nodes) for nodes, _ in shown] == [2, 1, 2, 1, 2]
    nodes = [n for s in parts.stretches for n in s.nodes]
    order = list(nodes[0].graph.nodes)
    assert [order.index(n) for n in nodes] == sorted(order.index(n) for n in nodes)


def test_a_stretch_without_kernels_is_no_segment():
    def fn(x):
        y = torch.sin(x)
        out = torch.empty_like(y)
        z = torch.cos(y[1:])
        return out.copy_(x), z

    shown, parts = cut(fn, rows(), eager=("sin", "cos"))
    assert shown == [(["sin", "cos"], ["mark", "mark"]), (["copy_"], [])]
    assert [n.name for n in parts.scratch] == ["empty_like"]


@pytest.mark.parametrize("least", [1, 2, 3])
def test_few_kernels_are_not_worth_a_recording(least):
    shown, _ = cut(lambda x: torch.sin(x + 1) * 2 - 3, rows(), eager=("sin",), least=least)
    assert (
        shown
        == {
            1: [(["add"], []), (["sin"], ["mark"]), (["mul", "sub"], [])],
            2: [(["add", "sin"], ["few kernels", "mark"]), (["mul", "sub"], [])],
            3: [(["add", "sin", "mul", "sub"], ["few kernels", "mark", "few kernels"])],
        }[least]
    )


def test_what_the_probe_found_is_a_cut_and_a_mark_goes_first():
    reason = Reason("host read", "sin", detail="tolist")
    shown, parts = cut(lambda x: torch.sin(x + 1) * 2, rows(), found=[reason])
    assert shown == [(["add"], []), (["sin"], ["host read"]), (["mul"], [])]
    assert parts.stretches[1].reasons == [reason]
    shown, _ = cut(lambda x: torch.sin(x + 1) * 2, rows(), found=[reason], eager=("sin",))
    assert shown[1] == (["sin"], ["mark"])


def test_items_of_an_eager_result_stay_with_it():
    def fn(x):
        low, high = operator.getitem(torch.aminmax(x), 0), operator.getitem(torch.aminmax(x), 1)
        return low + high

    shown, _ = cut(fn, rows(), eager=("aminmax", "aminmax_1"))
    assert shown[0][0] == ["aminmax", "getitem", "aminmax_1", "getitem_1"]
    assert shown[1] == (["add"], [])


# Marks of each form, in Dynamo's graphs.


class Sine(nn.Module):
    def forward(self, x):
        return (x * 0.5).sin()


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.sine = Sine()

    def forward(self, x):
        return self.sine(x + 1) * 2


def annotated(x):
    y = x + 1
    with annotate({"bcg": "eager"}):
        y = (y * 0.5).sin()
    return y * 2


def attention(x):
    y = x[None] + 1
    return F.scaled_dot_product_attention(y, y, y) * 2


MARKS = {
    "function": (lambda x: plus_one(x + 1) * 2, [], 1),
    "out_function": (lambda x: double_into(x + 1, torch.empty_like(x)), [], 1),
    "operator": (lambda x: (x + 1).sin() * 2, [torch.ops.aten.sin], 1),
    "overload": (lambda x: (x + 1).sin() * 2, [torch.ops.aten.sin.default], 1),
    "name": (lambda x: (x + 1).sin() * 2, ["aten::sin"], 1),
    "torch_function": (attention, [F.scaled_dot_product_attention], 1),
    "class": (Around(), [Sine], 2),
    "annotation": (annotated, [], 2),
}


@pytest.mark.parametrize(("fn", "mark", "eager"), MARKS.values(), ids=MARKS)
def test_marks_of_each_form(fn, mark, eager):
    plan = planned(fn, rows(), options={"mark": mark}).plan
    kinds = [s.kind for s in plan.segments]
    assert kinds[:2] == ["graph", "eager"]
    assert len(plan.segments[1].nodes) == eager
    assert {r.kind for r in plan.reasons} == {"mark"}
    assert len(plan.reasons) == 1 or len({r.unit for r in plan.reasons}) == eager


def test_without_its_mark_none_of_them_is_cut():
    for fn in (MARKS["operator"][0], attention, Around()):
        torch._dynamo.reset()
        assert [s.kind for s in planned(fn, rows()).plan.segments] == ["graph"]


# Units that no cut divides, and modes.


def test_a_functorch_unit_is_not_divided():
    def fn(x):
        y = torch.vmap(lambda a: a.sin().cos() * 2)(x + 1)
        return y + 3

    (recorded,) = stretches(planned(fn, rows()).plan)
    assert recorded[0] == "graph"
    plan = planned(fn, rows(), options={"mark": [torch.ops.aten.cos]}).plan
    assert [s.kind for s in plan.segments] == ["graph", "eager", "graph"]
    assert {"sin", "cos"} <= set(plan.segments[1].nodes)
    assert any("increment" in n for n in plan.segments[1].nodes)
    assert any("decrement" in n for n in plan.segments[1].nodes)


def calls(code):
    return [n.name for n in code.graph.nodes if n.op.startswith("call")]


def test_modes_are_put_in_force_in_every_segment():
    """Enter and exit nodes lie in no segment; the code of each enters and leaves by itself."""

    def fn(x):
        y = x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = plus_one(y @ x)
            u = z @ x
        return u.float() @ x

    graph = planned(fn, rows(6, 6))
    assert [kind for kind, _ in stretches(graph.plan)] == ["graph", "eager", "graph"]
    assert not any("autocast" in n for _, nodes in stretches(graph.plan) for n in nodes)
    for segment in graph.plan.segments:
        needs = graph.lowering.needs(segment.nodes, set(segment.nodes), lambda n: True)
        taken = (*segment.inputs, *segment.carried)
        code = graph.lowering.lower("s", segment.nodes, needs.inside, taken, segment.outputs)
        entered = [n for n in calls(code) if "enter" in n]
        left = [n for n in calls(code) if "exit" in n]
        assert (len(entered), len(left)) == (1, 1)
        assert modes.has_modes(code.graph)


def test_gradient_modes_of_a_place():
    def fn(x):
        with torch.enable_grad():
            y = x + 1
            with torch.no_grad():
                z = y * 2
        return y, z, z - 3

    graph = planned(fn, rows())
    found = {n.name: m.settings for n, m in modes.modes_at(graph.gm.graph).items()}
    enabled = {name: [node.args[0] for _, node in settings] for name, settings in found.items()}
    assert [enabled[name] for name in ("y", "z", "sub")] == [[True], [False], [False]]


@torch_bcg.eager_on_graph
def tell(x: Tensor) -> None:
    """A marked function without results."""


def test_a_marked_function_without_results_keeps_its_place():
    def fn(x):
        y = x + 1
        tell(y)
        return y * 2

    assert [kind for kind, _ in stretches(planned(fn, rows()).plan)] == ["graph", "eager", "graph"]
