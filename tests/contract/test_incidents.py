"""Faults that CUDA graph serving has had in public, each as a test that cites where.

Not here: what needs bound metadata or several ranks. A stream that is not joined is in
test_streams.py.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


@torch_bcg.eager_on_graph(fake=lambda x, bias: torch.empty_like(x))
def maybe_plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias, in new memory"""
    return x + 1 if bias is None else x + bias


class Layers(nn.Module):
    """Recorded and eager work, a cache that both write, a counter."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, device=device) for _ in range(2))
        self.register_buffer("cache", torch.zeros(4, 6, device=device))

    def forward(self, x, scale, given):
        y = self.first(x) * scale
        self.cache.add_(y)
        z = plus_one(self.cache)
        given.mul_(2)
        add_one_to(given)
        return self.second(z).relu() + given, y[1:]


@pytest.mark.cuda
@pytest.mark.parametrize("outputs", ["clone", "alias"])
def test_a_replay_waits_for_nothing(outputs):
    """sgl-project/sglang#37810: a hidden copy to the host stalled every step ("no-D2H guard")."""
    module = Layers("cuda")
    compiled = torch.compile(module, backend="bcg", options={"outputs": outputs}, dynamic=True)
    inputs = [(rows("cuda"), 1.0 + i, rows("cuda")) for i in range(6)]
    with torch.inference_mode():
        for x, scale, given in inputs[:3]:
            compiled(x, scale, given)
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with counted() as counts:
                for x, scale, given in inputs[3:]:
                    compiled(x, scale, given)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert counts.replays == 3
    assert counts.num_eager == 0


def addresses():
    """Address -> a tensor over it, of every storage that a tensor of this process is over."""
    found = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided:
            found[x.untyped_storage().data_ptr()] = x
    return found


def poison(ours):
    """Fills what a compiled function holds between calls; returns how many storages that were."""
    held = {a: t for a, t in addresses().items() if a and a not in ours}
    for t in held.values():
        t.untyped_storage().fill_(0xFF)  # NaN for floats, -1 for integers
    return len(held)


@pytest.mark.parametrize("way", ["module", "function"])
def test_memory_that_is_filled_before_use_may_hold_anything(device, way):
    """NVIDIA/TensorRT-LLM#18207: a slot that a step did not refill kept the last step's values.

    Everything that belongs to the program, slots, bridges and recorded results, is overwritten
    between calls.
    """
    if way == "module":
        fn = Layers(device)
        twin = Layers(device)
        twin.load_state_dict(fn.state_dict())
    else:

        def fn(x, scale, given):
            made = torch.empty_like(x)
            double_into(x * scale, made)
            y = maybe_plus(made.t().contiguous().t(), None)
            return F.pad(y, (1, 1)), given[1:] + y[:3], (y > 0).nonzero().shape[0]

        twin = fn

    def make(i):
        torch.manual_seed(i)
        return rows(device), 1.0 + i, rows(device)

    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad():
        for i in range(3):
            compiled(*make(i))
            twin(*make(i))
        torch_bcg.reset(compiled)
        gc.collect()
        ours = set(addresses())
        for i in range(3):
            compiled(*make(i))
            twin(*make(i))
        with counted() as counts:
            for i in range(3, 8):
                gc.collect()
                assert poison(ours) > 0
                got_args, want_args = make(i), make(i)
                assert_same(compiled(*got_args), twin(*want_args))
                assert_same(got_args, want_args)
                del got_args, want_args
    assert counts.replays >= 5
    assert counts.num_eager == 0


@pytest.mark.parametrize("where", ["recorded", "eager", "both"])
def test_an_optional_argument_that_is_absent_is_not_the_last_one(device, where):
    """NVIDIA/TensorRT-LLM#18207, sgl-project/sglang#27407: the value of an earlier step was used."""

    def fn(x, bias=None, mask=None):
        y = x * 2
        if where != "eager" and bias is not None:
            y = y + bias
        if where != "recorded":
            y = maybe_plus(y, bias)
        y = plus_one(y)
        return y if mask is None else y.masked_fill(mask, 0.0)

    def make(i):
        bias, mask = rows(device) if i % 2 else None, rows(device) > 0 if i % 4 > 1 else None
        return rows(device), bias, mask

    check(fn, make, calls=12, replays=8)


def test_eager_operations_meet_in_the_same_order_on_every_rank(device):
    """sgl-project/sglang#31987: ranks drifted apart while one still recorded, and a collective hung.

    Recording runs no eager operation, so no rank waits in one for a rank that records: each runs
    exactly once a call, in the order of the program, whether the call probes, warms or records.
    """
    order = []

    @torch_bcg.eager_on_graph(fake=lambda x, number: torch.empty_like(x))
    def collective(x: Tensor, number: int) -> Tensor:
        order.append(number)
        return x + number

    compiled = torch.compile(
        lambda x: collective(collective(x * 2, 1) * 3, 2) - 1, backend="bcg", dynamic=True
    )
    with torch.no_grad(), counted() as counts:
        for length in (4, 4, 5, 5, 5, 5, 4):
            order.clear()
            x = rows(device, length, 6)
            assert_same(compiled(x), ((x * 2 + 1) * 3 + 2) - 1)
            assert order == [1, 2]
    assert counts.captures == 2
    assert counts.replays == 4


ALIKE = {
    "the same tensor": lambda t: (t[:4], t[:4]),
    "one object": lambda t: (t[:4],) * 2,
    "views of one storage": lambda t: (t[:4], t[4:8]),
    "views that overlap": lambda t: (t[:4], t[2:6]),
    "a matrix and its transpose": lambda t: (t[:6], t[:6].t()),
}


@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
def test_arguments_that_share_memory(device, alike, writes):
    """tinygrad "duplicate inputs to JIT": refused there, and silently wrong in others."""

    def fn(x, y):
        if writes:
            x.mul_(2)
            add_one_to(y)
        return plus_one(x * 3) - y.sum(), y * 2

    def make(i):
        t = rows(device, 8, 6)
        return alike(t) if i % 2 else alike(t.clone())

    check(
        fn,
        make,
        calls=6,
        replays=5 if not writes else range(6),
        eager_calls=None,
        options={"on_eager_call": "count"},
    )


@pytest.mark.parametrize("outputs", ["clone", "alias"])
def test_a_result_kept_across_calls(device, outputs):
    """tinygrad test_output_buffer_reuse: the second call overwrote what the first returned."""
    compiled = torch.compile(
        lambda x: plus_one(x * 2) * 3, backend="bcg", options={"outputs": outputs}
    )
    inputs = [rows(device) for _ in range(5)]
    with torch.no_grad(), counted() as counts:
        kept = [compiled(x) for x in inputs]
        assert_same(kept[-1], (inputs[-1] * 2 + 1) * 3)
        if outputs == "clone":
            assert_same(kept, [(x * 2 + 1) * 3 for x in inputs])
        else:  # the kept one says so where it can, and a clone made in time is right
            mine = compiled(inputs[0]).clone()
            compiled(inputs[1])
            assert_same(mine, (inputs[0] * 2 + 1) * 3)
    assert counts.replays == (4 if outputs == "clone" else 6)


def test_constants_and_branches_of_python_follow_the_call(device):
    """tinygrad footguns: what Python decided while it was traced is what every call gets.

    Here Dynamo's guards look at each call, so another value is another graph.
    """
    settings = {"scale": 2.0, "double": True}

    def fn(x, mode):
        y = plus_one(x * settings["scale"])
        if settings["double"]:
            y = y * 2
        return y - 1 if mode == "minus" else y + len(mode)

    turns = [(2.0, True, "minus"), (3.0, True, "minus"), (3.0, False, "plus"), (2.0, True, "minus")]
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for scale, double, mode in turns * 4:
            settings.update(scale=scale, double=double)
            x = rows(device)
            assert_same(compiled(x, mode), fn(x, mode))
    assert counts.replays >= 16 - 4
    assert counts.num_eager == 0


def test_nothing_of_a_call_lives_on_in_a_program(device):
    """pytorch/pytorch#154824: arguments and results that a recording kept alive, or let go."""
    compiled = torch.compile(lambda x, y: (plus_one(x) * y, x[1:]), backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x, y = rows(device), rows(device)
            got = compiled(x, y)
            refs = [weakref.ref(t) for t in (x, y, *got)]
            del x, y, got
            assert [r() for r in refs] == [None] * 4
    assert counts.replays == 3


def test_padding_rows_do_not_change_real_rows(device):
    """sglang#37810: rows of an underfilled bucket leaked into the answers for real ones.

    The same program answers a call to the bit, whatever lay in the padded rows before it.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = (nn.Linear(6, 6, device=device) for _ in range(2))

        def forward(self, x):
            return self.out(plus_one(torch.relu(self.into(x)))) + x.cumsum(0)

    def tokens(n, scale=1.0):
        x = torch.randn(n, 6, device=device) * scale
        torch._dynamo.mark_dynamic(x, 0)
        return x

    model = Model()
    compiled = torch.compile(model, backend="bcg", options={"buckets": [8, 32]})
    with torch.inference_mode():
        x = tokens(5)
        for n in (5, 30, 5):
            compiled(tokens(n))
        first = compiled(x)
        torch.testing.assert_close(first, model(x))
        for n, scale in ((8, 1e6), (7, float("inf")), (32, float("nan")), (6, -1e30)):
            compiled(tokens(n, scale))
            assert torch.equal(compiled(x), first)
