"""`explain`: once before any call, and again after calls."""

import pytest
import torch

import torch_bcg
from report.shown import Layers, Untagged, called, compiled_and_called, compiler, explained
from torch_bcg.counters import counters
from torch_bcg.errors import BCGWarning
from torch_bcg.explain import Explanation, explain
from torch_bcg.graph.lower import Fused
from torch_bcg.runtime import capture
from torch_bcg.runtime.recorders import recorder_for


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


def test_what_is_fused_is_known_of_the_programs_that_there_are():
    x = torch.ones(4, 16)
    compiled = compiled_and_called(Layers(2), (x,), (x,), inner=compiler())
    (fusings,) = explain(compiled).fusings.values()
    assert [f.fused for f in fusings] == [((0, 0), (2, 1), (4, 2))]
    assert [f.unfused for f in fusings] == [()]
    torch_bcg.reset(compiled)
    assert list(explain(compiled).fusings.values()) == [()]
    assert "known once a program is recorded" in str(explain(compiled))
    torch._dynamo.reset()
    assert list(called(Layers(2), (x,), (x,)).fusings.values()) == [None]


def test_what_cannot_be_recorded_is_unfused_in_that_program_alone(monkeypatch):
    """The same compilation is in the program of another size, where it was recorded."""
    full = []

    class Recorder:
        def __init__(self, *how):
            self.recorder = recorder_for(*how)

        def record(self, code, *rest):
            if full and isinstance(code, Fused):
                raise TypeError("not on this stream")
            return self.recorder.record(code, *rest)

    monkeypatch.setattr(capture, "recorder_for", Recorder)
    options = {"inner": compiler(), "buckets": [4, 8]}
    compiled = compiled_and_called(Layers(), (torch.ones(8, 16),), dynamic=True, **options)
    full.append(True)
    with torch.inference_mode(), pytest.warns(BCGWarning, match="not on this stream"):
        compiled(torch.ones(4, 16))
    text = str(explain(compiled))
    assert "2 of 2, by 2 compilations, in 1 program\n" in text
    assert "0 of 2, by 0 compilations, in 1 program\n" in text
    assert "unfused  0, 2: TypeError: not on this stream" in text


def test_instances_are_programs_of_one_graph():
    models, x = [Layers(2).eval() for _ in range(3)], torch.ones(4, 16)
    compiled = torch.compile(
        lambda model, x: model(x), backend="bcg", options={"inner": compiler()}
    )
    with torch.inference_mode():
        for model in models * 2:
            compiled(model, x)
    assert "3 of 3, by 3 compilations, in 3 programs\n" in str(explain(compiled))
