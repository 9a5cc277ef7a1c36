"""Marking, against the graphs Dynamo really makes: what is met, what is refused, who is called.

`marked` compiles a function and prints every node that computes with the mark it has.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.fx.traceback import annotate

from torch_bcg.errors import MarkError
from torch_bcg.marking import (
    Handle,
    Mark,
    eager_on_graph,
    generation,
    mark_of,
    plain_function,
    resolve,
)

if TYPE_CHECKING:
    from torch import Tensor


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def marking():
    """`eager_on_graph` for operators and torch functions, taken back after the test."""
    handles = []

    def mark(target):
        handles.append(eager_on_graph(target))
        return handles[-1]

    yield mark
    for handle in handles:
        handle.remove()


def graphs(fn, *args, **settings):
    """The graphs of one call, and its result."""
    seen = []

    def record(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    result = torch.compile(fn, backend=record, **settings)(*args)
    return seen, result


def marked(fn, *args, extra=(), owner=None, **settings):
    lines = []
    for gm in graphs(fn, *args, **settings)[0]:
        for node in gm.graph.nodes:
            mark = mark_of(node, [resolve(target) for target in extra], owner=owner)
            if mark is not None:
                lines.append(f"{node.name}: {mark.name} [{mark.unit}]")
            elif node.op.startswith("call_"):
                lines.append(f"{node.name}: -")
    return "\n".join(lines)


def targets(fn, *args):
    (gm,), _ = graphs(fn, *args, fullgraph=True)
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


X = torch.arange(12.0).view(3, 4)


# ---------------------------------------------------------------------------------------- functions


def test_decorated_function_writes_its_argument():
    @eager_on_graph(mutates_args=("out",), name="marking::write")
    def write(q: Tensor, out: Tensor, layer: int, scale: float = 2.0) -> None:
        out.copy_(q * scale + layer)

    def model(x):
        out = torch.empty_like(x)
        write(x.relu(), out, layer=3)
        return out + 1

    (gm,), result = graphs(model, X, fullgraph=True)
    torch.testing.assert_close(result, X * 2 + 3 + 1)
    (call,) = (node for node in gm.graph.nodes if node.target is torch.ops.marking.write.default)
    assert (str(call.args), call.kwargs) == ("(relu, out)", {"layer": 3})
    torch._dynamo.reset()
    assert_expected_inline(
        marked(model, X),
        """\
out: -
relu: -
write_default: marking::write [write_default]
add: -""",
    )


def test_decorated_function_returns_new_memory():
    @eager_on_graph(fake=lambda x: torch.empty_like(x), name="marking::route")
    def route(x: Tensor) -> Tensor:
        return x * 2

    _, result = graphs(lambda x: route(x) + 1, X, fullgraph=True)
    torch.testing.assert_close(result, X * 2 + 1)
    torch._dynamo.reset()
    assert_expected_inline(
        marked(lambda x: route(x) + 1, X),
        """\
route_default: marking::route [route_default]
add: -""",
    )


def test_without_parentheses():
    @eager_on_graph
    def touch(x: Tensor) -> None:
        pass

    assert marked(lambda x: (touch(x), x + 1)[1], X).count("[") == 1


def test_keywords_and_defaults_mean_the_same_inside_and_outside():
    @eager_on_graph(fake=lambda x, k, *, add: torch.empty_like(x), name="marking::affine")
    def affine(x: Tensor, k: int = 2, *, add: float = 0.5) -> Tensor:
        return x * k + add

    def model(x):
        return affine(x), affine(x, 3), affine(k=4, x=x), affine(x, add=1.0, k=5)

    _, inside = graphs(model, X, fullgraph=True)
    for a, b in zip(inside, model(X), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_outside_a_compiled_program_it_is_the_plain_function():
    @eager_on_graph(fake=torch.empty_like)
    def double(x: Tensor) -> Tensor:
        """Twice x."""
        calls.append(type(x))
        return x * 2

    calls = []
    x = X.clone().requires_grad_()
    double(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(X, 2.0))
    assert (double.__name__, double.__doc__, len(calls)) == ("double", "Twice x.", 1)
    with torch.overrides.BaseTorchFunctionMode(), NoOperators():
        double(X)


class NoOperators(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises if an operator of our own is dispatched."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert plain_function(func) is None
        return func(*args, **(kwargs or {}))


def test_the_operator_is_unsafe_for_other_backends_as_well():
    @eager_on_graph(name="marking::tagged")
    def tagged(x: Tensor) -> None:
        pass

    assert torch.Tag.cudagraph_unsafe in torch.ops.marking.tagged.default.tags


def test_the_plain_function_of_an_operator():
    def plain(x: Tensor) -> None:
        pass

    eager_on_graph(plain, name="marking::plain")
    packet = torch.ops.marking.plain
    assert plain_function(packet) is plain
    assert plain_function(packet.default) is plain
    for other in (plain, torch.ops.aten.sin, torch.ops.aten.sin.default, "sin", torch.sin, None):
        assert plain_function(other) is None


def test_dynamo_does_not_trace_into_the_function_behind_the_dispatcher():
    @eager_on_graph(name="marking::behind")
    def behind(x: Tensor) -> None:
        traced.append(torch.compiler.is_compiling())
        x + 1

    traced = []

    def outer(x):
        torch._dynamo.graph_break()
        return inner(x)

    @torch._dynamo.disable(recursive=False)
    def inner(x):
        torch.ops.marking.behind(x)
        return x

    seen, _ = graphs(outer, X)
    assert traced == [False]
    assert not [n for gm in seen for n in gm.graph.nodes if n.op == "call_function"]


def test_enable_false_leaves_the_function_alone():
    def route(x: Tensor) -> Tensor:
        return x * 2

    assert eager_on_graph(route, enable=False) is route
    assert eager_on_graph(enable=False)(route) is route
    assert eager_on_graph(False)(route) is route
    before = generation()
    eager_on_graph("aten::sin", enable=False).remove()
    assert "relu: -" in marked(lambda x: x.sin().relu(), X)
    assert generation() == before


def test_true_by_position():
    @eager_on_graph(True)
    def touch(x: Tensor) -> None:
        pass

    assert ":" in marked(lambda x: (touch(x), x)[1], X)


def test_marked_twice_is_marked_once():
    @eager_on_graph
    @eager_on_graph
    def touch(x: Tensor) -> None:
        pass

    assert eager_on_graph(touch) is touch
    assert len(targets(lambda x: (touch(x), x + 1)[1], X)) == 2
    assert resolve(touch).name == "torch_bcg::" + re.sub(
        r"\W+", "_", f"{touch.__module__}_{touch.__qualname__}"
    ).strip("_")


def test_a_function_of_a_package_named_like_torch_is_decorated():
    def scatter(x: Tensor) -> None: ...

    scatter.__module__ = "torch_geometric.utils"
    assert not isinstance(eager_on_graph(scatter), Handle)
    assert resolve(eager_on_graph(scatter)).name.startswith("torch_bcg::torch_geometric_utils_")


# --------------------------------------------------------------------------------- defined again


def define(source, **names):
    """Run the text of a notebook cell and return what it named `f`."""
    scope = {"torch": torch, "Tensor": torch.Tensor, "eager_on_graph": eager_on_graph, **names}
    exec(source, scope)
    return scope["f"]


CELL = """
@eager_on_graph(name="marking::cell", fake=lambda x: torch.empty_like(x))
def f(x: Tensor) -> Tensor:
    return x * {factor}
"""


def test_a_cell_run_again_replaces_the_function():
    space = {"f": define(CELL.format(factor=2))}

    def model(x):
        return space["f"](x) + 1

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), X * 2 + 1)
    before = generation()
    space["f"] = define(CELL.format(factor=5))
    torch.testing.assert_close(compiled(X), X * 5 + 1)
    torch.testing.assert_close(space["f"](X), X * 5)
    torch.testing.assert_close(torch.ops.marking.cell(X), X * 5)
    assert generation() > before
    assert plain_function(torch.ops.marking.cell)(X)[0, 1] == 5


def test_a_cell_may_change_the_signature():
    define(CELL.format(factor=2))
    f = define(
        "@eager_on_graph(name='marking::cell', mutates_args=['out'])\n"
        "def f(x: Tensor, out: Tensor) -> None: out.copy_(x)"
    )
    _, op, _ = targets(lambda x: (f(x, torch.empty_like(x)), x + 1)[1], X)
    assert str(op._schema) == "marking::cell(Tensor x, Tensor(a1!) out) -> ()"


def test_who_holds_the_replaced_function_keeps_it():
    cell = CELL.replace("::cell", "::kept")
    old = define(cell.format(factor=2))
    old_operator = torch.ops.marking.kept.default
    compiled = torch.compile(lambda x: old(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), X * 2 + 1)
    new = define(cell.format(factor=5))
    torch.testing.assert_close(old(X), X * 2)
    torch.testing.assert_close(compiled(X), X * 2 + 1)
    assert plain_function(old_operator) is None
    torch._dynamo.reset()
    assert_expected_inline(
        marked(lambda x: old(x) + new(x), X),
        """\
kept_1_default: marking::kept_1 [kept_1_default]
kept_default: marking::kept [kept_default]
add: -""",
    )


def test_closures_made_in_a_loop_stay_apart():
    def make(factor):
        @eager_on_graph(fake=lambda x: torch.empty_like(x))
        def scale(x: Tensor) -> Tensor:
            return x * factor

        return scale

    layers = [make(2), make(3), make(5)]
    _, (a, b, c) = graphs(lambda x: tuple(f(x) for f in layers), X, fullgraph=True)
    torch.testing.assert_close((a, b, c), (X * 2, X * 3, X * 5))
    ops = targets(lambda x: tuple(f(x) for f in layers), X)
    assert [plain_function(op)(X)[0, 1].item() for op in ops] == [2, 3, 5]


# -------------------------------------------------------------------- operators and torch functions

ALL_SPELLINGS = {
    "function": lambda x: torch.nonzero(x),
    "method": lambda x: x.nonzero(),
    "unbound": lambda x: torch.Tensor.nonzero(x),
    "packet": lambda x: torch.ops.aten.nonzero(x),
    "overload": lambda x: torch.ops.aten.nonzero.default(x),
}


@pytest.mark.parametrize("spelling", ALL_SPELLINGS)
@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten.nonzero,
        torch.ops.aten.nonzero.default,
        "aten::nonzero",
        "aten.nonzero",
        "aten::nonzero.default",
        "aten.nonzero.default",
        torch.nonzero,
        torch.Tensor.nonzero,
    ],
    ids=lambda target: (
        target if isinstance(target, str) else getattr(target, "__name__", str(target))
    ),
)
def test_one_operator_under_all_its_spellings(target, spelling):
    fn = ALL_SPELLINGS[spelling]
    assert "nonzero [" not in marked(fn, X, fullgraph=True)
    torch._dynamo.reset()
    assert re.search(
        r"nonzero(\.default)? \[nonzero", marked(fn, X, extra=[target], fullgraph=True)
    )


def test_attention_as_models_call_it(marking):
    marking(F.scaled_dot_product_attention)
    q = torch.randn(1, 2, 3, 4)
    assert_expected_inline(
        marked(lambda q: F.scaled_dot_product_attention(q.relu(), q, q) + 1, q),
        """\
relu: -
scaled_dot_product_attention: scaled_dot_product_attention [scaled_dot_product_attention]
add: -""",
    )


@pytest.mark.parametrize(
    ("target", "call"),
    [
        (torch.sort, lambda x: torch.sort(x)[0]),
        (torch.sort, lambda x: x.sort()[0]),
        (torch.Tensor.sort, lambda x: x.sort()[0]),
        (torch.Tensor.sort, lambda x: torch.sort(x)[0]),
        (torch.Tensor.split, lambda x: x.split(1)[0]),
        (F.layer_norm, lambda x: F.layer_norm(x, (4,))),
        (torch.ops.aten.layer_norm, lambda x: F.layer_norm(x, (4,))),
        (F.gelu, lambda x: F.gelu(x)),
        (F.softmax, lambda x: F.softmax(x, dim=-1)),
        (F.interpolate, lambda x: F.interpolate(x[None], scale_factor=2)),
        (F.max_pool1d, lambda x: F.max_pool1d(x, 2)),
        (torch.matmul, lambda x: x @ x.t()),
        ("aten::div", lambda x: x / 3),
        ("aten::add_", lambda x: x.add_(1)),
        (torch.linalg.norm, lambda x: torch.linalg.norm(x)),
        (torch.fft.fft, lambda x: torch.fft.fft(x)),
        (torch.einsum, lambda x: torch.einsum("ab,cb->ac", x, x)),
    ],
)
def test_torch_functions_as_dynamo_leaves_them(target, call):
    assert "[" not in marked(call, X.clone())
    torch._dynamo.reset()
    assert marked(call, X.clone(), extra=[target]).count("[") == 1


def test_a_torch_function_whose_name_says_no_operator():
    graph = torch.fx.Graph()
    node = graph.call_function(nn.init.zeros_, (graph.placeholder("x"),))
    assert mark_of(node, [resolve(nn.init.zeros_)]) == Mark("zeros_", "zeros_")
    assert mark_of(node, [resolve(nn.init.ones_)]) is None


def test_other_overloads_and_other_operators_are_left_alone():
    def model(x):
        return torch.ops.aten.add.Tensor(x, x), torch.ops.aten.add.Scalar(x, 1), x.relu_(), x.sub(1)

    assert_expected_inline(
        marked(model, X.clone(), extra=["aten::add.Scalar", "aten::relu"]),
        """\
add_tensor: -
add_scalar: aten::add.Scalar [add_scalar]
relu_: -
sub: -""",
    )


def test_where_the_name_leaves_the_overload_open_a_mark_holds():
    def model(x):
        return x + 1, torch.ops.aten.add(x, 1)

    assert marked(model, X, extra=["aten::add.Scalar"]).count("[") == 2


def test_sizes_are_computed_without_operators():
    def model(x):
        return x.reshape(x.shape[0] * 2, -1) * 2

    assert_expected_inline(
        marked(model, X, extra=["aten::mul"], dynamic=True),
        """\
mul: -
reshape: -
mul_1: aten::mul [mul_1]""",
    )


def test_operators_reached_under_another_name():
    (gm,), _ = graphs(lambda x: F.interpolate(x[None], scale_factor=2), X)
    node = next(n for n in gm.graph.nodes if n.name == "interpolate")
    inside = [torch.ops.aten.upsample_nearest1d.default]
    by_operator, by_function = resolve("aten::upsample_nearest1d"), resolve(torch.sin)
    assert mark_of(node, [by_operator]) is None
    assert mark_of(node, [by_operator], dispatched=inside) == Mark(
        "aten::upsample_nearest1d", "interpolate"
    )
    assert mark_of(node, [by_function], dispatched=[torch.ops.aten.sin.default]) is None


def test_custom_op_of_torch():
    @torch.library.custom_op("marking::theirs", mutates_args=())
    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    theirs.register_fake(torch.empty_like)
    assert eager_on_graph(theirs) is theirs
    assert_expected_inline(
        marked(lambda x: theirs(x) + 1, X),
        """\
theirs_default: marking::theirs [theirs_default]
add: -""",
    )
    torch.testing.assert_close(theirs(X), X)


def test_a_higher_order_operator_by_its_function_or_name():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 128, 16)

    for target in (flex_attention, torch.ops.higher_order.flex_attention):
        text = marked(lambda q: flex_attention(q, q, q), q, extra=[target])
        assert "flex_attention: " in text
        assert text.count("[") == 1
        torch._dynamo.reset()
    assert resolve("higher_order::flex_attention").operators == (
        ("higher_order::flex_attention", None),
    )


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_collective_takes_its_wait_along():
    want = (("_c10d_functional::all_reduce", None), ("_c10d_functional::wait_tensor", None))
    assert resolve(torch.distributed.all_reduce).operators == want
    assert resolve("_c10d_functional::all_reduce").operators == want
    assert resolve(torch.distributed.gather).operators != resolve(torch.gather).operators


def test_a_handle_takes_its_own_mark_back():
    first, second = eager_on_graph("aten::sin"), eager_on_graph(torch.sin)
    assert isinstance(first, Handle)

    def text():
        torch._dynamo.reset()
        return marked(lambda x: x.sin(), X)

    first.remove()
    assert "[" in text()
    first.remove()
    assert "[" in text()
    second.remove()
    assert text() == "sin: -"


def test_generation_grows_with_each_change():
    seen = [generation()]
    handle = eager_on_graph("aten::sin")
    seen.append(generation())
    handle.remove()
    seen.append(generation())

    @eager_on_graph
    def touch(x: Tensor) -> None:
        pass

    seen.append(generation())
    eager_on_graph(type("Block", (nn.Module,), {}))
    seen.append(generation())
    resolve("aten::sin")
    handle.remove()
    assert seen == sorted(set(seen))
    assert generation() == seen[-1]


# ------------------------------------------------------------------------------------------ modules


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x).relu()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()
        self.layers = nn.ModuleList([Experts(), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.experts(x) * 2
        x = self.experts(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_class_marks_each_call_of_it():
    assert_expected_inline(
        marked(Model(), X, extra=[Experts]),
        """\
linear: Experts [L['self'].experts]
relu: Experts [L['self'].experts]
x: -
linear_1: Experts [L['self'].experts@1]
x_1: Experts [L['self'].experts@1]
linear_2: Experts [L['self'].layers.0]
x_2: Experts [L['self'].layers.0]
x_3: -""",
    )


def test_a_module_inside_a_marked_one_belongs_to_it():
    assert_expected_inline(
        marked(Model(), X, extra=[nn.Linear, Experts, "aten::relu"]),
        """\
linear: Experts [L['self'].experts]
relu: Experts [L['self'].experts]
x: -
linear_1: Experts [L['self'].experts@1]
x_1: Experts [L['self'].experts@1]
linear_2: Experts [L['self'].layers.0]
x_2: Experts [L['self'].layers.0]
x_3: Linear [L['self'].layers.1]""",
    )


def test_subclasses_are_marked_too():
    class Special(Experts):
        pass

    model = Model()
    model.experts = Special()
    assert "linear: Experts" in marked(model, X, extra=[Experts])


def test_a_class_is_decorated():
    @eager_on_graph
    class Block(Experts):
        pass

    @eager_on_graph()
    class Other(Experts):
        pass

    assert isinstance(Block(), Experts)
    assert eager_on_graph(Block) is Block
    model = Model()
    model.experts, model.layers[0] = Block(), Other()
    assert_expected_inline(
        marked(model, X),
        """\
linear: Block [L['self'].experts]
relu: Block [L['self'].experts]
x: -
linear_1: Block [L['self'].experts@1]
x_1: Block [L['self'].experts@1]
linear_2: Other [L['self'].layers.0]
x_2: Other [L['self'].layers.0]
x_3: -""",
    )


def test_graphs_that_name_classes_by_text():
    class Special(Experts):
        pass

    graph = torch.fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    for cls, met in ((Experts, True), (Special, True), (nn.Linear, False)):
        text = f"{cls.__module__}.{cls.__qualname__}"
        node.meta["nn_module_stack"] = {"a": ("", nn.Module), "b": ("layers.0", text)}
        found = mark_of(node, [resolve(Experts)])
        assert found == (Mark("Experts", "layers.0") if met else None)


def test_the_compiled_module_itself_is_known_by_its_owner():
    assert "[" not in marked(Experts(), X, extra=[Experts]).splitlines()[-1]
    torch._dynamo.reset()
    assert_expected_inline(
        marked(Experts(), X, extra=[Experts], owner=Experts),
        """\
linear: Experts [self]
relu: Experts [self]""",
    )


# -------------------------------------------------------------------------------------- annotations


def test_an_annotated_stretch():
    def model(x):
        x = x.relu()
        with annotate({"bcg": "eager"}):
            x = x + 1
            with annotate({"stage": 0}):
                x = x * 2
        x = x.sin()
        with annotate({"bcg": "eager"}):
            x = x.cos()
        with annotate({"stage": 1}):
            return x.tan()

    assert_expected_inline(
        marked(model, X),
        """\
x: -
x_1: annotate [x_1]
x_2: annotate [x_1]
x_3: -
x_4: annotate [x_4]
tan: -""",
    )


def test_an_annotation_that_means_nothing():
    def model(x):
        with annotate({"bcg": "egaer"}):
            return x + 1

    (gm,), _ = graphs(model, X)
    (node,) = (node for node in gm.graph.nodes if node.name == "add")
    with pytest.raises(MarkError) as caught:
        mark_of(node)
    assert_expected_inline(
        str(caught.value),
        """\
An annotation for bcg has a value that means nothing.
  where: node add
  expected: torch.fx.traceback.annotate({"bcg": "eager"})
  found: 'egaer'
  to do: write "eager\"""",
    )


def test_placeholders_and_outputs_are_never_marked():
    (gm,), _ = graphs(lambda x: x + 1, X)
    for node in gm.graph.nodes:
        node.meta["custom"] = {"bcg": "eager"}
    assert [mark_of(node) is not None for node in gm.graph.nodes] == [False, True, False]


# ------------------------------------------------------------------------------------------ refused


def returns_tensor(x: Tensor) -> Tensor:
    return x


def no_annotation(x, y: int) -> None: ...


def no_return(x: Tensor): ...


def an_object(x: Tensor, metadata: dict) -> None: ...


def unknown_type(x: Tensor, metadata: Metadata) -> None: ...  # noqa: F821


def method(self, x: Tensor) -> None: ...


def many(*xs: Tensor) -> None: ...


def odd_return(x: Tensor) -> dict: ...


def writes(kv: Tensor, out: Tensor, n: int) -> None: ...


async def asynchronous(x: Tensor) -> None: ...


def generator(x: Tensor) -> None:
    yield x


REFUSED = {
    "no fake": lambda: eager_on_graph(returns_tensor),
    "fake takes less": lambda: eager_on_graph(returns_tensor, fake=lambda: None),
    "no annotation": lambda: eager_on_graph(no_annotation),
    "no return annotation": lambda: eager_on_graph(no_return),
    "object": lambda: eager_on_graph(an_object),
    "unknown type": lambda: eager_on_graph(unknown_type),
    "method": lambda: eager_on_graph(method),
    "varargs": lambda: eager_on_graph(many),
    "odd return": lambda: eager_on_graph(odd_return),
    "async": lambda: eager_on_graph(asynchronous),
    "generator": lambda: eager_on_graph(generator),
    "mutates unknown": lambda: eager_on_graph(writes, mutates_args="unknown"),
    "mutates text": lambda: eager_on_graph(writes, mutates_args="out"),
    "mutates nearest": lambda: eager_on_graph(writes, mutates_args=("outt",)),
    "mutates number": lambda: eager_on_graph(writes, mutates_args=("n",)),
    "name": lambda: eager_on_graph(writes, name="attention"),
    "name taken": lambda: eager_on_graph(writes, name="aten::sin"),
    "keywords of operator": lambda: eager_on_graph("aten::sin", name="my::sin"),
    "no operator": lambda: eager_on_graph("aten::nonzeros"),
    "no namespace": lambda: eager_on_graph("nonzero"),
    "no overload": lambda: eager_on_graph("aten::sort.stabel"),
    "no text": lambda: eager_on_graph(""),
    "module": lambda: eager_on_graph(nn.Linear(1, 1)),
    "bound method": lambda: eager_on_graph(nn.Linear(1, 1).forward),
    "other class": lambda: eager_on_graph(dict),
    "autograd function": lambda: eager_on_graph(torch.autograd.Function),
    "builtin": lambda: eager_on_graph(len),
    "partial": lambda: eager_on_graph(functools.partial(writes, n=1)),
    "number": lambda: eager_on_graph(7),
    "syntax": lambda: eager_on_graph(torch.Tensor.__getitem__),
    "undecorated": lambda: resolve(writes),
    "tensor": lambda: eager_on_graph(X),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    before = generation()
    with pytest.raises(MarkError) as caught:
        REFUSED[case]()
    assert generation() == before, "nothing was marked"
    assert all(vars(caught.value)[part] for part in ("what", "where", "expected", "found", "fix"))


def test_texts_of_refusals():
    texts = []
    for case, refused in REFUSED.items():
        with pytest.raises(MarkError) as caught:
            refused()
        texts.append(f"[{case}] {caught.value}")
    text = re.sub(r"\S*test_marking.py:\d+", "FILE:LINE", "\n".join(texts))
    assert_expected_inline(
        text,
        """\
[no fake] returns_tensor returns tensors, and nothing says of what shape.
  where: FILE:LINE
  expected: fake=, a function of the same arguments that returns empty tensors
  found: no fake
  to do: @eager_on_graph(fake=lambda x: torch.empty_like(x)),
    or write into an argument and return None
[fake takes less] The fake of returns_tensor does not take its arguments (too many positional arguments).
  where: FILE:LINE
  expected: fake(x)
  found: fake()
  to do: give the fake the same parameters in the same order
[no annotation] no_annotation does not say what 'x' is, so it cannot become an operator.
  where: FILE:LINE
  expected: an annotation for each argument
  found: 'x' without one
  to do: annotate it, as x: torch.Tensor
[no return annotation] no_return does not say that it returns tensors, so it cannot become an operator.
  where: FILE:LINE
  expected: -> None, Tensor, a number, or a tuple of them
  found: no annotation
  to do: annotate what it returns
[object] an_object takes 'metadata', which no operator can, so it cannot become an operator.
  where: FILE:LINE
  expected: tensors, numbers, strings, dtypes, devices, lists of them
  found: metadata: dict
  to do: pass tensors and numbers;
    read objects inside, by a global
[unknown type] unknown_type has an annotation that cannot be evaluated, so it cannot become an operator.
  where: FILE:LINE
  expected: types that its module knows when it runs
  found: name 'Metadata' is not defined
  to do: import the type outside of TYPE_CHECKING
[method] method is a method, so it cannot become an operator.
  where: FILE:LINE
  expected: tensors and numbers
  found: an argument 'self'
  to do: pass tensors and numbers;
    read objects inside, by a global
[varargs] many takes 'xs', which no operator can, so it cannot become an operator.
  where: FILE:LINE
  expected: tensors, numbers, strings, dtypes, devices, lists of them
  found: *xs: torch.Tensor
  to do: pass tensors and numbers;
    read objects inside, by a global
[odd return] odd_return does not say that it returns tensors, so it cannot become an operator.
  where: FILE:LINE
  expected: -> None, Tensor, a number, or a tuple of them
  found: dict
  to do: annotate what it returns
[async] asynchronous is async, so it cannot become an operator.
  where: FILE:LINE
  expected: a function that returns when its work is done
  found: async
  to do: mark what it calls
[generator] generator is a generator, so it cannot become an operator.
  where: FILE:LINE
  expected: a function that returns when its work is done
  found: a generator
  to do: mark what it calls
[mutates unknown] mutates_args of writes does not name what it writes.
  where: FILE:LINE
  expected: a tuple of names out of kv, out, n
  found: 'unknown'
  to do: name each argument that is written
[mutates text] mutates_args of writes does not name what it writes.
  where: FILE:LINE
  expected: a tuple of names out of kv, out, n
  found: 'out'
  to do: did you mean ('out',)?
[mutates nearest] mutates_args of writes does not name what it writes.
  where: FILE:LINE
  expected: a tuple of names out of kv, out, n
  found: ('outt',)
  to do: did you mean ('out',)?
[mutates number] writes writes 'n', which no operator can, so it cannot become an operator.
  where: FILE:LINE
  expected: tensors
  found: n: int
  to do: pass tensors and numbers;
    read objects inside, by a global
[name] 'attention' cannot be the name of an operator.
  where: FILE:LINE
  expected: "namespace::name", both of letters, digits and underscores
  found: 'attention'
  to do: name="my::writes"
[name taken] The operator aten::sin exists and was not made by eager_on_graph.
  where: FILE:LINE
  expected: a name of its own
  found: aten::sin
  to do: mark the operator itself, eager_on_graph("aten::sin"), or choose another name
[keywords of operator] 'aten::sin' has its schema already.
  where: eager_on_graph
  expected: mutates_args, fake and name with a plain function only
  found: 'aten::sin'
  to do: leave them out
[no operator] There is no operator 'aten::nonzeros'.
  where: eager_on_graph, or options={'mark': ...}
  expected: "namespace::name", or "namespace::name.overload"
  found: 'aten::nonzeros'
  to do: did you mean 'aten::nonzero'? If a module of yours defines it, import that first
[no namespace] There is no operator 'nonzero'.
  where: eager_on_graph, or options={'mark': ...}
  expected: "namespace::name", or "namespace::name.overload"
  found: 'nonzero'
  to do: did you mean 'aten::nonzero'? If a module of yours defines it, import that first
[no overload] There is no operator 'aten::sort.stabel'.
  where: eager_on_graph, or options={'mark': ...}
  expected: "namespace::name", or "namespace::name.overload"
  found: 'aten::sort.stabel'
  to do: did you mean 'aten::sort'? If a module of yours defines it, import that first
[no text] There is no operator ''.
  where: eager_on_graph, or options={'mark': ...}
  expected: "namespace::name", or "namespace::name.overload"
  found: ''
  to do: did you mean 'aten::t'? If a module of yours defines it, import that first
[module] Linear object cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type Linear
  to do: mark its class, Linear
[bound method] Linear.forward cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type method
  to do: mark the class of its module, or a function that takes tensors instead of self
[other class] dict cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: a class
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})
[autograd function] Function cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: a class
  to do: mark the operators it calls, or annotate the call
[builtin] len cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type builtin_function_or_method
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})
[partial] partial object cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type partial
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})
[number] 7 cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type int
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})
[syntax] TensorBase.__getitem__ cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type wrapper_descriptor
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})
[undecorated] writes cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type function
  to do: decorate it with @torch_bcg.eager_on_graph, and pass what that returns
[tensor] Tensor object cannot be marked.
  where: eager_on_graph, or options={'mark': ...}
  expected: a function, a torch function, an operator or its name, or a module class
  found: of type Tensor
  to do: wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})""",
    )
