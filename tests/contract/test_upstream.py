"""Behaviours that PyTorch's own tests of CUDA graphs, and reports against them, name as hard.

Numbers are issues and pull requests of pytorch/pytorch. What other files here show as well is not
repeated: containers, strides, numbers, aliases, overlaps, resets, threads on one function.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_bcg
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@pytest.fixture(params=["clone", "alias"])
def outputs(request):
    return {"options": {"outputs": request.param}}


# Memory made, written and sent inside the graph.

INSIDE = {
    "to the host and back": lambda x: (x.cpu() + 1).to(x.device) * 2,
    "from the host": lambda x: x + torch.arange(6.0).to(x.device),
    "made, then written": lambda x: torch.zeros(4, 6, device=x.device).add_(x).mul_(2),
    "made by every factory": lambda x: (
        x
        + torch.ones(6, device=x.device)
        + torch.full((4, 1), 2.5, device=x.device)
        + torch.linspace(0, 1, 6, device=x.device)
        + torch.eye(4, 6, device=x.device)
        + torch.ones_like(x)
        + x.new_tensor([3.0])
    ),
    "a buffer filled and a part of it refilled": lambda x: (
        lambda b: (b.fill_(2), b[1:3].copy_(x[:2]), b[:0].fill_(9), b)[-1]
    )(torch.empty(4, 6, device=x.device)),
    "fills that nobody reads": lambda x: (x.clone().fill_(3), torch.empty_like(x).zero_(), x + 1)[2],
    "a constant that is written": lambda x: torch.tensor([1.0, 2.0], device=x.device).add_(x[0, :2]),
    "made larger": lambda x: x.new_empty(0).resize_(4, 6).copy_(x),
    "moved along": lambda x: x.clone().roll(1, 0).index_add_(
        0, torch.tensor([0, 0, 3], device=x.device), x[:3]
    ),
    "sent twice": lambda x: x.to("cpu").to(x.device).cpu().sum().to(x.device) + x,
}  # fmt: skip


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("marked", [False, True], ids=["alone", "between marks"])
def test_memory_of_the_graph(device, inside, marked):
    def fn(x):
        return plus_one(inside(plus_one(x))) if marked else inside(x)

    check(fn, lambda i: (rows(device),), replays=range(3, 16))  # a graph break more or less


def test_a_tensor_of_the_closure_is_written(device):
    made = [torch.zeros(4, 6, device=device) for _ in range(2)]

    def with_table(table):
        def fn(x):
            table.add_(x)
            return plus_one(table) * 2

        return fn

    compiled, eager = torch.compile(with_table(made[0]), backend="bcg"), with_table(made[1])
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x = rows(device)
            assert_same(compiled(x), eager(x))
            assert_same(made[0], made[1])
    assert (counts.replays, counts.num_eager) == (4, 0)


# Results that come back as arguments.


def test_state_made_inside_comes_back_as_a_written_argument(device, outputs):
    """#192748: a buffer made in a compiled function and fed back crashed at the second call."""

    def step(x, state):
        if state is None:
            state = torch.zeros(4, 6, device=device)
        state.mul_(0.5).add_(x)
        return plus_one(state) * 2, state

    compiled = torch.compile(step, backend="bcg", **outputs)
    got = want = None
    with torch.no_grad(), counted() as counts:
        for _ in range(7):
            x = rows(device)
            y, got = compiled(x, got)
            z, want = step(x, want)
            assert_same((y, got), (z, want))
    assert (counts.replays, counts.num_eager) == (5, 0)


def test_state_made_by_one_function_is_written_by_another(device, outputs):
    def make(x):
        return torch.zeros_like(x) + x.mean(), x * 2

    def update(state, x):
        state.add_(x)
        add_one_to(state)
        return state.sum(0)

    f, g = (torch.compile(fn, backend="bcg", **outputs) for fn in (make, update))
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            got, want = f(x)[0], make(x)[0]
            for _ in range(3):
                assert_same(g(got, x), update(want, x))
                assert_same(got, want)
    assert (counts.replays, counts.num_eager) == (3 + 11, 0)


def test_several_states_change_places(device, outputs):
    """#188161: arguments that are now one result, now the other."""

    def step(a, b):
        return plus_one(b), a * 0.5

    compiled = torch.compile(step, backend="bcg", **outputs)
    got = want = (rows(device), rows(device))
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            got = compiled(*(got if i % 3 else got[::-1]))
            want = step(*(want if i % 3 else want[::-1]))
            assert_same(got, want)
    assert (counts.captures, counts.replays, counts.num_eager) == (1, 7, 0)


def test_compiled_layers_in_turn(device, outputs):
    """#152887, #160281: blocks compiled one by one, each fed with what the last returned."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))).to(device)
    blocks = [torch.compile(block, backend="bcg", **outputs) for block in model]
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            y = x
            for block in blocks:
                y = block(y)
            assert_same(y, model(x))
    assert counts.replays == 9
    assert counts.num_eager == 0


# Results that the caller keeps.


@pytest.mark.parametrize(
    "view", [lambda y: y.detach(), lambda y: y[1:], lambda y: y.t()], ids=["detached", "part", "t"]
)
def test_a_view_of_a_result_is_kept(device, view):
    """#104435: a detached view escaped the check for overwritten results."""

    def fn(x):
        return plus_one(x * 2) * 3

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        kept, wanted = [], []
        for _ in range(5):
            x = rows(device)
            kept.append(view(compiled(x)))
            wanted.append(view(fn(x)))
    assert_same(kept, wanted)
    assert counts.replays == 4


def test_each_call_returns_its_own_tensors(device):
    """#122192, #126914: results cached by the wrapper collect what callers hang on them."""
    compiled = torch.compile(lambda x: (plus_one(x), x * 2), backend="bcg")
    with torch.no_grad(), counted() as counts:
        seen = []
        for _ in range(4):
            result = compiled(rows(device))
            assert not any(hasattr(t, "note") for t in result)
            for t in result:
                t.note = "mine"
            seen += [*result]
    assert len({id(t) for t in seen}) == len({t.data_ptr() for t in seen}) == 8
    assert counts.replays == 3


def test_results_are_added_up_outside(device):
    """#169545: gradients made by a graph are accumulated by the caller, in place, for good."""
    weight = nn.Parameter(rows(device, 6))

    def gradient(x, w):
        y = plus_one(x * w)
        return (y * x).sum(0) * 2

    compiled = torch.compile(gradient, backend="bcg")
    want = torch.zeros(6, device=device)
    with torch.no_grad(), counted() as counts:
        for i in range(6):
            x = rows(device)
            got = compiled(x, weight.detach())
            if i == 0:
                weight.grad = got
            else:
                weight.grad += got
            want += gradient(x, weight)
            assert_same(weight.grad, want)
    assert counts.replays == 5


def test_an_attribute_holds_what_a_call_made(device):
    """#114844: what Python would set at each call is set at each replay."""

    class Recorder(nn.Module):
        def forward(self, x):
            self.last = x * 2
            return plus_one(self.last)

    module, kept = Recorder(), []
    compiled = torch.compile(module, backend="bcg")
    inputs = [rows(device) for _ in range(6)]
    with torch.no_grad(), counted() as counts:
        for x in inputs:
            compiled(x)
            kept.append(module.last)
    assert_same(kept, [x * 2 for x in inputs])
    assert counts.replays == 5


# Parameters.


def test_weights_masked_through_data(device):
    """#183313: a pruned layer that multiplies its weight with a mask at every call."""

    class Pruned(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6, device=device)
            self.register_buffer("mask", (torch.rand(6, 6, device=device) > 0.3).float())

        def forward(self, x):
            self.linear.weight.data *= self.mask
            return plus_one(self.linear(x)) * 2

    module = Pruned()
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x, noise = rows(device), rows(device, 6, 6)
            assert_same(compiled(x), twin(x))
            for m in (module, twin):
                m.linear.weight.add_(noise)
                m.mask[0].mul_(0.5)
            assert_same(module.state_dict(), twin.state_dict())
    assert counts.replays == 4


def test_parameters_that_are_new_at_every_call(device):
    """PR #182531: many short-lived parameter sets neither go wrong nor pile up memory."""

    def fn(layer, x):
        return plus_one(layer(x)) * 2

    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    held = torch_bcg.stats().pool_bytes
    most = 0
    with torch.no_grad():
        for _ in range(12):
            layer = nn.Linear(6, 6, device=device)
            for _ in range(3):
                x = rows(device)
                assert_same(compiled(layer, x), fn(layer, x))
            most = max(most, len(torch_bcg.programs(compiled)))
    assert most < 6
    del layer
    gc.collect()
    torch_bcg.reset(compiled)
    assert torch_bcg.stats().pool_bytes == held


def test_inference_first_then_training(device):
    """#135892: memory made under inference mode must not reach a later training step."""
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).to(device)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, backend="bcg", options={"on_eager_call": "count"})
    with counted() as counts:
        for _ in range(3):
            for _ in range(3):
                x = rows(device)
                with torch.inference_mode():
                    assert_same(compiled(x), twin(x))
            x = rows(device)
            for m, f in ((module, compiled), (twin, twin)):
                m.zero_grad()
                f(x).square().sum().backward()
                with torch.no_grad():
                    for p in m.parameters():
                        p.sub_(p.grad, alpha=0.1)
            assert_same(module.state_dict(), twin.state_dict())
    assert counts.replays == 8
    assert counts.eager_calls == {"gradients": 3}


# Shapes and strides.


def test_strides_of_a_dimension_of_size_one_mean_nothing(device):
    """transformers#32227: what is the same memory is the same program."""

    def fn(x):
        return plus_one(x * 2) + x.sum(1, keepdim=True)

    compiled = torch.compile(fn, backend="bcg", dynamic=False)
    with torch.no_grad():
        for stride in ((6, 6, 1), (6, 1, 1)):
            compiled(rows(device, 4, 1, 6).as_strided((4, 1, 6), stride))
        with counted() as counts:
            for stride in ((6, 6, 1), (6, 1, 1)) * 3:
                x = rows(device, 24).as_strided((4, 1, 6), stride)
                assert_same(compiled(x), fn(x))
    assert counts.replays >= 4
    assert counts.captures <= 1


def test_channels_last(device):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device).eval()
    model = model.to(memory_format=torch.channels_last)

    def make(i):
        return (rows(device, 2, 3, 8, 8).to(memory_format=torch.channels_last),)

    check(model, make, exact=device == "cpu")


def test_more_dynamic_dimensions_than_one_call_shows(device):
    """#131009: dynamic shapes with one program for each, whatever the order."""

    def fn(x, y):
        return plus_one(x @ y).softmax(-1), y.sum(0)

    sizes = [(2, 3, 4), (5, 3, 4), (5, 6, 7), (2, 3, 4)] * 4

    def make(i):
        a, b, c = sizes[i]
        return rows(device, a, b), rows(device, b, c)

    check(fn, make, calls=16, replays=range(3, 16), exact=device == "cpu", dynamic=True)


@pytest.mark.parametrize("marked", [False, True])
def test_a_size_that_data_decides(device, marked):
    def fn(x):
        kept = x[x[:, 0] > 0]
        y = (plus_one(kept) if marked else kept) * 2
        return y, y.sum(0) + x[0]

    check(
        fn, lambda i: (rows(device),), replays=range(3, 10), fullgraph=True, exact=device == "cpu"
    )


# Control flow, random numbers, threads.


def test_branches_and_loops_on_the_device(device):
    def fn(x):
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x * 2,))
        _, z = torch.while_loop(
            lambda i, v: i < 3, lambda i, v: (i + 1, v * 1.5), (torch.tensor(0), y)
        )
        return plus_one(z) * 2

    check(fn, lambda i: (rows(device).abs() * (-1) ** i,), replays=range(3, 4))


def test_the_random_state_of_the_caller(device):
    """#91950: state read and put back by the caller, and draws of the caller's in between."""

    def fn(x):
        return F.dropout(plus_one(x), 0.5) + torch.rand_like(x)

    state = torch.cuda if device == "cuda" else torch
    compiled = torch.compile(fn, backend="bcg")
    x = torch.zeros(30, 40, device=device)
    with torch.no_grad(), counted() as counts:
        compiled(x)
        before = state.get_rng_state()
        first = [compiled(x), torch.rand(5, device=device), compiled(x)]
        state.set_rng_state(before)
        again = [compiled(x), torch.rand(5, device=device), compiled(x)]
        with torch.random.fork_rng():
            compiled(x)
        after = torch.rand(5, device=device)
        state.set_rng_state(before)
        compiled(x), torch.rand(5, device=device), compiled(x)
        assert_same(torch.rand(5, device=device), after)
    assert_same(again, first)
    assert not torch.equal(first[0], first[2])
    assert counts.replays == 7


def test_threads_with_functions_of_their_own(device):
    """#123177: what one thread compiles and captures does not disturb the others.

    Random numbers are the host's: while any graph is captured, a GPU's generator refuses others.
    """
    errors = []

    def work(k):
        try:
            module = nn.Linear(6, 6, device=device)

            def fn(x):
                return plus_one(module(x)) * (k + 1)

            compiled = torch.compile(fn, backend="bcg")
            with torch.no_grad():
                for _ in range(6):
                    x = rows("cpu").to(device)
                    assert_same(compiled(x), fn(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    with counted() as counts:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert counts.replays >= 9


# Lists as indices, which a GPU would be sent at every call.

LISTS = {
    "read": lambda x, y: x[[0, 2]] * 2,
    "negative": lambda x, y: x[[-1, 1, -1]] + 1,
    "within slices": lambda x, y: x[1:, [0, -2]],
    "after an ellipsis": lambda x, y: x[..., [-2], :],
    "two of them": lambda x, y: x[[0, 1, 3], [5, 0, -1]],
    "with a new dimension": lambda x, y: x[None, [1], ..., 2],
    "beside a tensor": lambda x, y: x[[1, 0], (y[:2, 0] > 0).long()],
    "written": lambda x, y: (y.__setitem__([0, 3], x[:2]), y * 1)[1],
    "written in part": lambda x, y: (y.__setitem__((slice(1, 3), [0, -1]), 7.0), y + x)[1],
    "of results": lambda x, y: x[[2, 1]][:, [3]] + plus_one(y)[[0], [1]],
    "empty": lambda x, y: x[[]] + 1,
}


@pytest.mark.parametrize("fn", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("marked", [False, True], ids=["alone", "after a mark"])
def test_a_list_as_an_index(device, fn, marked):
    check(
        lambda x, y: fn(plus_one(x) if marked else x, y),
        lambda i: (rows(device), rows(device)),
    )


def test_a_list_assigned_through(device):
    def fn(x, y):
        y[[1, -1], 1:] = x[:2, 1:]
        y[[3]] *= 2
        double_into(x[[0]], y[:1])
        return y[[0, 1]] + plus_one(x)[[2, 3]]

    compiled = check(fn, lambda i: (rows(device), rows(device)))
    assert [r.kind for r in torch_bcg.programs(compiled)[0].plan.reasons] == ["mark", "mark"]


def test_a_list_of_booleans_stays_a_mask(device):
    mask = [True, False, True, True]
    check(lambda x: plus_one(x)[mask] * 2, lambda i: (rows(device),), replays=range(3, 7))


def test_a_written_buffer_dies_with_its_module(device):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(6, device=device))

        def forward(self, x):
            self.count += 1
            return plus_one(x) * self.count

    module, twin = Counter(), Counter()
    compiled = torch.compile(module, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), twin(x))
            assert_same(module.count, twin.count)
    assert counts.replays == 3
    count = weakref.ref(module.count)
    del compiled, module
    gc.collect()
    assert count() is None
