"""What keeps nodes and graphs from being recorded, and symbols: facts about sizes and geometry."""

import pytest
import torch
from torch import fx
from torch.testing._internal.two_tensor import TwoTensor

from graph.traced import traced
from torch_bcg.graph.facts import facts_of


def rows(*shape):
    return torch.randn(shape or (4, 6))


# Causes of cuts.

CAUSES = {
    "nonzero": (lambda x: x.nonzero() * 2, ["data-dependent size"] * 2),
    "mask": (lambda x: x[x > 0].relu() + 1, ["data-dependent size"] * 3),
    "inherited": (lambda x: x.nonzero().sum(), ["data-dependent size"] * 2),
    "item": (lambda x: x * x.sum().item(), ["host read"]),
    "setitem_mask": (lambda x: x.clone().__setitem__(x > 0, 0), ["host read"]),
    "plain": (lambda x: x.softmax(-1) @ x.t(), []),
}


@pytest.mark.parametrize(("fn", "expected"), CAUSES.values(), ids=CAUSES)
def test_causes(fn, expected):
    captured = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(captured):
        one = traced(lambda x: (fn(x), x + 1), rows())
    found = [n.cause[0] for n in one.facts.nodes.values() if n.cause]
    assert found[: len(expected)] == expected
    assert bool(found) == bool(expected)


def test_tagged_operators_and_wrapper_subclasses():
    with torch.library._scoped_library("causes_test", "FRAGMENT") as library:
        library.define("tagged(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.impl("tagged", torch.clone, "CompositeExplicitAutograd")
        torch.library.register_fake("causes_test::tagged", torch.empty_like, lib=library)
        tagged = traced(torch.ops.causes_test.tagged, rows())
    assert tagged.last().cause == (
        "cudagraph_unsafe",
        "causes_test::tagged",
    )
    two = traced(lambda x: x + 1, TwoTensor(rows(), rows()))
    assert two.last().cause == ("special tensor", "TwoTensor")


GEOMETRIES = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "resize_": lambda x: x.resize_(2, 3),
    "set_": lambda x: x.set_(x[1:].clone()),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_name_that_means_other_memory_later(name):
    gm = fx.symbolic_trace(lambda x: (x * 2, GEOMETRIES[name](x)))
    facts = facts_of(gm, [rows()])
    assert facts.whole == ("changed geometry", name, name)
    assert facts.nodes[name].cause[0] == "no facts"
    assert 0 in facts.nodes[name].writes


def test_layouts_without_strides_and_failing_fakes():
    gm = fx.symbolic_trace(lambda x, y: (x.to_dense(), y.view(5)))
    facts = facts_of(gm, [rows().to_sparse(), rows()])
    assert facts.nodes["to_dense"].cause == ("special tensor", "sparse_coo layout")
    kind, why = facts.nodes["view"].cause
    assert (kind, "RuntimeError" in why or "ValueError" in why) == ("no facts", True)


# Symbols.


def test_symbols_without_a_new_guard():
    def fn(x, n):
        y = x[:, : x.shape[0]] * n
        z = torch.cat([y, y.t()])
        return z.view(-1, 2).softmax(-1), x.shape[0] * 2, torch.arange(n)

    one = traced(fn, rows(4, 6), 5, dynamic=True)
    facts = one.facts
    sizes = {t.spec.size[0] for n in facts.nodes.values() if n.kind == "input" for t in n.tensors}
    assert one.guards == 0
    assert sizes <= facts.key_symbols
    assert all(s in facts.key_symbols for n in facts.nodes.values() if n.tensors for s in n.symbols)


def test_unbacked_sizes_are_new_in_each_pass_and_no_key():
    def fn(x):
        index = x.nonzero()
        return x.flatten()[index[:, 0]] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        one = traced(fn, rows(), dynamic=True)
    assert one.guards == 0
    assert not any(s.startswith("u") for s in one.facts.key_symbols)
    assert any(t.unbacked for n in one.facts.nodes.values() for t in n.tensors)


def test_a_plain_fx_graph_needs_no_dynamo():
    gm = fx.symbolic_trace(lambda x, y: (x[1:].add_(y), x))
    facts = facts_of(gm, [rows(), rows(3, 6)])
    assert {facts.origin[s] for s in facts.written} == {"x"}
    spec = facts.nodes["getitem"].tensors[0].spec
    assert (spec.size, spec.stride, spec.offset) == (("3", "6"), ("6", "1"), "24")
    assert facts.key_symbols == frozenset()


def test_offsets_follow_the_tensor_that_made_the_storage():
    """A view of an input that itself starts midway in its storage."""
    facts = traced(lambda x: x[1, 2:] * 1, rows(9, 6)[2:5]).facts
    offsets = [t.spec.offset for n in facts.nodes.values() if n.kind == "view" for t in n.tensors]
    assert offsets[-1] == str(4 * (6 + 2))
