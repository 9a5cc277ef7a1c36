"""Small calls in shared memory and under checks that a mutant must spoil."""

import pytest
import torch
from torch import Tensor

import torch_bcg
from mutants.on_padding import dynamic, rows, verdicts
from mutants.recorders import one_too_much, recorders
from torch_bcg.errors import CheckError
from torch_bcg.runtime.workspace import Workspace
from twin import assert_same, check, plus_one


@torch_bcg.eager_on_graph(mutates_args=("out",), name="mutants::turn_into")
def turn_into(x: Tensor, out: Tensor) -> None:
    """x from the last row to the first; wrong where out is x."""
    out.zero_()
    out.add_(x.flip(0))


@torch.library.custom_op("mutants::pick", mutates_args=())
def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows by number, of which facts know nothing; numbers past the end are the last row."""
    return x[index.clamp(max=len(x) - 1)]


pick.register_fake(lambda x, index: x.new_empty(index.shape[0], x.shape[1]))


# memory


def lives_that_meet(device):
    """One buffer is read while the next is written."""

    def fn(x):
        a, b = torch.empty_like(x), torch.empty_like(x)
        turn_into(x, a)
        turn_into(a, b)
        return b * 2

    check(fn, lambda i: (torch.randn(4, 6, device=device),))


def _read_twice(x):
    a = x * 2
    return plus_one(a) * a


def two_results(device):
    """What one recorded segment makes lies apart."""

    def fn(x):
        a, b = x * 2, x * 3
        return plus_one(a) * a + b

    check(fn, lambda i: (torch.randn(4, 6, device=device),))


def read_twice_under_verify(device):
    """A segment run again reads what it read, also after its results are there."""
    check(_read_twice, lambda i: (torch.randn(4, 6, device=device),), options={"check": "verify"})


def read_twice_under_poison(device):
    """Nobody reads memory that was filled since nobody reads it any more."""
    check(_read_twice, lambda i: (torch.randn(4, 6, device=device),), options={"check": "poison"})


# faults that a check has to find


def found(compiled, *args, node):
    """The error of a call, which says where and what."""
    with torch.no_grad(), pytest.raises(CheckError, match="Segment ") as raised:
        compiled(*args)
    assert f"node '{node}'" in raised.value.where
    assert "on_checks.py:" in raised.value.where
    assert "run eagerly" in raised.value.what


def _picked(fn, device, node):
    """Calls that pick rows of their own, and one that picks a row it does not have."""
    compiled = torch.compile(fn, backend="bcg", options={"buckets": [8], "check": "poison"})
    with torch.no_grad():
        for i in range(6):
            x = rows(device, i)
            index = dynamic(torch.arange(len(x), device=device).flip(0))
            assert_same(compiled(x, index), fn(x, index))
    assert verdicts(compiled) == [None]
    found(compiled, rows(device, 2), index_past(device), node=node)


def index_past(device):
    return dynamic(torch.tensor([0, 1, 6, 2, 3], device=device))


def padded_row_read(device):
    _picked(lambda x, index: pick(x, index) + plus_one(x), device, "pick_default")


def bridge_tail_read(device):
    _picked(lambda x, index: pick(plus_one(x), index) + x, device, "add")


def wrong_segment(device):
    """A recording that computes something else."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorders(one_too_much)(monkeypatch)
        compiled = torch.compile(_read_twice, backend="bcg", options={"check": "verify"})
        with torch.no_grad():
            compiled(torch.randn(4, 6, device=device))
        found(compiled, torch.randn(4, 6, device=device), node="a")


def freed_too_early(device):
    """Results lie in memory that is still read: what nobody reads any more is not a number."""
    release = Workspace.release
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Workspace, "release", lambda space, i: release(space, i + 1))
        compiled = torch.compile(_read_twice, backend="bcg", options={"check": "poison"})
        with torch.no_grad():
            for _ in range(2):
                y = compiled(torch.randn(4, 6, device=device))
    assert y.isnan().all()
