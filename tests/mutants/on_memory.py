"""Small calls about memory that a mutant must spoil: each raises where the contract is broken."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from mutants.common import QUIET, Block, Fragile, rows
from torch_bcg.errors import BCGWarning
from twin import add_one_to, assert_same, check, counted, plus_one


def plain(device):
    """Inputs that change, an eager value read by a recorded segment, an output."""
    check(lambda x, y: plus_one(x * 2) * y, lambda i: (rows(device), rows(device)))


def eager_values(device):
    """Values of an eager segment that are returned, or go to another eager segment."""

    def fn(x):
        y = plus_one(x * 2)
        z = y * 3
        return plus_one(y), plus_one(z)

    check(fn, lambda i: (rows(device),))


def module(device):
    check(Block(device), lambda i: (rows(device),))


def instances(device):
    """Three instances of one class share a graph, not a program."""
    blocks, twins = ([Block(device) for _ in range(3)] for _ in range(2))
    for block, twin in zip(blocks, twins, strict=True):
        twin.load_state_dict(block.state_dict())
    compiled = torch.compile(lambda block, x: block(x), backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(3):
            for block, twin in zip(blocks, twins, strict=True):
                x = rows(device)
                assert_same(compiled(block, x), twin(x))
                assert_same(block.counter, twin.counter)
    assert (counts.captures, counts.replays) == (3, 6)


def replaced_parameter(device):
    block, twin = Block(device), Block(device)
    twin.load_state_dict(block.state_dict())
    compiled = torch.compile(block, backend="bcg")
    with torch.no_grad():
        for i in range(6):
            x = rows(device)
            if i == 3:
                new = rows(device, 6, 6)
                block.linear.weight.data, twin.linear.weight.data = new, new.clone()
                with pytest.warns(BCGWarning, match="weight"):
                    got = compiled(x)
            else:
                got = compiled(x)
            assert_same(got, twin(x))


class Counting(nn.Module):
    """Counts calls in its first segment and has its weight in its last one."""

    def __init__(self, device):
        super().__init__()
        self.last = nn.Linear(6, 6, device=device)
        self.register_buffer("calls", torch.zeros((), device=device))

    def forward(self, x):
        self.calls += 1
        return self.last(plus_one(x * self.calls))


class Scaling(nn.Module):
    """Its first segment has a weight of its own and writes nothing."""

    def __init__(self, device):
        super().__init__()
        self.last = nn.Linear(6, 6, device=device)
        self.scale = nn.Parameter(rows(device, 6))

    def forward(self, x):
        return self.last(plus_one(x * self.scale))


def replaced_last_parameter(device):
    for kind in (Counting, Scaling):
        model = kind(device)
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, backend="bcg")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BCGWarning)
            for i in range(9):
                x = rows(device)
                if i % 3 == 2:
                    new = rows(device, 6, 6)
                    model.last.weight.data, twin.last.weight.data = new, new.clone()
                assert_same(compiled(x), twin(x))
        assert_same(model.state_dict(), twin.state_dict())


def dead_module(device):
    """A program goes with the tensors it was recorded with."""
    blocks = [Block(device) for _ in range(3)]
    compiled = torch.compile(lambda block, x: block(x), backend="bcg")
    with torch.no_grad():
        for block in blocks * 2:
            compiled(block, rows(device))
    assert len(torch_bcg.programs(compiled)) == 3
    del block, blocks[0]
    gc.collect()
    assert len(torch_bcg.programs(compiled)) == 2


def reset(device):
    before = torch_bcg.stats().pool_bytes
    check(lambda x: plus_one(x * 2) * 3, lambda i: (rows(device),))
    assert torch_bcg.stats().pool_bytes > before
    torch_bcg.reset()
    assert torch_bcg.stats().pool_bytes == before


def written_input(device):
    def fn(x, cache):
        cache.add_(x)
        return plus_one(cache) * 2

    check(fn, lambda i: (rows(device), rows(device)))


def written_in_turn(device):
    def fn(x, cache):
        cache.mul_(2)
        add_one_to(cache)
        y = cache * x
        add_one_to(cache)
        return y + cache

    check(fn, lambda i: (rows(device), rows(device)))


def ambient_read(device):
    """A marked function reads, from outside the graph, what a recorded segment wrote."""
    cache = torch.zeros(4, 6, device=device)

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def plus_cache(x: Tensor) -> Tensor:
        return x + cache

    def fn(x, written):
        written.add_(x)
        return plus_cache(x) * 2

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x, before = rows(device), cache.clone()
            assert_same(compiled(x, cache), (x + (before + x)) * 2)
    assert counts.replays == 3


def exception_after_a_write(device):
    """The caller's tensor is what eager leaves behind, and the next calls are replays."""
    fragile = Fragile()

    def fn(x, cache):
        cache.add_(x)
        y = fragile.call(x)
        cache.mul_(2)
        return y + cache

    compiled = torch.compile(fn, backend="bcg")
    got, want = (torch.zeros(4, 6, device=device) for _ in range(2))
    with torch.no_grad(), counted() as counts:
        for i in range(6):
            x = rows(device)
            fragile.armed = i == 3
            if fragile.armed:
                with pytest.raises(ValueError, match="on demand"):
                    fn(x, want)
                with pytest.raises(ValueError, match="on demand"):
                    compiled(x, got)
            else:
                assert_same(compiled(x, got), fn(x, want))
            assert_same(got, want)
    assert counts.replays >= 4


def overlapping_views(device):
    def fn(x, y):
        x.mul_(2)
        z = plus_one(y) * 2
        y.add_(1)
        return z + x

    def make(i):
        buffer = rows(device, 12, 6)
        return buffer[:4], buffer[2:6] if i % 2 else buffer[4:8]

    check(fn, make, calls=6, replays=range(2, 6), eager_calls=None, options=QUIET)


def warned_once(device):
    """A call that is not replayed is said once, with its reason, and counted each time."""

    def fn(x, y):
        x.mul_(2)
        return plus_one(y) * x

    def make(i):
        buffer = rows(device, 12, 6)
        return buffer[:4], buffer[2:6] if i > 1 else buffer[4:8]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(fn, make, replays=1, eager_calls=2)
    assert [w.category for w in caught if "overlapping" in str(w.message)] == [BCGWarning]


def view_of_an_input(device):
    def fn(x):
        x.add_(1)
        return x[1:3], plus_one(x), x

    check(fn, lambda i: (rows(device),))


def outputs_that_share(device):
    def fn(x):
        y = plus_one(x) * 2
        return y, y[1:], y.t(), x * 3

    check(fn, lambda i: (rows(device),))


def passed_by_reference(device):
    """What only eager operations touch is the caller's own tensor, and is let go of."""
    seen = []

    @torch_bcg.eager_on_graph(fake=lambda x, big: torch.empty_like(x))
    def look(x: Tensor, big: Tensor) -> Tensor:
        seen.append(big.data_ptr())
        return x + big[0, :6]

    compiled = torch.compile(lambda x, big: look(x * 2, big[1:]) * 3, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x, big = rows(device), rows(device, 50, 60)
            assert_same(compiled(x, big), (x * 2 + big[1, :6]) * 3)
            assert seen[-1] == big[1:].data_ptr()
            held = weakref.ref(big)
            del big
            assert held() is None
    assert counts.replays == 3
