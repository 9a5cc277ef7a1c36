"""`explain`: once before any call, and again after calls."""

import torch

import torch_bcg
from report.shown import Layers, Untagged, called, explained
from torch_bcg.counters import counters
from torch_bcg.explain import Explanation, explain


def test_nothing_is_recorded_or_counted():
    with counters.expect(probes=0, captures=0, replays=0, eager_calls=0):
        explanation = explained(Layers(), torch.ones(4, 16))
    assert isinstance(explanation, Explanation)
    assert not explanation.probed
    assert [s.kind for s in explanation.plans[0].segments] == ["graph", "eager", "graph"]


def test_side_effects_happen_once():
    total = torch.zeros(())

    def f(x):
        total.add_(x.sum())
        return x + total

    with torch.inference_mode():
        explain(f)(torch.ones(2))
    assert total.item() == 2


def test_options_are_those_of_compile():
    def f(x):
        return torch.nn.functional.gelu(x + 1) + 1

    with torch.inference_mode():
        explanation = explain(f, {"mark": [torch.nn.functional.gelu]})(torch.ones(2))
    assert [r.kind for r in explanation.plans[0].reasons] == ["mark"]


def test_before_and_after_the_probe():
    before = explained(Untagged(), torch.ones(3))
    assert before.plans[0].reasons == ()
    assert "Not probed" in str(before)
    after = called(Untagged(), (torch.ones(3),))
    assert after.probed
    assert [r.kind for r in after.plans[0].reasons] == ["host read"]
    assert "\nProbed" in str(after)


def test_numbering_does_not_depend_on_what_was_compiled_before():
    texts = set()
    for _ in range(2):
        torch._dynamo.reset()
        texts.add(str(explained(Layers(), torch.ones(4, 16))))
    assert len(texts) == 1


def test_compiled_and_not_called():
    assert "No graph was planned" in str(explain(torch.compile(Layers(), backend="bcg")))


def test_the_compiled_function_works_on():
    compiled = torch.compile(Layers().eval(), backend="bcg")
    x = torch.ones(4, 16)
    with torch.inference_mode():
        expected = compiled(x)
        explain(compiled)
        with counters.expect(replays=1):
            assert torch.equal(compiled(x), expected)


def test_says_that_gradients_are_needed():
    explanation = explain(Layers())(torch.ones(4, 16))
    assert explanation.gradients == ("graph_0",)
    assert "gradients are needed" in str(explanation)
    assert "torch.inference_mode()" in str(explanation)


def test_only_the_graphs_of_what_was_asked():
    called(Layers(2), (torch.ones(4, 16),))
    (plan,) = called(Untagged(), (torch.ones(3),)).plans
    assert torch_bcg.stats().captures == 2
    assert len(plan.segments) == 3


def test_marks_that_were_met_are_not_listed():
    def fn(x):
        return torch.relu(x @ x) + 1

    with torch.no_grad():
        text = str(torch_bcg.explain(fn, {"mark": ["aten::relu", "aten::mm"]})(torch.ones(3, 3)))
    assert "met nothing" not in text  # a product of matrices dispatches to aten::mm
