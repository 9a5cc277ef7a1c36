"""What an operator's Python does past its schema is found by the first call and cut, by name.

A recording would repeat none of it: a value read on the host, a wait, memory that Python keeps and
may replace. Operators are made with `torch.library`, and nobody marks them.
"""

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

import torch_bcg
from twin import add_one_to, assert_same, check, counted, plus_one

NAME = "torch_bcg_hidden"


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def operator(function):
    """A custom operator whose result is like its first argument."""
    made = torch.library.custom_op(f"{NAME}::{function.__name__}", function, mutates_args=())
    made.register_fake(lambda x, *rest: torch.empty_like(x))
    return made


def cuts(compiled):
    """(kind, detail) of each cut that nobody marked, and whether its line is in this file."""
    reasons = [r for p in torch_bcg.programs(compiled)[:1] for r in p.plan.reasons]
    found = [r for r in reasons if r.kind != "mark"]
    assert all(r.where.startswith("test_hidden_state.py:") for r in found)
    shown = str(torch_bcg.explain(compiled))
    assert all(str(r) in shown for r in found)
    return [(r.kind, r.detail) for r in found]


# Values read on the host.

READS = {
    "cpu": lambda t: t.cpu(),
    "tolist": lambda t: sum(t.tolist()),
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t.sum()),
    "numpy": lambda t: float(t.cpu().numpy().sum()),
    "asarray": lambda t: float(np.asarray(t.cpu()).sum()),
    "branch": lambda t: 2 if (t > 0).all() else 3,
    "text": lambda t: len(f"{t.sum():.3f}"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_operator_that_reads_its_argument_on_the_host(device, read):
    def scaled(x: Tensor, t: Tensor) -> Tensor:
        factor = read(t)
        return x * (factor.to(x.device)[0] if isinstance(factor, Tensor) else factor)

    op = operator(scaled)
    compiled = check(
        lambda x, t: plus_one(op(x * 2, t + 1)) * 3, lambda i: (rows(device), rows(device, 3))
    )
    ((kind, detail),) = cuts(compiled)
    assert kind == "host read"
    assert detail.startswith(f"{NAME}::scaled, Tensor.")


WAITS = {
    "device": lambda: torch.cuda.synchronize(),
    "stream": lambda: torch.cuda.current_stream().synchronize(),
    "event": lambda: (e := torch.cuda.Event(), e.record(), e.synchronize()),
}


@pytest.mark.cuda
@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_an_operator_that_waits_for_the_device(wait):
    """PyTorch's debug mode for synchronisation hears of none of these."""

    def waits(x: Tensor) -> Tensor:
        y = x + 1
        wait()
        return y

    op = operator(waits)
    compiled = check(lambda x: plus_one(op(x * 2)) * 3, lambda i: (rows("cuda"),))
    ((kind, detail),) = cuts(compiled)
    assert kind == "host read"
    assert detail.startswith(f"{NAME}::waits, ")
    assert detail.endswith("waits for the device")


def test_an_operator_that_times_itself_first(device, monkeypatch):
    """An autotuner: it waits at its first call, chooses, and never waits again."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    chosen = []

    def tuned(x: Tensor) -> Tensor:
        if not chosen:
            for way in (torch.add, torch.sub):
                way(x, 1)
                torch.cuda.synchronize()
            chosen.append(torch.add)
        return chosen[0](x, 1)

    op = operator(tuned)
    compiled = torch.compile(lambda x: plus_one(op(x * 2)) * 3, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), (x * 2 + 1 + 1) * 3)
    assert counts.replays == 3
    assert cuts(compiled) == [
        ("host read", f"{NAME}::tuned, torch.cuda.synchronize waits for the device")
    ]


# Memory that Python keeps.


@pytest.fixture
def kept():
    """A place for what operators keep."""
    kept = {}
    yield kept
    kept.clear()


def workspace(kept, x):
    """A buffer for ``x``, made larger when it is too small."""
    if kept.get("buffer") is None or kept["buffer"].shape[0] < x.shape[0]:
        kept["buffer"] = torch.full((x.shape[0], x.shape[1]), float("nan"), device=x.device)
    return kept["buffer"][: x.shape[0]]


def test_a_workspace_that_grows_with_the_batch(device, kept):
    def through_workspace(x: Tensor) -> Tensor:
        w = workspace(kept, x)
        w.copy_(x)
        return w * 2

    op = operator(through_workspace)

    def fn(x):
        return plus_one(op(x + 1) * 3), op(x).sum(0)

    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad(), counted() as counts:
        for length in (4, 4, 4, 6, 6, 6, 6, 9, 9, 9, 9, 4, 6, 9):
            x = rows(device, length, 6)
            assert_same(compiled(x), (((x + 1) * 2) * 3 + 1, (x * 2).sum(0)))
            rows(device, 6, 6).fill_(7)  # takes memory that was given back
    assert counts.replays == 2 + 2 + 2 + 3
    assert cuts(compiled) == [("keeps memory", f"{NAME}::through_workspace")] * 2


def resized(kept, x):
    kept["buffer"].resize_(x.shape).copy_(x)
    return kept["buffer"] * 2


def replaced(kept, x):
    kept["last"] = x * 2
    return kept["last"] + 0


def returned(kept, x):
    kept["result"] = x * 2
    return kept["result"]


def part_returned(kept, x):
    kept["large"] = x.new_empty(2, *x.shape)
    return torch.mul(x, 2, out=kept["large"][1])


def inside_an_object(kept, x):
    class Plan:
        pass

    kept["plan"] = Plan()
    kept["plan"].tables = [x * 2]
    return kept["plan"].tables[0] + 0


KEEP = [resized, replaced, returned, part_returned, inside_an_object]


@pytest.mark.parametrize("keep", KEEP, ids=lambda f: f.__name__)
def test_an_operator_that_keeps_what_it_made(device, kept, keep):
    kept["buffer"] = torch.empty(0, device=device)

    def keeping(x: Tensor) -> Tensor:
        return keep(kept, x)

    op = operator(keeping)
    compiled = torch.compile(lambda x: plus_one(op(x + 1) * 3), backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), ((x + 1) * 2) * 3 + 1)
    assert counts.replays == 3
    assert cuts(compiled) == [("keeps memory", f"{NAME}::keeping")]


def nothing(x):
    return x * 2


def temporaries(x):
    return sum([x * k for k in range(4)]) / 3


def a_cycle(x):
    class Node:
        pass

    node = Node()
    node.itself, node.tensor = node, x * 2
    return node.tensor + 0


def a_view(x):
    return x.new_empty(3, *x.shape)[1].copy_(x * 2)


def numbers(x):
    numbers.count = getattr(numbers, "count", 0) + 1
    return x * 2


KEEP_NOTHING = [nothing, temporaries, a_cycle, a_view, numbers]


@pytest.mark.parametrize("function", KEEP_NOTHING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("last", [True, False], ids=["returned", "read"])
def test_an_operator_that_keeps_nothing_is_recorded(device, function, last):
    def honest(x: Tensor) -> Tensor:
        return function(x)

    op = operator(honest)
    gc.collect()
    compiled = check(lambda x: op(x + 1) if last else op(x + 1) * 3, lambda i: (rows(device),))
    assert cuts(compiled) == []


def test_a_table_that_was_there_before_is_recorded(device, kept):
    """A workspace made before the first call, and never replaced, costs no cut."""
    kept["buffer"] = torch.zeros(8, 6, device=device)

    def through_workspace(x: Tensor) -> Tensor:
        w = workspace(kept, x)
        w.copy_(x)
        return w * 2

    op = operator(through_workspace)
    compiled = check(lambda x: plus_one(op(x + 1)) * 3, lambda i: (rows(device),))
    assert cuts(compiled) == []


def test_an_operator_of_several_results_that_keeps_one(device, kept):
    def several(x: Tensor) -> list[Tensor]:
        kept["second"] = x + 1
        return [x * 2, kept["second"], x * 3]

    op = torch.library.custom_op(f"{NAME}::several", several, mutates_args=())
    op.register_fake(lambda x: [torch.empty_like(x) for _ in range(3)])
    compiled = torch.compile(lambda x: (op(x)[0] + op(x * 2)[1], op(x)[2]), backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), (x * 2 + (x * 2 + 1), x * 3))
    assert counts.replays == 3
    assert cuts(compiled) == [("keeps memory", f"{NAME}::several")] * 3


# Triton kernels: arguments and grids that change from call to call are never frozen.


@pytest.mark.cuda
def test_a_triton_kernel_whose_grid_is_a_number_of_the_call():
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def double_blocks(x, out, block: tl.constexpr):
        i = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + i, tl.load(x + i) * 2)

    def fn(x, blocks):
        y = x + 1
        out = torch.zeros_like(y)
        double_blocks[(blocks,)](y, out, block=8)
        add_one_to(out)
        return out * 3

    compiled = torch.compile(fn, backend="bcg")
    blocks = (1, 2, 2, 2, 3, 3, 4, 2, 1, 4)
    with torch.no_grad(), counted() as counts:
        for n in blocks:
            x = rows("cuda", 4, 8)
            want = torch.zeros_like(x)
            want[:n] = (x + 1)[:n] * 2
            assert_same(compiled(x, n), (want + 1) * 3)
    assert counts.replays >= 5
    assert counts.num_eager == 0
    shown = [p.plan.reasons for p in torch_bcg.programs(compiled)]
    assert any(r.kind == "number" and r.where for reasons in shown for r in reasons)


@pytest.mark.cuda
def test_a_triton_kernel_of_a_size_is_recorded():
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def double_all(x, out, n, block: tl.constexpr):
        i = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)

    def fn(x):
        out = torch.empty_like(x)
        double_all[lambda meta: (triton.cdiv(x.numel(), meta["block"]),)](
            x, out, x.numel(), block=16
        )
        return plus_one(out) * 3

    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad(), counted() as counts:
        for length in (3, 3, 3, 40, 40, 40, 40, 5, 5, 5, 40, 3):
            x = rows("cuda", length, 6)
            assert_same(compiled(x), (x * 2 + 1) * 3)
    assert counts.num_eager == 0
    assert counts.replays >= 6
    assert cuts(compiled) == []
