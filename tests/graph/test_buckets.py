"""Buckets: the ladder, which size is padded, what a call is padded to, what the graph allows."""

import functools
import gc
import weakref

import pytest
import sympy
import torch
from torch import nn
from torch._guards import TracingContext
from torch.fx.experimental import _config as symbolic

from torch_bcg.commands.models import build
from torch_bcg.frame import argument_names
from torch_bcg.graph.buckets import LADDER, RowDim, SizeGuards, find, row_dim
from torch_bcg.graph.facts import facts_of


def test_the_ladder_is_that_of_sglang():
    assert len(LADDER) == 42
    assert sorted(set(LADDER)) == list(LADDER)
    assert LADDER[:9] == (4, 8, 12, 16, 20, 24, 28, 32, 48)
    assert {256, 288, 512, 576, 1024, 1280} < set(LADDER)
    assert LADDER[-1] == 2048


# which size


def test_one_size_that_varies():
    sizes = {"w": ("64", "64"), "x": ("1", "s3", "64"), "mask": ("s3", "s3"), "y": ("2*s3",)}
    assert row_dim(sizes, {}, None) == RowDim("s3", "x", 1)


@pytest.mark.parametrize("sizes", [{}, {"x": ("4", "2*s0")}, {"x": ()}])
def test_no_size_varies(sizes):
    assert row_dim(sizes, {}, None) == "no size varies"


def test_the_batch_gives_way_to_the_tokens():
    sizes = {"ids": ("s0", "s1"), "hidden": ("s0", "s1", "64")}
    assert row_dim(sizes, {}, None) == RowDim("s1", "ids", 1)


def test_several_sizes_are_named():
    sizes = {"l_x_": ("s0", "s1"), "l_args_1_": ("s0",)}
    assert row_dim(sizes, {"l_x_": "x", "l_args_1_": "lengths"}, None) == (
        "several sizes vary: s0 is dim 0 of x and dim 0 of lengths, s1 is dim 1 of x; "
        "name one with bucket_dim"
    )


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("x", 0), RowDim("s0", "l_x_", 0)),
        (("x", 1), RowDim("s1", "l_x_", 1)),
        (("x", -2), RowDim("s1", "l_x_", 1)),
        (("l_x_", 1), RowDim("s1", "l_x_", 1)),
        (("y", 0), RowDim("s1", "y", 0)),
    ],
)
def test_a_size_by_name(wanted, found):
    sizes = {"l_x_": ("s0", "s1", "64"), "y": ("s1",)}
    assert row_dim(sizes, {"l_x_": "x"}, wanted) == found


VARY = "those that vary: s0 is dim 0 of x, s1 is dim 1 of x"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (("ids", 1), f"bucket_dim: no tensor argument is called ids; {VARY}"),
        (("x", 3), f"bucket_dim: x has 3 dims, not a dim 3; {VARY}"),
        (("x", -4), f"bucket_dim: x has 3 dims, not a dim -4; {VARY}"),
        (("x", 2), f"bucket_dim: dim 2 of x is 64, which is no size to vary; {VARY}"),
        (("y", 0), f"bucket_dim: dim 0 of y is 2*s0, which is no size to vary; {VARY}"),
    ],
)
def test_what_is_named_wrongly(wanted, reason):
    sizes = {"l_x_": ("s0", "s1", "64"), "y": ("2*s0",)}
    assert row_dim(sizes, {"l_x_": "x"}, wanted) == reason


def test_named_where_nothing_varies():
    assert row_dim({"x": ("4",)}, {}, ("x", 0)) == (
        "bucket_dim: dim 0 of x is 4, which is no size to vary; no size varies"
    )


# what the user calls a placeholder


def names_of(fn, *args, **kwargs):
    """The user's names of the tensor arguments of every graph, by placeholder."""
    found = []

    def backend(gm, example_inputs):
        names = argument_names(gm)
        places = {n.name for n in gm.graph.find_nodes(op="placeholder")}
        assert names.keys() == places
        nodes = facts_of(gm, example_inputs).nodes
        own = {n: names[n] for n in names if nodes[n].tensors and "parameters" not in n}
        found.append(own)
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=True)(*args, **kwargs)
    return found


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def checked(count, function):
    """A wrapper of a method with more in its closure than the method."""

    def check(args):
        assert len(args) < count

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        check(args)
        return function(self, *args, **kwargs)

    return wrapper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, ids, mask=None, *rest, **more):
        out = self.linear(ids)
        for x in (mask, *rest, *more.values()):
            out = out if x is None else out + x
        return out


class PassedOn(Net):
    forward = passed_on(passed_on(Net.forward))


class Checked(Net):
    forward = checked(9, Net.forward)


def rows():
    return torch.randn(5, 6)


@pytest.mark.parametrize("net", [Net, PassedOn, Checked])
def test_names_of_a_module(net):
    (by_place,) = names_of(net(), rows(), rows())
    assert list(by_place.values()) == ["ids", "mask"]
    torch._dynamo.reset()
    (by_name,) = names_of(net(), mask=rows(), ids=rows(), bias=rows())
    assert sorted(by_name.values()) == ["bias", "ids", "mask"]


def test_names_of_more_arguments_than_parameters():
    (names,) = names_of(Net(), rows(), rows(), rows())
    assert list(names.values()) == ["ids", "mask", "rest[0]"]


def test_names_of_a_module_of_torch():
    assert names_of(nn.Linear(6, 6), rows()) == [{"l_args_0_": "input"}]


def test_names_of_parts():
    (names,) = names_of(lambda batch, xs: batch["ids"][0] + xs[1], {"ids": [rows()]}, (1, rows()))
    assert list(names.values()) == ["batch['ids'][0]", "xs[1]"]


def test_names_of_a_wrapped_function():
    @passed_on
    def fn(ids, pair, *others):
        return ids + pair[0] + others[0]

    (names,) = names_of(fn, rows(), (rows(),), rows())
    assert list(names.values()) == ["ids", "pair[0]", "args[2]"]


def test_names_where_arguments_are_not_passed_on():
    def add(left, right):
        return left + right

    def fn(*xs):
        return add(xs[1], xs[0])

    (names,) = names_of(fn, rows(), rows())
    assert sorted(names.values()) == ["xs[0]", "xs[1]"]


def test_names_after_a_graph_break():
    def fn(a, b):
        c = a + b
        torch._dynamo.graph_break()
        return c * b

    assert [sorted(names.values()) for names in names_of(fn, rows(), rows())] == [
        ["a", "b"],
        ["b", "c"],
    ]


def test_no_names_outside_a_compilation():
    assert argument_names(torch.fx.symbolic_trace(lambda x: x + 1)) == {}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_tokens_of_a_model_of_transformers(name, keyword):
    pytest.importorskip("transformers")
    model, _ = build(name, 1, "cpu", 0)
    seen = []

    def backend(gm, example_inputs):
        nodes = facts_of(gm, example_inputs).nodes
        places = gm.graph.find_nodes(op="placeholder")
        sizes = {
            n.name: nodes[n.name].tensors[0].spec.size for n in places if nodes[n.name].tensors
        }
        names = argument_names(gm)
        seen.append([row_dim(sizes, names, wanted) for wanted in (None, ("input_ids", 1))])
        return gm.forward

    ids = torch.randint(0, 100, (1, 7))
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, dynamic=True)
        compiled(input_ids=ids) if keyword else compiled(ids)
    ((found, wanted),) = seen
    assert found == wanted
    assert wanted.dim == 1


# what a call is padded to


def anything(size):
    return True


@pytest.mark.parametrize(
    ("live", "found"),
    [
        (1, 4),
        (4, 4),
        (5, 8),
        (0, 4),
        (33, 64),
        (64, 64),
        (65, "max_padding"),
        (127, "max_padding"),
        (128, 256),
        (256, 256),
        (257, "above the ladder"),
    ],
)
def test_the_smallest_size_that_fits(live, found):
    assert find(live, (4, 8, 16, 32, 64, 256), 2.0, anything) == found


def test_padding_of_few_rows_is_no_matter():
    assert find(1, (32, 64), 1.0, anything) == 32
    assert find(33, (32, 64), 1.0, anything) == "max_padding"
    assert find(64, (32, 64), 1.0, anything) == 64


def test_a_size_that_the_graph_does_not_allow_is_passed_over():
    assert find(5, (8, 16, 32), 2.0, lambda size: size != 8) == 16
    assert find(60, (64, 128, 256), 2.0, lambda size: size > 128) == "max_padding"
    assert find(5, (8, 16, 32), 2.0, lambda size: False) == "guard"
    assert find(5, (), 2.0, anything) == "above the ladder"


# what the graph allows


class Graph:
    """The only graph of a function: its guards, and the sizes and names of its placeholders."""

    def __init__(self, fn, *args, **options):
        self.graphs = 0

        def backend(gm, example_inputs):
            self.graphs += 1
            if self.graphs == 1:
                self.look(gm, example_inputs)
            return gm.forward

        self.compiled = torch.compile(fn, backend=backend, fullgraph=True, **options)
        with torch.no_grad():
            self.compiled(*args)
        assert self.graphs == 1

    def look(self, gm, example_inputs):
        self.guards = SizeGuards(TracingContext.get().fake_mode.shape_env)
        nodes = facts_of(gm, example_inputs).nodes
        self.sizes = {
            n.name: nodes[n.name].tensors[0].spec.size
            for n in gm.graph.find_nodes(op="placeholder")
            if nodes[n.name].tensors
        }
        self.names = argument_names(gm)

    def rows(self, *wanted):
        return row_dim(self.sizes, self.names, wanted or None)

    def allows(self, *wanted):
        """The sizes up to 40 that are allowed for what is padded."""
        rows = self.rows(*wanted)
        return [n for n in range(41) if self.guards.allows({rows.symbol: n})]


def dynamic(*shape, dim=0, **limits):
    x = torch.randn(shape)
    torch._dynamo.mark_dynamic(x, dim, **limits)
    return x


def test_without_guards_all_but_0_and_1():
    graph = Graph(lambda x: x + 1, dynamic(13, 6))
    assert graph.allows() == list(range(2, 41))


def test_one_side_of_a_branch():
    def fn(x):
        if x.shape[0] < 16:
            return x + 1
        return x * 2

    graph = Graph(fn, torch.randn(13, 6), dynamic=True)
    assert graph.allows("x", 0) == list(range(2, 16))
    assert find(13, (16, 20), 2.0, lambda n: n in graph.allows("x", 0)) == "guard"
    torch._dynamo.reset()
    graph = Graph(fn, torch.randn(17, 6), dynamic=True)
    assert graph.allows("x", 0) == list(range(16, 41))


def test_multiples():
    graph = Graph(lambda x: x.view(4, -1) + 1, torch.randn(12), dynamic=True)
    assert graph.allows() == list(range(8, 41, 4))  # 4 would be a size of 1


LIMITED = {
    "divided": (lambda x: x.view(-1, 4, 3).sum(1) + 1, 12),
    "below": (lambda x: x + 1 if x.shape[0] < 16 else x * 2, 13),
    "odd": (lambda x: x + 1 if x.shape[0] % 2 else x * 2, 13),
    "between": (lambda x: x + 1 if 5 < x.shape[0] ** 2 // 4 < 50 else x * 2, 10),
    "other_than": (lambda x: x + 1 if x.shape[0] != 12 else x * 2, 13),
    "reversed": (lambda x: x[: x.shape[0] - 5] * 2, 13),
    "divides": (lambda x: x + 1 if 36 % x.shape[0] == 0 else x * 2, 12),
    "divides_by_0": (lambda x: x + 1 if 36 % (x.shape[0] // 4) == 0 else x * 2, 12),
}


@pytest.mark.parametrize(("fn", "size"), LIMITED.values(), ids=LIMITED)
def test_sizes_are_allowed_for_which_dynamo_makes_no_other_graph(fn, size):
    graph = Graph(fn, dynamic(size, 3), dynamic=True)
    allowed = graph.allows("x", 0)
    for n in (4, 5, 8, 11, 12, 13, 15, 16, 20):
        torch._dynamo.reset()
        graph = Graph(fn, dynamic(size, 3), dynamic=True)
        with torch.no_grad():
            try:
                graph.compiled(torch.randn(n, 3))
            except (RuntimeError, ZeroDivisionError):  # eager would raise as well
                assert n not in allowed
                continue
        assert (graph.graphs == 1) == (n in allowed), n


def test_what_the_author_checks():
    def fn(x):
        torch._check(x.shape[0] % 3 == 0)
        torch._check(x.shape[0] < 30)
        return x + 1

    assert Graph(fn, torch.randn(12), dynamic=True).allows() == list(range(3, 30, 3))


def test_limits_of_mark_dynamic():
    graph = Graph(lambda x: x + 1, dynamic(8, 6, min=4, max=24))
    assert graph.allows() == list(range(4, 25))


def test_inputs_that_share_a_symbol():
    graph = Graph(lambda x, y: (x + 1, y * 2), torch.randn(8, 6), torch.randn(8, 5), dynamic=True)
    rows = graph.rows("y", 0)
    assert rows == RowDim(graph.rows("x", 0).symbol, "l_y_", 0)
    assert graph.guards.allows({rows.symbol: 12})


def test_symbols_that_are_found_equal():
    def fn(x, y):
        y = y * 2 if y.shape[0] < 25 else y * 3
        x = x * 2 if x.shape[0] > 3 else x * 3
        return x + y

    with symbolic.patch(use_duck_shape=False):
        graph = Graph(fn, dynamic(8, 6), dynamic(8, 6))
    assert graph.allows("x", 0) == graph.allows("y", 0) == list(range(4, 25))


def test_a_symbol_that_is_twice_another():
    with symbolic.patch(use_duck_shape=False):
        graph = Graph(lambda x, y: torch.cat([x, x]) + y, dynamic(8), dynamic(16, min=10, max=40))
    assert graph.allows() == list(range(5, 21))


def test_a_guard_between_a_named_symbol_and_another_says_nothing():
    def fn(x, y):
        if x.shape[0] < y.shape[0]:
            return x + 1, y * 2
        return x * 2, y * 2

    with symbolic.patch(use_duck_shape=False):
        graph = Graph(fn, dynamic(8), dynamic(16))
    rows, other = graph.rows("x", 0).symbol, graph.rows("y", 0).symbol
    assert graph.guards.allows({rows: 40})
    assert not graph.guards.allows({rows: 40, other: 16})
    assert graph.guards.allows({rows: 15, other: 16})


def test_a_name_that_is_no_symbol_says_nothing():
    assert Graph(lambda x: x + 1, dynamic(8)).guards.allows({"nothing": 1})


def test_guards_are_read_late_and_the_rest_is_let_go():
    class Shapes:
        def __init__(self):
            self.guards, self.var_to_range, self.replacements = [], {}, {}

    class Guard:
        def __init__(self, expr):
            self.expr = expr

    shapes = Shapes()
    guards = SizeGuards(shapes)
    shapes.guards.append(Guard(sympy.Symbol("s0", integer=True) < 16))
    assert not guards.allows({"s0": 16})
    assert guards.allows({"s0": 15})
    gone = weakref.ref(shapes)
    del shapes
    gc.collect()
    assert gone() is None
