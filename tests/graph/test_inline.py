"""Rewrites before anything is found out about a graph."""

import copy
import operator

import pytest
import torch

import torch_bcg
from torch_bcg.graph.inline import inlined
from twin import check, plus_one


def graph_of(fn, *args):
    """The graph that Dynamo hands over, rewritten."""
    taken = []

    def backend(gm, example_inputs):
        taken.append(inlined(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return taken[0].graph


def written(x):
    x[[1], :2] = 0.0
    return x


INDICES = {
    "alone": (lambda x: x[[0, 2]], [[0, 2]]),
    "in a tuple": (lambda x: x[..., [-2], :], [[-2]]),
    "two": (lambda x: x[[0, 1], [2, -3]], [[0, 1], [2, -3]]),
    "written": (written, [[1]]),
}


@pytest.mark.parametrize(("fn", "lists"), INDICES.values(), ids=INDICES)
def test_a_list_of_numbers_as_an_index_becomes_a_tensor(device, fn, lists):
    x = torch.zeros(4, 6, device=device)
    graph = graph_of(fn, x)
    made = graph.find_nodes(op="call_function", target=torch.tensor)
    assert [list(n.args[0]) for n in made] == lists
    assert all(n.kwargs == {"device": x.device} for n in made)
    (indexed,) = (n for n in graph.nodes if n.target in (operator.getitem, operator.setitem))
    assert set(indexed.all_input_nodes) >= set(made)
    assert all(n.meta["stack_trace"] == indexed.meta["stack_trace"] for n in made)
    assert all("example_value" not in n.meta for n in made)


LEFT = {
    "slices": lambda x: x[1:, ..., None, 2],
    "an empty list": lambda x: x[[]],
    "a tensor": lambda x: x[torch.arange(2, device=x.device)],
}


@pytest.mark.parametrize("fn", LEFT.values(), ids=LEFT)
def test_any_other_index_stays(device, fn):
    graph = graph_of(fn, torch.zeros(4, 6, device=device))
    assert graph.find_nodes(op="call_function", target=torch.tensor) == []


@pytest.mark.cuda
def test_the_tensor_is_made_once_a_program():
    compiled = check(
        lambda x: plus_one(x[..., [-2], :] * 2) + x[[1, 0, 1, 2]],
        lambda i: (torch.randn(4, 6, device="cuda"),),
    )
    (plan,) = {p.plan for p in torch_bcg.programs(compiled)}
    assert [r.kind for r in plan.reasons] == ["mark"]
    assert len([v for v in plan.values if v.home == "constant"]) == 2


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_order_of_a_norm_that_nobody_takes(device, max_norm):
    """With ``dynamic=True`` the number is an argument, and would make the embedding eager."""
    table = torch.nn.Embedding(10, 8, max_norm=max_norm, norm_type=3.0, device=device)
    twin = copy.deepcopy(table)
    compiled = torch.compile(lambda i: plus_one(table(i) * 2) * 3, backend="bcg", dynamic=True)
    with torch.no_grad():
        for n in (4, 5, 6, 4, 5):
            i = torch.randint(10, (n,), device=device)
            assert torch.equal(compiled(i), (twin(i) * 2 + 1) * 3)
    reasons = [r.kind for p in torch_bcg.explain(compiled).plans for r in p.reasons]
    assert max_norm is not None or reasons == ["mark"]
