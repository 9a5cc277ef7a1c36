"""Memory that moves, is given back, or is not there: parameters, resets, teardown, no memory left."""

import copy
import gc
import itertools
import threading
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from torch_bcg.errors import BCGWarning
from torch_bcg.runtime import recorders
from twin import assert_same, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


class Model(nn.Module):
    """Two layers with a mark in between, and a cache that each call adds to."""

    def __init__(self, device, width=6):
        super().__init__()
        self.first, self.second = (nn.Linear(width, width, device=device) for _ in range(2))
        self.register_buffer("cache", torch.zeros(4, width, device=device))

    def forward(self, x):
        self.cache.add_(x)
        return self.second(plus_one(self.first(x) + self.cache))


def pair(device, **kwargs):
    model = Model(device)
    return model, copy.deepcopy(model), torch.compile(model, backend="bcg", **kwargs)


def run(compiled, eager, device, calls=3):
    with torch.no_grad(), counted() as counts:
        for _ in range(calls):
            x = rows(device)
            assert_same(compiled(x), eager(x))
    return counts


# Parameters that move.


def update_in_place(model, device):
    for p in model.parameters():
        p.copy_(torch.linspace(-1, 1, p.numel(), device=device).view_as(p))


def replace_data(model, device):
    for p in model.parameters():
        p.data = torch.linspace(-1, 1, p.numel(), device=device).view_as(p)


def load_and_assign(model, device):
    state = {k: v.clone() * 0.5 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def offload_and_return(model, device):
    """To the host and back: other storages, and the old ones are somebody else's meanwhile."""
    kept = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    if device == "cuda":
        model.to("cpu")
    for t in (*model.parameters(), *model.buffers()):
        t.data = torch.empty(0, device=t.device)
    taken = [torch.full((6, 6), float("nan"), device=device) for _ in range(8)]
    for t, value in zip((*model.parameters(), *model.buffers()), kept, strict=True):
        t.data = value.to(t.device, copy=True)
    model.to(device)
    del taken


MOVES = (update_in_place, replace_data, load_and_assign, offload_and_return)


def tensors_of(model):
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
def test_parameters_that_move(device, move):
    model, twin, compiled = pair(device)
    assert run(compiled, twin, device).replays == 2
    for _ in range(3):
        before = [(weakref.ref(t), t.data_ptr()) for t in tensors_of(model)]
        with torch.no_grad():
            for m in (model, twin):
                move(m, device)
        # Tensors that are all new objects are another set, as those of another instance are, and
        # the old one is gone; a GPU's allocator may give the very same memory again.
        now = tensors_of(model)
        kept = [ref() is t for (ref, _), t in zip(before, now, strict=True)]
        stayed = all(kept) and [p for _, p in before] == [t.data_ptr() for t in now]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first = run(compiled, twin, device, calls=1)
        told = [w for w in caught if issubclass(w.category, BCGWarning)]
        assert len(told) == (any(kept) and not stayed)
        assert first.replays == stayed
        assert first.num_eager == 0
        run(compiled, twin, device)
        assert run(compiled, twin, device).replays == 3
        assert_same(model.state_dict(), twin.state_dict())
    assert len(torch_bcg.programs(compiled)) == 1


def test_memory_of_moved_parameters_is_given_back(device):
    model, _, compiled = pair(device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            compiled(rows(device))
        old = [weakref.ref(p.data.untyped_storage()) for p in model.parameters()]
        held = torch_bcg.stats().pool_bytes
        replace_data(model, device)
        for _ in range(4):
            compiled(rows(device))
    gc.collect()
    assert [r() for r in old] == [None] * 4
    assert torch_bcg.stats().pool_bytes <= held * 1.5


# Memory given back.


@pytest.mark.parametrize("how", ["one", "all", "dynamo", "forgotten"])
def test_reset_gives_memory_back(device, how):
    before = torch_bcg.stats().pool_bytes
    model = Model(device, 600)
    compiled = torch.compile(model.forward, backend="bcg")
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device, 4, 600))
    assert torch_bcg.stats().pool_bytes > before
    weight = weakref.ref(model.first.weight)
    if how == "one":
        torch_bcg.reset(compiled)
    elif how == "all":
        torch_bcg.reset()
    elif how == "dynamo":
        torch._dynamo.reset()
    else:
        del compiled
        torch._dynamo.reset()
    assert torch_bcg.stats().pool_bytes == before
    gc.collect()
    if device == "cuda" and how in ("all", "dynamo"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= reserved + (4 << 20)
    compiled = None
    del model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None


def test_what_was_reset_works_on(device):
    model, twin, compiled = pair(device)
    for _ in range(3):
        counts = run(compiled, twin, device)
        assert (counts.captures, counts.replays, counts.num_eager) == (1, 2, 0)
        torch_bcg.reset(compiled)
        assert torch_bcg.programs(compiled) == []
        assert_same(model.state_dict(), twin.state_dict())


ORDERS = list(itertools.permutations(["compiled", "programs", "outputs", "model"]))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_teardown_in_any_order(device, order):
    before = torch_bcg.stats().pool_bytes
    model = Model(device)
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        outputs = [compiled(rows(device)) for _ in range(3)]
    values = [y.clone() for y in outputs]
    held = {
        "compiled": compiled,
        "programs": torch_bcg.programs(compiled),
        "outputs": outputs,
        "model": model,
    }
    refs = [weakref.ref(t) for t in (*model.parameters(), *outputs)]
    del model, compiled, outputs
    for name in order:
        if "outputs" in held:
            assert_same(held["outputs"], values)
        if name == "programs":
            torch._dynamo.reset()
        del held[name]
        gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)
    assert torch_bcg.stats().pool_bytes == before


def test_teardown_in_a_thread(device):
    before = torch_bcg.stats().pool_bytes
    model = Model(device)
    held = [torch.compile(model, backend="bcg")]
    weight = weakref.ref(model.first.weight)
    with torch.no_grad():
        outputs = [held[0](rows(device)) for _ in range(3)]
    del model

    def tear_down():
        held.clear()
        torch._dynamo.reset()
        gc.collect()

    thread = threading.Thread(target=tear_down)
    thread.start()
    thread.join()
    gc.collect()
    assert weight() is None
    assert torch_bcg.stats().pool_bytes == before
    assert all(bool(y.isfinite().all()) for y in outputs)


def test_teardown_during_a_call(device):
    """A marked function frees what is running; the call ends as it should, the next records."""
    armed = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def frees(x: Tensor) -> Tensor:
        if armed:
            armed.pop()
            torch_bcg.reset(compiled)
            gc.collect()
        return x + 1

    model = nn.Linear(6, 6, device=device)

    def fn(x):
        return model(frees(model(x) * 2)) * 3

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(8):
            armed[:] = [1] if i in (3, 5) else []
            x = rows(device)
            assert_same(compiled(x), model(model(x) * 2 + 1) * 3)
    assert counts.num_eager == 0
    assert counts.captures == 3


# No memory left.


class Hungry:
    """An operator that asks for too much while its segment is recorded."""

    def __init__(self, device, monkeypatch):
        self.device, self.refused, self.recording = device, 0, False
        if device == "cpu":
            original = recorders.HostRecorder.record

            def record(recorder, code, operands, allocate):
                if any("hungry" in str(n.target) for n in code.graph.nodes):
                    self.refuse()
                return original(recorder, code, operands, allocate)

            monkeypatch.setattr(recorders.HostRecorder, "record", record)

        def hungry(x: Tensor) -> Tensor:
            if self.device == "cuda" and torch.cuda.is_current_stream_capturing():
                self.refuse()
            return x + 1

        self.call = torch.library.custom_op("torch_bcg_release::hungry", hungry, mutates_args=())
        self.call.register_fake(torch.empty_like)

    def refuse(self):
        if self.recording:
            self.refused += 1
            raise torch.OutOfMemoryError("none left")


def test_no_memory_left_while_recording(device, monkeypatch):
    """Nothing of the function is recorded, it goes on working, and the report says why."""
    hungry = Hungry(device, monkeypatch)
    hungry.recording = True

    def fn(x, table):
        table.add_(x)
        y = hungry.call(plus_one(x * 2) * 3)
        double_into(y, table)
        return y + table

    compiled = torch.compile(fn, backend="bcg")
    got, want = torch.zeros(4, 6, device=device), torch.zeros(4, 6, device=device)
    before = torch_bcg.stats().pool_bytes

    def call(times):
        for _ in range(times):
            x = rows(device)
            assert_same(compiled(x, got), fn(x, want))
            assert_same(got, want)

    with torch.no_grad(), counted() as counts:
        call(1)
        with pytest.warns(BCGWarning, match="out of memory") as caught:
            call(4)
    assert len([w for w in caught if issubclass(w.category, BCGWarning)]) == 1
    assert hungry.refused == 1
    assert (counts.captures, counts.replays, counts.num_eager) == (0, 0, 4)
    assert torch_bcg.stats().pool_bytes == before
    assert "out of memory" in str(torch_bcg.explain(compiled))

    hungry.recording = False  # memory is there again, and a reset tries once more
    torch_bcg.reset(compiled)
    with torch.no_grad(), counted() as counts:
        call(4)
    assert (counts.captures, counts.replays, counts.num_eager) == (1, 3, 0)


def test_no_memory_left_for_another_shape(device, monkeypatch):
    """What was recorded before stays right, whether it is kept or not."""
    hungry = Hungry(device, monkeypatch)

    def fn(x):
        return hungry.call(plus_one(x * 2) * 3) - x

    compiled = torch.compile(fn, backend="bcg", dynamic=True, options={"on_eager_call": "count"})
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), fn(x))
        hungry.recording = True
        for length in (5, 5, 5, 5, 4, 4, 5, 4):
            x = rows(device, length, 6)
            assert_same(compiled(x), fn(x))
    assert hungry.refused == 1


@pytest.mark.cuda
def test_a_device_that_is_full():
    """Recording on a device without memory, not an operator that says so."""
    torch.cuda.empty_cache()
    compiled = torch.compile(
        lambda x: plus_one(x * 2).sin() + x, backend="bcg", options={"on_eager_call": "count"}
    )
    size = 64 << 20
    x = torch.zeros(size, device="cuda")  # a quarter of a GiB
    total = torch.cuda.get_device_properties(0).total_memory
    taken = torch.cuda.memory_reserved() + 5 * size * 4
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, taken / total))
        with torch.no_grad():
            for _ in range(4):
                try:
                    got = compiled(x)
                except torch.OutOfMemoryError:
                    got = None  # eager itself had no room
                if got is not None:
                    assert bool((got == torch.ones((), device="cuda").sin()).all())
                del got
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch_bcg.reset(compiled)
    torch.cuda.empty_cache()
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            assert_same(compiled(x[:8]), (x[:8] * 2 + 1).sin() + x[:8])
    assert counts.num_eager == 0


def test_no_room_for_slots_leaves_a_working_function(device, monkeypatch):
    """The device may be full before the first segment is recorded."""

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fn(x):
        return plus_one(x * 2) * 3

    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    monkeypatch.setattr("torch_bcg.runtime.slots.Slots.take", full)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 6, device=device)
            assert_same(compiled(x), fn(x))
    (plan,) = torch_bcg.explain(compiled).plans
    assert plan.unrecorded.kind == "out of memory"
    assert "2.00 GiB" in plan.unrecorded.detail
    monkeypatch.undo()
    torch_bcg.reset(compiled)
    with torch.no_grad(), counted() as counts:
        for _ in range(3):
            x = torch.randn(4, 6, device=device)
            assert_same(compiled(x), fn(x))
    assert (counts.replays, counts.num_eager) == (2, 0)


def test_no_room_for_a_trial_leaves_a_call_as_it_is(device, monkeypatch):
    """What a trial would keep of a call is not worth the call."""

    def fn(x, i):
        return plus_one(x * 2)[i] + x

    def full(trial, x):
        trial.full = True
        return x

    monkeypatch.setattr("torch_bcg.runtime.trial.Trial.copy", full)
    compiled = torch.compile(fn, backend="bcg", options={"buckets": [8]})
    with torch.no_grad():
        for _ in range(5):
            x, i = torch.randn(5, 6, device=device), torch.randint(0, 5, (5,), device=device)
            for t in (x, i):
                torch._dynamo.mark_dynamic(t, 0)
            assert_same(compiled(x, i), fn(x, i))
    (plan,) = torch_bcg.explain(compiled).plans
    assert plan.padding.refused.kind == "out of memory"
