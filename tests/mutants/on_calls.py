"""Small calls about numbers, modes and order that a mutant must spoil."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from mutants.common import QUIET, Fragile, rows
from torch_bcg.errors import MisfitError
from twin import assert_same, check, counted, double_into, plus_one


def changing_number(device):
    check(
        lambda x, n: (plus_one(x) * n, n + 1),
        lambda i: (rows(device), (7, 3, 11, 5)[i]),
        dynamic=True,
    )


def size_from_a_number(device):
    def fn(x, n):
        return plus_one(x) + torch.arange(n, device=x.device).sum()

    sizes = (4, 4, 5, 5, 5, 4)  # probe, replay, warming twice, then replays of both
    check(fn, lambda i: (rows(device), sizes[i]), calls=6, replays=3, dynamic=True)


def changing_shape(device):
    check(
        lambda x: plus_one(x * 2) * x.shape[0],
        lambda i: (rows(device, (4, 5)[i // 2 % 2], 6),),
        calls=8,
        replays=5,
        dynamic=True,
    )


def autocast(device):
    def fn(x, w):
        y = x @ w
        with torch.autocast(device, dtype=torch.bfloat16):
            z = plus_one(y @ w)
            u = z @ w
        return u.float() @ w

    check(fn, lambda i: (rows(device, 6, 6), rows(device, 6, 6)))


def exception_inside_autocast(device):
    """No mode is left behind, by Dynamo's wrapper or past it."""
    fragile = Fragile()

    def fn(x, w):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fragile.call(x @ w) @ w

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(4):
            fragile.armed = i == 2
            with pytest.raises(ValueError, match="on demand") if i == 2 else nullcontext():
                compiled(rows(device, 6, 6), rows(device, 6, 6))
            assert not torch.is_autocast_enabled(device)
        fragile.armed = True
        program = torch_bcg.programs(compiled)[0]
        with pytest.raises(ValueError, match="on demand"):
            program(rows(device, 6, 6), rows(device, 6, 6))
        assert not torch.is_autocast_enabled(device)
    assert (counts.captures, counts.replays) == (1, 2)


def no_grad_and_inference_mode(device):
    def fn(x):
        return plus_one(x * 2) * 3

    compiled = torch.compile(fn, backend="bcg")
    for i in range(6):
        with torch.inference_mode() if i % 2 == 0 else torch.no_grad():
            x = rows(device)
            assert_same(compiled(x), fn(x))


def dropout(device):
    compiled = torch.compile(lambda x: F.dropout(plus_one(x), 0.5) * 1, backend="bcg")
    x = torch.ones(30, 40, device=device)
    with torch.no_grad(), counted() as counts:
        drawn = [compiled(x) for _ in range(4)]
    assert counts.replays == 3
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def side_effects(device):
    """The first call is a real one, and every side effect happens once a call."""
    log = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def note(x: Tensor) -> Tensor:
        log.append(1)
        return x + 1

    def fn(x, counter):
        counter += 1
        return note(x) * counter

    compiled = torch.compile(fn, backend="bcg")
    counter = torch.zeros((), device=device)
    with torch.no_grad():
        for i in range(1, 5):
            x = rows(device)
            assert_same(compiled(x, counter), (x + 1) * i)
            assert (len(log), counter.item()) == (i, i)


def re_entry(device):
    depth = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def again(x: Tensor) -> Tensor:
        if depth:
            return x + 100
        depth.append(1)
        y = compiled(x * 2)
        depth.pop()
        return y + x

    def fn(x):
        y = x + 1
        return again(y) * 3 + y

    def want(x, inner=False):
        y = x + 1
        return (y + 100 if inner else want(y * 2, True) + y) * 3 + y

    compiled = torch.compile(fn, backend="bcg", options=QUIET)
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), want(x))
    assert (counts.replays, counts.num_eager) == (3, 4)


def later_mark(device):
    """A mark made after the first call takes effect at the next."""
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend="bcg")
    with torch.no_grad():
        for _ in range(2):
            compiled(rows(device))
        handle = torch_bcg.eager_on_graph(torch.sin)
        try:
            x = rows(device)
            assert_same(compiled(x), x.sin() * 2 + 1)
        finally:
            handle.remove()
        (program,) = torch_bcg.programs(compiled)
    assert [r.kind for r in program.plan.reasons] == ["mark"]


def untagged_host_read(device):
    """Nobody marked the operator that reads the host: the probe finds it."""
    with torch.library._scoped_library("torch_bcg_mutants", "FRAGMENT") as library:
        library.define("scale(Tensor x, Tensor counts) -> Tensor")
        library.impl("scale", lambda x, c: x * sum(c.tolist()), "CompositeExplicitAutograd")
        fake = torch.library.register_fake
        fake("torch_bcg_mutants::scale", lambda x, c: torch.empty_like(x), lib=library)
        scale = torch.ops.torch_bcg_mutants.scale

        def make(i):
            return rows(device), torch.randint(0, 9, (3,), device=device)

        check(lambda x, counts: scale(x + 1, counts * 2).relu() + 1, make)


def gradients(device):
    def make(i):
        return rows(device), rows(device, requires_grad=True)

    fn = double_gradients
    check(fn, make, replays=0, eager_calls=4, mode=torch.enable_grad, options=QUIET)


def double_gradients(x, w):
    out = torch.empty_like(x)
    double_into(x, out)
    return plus_one(out) * w


def handle_of(module, device, around=nullcontext):
    """The program of a module after three calls."""
    compiled = torch.compile(module, backend="bcg")
    for _ in range(3):
        with torch.no_grad(), around():
            compiled(rows(device))
    return torch_bcg.programs(compiled)[0]


def handle_after_a_replaced_weight(device):
    model = nn.Linear(6, 6, device=device)
    program, old = handle_of(model, device), model.weight
    model.weight = nn.Parameter(rows(device, 6, 6))
    with torch.no_grad(), pytest.raises(MisfitError, match="weight"):
        program(rows(device))
    assert old is not model.weight


def handle_after_a_transpose(device):
    model = nn.Linear(6, 6, device=device)
    program = handle_of(model, device)
    with torch.no_grad():
        program(rows(device))
        model.weight.data = model.weight.data.t()
        with pytest.raises(MisfitError, match="weight"):
            program(rows(device))


def handle_under_other_settings(device):
    program = handle_of(nn.Linear(6, 6, device=device), device)
    other = torch.autocast(device, dtype=torch.bfloat16)
    with other, torch.no_grad(), pytest.raises(MisfitError, match="settings"):
        program(rows(device))


@dataclass
class Scaled:
    by: torch.Tensor
    times: int


class Scaling(nn.Module):
    def forward(self, x):
        md = torch_bcg.current_metadata(Scaled)
        return plus_one(x) * md.by * md.times


def handle_of_other_numbers(device):
    registration = torch_bcg.register_metadata_binding(Scaled)
    try:
        program = handle_of(
            Scaling(), device, lambda: torch_bcg.bind_metadata(Scaled(rows(device, 6), 2))
        )
        with pytest.raises(MisfitError, match="times"), torch.no_grad():
            program(rows(device), metadata=Scaled(rows(device, 6), 3))
    finally:
        registration.remove()
