"""What is true of nodes: what they write, read and launch; by tables."""

import pytest
import torch
import torch.nn.functional as F

from graph.traced import traced


def rows(*shape):
    return torch.randn(shape or (4, 6))


# Writes: by storage, from schemas, since version counters miss the first four.

WRITES = {
    "foreach_add_": (lambda x, y: torch._foreach_add_([x, y], 1), {"x", "y"}),
    "foreach_copy_": (lambda x, y: torch._foreach_copy_([x], [y]), {"x"}),
    "foreach_views": (lambda x, y: torch._foreach_mul_([x[0], y[1:]], 2), {"x", "y"}),
    "data": (lambda x, y: x.data.add_(1), {"x"}),
    "in_place": (lambda x, y: x.add_(y), {"x"}),
    "through_a_view": (lambda x, y: x.view(-1)[2:].mul_(2), {"x"}),
    "through_an_alias": (lambda x, y: x.contiguous().add_(1), {"x"}),
    "setitem": (lambda x, y: x.__setitem__(1, y[2]), {"x"}),
    "setitem_mask": (lambda x, y: x.__setitem__(y > 0, 0), {"x"}),
    "setitem_index": (lambda x, y: x.__setitem__(torch.tensor([0, 2]), 1), {"x"}),
    "out": (lambda x, y: torch.add(x, 1, out=y), {"y"}),
    "copy_": (lambda x, y: x.copy_(y[:1]), {"x"}),
    "index_add_": (lambda x, y: x.index_add_(0, torch.tensor([0]), y[:1]), {"x"}),
    "vmap": (lambda x, y: torch.vmap(lambda a, b: a.add_(b))(x, y), {"x"}),
    "intermediate": (lambda x, y: (x + 1).add_(y), {"add"}),
    "nothing": (lambda x, y: x.clone() + y, set()),
    "only_a_view": (lambda x, y: x.t()[1:], set()),
}


def run_and_return(fn):
    def run(x, y):
        fn(x, y)
        return x + 1, y + 1

    return run


def short(names):
    return {n.removeprefix("l_").removesuffix("_") for n in names}


@pytest.mark.parametrize(("fn", "expected"), WRITES.values(), ids=WRITES)
def test_writes(fn, expected):
    assert short(traced(run_and_return(fn), rows(), rows()).written()) == expected


def test_writes_of_library_operators():
    """Nothing but the schema tells of them."""
    with torch.library._scoped_library("facts_test", "FRAGMENT") as library:
        library.define("into(Tensor x, Tensor(a!) out) -> ()")
        library.define("into_each(Tensor x, Tensor(a!)[] outs) -> ()")
        for name in ("into", "into_each"):
            library.impl(name, lambda *a: None, "CompositeExplicitAutograd")
        ops = torch.ops.facts_test

        def fn(x, y, z):
            ops.into(x, y[1:])
            ops.into_each(x, [z[0], z])
            return x + 1

        one = traced(fn, rows(), rows(), rows())
    assert short(one.written()) == {"y", "z"}
    kernels = {name: n for name, n in one.facts.nodes.items() if n.kind == "kernel"}
    into, each, _ = kernels.values()
    storage = {short([name]).pop(): s for s, name in one.facts.origin.items()}
    assert (into.reads, into.writes) == ({storage["x"], storage["y"]}, {storage["y"]})
    assert (each.reads, each.writes) == ({storage["x"], storage["z"]}, {storage["z"]})


# Views read nothing, and what returns its argument is its argument.

VIEWS = {
    "select": lambda x: x[1],
    "slice": lambda x: x[1:3, ::2],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(3, 8),
    "unsafe_view": lambda x: torch.ops.aten._unsafe_view(x, (24,)),
    "expand": lambda x: x[None].expand(5, 4, 6),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2), 3),
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2),
    "view_of_dtype": lambda x: x.view(torch.int32),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "dropout_in_evaluation": lambda x: F.dropout(x, 0.5, training=False),
}


@pytest.mark.parametrize("fn", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_is_no_read(fn, dynamic):
    def around(x):
        return fn(x), x + 1

    one = traced(around, rows(), dynamic=dynamic)
    views = [n for n in one.facts.nodes.values() if n.kind == "view"]
    (storage,) = (s for s, name in one.facts.origin.items() if name == "l_x_")
    assert views
    assert one.kinds() == ["view"] * len(views) + ["kernel"]
    for n in views:
        assert (n.kernels, n.reads, n.writes) == (0, frozenset(), frozenset())
        assert {t.storage for t in n.tensors} == {storage}


UNCHANGED = ("contiguous", "to", "float", "dropout_in_evaluation")


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_its_argument(name):
    one = traced(lambda x: (VIEWS[name](x), x + 1), rows())
    found = {n.same_as for n in one.facts.nodes.values() if n.same_as}
    assert found == ({"l_x_"} if name in UNCHANGED else set())


def test_what_an_in_place_operation_returns_is_its_argument():
    nodes = traced(lambda x: x.add_(1).t().mul_(2) + 1, rows()).facts.nodes
    assert {name: n.same_as for name, n in nodes.items() if n.same_as} == {
        "add_": "l_x_",
        "mul_": "t",
    }


def test_the_same_calls_where_they_copy():
    for fn in (
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: x.t().reshape(-1),
    ):
        last = traced(fn, rows()).last()
        assert (last.kind, last.kernels, last.same_as) == ("kernel", 1, "")


KERNELS = {
    "one": (lambda x: x.relu(), 1),
    "two": (lambda x: x * 2 + 1, 2),
    "linear": (lambda x: F.linear(x, x), 1),  # the transpose in it is a view
    "in_place": (lambda x: x.clone().add_(1), 2),
    "allocation": (lambda x: torch.empty_like(x), 0),
    "filled_allocation": (lambda x: torch.zeros_like(x), 1),
    "views": (lambda x: x.t()[1:].unsqueeze(0), 0),
    "foreach": (lambda x: torch._foreach_add([x, x], 1), 1),
    "number": (lambda x: x.shape[0] * 2 + x.dim(), 0),
}


@pytest.mark.parametrize(("fn", "expected"), KERNELS.values(), ids=KERNELS)
def test_kernels_are_counted(fn, expected):
    one = traced(lambda x: (fn(x), x * x), rows())
    assert sum(n.kernels for n in one.facts.nodes.values()) == expected + 1


RANDOM = {
    "dropout": (lambda x: F.dropout(x, 0.5), True),
    "rand_like": (lambda x: torch.rand_like(x), True),
    "normal_": (lambda x: torch.empty_like(x).normal_(), True),
    "multinomial": (lambda x: torch.multinomial(x.abs(), 2), True),
    "dropout_in_evaluation": (lambda x: F.dropout(x, 0.5, training=False), False),
    "zeros_like": (lambda x: torch.zeros_like(x), False),
}


@pytest.mark.parametrize(("fn", "expected"), RANDOM.values(), ids=RANDOM)
def test_random_nodes(fn, expected):
    one = traced(lambda x: (fn(x), x + 1), rows())
    assert any(n.random for n in one.facts.nodes.values()) == expected
