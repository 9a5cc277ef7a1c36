"""Every way to mark: functions, operators, torch functions, module classes, stretches of code."""

from enum import Enum

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate

import torch_bcg
from torch_bcg.errors import MarkError
from twin import assert_same, check, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


NOTED = []


@torch_bcg.eager_on_graph
def note(x: Tensor) -> None:
    NOTED.append(float(x[0, 0]))


@torch_bcg.eager_on_graph(True, fake=lambda x: torch.empty_like(x))
def positional(x: Tensor) -> Tensor:
    return x.sin()


@torch_bcg.eager_on_graph(name="torch_bcg_contract_ops::named", fake=lambda x: torch.empty_like(x))
def named(x: Tensor) -> Tensor:
    return x.sin()


@torch_bcg.eager_on_graph(enable=False)
def not_marked(x: Tensor) -> Tensor:
    return x.sin()


@torch_bcg.eager_on_graph
class Sine(nn.Module):
    def forward(self, x):
        return (x * 2).sin() / 1


class OtherSine(nn.Module):
    def forward(self, x):
        return (x * 2).sin() / 1


def by_module(module):
    return lambda x: module(x)


def annotated(x):
    with annotate({"bcg": "eager"}):
        y = x * 2
        return y.sin()


def cuts_of(fn, device, **options):
    """Checks `fn` and returns how many reasons to cut its plan holds."""
    compiled = check(fn, lambda i: (rows(device),), options=options)
    return sum(len(program.plan.reasons) for program in torch_bcg.programs(compiled))


FORMS = {
    "positional": positional,
    "named": named,
    "module_class": by_module(Sine()),
    "annotated": annotated,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_marked_form_is_a_cut(device, form):
    assert cuts_of(lambda x: form(x + 1) * 2, device) >= 1


def test_a_function_without_results_and_writes_runs_all_the_same(device):
    def fn(x):
        y = x * 2
        note(y)
        return y + 1

    NOTED.clear()
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for i in range(5):
            compiled(torch.full((4, 6), float(i), device=device))
    assert NOTED == [0, 2, 4, 6, 8]


def test_what_is_not_enabled_is_recorded(device):
    assert cuts_of(lambda x: not_marked(x + 1) * 2, device) == 0
    assert not_marked(torch.zeros(2)).tolist() == [0, 0]


MARKS = {
    "overload": (torch.ops.aten.cumsum.default, lambda x: x.cumsum(0)),
    "packet": (torch.ops.aten.cumsum, lambda x: x.cumsum(0)),
    "qualified_name": ("aten::cumsum", lambda x: torch.cumsum(x, 0)),
    "torch_function": (
        F.scaled_dot_product_attention,
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    ),
    "module_class": (OtherSine, by_module(OtherSine())),
}


@pytest.mark.parametrize(("mark", "use"), MARKS.values(), ids=MARKS)
def test_marks_for_one_compile(device, mark, use):
    def fn(x):
        return use(x + 1) * 2

    assert cuts_of(fn, device) == 0
    torch._dynamo.reset()  # programs are listed by code object, whatever the options
    assert cuts_of(fn, device, mark=[mark]) >= 1


def test_a_mark_made_and_removed_plans_live_programs_again(device):
    def fn(x):
        return (x * 2).cumsum(0) + 1

    compiled = torch.compile(fn, backend="bcg")

    def cuts(calls=3):
        with torch.no_grad():
            for _ in range(calls):
                x = rows(device)
                assert_same(compiled(x), fn(x))
        return len(torch_bcg.programs(compiled)[0].plan.reasons)

    assert cuts() == 0
    handle = torch_bcg.eager_on_graph(torch.ops.aten.cumsum)
    try:
        assert cuts() >= 1
    finally:
        handle.remove()
    assert cuts() == 0


def test_a_method_cannot_be_marked():
    class Model:
        @staticmethod
        def take_anything(x):
            return x

    with pytest.raises(MarkError, match="self"):

        @torch_bcg.eager_on_graph
        def method(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(MarkError, match="model"):

        @torch_bcg.eager_on_graph
        def takes_object(x: Tensor, model: Model) -> Tensor:
            return x

    with pytest.raises(MarkError):
        torch_bcg.eager_on_graph(Enum)


def test_outside_a_compiled_function_a_marked_one_is_itself(device):
    x = rows(device)
    out = torch.empty_like(x)
    assert double_into(x, out) is None
    assert_same(out, x * 2)
    assert_same(plus_one(x), x + 1)
