"""A program called directly, past Dynamo: what Dynamo would have noticed is noticed, or said.

Each test changes one thing between calls that a guard of Dynamo's looks at.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import torch_bcg
import torch_bcg.compiled
from torch_bcg import frame, sources
from torch_bcg.errors import BCGWarning, BindingError, MisfitError
from twin import assert_same, counted, plus_one


def rows(device, n=4):
    return torch.randn(n, 6, device=device)


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, device=device) for _ in range(2))
        self.register_buffer("scale", torch.randn(6, device=device))
        self.tied = self.first
        self.shift, self.also = 0.5, True

    def forward(self, x):
        x = self.tied(self.second(plus_one(self.first(x)))) * self.scale
        return x + self.shift if self.also else x


@pytest.fixture(params=["compiled", "its forward", "in place"])
def called(request, device):
    """(model, compiled, its program) after three calls."""
    model = Model(device)
    if request.param == "in place":
        model.compile(backend="bcg")
        compiled = model
    else:
        whole = request.param == "compiled"
        compiled = torch.compile(model if whole else model.forward, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
    (program,) = torch_bcg.programs(compiled)
    return model, compiled, program


def new(linear):
    return nn.Parameter(torch.randn_like(linear.weight))


def set_weight(model):
    model.second.weight = new(model.second)


def set_weight_of_the_first_segment(model):
    model.first.weight = new(model.first)


def set_weight_behind_the_module(model):
    model.second._parameters["weight"] = new(model.second)


def set_buffer(model):
    model.scale = torch.randn_like(model.scale)


def set_module(model):
    model.second = copy.deepcopy(model.second)


def set_tied_module(model):
    model.tied = copy.deepcopy(model.first)


def assign_state(model):
    state = {name: torch.randn_like(x) for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def set_data(model):
    model.second.weight.data = torch.randn_like(model.second.weight)


def set_strides(model):
    """At the address it had, of the sizes it had."""
    model.second.weight.data = model.second.weight.data.t()


def transpose_in_place(model):
    model.second.weight.t_()


def set_sizes(model):
    model.scale.data = model.scale.data[:1]


def set_dtype(model):
    model.scale.data = model.scale.data.view(torch.int32)


def ask_for_gradients(model):
    model.second.weight.requires_grad_(not model.second.weight.requires_grad)


def set_number(model):
    model.shift = 1.5


def set_truth(model):
    model.also = False


CHANGES = (
    set_number, set_truth, set_weight, set_weight_of_the_first_segment, set_weight_behind_the_module, set_buffer,
    set_module, set_tied_module, assign_state, set_data, set_strides, transpose_in_place, set_sizes,
    ask_for_gradients,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_a_module_is_given_since(called, device, change):
    """The old tensors are alive, kept by whoever likes to, and not the module's any more."""
    model, compiled, program = called
    old = [*model.parameters(), *model.buffers()]
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(program(x), (Model.forward(plain, x),))
        change(model)
        for _ in range(3):
            with pytest.raises(MisfitError, match=r"moved or gone|something else") as e:
                program(rows(device))
            assert e.value.program is program
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BCGWarning)
            for _ in range(3):
                x = rows(device)
                assert_same(compiled(x), Model.forward(model, x))
        if change is not set_number:  # which Dynamo takes for an argument from now on
            x = rows(device)
            assert_same(torch_bcg.programs(compiled)[0](x), (Model.forward(model, x),))
    assert old


def test_what_is_written_in_place_is_no_change(called, device):
    model, _, program = called
    with torch.no_grad():
        for i in range(3):
            for x in model.state_dict().values():
                x.copy_(torch.randn_like(x))
            model.train(i % 2 == 0)
            x = rows(device)
            assert_same(program(x), (Model.forward(model, x),))


def test_a_program_of_another_instance(device):
    """All instances of a class are listed; a program is called for the module that has its tensors."""
    mine, other = Model(device), Model(device)
    other.first = mine.first
    compiled = [torch.compile(m, backend="bcg") for m in (mine, other)]
    with torch.no_grad():
        for one in (*compiled, compiled[0]):
            for _ in range(2):
                one(rows(device))
        x = rows(device)
        for one, model in zip(compiled, (mine, other), strict=True):
            programs = torch_bcg.programs(one)
            own = [p for p in programs if answers(p, x)]
            assert 0 < len(own) < len(programs)
            assert_same([p(x) for p in own], [(Model.forward(model, x),)] * len(own))


def answers(program, x):
    with contextlib.suppress(MisfitError):
        return program(x)
    return None


def test_a_handle_taken_after_a_change(called, device):
    """The program is not the module's, whenever that was found out."""
    model, compiled, _ = called
    old, model.second.weight = model.second.weight, new(model.second)
    (program,) = torch_bcg.programs(compiled)
    with torch.no_grad(), pytest.raises(MisfitError, match="weight"):
        program(rows(device))
    model.second.weight = old
    model.first, model.second = model.second, model.first  # all of them are there, in other places
    (program,) = torch_bcg.programs(compiled)
    with torch.no_grad(), pytest.raises(MisfitError, match="weight"):
        program(rows(device))


@pytest.mark.parametrize("change", [set_strides, set_sizes, set_data, set_dtype])
def test_tensors_that_are_other_ones_before_a_handle_is_called(called, device, change):
    model, compiled, _ = called
    (program,) = torch_bcg.programs(compiled)
    change(model)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(MisfitError, match=r"weight|scale|moved or gone"):
            program(rows(device))


class Varied(nn.Module):
    """Has what a trace looks into besides tensors."""

    slope = 2.0

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False, device=device) for _ in range(2))
        self.register_buffer("offset", None)
        self.last = None
        self.factors, self.names = [2.0, 3.0], {"a": 1.5}
        self.config = dataclasses.make_dataclass("Config", ["eps", "device"])(0.5, device)
        self.ids = {3, 5}
        self.register_buffer("unsaved", torch.ones(6, device=device), persistent=False)
        self.deep = {"a": {"b": 0.25}, "c": [[torch.randn(6, device=device)]]}

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = plus_one(x) * self.factors[1] + self.names["a"] + self.config.eps * self.slope
        x = x * self.deep["a"]["b"] + self.deep["c"][0][0] * self.unsaved
        x = x + 1 if 4 in self.ids else x
        if self.offset is not None:
            x = x + self.offset
        if hasattr(self, "extra"):
            x = x + 1
        return x if self.last is None else self.last(x)


VARIED = {
    "grown": lambda m, d: m.layers.append(nn.Linear(6, 6, device=d)),
    "shrunk": lambda m, d: m.layers.__delitem__(0),
    "swapped": lambda m, d: m.layers.__setitem__(0, m.layers[1]),
    "bias": lambda m, d: setattr(m.layers[0], "bias", nn.Parameter(rows(d, 1)[0])),
    "buffer": lambda m, d: setattr(m, "offset", rows(d)),
    "module": lambda m, d: setattr(m, "last", nn.Linear(6, 6, device=d)),
    "list": lambda m, d: m.factors.__setitem__(1, 4.0),
    "dict": lambda m, d: m.names.update(a=2.5),
    "deep in a dict": lambda m, d: m.deep["a"].update(b=0.75),
    "deep in a list": lambda m, d: m.deep["c"][0].__setitem__(0, rows(d, 1)[0]),
    "in an object": lambda m, d: setattr(m.config, "eps", 9.0),
    "set": lambda m, d: m.ids.symmetric_difference_update({3, 4}),
    "asked for": lambda m, d: setattr(m, "extra", 1),
    "of the class": lambda m, d: setattr(m, "slope", 3.0),
    "object": lambda m, d: setattr(m, "config", dataclasses.replace(m.config, eps=7.0)),
}


@pytest.mark.parametrize("what", VARIED)
def test_other_parts_of_a_module(device, what):
    model = Varied(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        for _ in range(3):
            x = rows(device)
            assert_same(program(x), (Varied.forward(model, x),))
        VARIED[what](model, device)
        for _ in range(3):
            x = rows(device)
            for stale in (program, *(p for p in torch_bcg.programs(compiled) if p == program)):
                with pytest.raises(MisfitError):
                    stale(x)
            assert_same(compiled(x), Varied.forward(model, x))


def put(key, value):
    """A change: another value in what a module holds."""
    return lambda model: model.held.__setitem__(key, value)


def hold(value):
    """A change: a module holds something else."""
    return lambda model: setattr(model, "held", value)


def again(model):
    """The first of a dict is the last."""
    key = next(iter(model.held))
    model.held[key] = model.held.pop(key)


def chained(values, x):
    for value in values:
        x = value(x - 0.1) if callable(value) else x / (1 + value) + value
    return x


class Choice(enum.Enum):
    ONE = 1
    TWO = 2


class MyList(list):
    """A class of its own."""


HELD = {  # held -> how it is read -> what changes
    "under a tuple": (lambda: {(0, "k"): 1.5}, lambda h, x: x * h[0, "k"], put((0, "k"), 7.0)),
    "under a negative number": (lambda: {-1: 1.5}, lambda h, x: x * h[-1], put(-1, 7.0)),
    "under None": (lambda: {None: 1.5}, lambda h, x: x * h[None], put(None, 7.0)),
    "under a quote": (lambda: {"a'b": 1.5}, lambda h, x: x * h["a'b"], put("a'b", 7.0)),
    "under an enum": (
        lambda: {Choice.TWO: 2.5, Choice.ONE: 1.5},
        lambda h, x: x * h[Choice.ONE],
        put(Choice.ONE, 7.0),
    ),
    "under a dtype": (
        lambda: {torch.float32: 1.5}, lambda h, x: x * h[x.dtype], put(torch.float32, 7.0),
    ),
    "a module under a tuple": (
        lambda: {(0, 1): nn.Softmax(0)}, lambda h, x: h[0, 1](x), put((0, 1), nn.ReLU()),
    ),
    "length": (lambda: [1.0], lambda h, x: x * len(h), lambda m: m.held.append(1.0)),
    "truth": (list, lambda h, x: x * 2 if h else x, lambda m: m.held.append(1.0)),
    "no items": (list, chained, lambda m: m.held.append(nn.ReLU())),
    "other keys": (
        lambda: {"a": 1.0},
        lambda h, x: x * h.get("q", 3.0),
        lambda m: (m.held.clear(), m.held.update(q=2.0)),
    ),
    "order": (lambda: {"a": 1.0, "b": 2.0}, lambda h, x: chained(h.values(), x), again),
    "order of modules": (
        lambda: nn.ModuleDict({"r": nn.Tanh(), "t": nn.Softmax(-1)}),
        lambda h, x: chained(h.values(), x),
        again,
    ),
    "ordered": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda h, x: chained(h.values(), x),
        lambda m: m.held.move_to_end("a"),
    ),
    "in a deque": (lambda: collections.deque([1.5]), lambda h, x: x * h[0], put(0, 7.0)),
    "in a list of its own class": (lambda: MyList([1.5]), lambda h, x: x * h[0], put(0, 7.0)),
    "counted": (lambda: collections.Counter(a=2), lambda h, x: x * h["a"], put("a", 5)),
    "a function": (lambda: torch.relu, lambda h, x: h(x - 1), hold(torch.tanh)),
    "a function of Python": (lambda: nn.functional.silu, lambda h, x: h(x), hold(nn.functional.relu)),
    "a function in a list": (lambda: [torch.relu], lambda h, x: h[0](x), put(0, torch.tanh)),
    "partly called": (
        lambda: functools.partial(nn.functional.leaky_relu, negative_slope=0.5),
        lambda h, x: h(x),
        hold(functools.partial(nn.functional.leaky_relu, negative_slope=0.1)),
    ),
    "complex": (lambda: 2j, lambda h, x: x * abs(h), hold(5j)),
    "bytes": (lambda: b"a", lambda h, x: x * (2 if h == b"a" else 3), hold(b"b")),
    "a class": (lambda: nn.ReLU, lambda h, x: x * (2 if h is nn.ReLU else 3), hold(nn.GELU)),
    "a layout": (
        lambda: torch.strided,
        lambda h, x: x * (2 if h is torch.strided else 3),
        hold(torch.sparse_coo),
    ),
    "a long tuple": (
        lambda: (*range(2000),), lambda h, x: x * (2 if 7 in h else 3), hold((9,) * 2000),
    ),
    "untied": (
        lambda: nn.ParameterList([nn.Parameter(torch.ones(6))] * 2),
        lambda h, x: x * h[0] + h[1],
        lambda m: setattr(m.held, "1", nn.Parameter(torch.full((6,), 3.0))),
    ),
    "requires_grad": (
        lambda: nn.Linear(6, 6),
        lambda h, x: h(x) * (2 if h.weight.requires_grad else 3),
        lambda m: m.requires_grad_(False),
    ),
    "only a size": (
        lambda: nn.Buffer(torch.ones(3)), lambda h, x: x * h.shape[0], hold(nn.Buffer(torch.ones(9))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HELD)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_module_holds(device, what, when):
    """It changes before its program is called for the first time, or after that."""
    held, read, change = HELD[what]

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = held()

        def forward(self, x):
            return read(self.held, plus_one(x))

    model = Holding().to(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        x = rows(device)
        if when == "after":
            assert_same(program(x), (model(x),))
        change(model.to(device))
        with pytest.raises(MisfitError):
            program(x)


class Limited(nn.Module):
    """Reads what nobody can tell apart from another one."""

    def __init__(self):
        super().__init__()
        self.info = torch.finfo(torch.float16)

    def forward(self, x):
        return plus_one(x).clamp(max=self.info.max)


def test_a_module_of_which_something_cannot_be_compared(device):
    compiled = torch.compile(Limited(), backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        with pytest.raises(MisfitError, match=r"(?s)info.*can be compared"):
            program(rows(device))


def handed_on(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Weightless(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = 0.5

    def forward(self, x):
        return plus_one(x) * self.shift


class Wrapped(Weightless):
    @handed_on
    def forward(self, x):
        return plus_one(x) * self.shift


@pytest.mark.parametrize("kind", [Weightless, Wrapped])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_module_without_tensors(device, kind, when):
    """Its number changes before its program is asked for, or after that."""
    model = kind()
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            want = compiled(x)
        if when == "after":
            (program,) = torch_bcg.programs(compiled)
            assert_same(program(x), (want,))
        model.shift = 1.5
        if when == "before":
            (program,) = torch_bcg.programs(compiled)
        for _ in range(3):
            with pytest.raises(MisfitError, match="shift"):
                program(rows(device))


@pytest.mark.parametrize("kind", [nn.Linear, lambda *a, **k: nn.Sequential(nn.Linear(*a, **k))])
def test_a_module_of_torch(device, kind):
    """Dynamo compiles a wrapper of its forward."""
    model = kind(6, 6, device=device)
    twin, linear = copy.deepcopy(model), [*model.modules()][-1]
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        for _ in range(3):
            x = rows(device)
            assert_same(program(x), (twin(x),))
        linear.weight = new(linear)
        for _ in range(3):
            with pytest.raises(MisfitError, match="weight"):
                program(rows(device))


class LazyDict(dict):
    """Whoever asks for all of it is wrong."""

    def values(self):
        raise AssertionError("values")

    def __repr__(self):
        raise AssertionError("repr")


class Odd(nn.Module):
    """Has what must not be asked for more than the trace asks."""

    def __init__(self, device):
        super().__init__()
        self.lazy, self.key = LazyDict(a=2.0), nn.Parameter(torch.ones(1, device=device))
        self.by_key, self.large = {self.key: 3.0}, dict.fromkeys(range(5000), 1.0)
        self.huge = {"a": 2.0, "b": 2**20_000}

    def forward(self, x):
        x = plus_one(x) * self.lazy["a"] * self.large[7]
        return x * len(self.huge) + self.huge["a"] + len(self.by_key)


def test_odd_attributes_of_a_module(device):
    model = Odd(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), model(x))
        (program,) = torch_bcg.programs(compiled)
        for _ in range(3):
            x = rows(device)
            assert_same(program(x), (model(x),))
        model.by_key = {nn.Parameter(torch.ones(1, device=device)): 3.0}
        with pytest.raises(MisfitError, match="by_key"):
            program(x)


def test_rows_that_no_trial_has_shown(device):
    """Recorded at its own size, the program has not been tried with padded rows."""
    compiled = torch.compile(
        lambda x: plus_one(x / x.amax(0, keepdim=True)),
        backend="bcg",
        options={"buckets": [8, 16], "rows": "independent"},
        dynamic=True,
    )
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device, 8))
        for program in torch_bcg.programs(compiled):
            with pytest.raises(MisfitError, match="sizes"):
                program(-torch.ones(6, 6, device=device))


@torch_bcg.eager_on_graph(mutates_args=("out",))
def add_all_(x: torch.Tensor, others: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + others.sum())


@pytest.mark.parametrize("what", ["a number", "rows that nothing is recorded for"])
def test_sizes_that_the_graph_was_not_made_for(device, what):
    """They are in no key: a guard of Dynamo's alone tells them apart."""

    def by_number(x, n):
        return plus_one(x * n) * (2 if n > 5 else 3)

    def by_rows(x, others):
        out = torch.empty_like(x)
        add_all_(x * 2, others, out)
        return out * (2 if others.shape[0] > 5 else 3)

    fn = by_number if what == "a number" else by_rows
    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad():
        for n in range(6, 12):
            compiled(rows(device), n if fn is by_number else rows(device, n))
        program = torch_bcg.programs(compiled)[0]
        for n in (7, 12, 3, 9, 5):
            x, y = rows(device), n if fn is by_number else rows(device, n)
            if n > 5:
                assert_same(program(x, y), (fn(x, y),))
            else:
                with pytest.raises(MisfitError, match="sizes"):
                    program(x, y)
        if fn is by_number:
            with pytest.raises(MisfitError, match="int"):
                program(x, 7.5)


OF_OTHER_SHAPE = {
    "narrower": lambda d: rows(d, 7)[:, :2].contiguous(),
    "wider": lambda d: torch.randn(7, 9, device=d),
    "strided": lambda d: torch.randn(6, 7, device=d).t(),
    "of a wider one": lambda d: torch.randn(7, 8, device=d)[:, :6],
    "of more dims": lambda d: torch.randn(7, 6, 2, device=d),
    "of one dim": lambda d: torch.randn(7, device=d),
    "of none": lambda d: torch.randn((), device=d),
}


@pytest.mark.parametrize("other", OF_OTHER_SHAPE)
@pytest.mark.parametrize("how", ["given", "bound"])
def test_other_sizes_of_a_tensor_of_which_one_varies(device, how, other):
    """What varies is in no key, so nothing of this tensor follows from a key alone."""
    torch_bcg.register_metadata_binding(Table)

    def reading(x, table=None):
        out = torch.empty_like(x)
        table = torch_bcg.current_metadata(Table).table if table is None else table
        add_all_(x * table.shape[1], table, out)
        return out * 2

    def call(fn, x, table):
        torch._dynamo.maybe_mark_dynamic(table, 0)
        if how == "given":
            return fn(x, table)
        with torch_bcg.bind_metadata(Table(table)):
            return fn(x)

    compiled = torch.compile(reading, backend="bcg")
    with torch.no_grad():
        for n in (3, 4, 5, 3):
            call(compiled, rows(device), rows(device, n))
        (program,) = torch_bcg.programs(compiled)
        for n in (7, 3, 8):
            x, table = rows(device), rows(device, n)
            assert_same(call(program, x, table), (call(reading, x, table),))
        with pytest.raises(MisfitError, match="table"):
            call(program, rows(device), OF_OTHER_SHAPE[other](device))


@pytest.mark.parametrize("n", [3, 5])
def test_other_sizes_of_a_tensor_that_follow_from_those_of_another(device, n):
    def reading(x, a, b):
        out, also = torch.empty_like(x), torch.empty_like(x)
        add_all_(x * 2, a, out)
        add_all_(x * 3, b, also)
        return out * also if a.shape[0] == b.shape[0] else out

    compiled = torch.compile(reading, backend="bcg", dynamic=True)
    with torch.no_grad():
        for k in (3, 4, 5, 3):
            compiled(rows(device), rows(device, k), rows(device, k))
        program = torch_bcg.programs(compiled)[-1]
        x, a = rows(device), rows(device, 4)
        b = a + 1
        assert_same(program(x, a, b), (reading(x, a, b),))
        with pytest.raises(MisfitError, match="not recorded for"):
            program(x, a, rows(device, n))


def test_padded_sizes_that_the_graph_was_not_made_for(device):
    compiled = torch.compile(
        lambda x: plus_one(x * 2) * (2 if x.shape[0] > 5 else 3),
        backend="bcg",
        options={"buckets": [8, 16]},
        dynamic=True,
    )
    with torch.no_grad():
        for n in (6, 7, 8, 7, 6):
            compiled(rows(device, n))
        program = torch_bcg.programs(compiled)[0]
        for n in (7, 8, 6):
            x = rows(device, n)
            assert_same(program(x), (plus_one(x * 2) * 2,))
        for n in (5, 3, 9):
            with pytest.raises(MisfitError, match="sizes"):
                program(rows(device, n))


@pytest.mark.parametrize(
    "x", [3, None, torch.empty(4, 6, device="meta")], ids=["int", "None", "meta"]
)
def test_what_is_no_tensor_of_the_device(called, x):
    _, _, program = called
    with torch.no_grad(), pytest.raises(MisfitError, match="l_x_"):
        program(x)


class Negated(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        return -y if func is torch.Tensor.mul else y


OF_OTHER_KIND = {
    "wrapper": (lambda x: TwoTensor(x, x * 5), "a Tensor"),
    "subclass": (lambda x: x.as_subclass(Negated), "a Tensor"),
    "parameter": (lambda x: nn.Parameter(x, requires_grad=False), "a Tensor"),
    "requires_grad": (lambda x: x.requires_grad_(), "requires_grad of l_x_"),
    "csr": (lambda x: x.to_sparse_csr(), "layout of l_x_"),
    "coo": (lambda x: x.to_sparse(), "layout of l_x_"),
    "dtype": (lambda x: x.double(), "dtype of l_x_"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", OF_OTHER_KIND)
def test_a_tensor_of_another_kind(device, kind):
    def reading(x):
        return plus_one(x * 2) * (3 if type(x) is torch.Tensor and not x.requires_grad else 5)

    change, said = OF_OTHER_KIND[kind]
    compiled = torch.compile(reading, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        x = rows(device)
        assert_same(program(x), (reading(x),))
        with pytest.raises(MisfitError, match=said):
            program(change(x))


def test_a_tensor_that_required_gradients(device):
    """None were asked for; the code may have looked."""
    compiled = torch.compile(lambda x: plus_one(x * (2 if x.requires_grad else 3)), backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device).requires_grad_())
        (program,) = torch_bcg.programs(compiled)
        x = rows(device).requires_grad_()
        assert_same(program(x), (plus_one(x * 2),))
        with pytest.raises(MisfitError, match="requires_grad of l_x_"):
            program(x.detach())


@pytest.mark.parametrize("apart", [True, False])
def test_one_tensor_in_two_places(device, apart):
    compiled = torch.compile(lambda x, y: plus_one(x * (2 if x is y else 3)) + y, backend="bcg")

    def call(fn, x):
        return fn(x, x.clone()) if apart else fn(x, x)

    with torch.no_grad():
        for _ in range(3):
            call(compiled, rows(device))
        (program,) = torch_bcg.programs(compiled)
        x = rows(device)
        if not apart:  # what is one tensor is one argument
            assert_same(program(x), (plus_one(x * 2) + x,))
        else:
            assert_same(program(x, x.clone()), (plus_one(x * 3) + x,))
        with pytest.raises(MisfitError, match=r"one of them in two|number of arguments"):
            program(x, x)


def test_what_is_there_no_more_or_was_not_there(called, device):
    model, _, program = called
    x = rows(device)
    with torch.no_grad():
        model.empty, model.another, model.size = None, nn.Linear(6, 6), 7  # nobody asked for these
        assert_same(program(x), (Model.forward(model, x),))
        model.shift = model.shift  # the very number
        assert_same(program(x), (Model.forward(model, x),))
        del model.shift
        with pytest.raises(MisfitError, match="shift"):
            program(x)


def test_handles_of_one_program_are_equal(called):
    _, compiled, program = called
    (other,) = torch_bcg.programs(compiled)
    assert other is not program
    assert {program: 1}[other] == 1
    assert program != 1


@contextlib.contextmanager
def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def determinism():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("other", "name"),
    [(precision, "allow_tf32"), (determinism, "deterministic"), (autocast, "autocast")],
    ids=["precision", "determinism", "autocast"],
)
def test_settings_of_torch(called, device, other, name):
    model, _, program = called
    with torch.no_grad():
        x = rows(device)
        with other():
            for _ in range(3):
                with pytest.raises(MisfitError, match="settings of torch") as e:
                    program(x)
            assert name in e.value.found
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert_same(program(x)[0], Model.forward(model, x))


class Looking(TorchFunctionMode):
    """Changes nothing: what does is applied twice by Dynamo, at the trace and at the run."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def nowhere():
    return torch.device("meta")


FUNCTION_MODES = [
    (contextlib.nullcontext, Looking), (Looking, contextlib.nullcontext),
    (contextlib.nullcontext, nowhere), (lambda: torch.device("cpu"), nowhere),
]  # fmt: skip


@pytest.mark.parametrize(
    ("then", "now"), FUNCTION_MODES, ids=["new", "over", "a device", "another device"]
)
def test_a_mode_of_torch_functions(device, then, now):
    """A replay asks none; a default device is one."""
    compiled = torch.compile(lambda x: plus_one(x) * torch.ones((), device=device), backend="bcg")
    with torch.no_grad():
        with then():
            for _ in range(3):
                compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        x = rows(device)
        for _ in range(2):
            with then():
                assert_same(program(x), (plus_one(x) * torch.ones((), device=device),))
            with now(), pytest.raises(MisfitError, match="settings of torch") as e:
                program(x)
            assert "modes of torch functions" in e.value.found


@pytest.mark.parametrize("first", [True, False])
def test_a_mode_of_dispatch_that_is_over_or_new(called, device, first):
    """What of a tensor is noted at the first call is of the tensor, not of who looks on."""
    model, _, program = called
    with torch.no_grad():
        for on in (first, not first, first):
            x = rows(device)
            with FlopCounterMode(display=False) if on else contextlib.nullcontext():
                y = program(x)[0]
            assert_same(y, Model.forward(model, x))


def test_another_mode_of_autograd(called, device):
    _, _, program = called
    with pytest.raises(MisfitError, match="grad_mode"):
        program(rows(device))


@pytest.mark.parametrize("check", ["address", "off"])
def test_gradients_that_are_needed(device, check):
    """A replay would give results without."""
    model = Model(device).requires_grad_(False)
    compiled = torch.compile(model, backend="bcg", options={"check": check})
    for _ in range(3):
        compiled(rows(device))
    (program,) = torch_bcg.programs(compiled)
    x = rows(device)
    assert_same(program(x), (Model.forward(model, x),))
    with pytest.raises(MisfitError, match="gradients"):
        program(x.requires_grad_())
    (late,) = torch_bcg.programs(compiled)
    model.requires_grad_()
    for one in (program, late):
        with pytest.raises(MisfitError, match="gradients" if check == "off" else "requires_grad"):
            one(rows(device))


def test_gradients_that_an_argument_of_a_subclass_needs(device):
    compiled = torch.compile(lambda x: plus_one(x) * 2, backend="bcg")

    def pair(**kind):
        return TwoTensor(rows(device).requires_grad_(**kind), rows(device).requires_grad_(**kind))

    for _ in range(3):
        compiled(pair(requires_grad=False))
    for program in torch_bcg.programs(compiled):
        with pytest.raises(MisfitError, match="gradients"):
            program(pair(requires_grad=True))


def test_a_torch_that_does_not_compare_tensors(device, monkeypatch):
    monkeypatch.delattr(frame.guards, "TensorGuards")
    with_weights, without = (
        torch.compile(model, backend="bcg") for model in (Model(device), Weightless())
    )
    with torch.no_grad():
        for _ in range(3):
            with_weights(rows(device)), without(rows(device))
        (program,), (other,) = torch_bcg.programs(with_weights), torch_bcg.programs(without)
        with pytest.raises(MisfitError, match="this torch does not say"):
            program(rows(device))
        x = rows(device)
        assert_same(other(x), (Weightless()(x),))


def test_a_mark_made_since(called, device):
    """The program has it recorded: it is over, though nobody has called what was compiled."""
    _, _, program = called
    mark = torch_bcg.eager_on_graph(torch.nn.functional.linear)
    try:
        with torch.no_grad(), pytest.raises(MisfitError, match="freed"):
            program(rows(device))
    finally:
        mark.remove()


@pytest.mark.parametrize(
    "text",
    [
        "dict(type(L['self'].a).__dict__)['n']", "type(L['self'].a).__dict__['n']",
        "type(L['self'].a).__mro__[1].__dict__['n']", "L['self'].a.__class__.n",
        "dict(type(L['self'].a).__mro__[2].__dict__)['n']", "type(L['self'].a).n", "L['self'].a.n",
    ],
)  # fmt: skip
def test_an_attribute_of_a_class_as_dynamo_writes_it(text):
    assert sources._of_instance(text) == "L['self'].a.n"


def test_a_torch_that_does_not_say_what_a_graph_was_made_for(device, monkeypatch):
    """Compiled functions work as ever; their programs cannot be called directly."""

    def silent():
        raise sources._silent("guards", "nothing")

    monkeypatch.setattr(sources, "_guards", silent)
    monkeypatch.setattr(torch_bcg.compiled, "metadata_behind", lambda gm: ())
    model = Model(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), model(x))
        (program,) = torch_bcg.programs(compiled)
        with pytest.raises(MisfitError, match="guards"):
            program(x)


def test_a_program_that_was_freed(called, device):
    _, compiled, program = called
    torch_bcg.reset(compiled)
    with torch.no_grad(), pytest.raises(MisfitError, match="freed"):
        program(rows(device))


# metadata


@dataclasses.dataclass
class Table:
    table: torch.Tensor


@dataclasses.dataclass
class Part:
    table: torch.Tensor
    width: int = 2
    name: object = None


@dataclasses.dataclass
class Meta:
    slots: torch.Tensor
    part: Part
    scale: torch.Tensor | None = None
    offset: int = 3
    count: int = 4
    others: object = None
    places: tuple = ()


@torch_bcg.eager_on_graph(mutates_args=("out",))
def gather_(x: torch.Tensor, out: torch.Tensor) -> None:
    md = torch_bcg.current_metadata(Meta)
    out.copy_(x[md.slots] + md.part.table.sum())


def make(device, n=4, **more):
    part = Part(torch.randn(3, device=device))
    return Meta(torch.randperm(n, device=device), part, torch.randn(n, device=device), **more)


class Reading(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(6, 6, device=device)

    def forward(self, x):
        md = torch_bcg.current_metadata(Meta)
        out = torch.empty_like(x)
        gather_(self.linear(x) * md.offset, out)
        out = out if md.scale is None else out * md.scale[:, None]
        out = out + md.part.table[: md.part.width].sum()
        return out if md.others is None else out + 1


@pytest.fixture
def registered():
    torch_bcg.register_metadata_binding(Meta)


def programs_of(device, n=4, calls=3, **more):
    model = Reading(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(calls):
            with torch_bcg.bind_metadata(make(device, n, **more)):
                compiled(rows(device, n))
    return model, compiled, torch_bcg.programs(compiled)[0]


def same_as(model, program, md, device):
    x = rows(device, len(md.slots))
    with torch.no_grad(), torch_bcg.bind_metadata(md):
        want = model(x)
        for _ in range(3):
            assert_same(program(x), (want,))


@pytest.mark.usefixtures("registered")
def test_fields_come_from_what_is_bound(device):
    model, compiled, program = programs_of(device)
    assert program.arguments == ("l_x_",)
    for _ in range(3):
        same_as(model, program, make(device), device)
    captured = program.captured(make(device))
    for _ in range(3):
        torch_bcg.metadata.refresh(captured, make(device))
        same_as(model, program, captured, device)
    with counted() as counts:
        same_as(model, program, make(device), device)
    assert counts.replays == 3
    assert len(torch_bcg.programs(compiled)) == 1


@dataclasses.dataclass
class Under(Meta):
    pass


@pytest.mark.usefixtures("registered")
def test_nothing_is_bound(device):
    _, _, program = programs_of(device)
    with torch.no_grad(), pytest.raises(BindingError, match="No Meta is bound"):
        program(rows(device))


WRONG = {
    "a number": (lambda md: setattr(md, "offset", 4), MisfitError, "offset"),
    "of another type": (lambda md: setattr(md, "offset", 3.0), MisfitError, "offset"),
    "a nested number": (lambda md: setattr(md.part, "width", 3), MisfitError, "width"),
    "none": (lambda md: setattr(md, "scale", None), MisfitError, "scale"),
    "not none any more": (lambda md: setattr(md, "others", object()), MisfitError, "others"),
    "a dtype": (lambda md: setattr(md, "scale", md.scale.double()), MisfitError, "scale"),
    "strides": (
        lambda md: setattr(md, "scale", torch.randn(4, 2, device=md.scale.device)[:, 0]),
        MisfitError,
        "scale",
    ),
    "a shape": (
        lambda md: setattr(md.part, "table", md.part.table.repeat(2)),
        MisfitError,
        "table",
    ),
    "a varying number": (lambda md: setattr(md, "offset", 2.5), MisfitError, "offset"),
    "other parts": (lambda md: setattr(md, "part", None), MisfitError, "its parts"),
    "another class": (lambda md: setattr(md, "__class__", Under), MisfitError, "its class"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.usefixtures("registered")
def test_an_object_that_the_graph_was_not_made_for(device, what):
    model, compiled, program = programs_of(device)
    change, kind, said = WRONG[what]
    md = make(device)
    change(md)
    x = rows(device)
    with torch.no_grad(), torch_bcg.bind_metadata(md):
        for _ in range(3):
            with pytest.raises(kind) as e:
                program(x)
            assert said in str(e.value)
        if what not in ("other parts", "a shape"):
            assert_same(compiled(x), model(x))  # which is what the message says to call
    same_as(model, program, make(device), device)


@pytest.mark.usefixtures("registered")
def test_what_only_marked_functions_read_is_free(device):
    model, _, program = programs_of(device)
    for count in (4, 5, 6):
        same_as(model, program, make(device, count=count, places=(count,)), device)


@pytest.mark.usefixtures("registered")
def test_an_object_of_which_only_the_class_counts(device):
    model, _, program = programs_of(device, others=object())
    same_as(model, program, make(device, others=object()), device)
    with (
        torch.no_grad(),
        torch_bcg.bind_metadata(make(device)),
        pytest.raises(MisfitError, match="others"),
    ):
        program(rows(device))


class Looping(nn.Module):
    """Reads all that is in a container, or something of an object."""

    def forward(self, x):
        md = torch_bcg.current_metadata(Meta)
        if isinstance(md.others, dict):
            for table in md.others.values():
                x = x + table
        elif isinstance(md.others, list):
            for table in md.others:
                x = x + table
        elif hasattr(md.others, "swing"):
            x = x + 1
        return plus_one(x * 2) * md.offset


def tables(device, n):
    return [torch.randn(6, device=device) for _ in range(n)]


CONTAINERS = {
    "list": (lambda d: tables(d, 2), lambda d: tables(d, 3)),
    "empty list": (lambda d: [], lambda d: tables(d, 1)),
    "numbers": (lambda d: [1, 2], lambda d: [1, 3]),
    "dict": (lambda d: {"a": tables(d, 1)[0]}, lambda d: {"b": tables(d, 1)[0]}),
    "empty dict": (lambda d: {}, lambda d: {"b": tables(d, 1)[0]}),
}


@pytest.mark.parametrize("what", CONTAINERS)
@pytest.mark.usefixtures("registered")
def test_containers_that_the_graph_looks_into(device, what):
    one, other = CONTAINERS[what]
    compiled = torch.compile(Looping(), backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            with torch_bcg.bind_metadata(make(device, others=one(device))):
                compiled(rows(device))
    (program,) = torch_bcg.programs(compiled)
    for _ in range(3):
        same_as(Looping(), program, make(device, others=one(device)), device)
    with torch.no_grad(), torch_bcg.bind_metadata(make(device, others=other(device))):
        x = rows(device)
        with pytest.raises(MisfitError, match=r"others|its parts"):
            program(x)
        assert_same(compiled(x), Looping()(x))


@pytest.mark.usefixtures("registered")
def test_an_object_that_nobody_can_compare(device):
    compiled = torch.compile(Looping(), backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            with torch_bcg.bind_metadata(make(device, others=Model(device))):
                compiled(rows(device))
    program = torch_bcg.programs(compiled)[0]
    assert program.arguments == ("l_x_",)
    with (
        torch.no_grad(),
        torch_bcg.bind_metadata(make(device, others=Model(device))),
        pytest.raises(MisfitError, match="looks into"),
    ):
        program(rows(device))


class Counting(nn.Module):
    """Reads a number that is the number of rows."""

    def forward(self, x):
        md = torch_bcg.current_metadata(Meta)
        return plus_one(x) * torch.arange(md.count, device=x.device)[:, None]


@pytest.mark.usefixtures("registered")
def test_a_number_that_is_a_size(device):
    """Dynamo takes it and the rows for one symbol, or makes another graph."""
    compiled = torch.compile(Counting(), backend="bcg", dynamic=True)
    with torch.no_grad():
        for n in (4, 5, 6, 6, 6, 7, 7):
            with torch_bcg.bind_metadata(make(device, n, count=n)):
                compiled(rows(device, n))
        program = next(p for p in torch_bcg.programs(compiled) if 7 in p.sizes.values())
        for count in (7, 8, 7):
            x = rows(device, 7)
            with torch_bcg.bind_metadata(make(device, 7, count=count)):
                if count == 7:
                    assert_same(program(x), (Counting()(x),))
                    continue
                with pytest.raises(MisfitError, match="not recorded for"):
                    program(x)


@pytest.mark.usefixtures("registered")
def test_a_field_that_stays_in_place(device):
    """Its address is compared, whatever else is."""
    table = torch.randn(3, device=device)
    torch._dynamo.mark_static_address(table)

    def of_table(table):
        md = make(device)
        md.part.table = table
        return md

    model = Reading(device)
    compiled = torch.compile(model, backend="bcg", options={"check": "off"})
    with torch.no_grad():
        for _ in range(3):
            with torch_bcg.bind_metadata(of_table(table)):
                compiled(rows(device))
        program = torch_bcg.programs(compiled)[0]
        for _ in range(3):
            same_as(model, program, of_table(table), device)
        with (
            torch_bcg.bind_metadata(of_table(table.clone())),
            pytest.raises(MisfitError, match="table"),
        ):
            program(rows(device))
