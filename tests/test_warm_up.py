"""``warm_up``: the sizes that are asked for are recorded, and what it says of each is true."""

import contextlib
import gc
import importlib.util
import logging
import sys

import pytest
import torch
from torch import nn

import torch_bcg
from torch_bcg.counters import counters
from torch_bcg.errors import BCGError, BCGWarning
from torch_bcg.graph.buckets import LADDER
from torch_bcg.warm_up import Warmed
from twin import counted, plus_one


def simple(x):
    return plus_one(x * 2) * 3


class Inputs:
    """Rows of the size asked for; remembers the sizes."""

    def __init__(self, device="cpu"):
        self.device, self.sizes = device, []

    def __call__(self, size):
        self.sizes.append(size)
        return (torch.randn(size, 6, device=self.device),)


def warmed(compiled, sizes=None, **kwargs):
    inputs = Inputs(**kwargs)
    with torch.inference_mode():
        return torch_bcg.warm_up(compiled, inputs, sizes), inputs.sizes


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_every_size_is_a_replay_afterwards(device, dynamic):
    compiled = torch.compile(simple, backend="bcg", dynamic=dynamic)
    gc.collect()
    before = counters.pool_bytes
    found, _ = warmed(compiled, [8, 4, 2], device=device)
    assert [w.size for w in found] == [8, 4, 2]
    assert {w.how for w in found} == {"replay"}
    assert all(w.captures >= 1 and w.bytes >= 0 and w.seconds > 0 for w in found)
    assert sum(w.captures for w in found) == counters.captures
    assert sum(w.bytes for w in found) == counters.pool_bytes - before
    with torch.inference_mode(), counted() as counts:
        for size in (2, 4, 8):
            compiled(torch.randn(size, 6, device=device))
    assert (counts.replays, counts.probes, counts.warming, counts.captures) == (3, 0, 0, 0)


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_second_time_captures_nothing_and_replays_each_size_once(device, dynamic):
    compiled = torch.compile(simple, backend="bcg", dynamic=dynamic)
    warmed(compiled, [8, 4, 2], device=device)
    with counters.expect(captures=0, probes=0, warming=0, replays=3):
        found, sizes = warmed(compiled, [8, 4, 2], device=device)
    assert sizes == [8, 4, 2]
    assert [(w.captures, w.bytes, w.how) for w in found] == [(0, 0, "replay")] * 3


def test_the_largest_comes_first_and_every_size_once():
    compiled = torch.compile(simple, backend="bcg", dynamic=True)
    found, sizes = warmed(compiled, (2, 8, 4, 8))
    assert [w.size for w in found] == [8, 4, 2]
    # A probe and a replay; another size is warming twice before its replay.
    assert sizes == [8, 8, 4, 4, 4, 2, 2, 2]


def test_a_graph_made_on_the_way_answers_earlier_sizes_as_well():
    compiled = torch.compile(simple, backend="bcg")
    found, sizes = warmed(compiled, [8, 4, 2])
    first, second = sizes[:7], sizes[7:]
    assert first == [8, 8, 4, 4, 2, 2, 2]  # 4 makes Dynamo compile for any size
    assert set(second) == {8}
    assert {w.how for w in found} == {"replay"}


def test_sizes_that_each_have_a_graph_after_a_graph_break():
    def fn(x):
        y = plus_one(x * 2)
        torch._dynamo.graph_break()
        return y * 3

    compiled = torch.compile(fn, backend="bcg")
    found, _ = warmed(compiled, [8, 4, 2])
    assert {w.how for w in found} == {"replay"}
    with torch.inference_mode(), counters.expect(replays=6, captures=0):
        for size in (2, 4, 8):
            compiled(torch.randn(size, 6))


@pytest.mark.parametrize("sizes", [None, [8, 2]])
def test_gradients_are_a_reason(sizes):
    compiled = torch.compile(nn.Linear(6, 6), backend="bcg", options={"on_eager_call": "count"})
    inputs = Inputs()
    found = torch_bcg.warm_up(compiled, inputs, sizes)
    assert {w.how for w in found} == {"gradients"}
    assert {(w.captures, w.bytes) for w in found} == {(0, 0)}
    assert tuple(w.size for w in found) == tuple(sorted(sizes or LADDER, reverse=True))
    assert inputs.sizes == [w.size for w in found]


def test_more_sizes_than_programs():
    options = {"max_programs": 2, "on_eager_call": "count"}
    compiled = torch.compile(simple, backend="bcg", dynamic=True, options=options)
    found, _ = warmed(compiled, [8, 4, 2])
    assert [w.how for w in found] == ["replay", "replay", "max_programs"]


def test_more_graphs_than_dynamo_makes():
    compiled = torch.compile(simple, backend="bcg", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        found, _ = warmed(compiled, [8, 4, 2])
    assert [w.how for w in found] == ["replay", "replay", "not compiled"]


@pytest.mark.parametrize("named", [False, True])
def test_graphs_that_are_not_padded_are_told(device, named):
    """Two sizes vary: without a word each size would be a program of its own."""

    def fn(x, lengths):
        return plus_one(x * 2) + 1, lengths * 2

    options = {"buckets": [4, 8], **({"bucket_dim": ("x", 0)} if named else {})}
    compiled = torch.compile(fn, backend="bcg", dynamic=True, options=options)

    def make(n):
        return torch.randn(n, 6, device=device), torch.ones(n // 2, device=device)

    told = pytest.warns(BCGWarning, match="warm_up: not padded to buckets.* several sizes vary")
    with torch.inference_mode(), contextlib.nullcontext() if named else told:
        torch_bcg.warm_up(compiled, make)
    with torch.inference_mode(), counters.expect(replays=int(named), captures=0):
        compiled(torch.randn(7, 6, device=device), torch.ones(4, device=device))


def test_no_sizes():
    compiled = torch.compile(simple, backend="bcg")
    assert warmed(compiled, []) == ((), [])


@pytest.mark.parametrize("kind", ["module", "in_place", "forward", "function", "method"])
def test_sizes_of_the_option(kind):
    options = {"backend": "bcg", "dynamic": True, "options": {"buckets": [2, 8, 4]}}

    class Net(nn.Module):
        def forward(self, x):
            return simple(x)

        @torch.compile(**options)
        def other(self, x):
            return simple(x)

    class Forward(nn.Module):
        @torch.compile(**options)
        def forward(self, x):
            return simple(x)

    module = Net()
    if kind == "in_place":
        module.compile(**options)
    compiled = {
        "module": torch.compile(module, **options),
        "in_place": module,
        "forward": Forward(),
        "function": torch.compile(simple, **options),
        "method": module.other,
    }[kind]
    for _ in range(2):  # before there is a graph, and after
        found, _ = warmed(compiled)
        assert [w.size for w in found] == [8, 4, 2]


def test_sizes_of_the_variable(monkeypatch):
    monkeypatch.setenv("TORCH_BCG_BUCKETS", "2,4")
    found, _ = warmed(torch.compile(simple, backend="bcg", dynamic=True))
    assert [w.size for w in found] == [4, 2]


def test_what_is_not_compiled():
    for other in (simple, nn.Sequential(nn.Linear(6, 6)), 7):
        with pytest.raises(BCGError, match="nothing to warm up") as caught:
            warmed(other, [2])
        assert 'backend="bcg"' in caught.value.expected
        assert caught.value.found == repr(other).splitlines()[0]


def test_what_another_backend_compiled():
    with pytest.raises(BCGError, match="nothing to warm up") as caught:
        warmed(torch.compile(simple, backend="eager"), [4, 2])
    assert caught.value.found == "a call that ran nothing of this backend"


def test_inputs_that_are_no_tuple():
    compiled = torch.compile(simple, backend="bcg")
    with pytest.raises(BCGError, match="make_inputs") as caught:
        torch_bcg.warm_up(compiled, lambda size: torch.randn(size, 6), [4])
    assert (caught.value.where, caught.value.found) == ("warm_up, size 4", "Tensor")


def test_an_exception_of_the_model_comes_as_it_is():
    compiled = torch.compile(simple, backend="bcg", dynamic=True)

    def inputs(size):
        if size == 4:
            raise KeyError(size)
        return (torch.randn(size, 6),)

    with torch.inference_mode():
        with pytest.raises(KeyError):
            torch_bcg.warm_up(compiled, inputs, [8, 4, 2])
        assert torch_bcg.warm_up(compiled, Inputs(), [8])[0].how == "replay"


# what is shown


def test_a_line_of_the_log_for_each_size_and_nothing_else(caplog, capsys):
    caplog.set_level(logging.INFO, "torch_bcg")
    found, _ = warmed(torch.compile(simple, backend="bcg", dynamic=True), [8, 4, 2])
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_bcg"]
    starts = [f"warm_up: size {w.size}: replay, 1 captured, {w.bytes:,} bytes, " for w in found]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_without_progress_nothing_is_shown(caplog, capsys, monkeypatch, terminal):
    caplog.set_level(logging.INFO, "torch_bcg")
    compiled = torch.compile(simple, backend="bcg")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with torch.inference_mode():
        torch_bcg.warm_up(compiled, Inputs(), [4], progress=False)
    assert [r for r in caplog.records if r.name == "torch_bcg"] == []
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO, "torch_bcg")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warmed(torch.compile(simple, backend="bcg"), [8, 4])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "4: replay" in shown.err
    assert "100%" in shown.err
    assert [r for r in caplog.records if r.name == "torch_bcg"] == []


def test_a_terminal_without_rich(caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO, "torch_bcg")
    compiled = torch.compile(simple, backend="bcg")
    with torch.inference_mode():
        compiled(torch.randn(4, 6))  # Dynamo also looks for modules
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    warmed(compiled, [4])
    assert len([r for r in caplog.records if r.name == "torch_bcg"]) == 1
    assert capsys.readouterr().err == ""


def test_a_record_is_frozen():
    with pytest.raises(AttributeError):
        Warmed(8, 0.1, 64, 1, "replay").how = "eager"
