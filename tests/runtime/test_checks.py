"""Checks: none changes a result, each finds the fault that is planted for it and says where."""

import dataclasses
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from mutants.on_checks import pick
from mutants.on_padding import dynamic
from torch_bcg.errors import CheckError
from torch_bcg.runtime import capture, compare, memory
from twin import add_one_to, assert_same, check, counted, double_into, plus_one

CHECKS = ("address", "verify", "poison")
COMBINATIONS = [
    ",".join(c) for n in range(len(CHECKS) + 1) for c in itertools.combinations(CHECKS, n)
]
SIZES = (8, 8, 5, 3, 7, 5)


def rows(device, *shape):
    return torch.randn(*(shape or (4, 6)), device=device)


@pytest.fixture(params=COMBINATIONS, ids=lambda c: c or "off")
def checks(request):
    return request.param or "off"


# results


class Everything(nn.Module):
    """Buffers, a buffer filled by an eager operation, views, arguments that are written."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(6, 6, device=device)
        self.register_buffer("calls", torch.zeros((), device=device))
        self.register_buffer("last", torch.zeros(6, device=device))

    def forward(self, x, y, n):
        self.calls += 1
        h = self.linear(x)
        out = torch.empty_like(h)
        double_into(h, out)
        y.mul_(2)
        add_one_to(y)
        y[:, 1:].add_(out[:, 1:] * n)
        z = plus_one(h + y) * self.calls
        self.last.copy_(z[0])
        return z, z.t(), out, y[1:], (z > 0).sum(-1), n + 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_check_changes_a_result(device, checks, mode):
    check(
        Everything(device),
        lambda i: (rows(device), rows(device), i / 2),
        mode=mode,
        replays=range(2, 4),
        options={"check": checks},
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_check_changes_a_padded_result(device, checks, mode):
    check(
        Everything(device),
        lambda i: (dynamic(rows(device, SIZES[i], 6)), dynamic(rows(device, SIZES[i], 6)), i / 2),
        calls=6,
        mode=mode,
        exact=False,
        replays=range(3, 6),
        options={"check": checks, "buckets": [8]},
    )


def test_side_effects_happen_once_a_call(device, checks):
    log = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def note(x: Tensor) -> Tensor:
        log.append(len(x))
        return x + 1

    compiled = torch.compile(lambda x: note(x * 2) * 2, backend="bcg", options={"check": checks})
    with torch.no_grad():
        for i in range(1, 5):
            compiled(rows(device))
            assert len(log) == i


def test_random_segments_are_not_run_again(device, checks):
    """A second run would draw other numbers, rightly; and those drawn are as many as eager draws."""
    compiled = torch.compile(
        lambda x: F.dropout(plus_one(x), 0.5) * 2, backend="bcg", options={"check": checks}
    )
    x = torch.ones(30, 40, device=device)
    with torch.no_grad(), counted() as counts:
        drawn = [compiled(x) for _ in range(4)]
        torch.manual_seed(7)
        ours = [compiled(x) for _ in range(2)]
        if device == "cpu":
            torch.manual_seed(7)
            assert_same(ours, [F.dropout(plus_one(x), 0.5) * 2 for _ in range(2)])
    assert counts.replays == 5
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_outputs_that_are_program_memory(device, checks):
    options = {"check": checks, "outputs": "alias"}
    compiled = torch.compile(lambda x: plus_one(x * 2) * x, backend="bcg", options=options)
    with torch.no_grad():
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), plus_one(x * 2) * x)


# faults


def plant(monkeypatch, fault, index=None):
    """Lets ``fault(recording)`` take the place of one segment's recording, or of all."""
    record = capture.record

    def planted(space, segment, unrecorded, inner):
        recording = record(space, segment, unrecorded, inner)
        wanted = index is None or segment.index == index
        return fault(space, segment, recording) if wanted and not unrecorded else recording

    monkeypatch.setattr(capture, "record", planted)


def one_too_much(space, segment, recording):
    places = [memory.unowned(space.bound[n]) for n in segment.outputs]

    def replay():
        recording.replay()
        for t in places:
            t.add_(1)

    return dataclasses.replace(recording, replay=replay)


def twice(space, segment, recording):
    def replay():
        recording.replay()
        recording.replay()

    return dataclasses.replace(recording, replay=replay)


def chain(x):
    for _ in range(4):
        x = plus_one(x * 2)
    return x * 2


def raised(fn, *args, options):
    """The error of the first replay."""
    compiled = torch.compile(fn, backend="bcg", options=options)
    with torch.no_grad():
        compiled(*args)
        with pytest.raises(CheckError) as error:
            compiled(*args)
    return error.value


def test_verify_names_the_first_segment_that_is_wrong(device, monkeypatch):
    plant(monkeypatch, one_too_much, 4)
    error = raised(chain, rows(device), options={"check": "verify"})
    assert error.what == "Segment 4 gives another 'mul_2' replayed than run eagerly."
    assert re.fullmatch(
        r"segment 4 graph, 1 kernel, node 'mul_2', \S*test_checks.py:\d+", error.where
    )
    assert error.expected == "what the same operations give eagerly (check='verify')"
    assert re.fullmatch(r"off by 1 where values go up to [\d.]+", error.found)
    assert "execute='segments:4'" in error.fix
    assert "eager_on_graph" in error.fix
    parts = [line.split(":")[0].strip() for line in str(error).splitlines()[1:]]
    assert parts == ["where", "expected", "found", "to do"]


def test_verify_compares_what_a_segment_writes(device, monkeypatch):
    def fn(x, y):
        y.add_(x)
        return plus_one(x)

    plant(monkeypatch, twice)
    error = raised(fn, rows(device), rows(device), options={"check": "verify"})
    assert error.what == "Segment 0 gives another 'l_y_' replayed than run eagerly."


def test_verify_compares_buffers(device, monkeypatch):
    plant(monkeypatch, twice)
    args = (rows(device), rows(device), 0.5)
    error = raised(Everything(device), *args, options={"check": "verify"})
    assert "calls" in error.what


def test_verify_says_that_it_looked_at_some_rows(device, monkeypatch):
    plant(monkeypatch, one_too_much)
    monkeypatch.setattr(compare, "SAMPLED", 10)
    error = raised(chain, rows(device), options={"check": "verify"})
    assert error.found.endswith(", of the rows that were sampled")


@pytest.mark.parametrize("checked", ["off", "address", "poison"])
def test_others_do_not_verify(device, monkeypatch, checked):
    plant(monkeypatch, one_too_much, 4)
    compiled = torch.compile(chain, backend="bcg", options={"check": checked})
    x = rows(device)
    with torch.no_grad():
        assert_same(compiled(x), chain(x))
        assert not torch.equal(compiled(x), chain(x))


def test_what_was_found_does_not_spoil_the_next_call(device):
    def fn(x, y, index):
        y.add_(x)
        return pick(plus_one(x), index) + x

    options = {"check": "poison,verify", "buckets": [8]}
    compiled = torch.compile(fn, backend="bcg", options=options)
    with torch.no_grad(), counted() as counts:
        for i in range(11):  # of which two sizes are tried
            x = dynamic(rows(device, SIZES[i % 6], 6))
            y = rows(device, SIZES[i % 6], 6)
            index = dynamic(torch.arange(len(x), device=device))
            ours, theirs = dynamic(y.clone()), y.clone()
            if i == 5:
                index[0] = 6  # a row that the call does not have
            if i == 5:
                with pytest.raises(CheckError, match="Segment 2 gives another 'add'") as error:
                    compiled(x, ours, index)
                assert "A row of the call follows from rows it does not have" in error.value.fix
                assert "test_checks.py:" in error.value.where
                assert_same(ours, y + x)  # written before, as in eager
            else:
                assert_same(compiled(x, ours, index), fn(x, theirs, index))
                assert_same(ours, theirs)
    assert counts.replays >= 7


# from the whole to one segment


def is_right(device, execute):
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend="bcg", options={"execute": execute})
    x = rows(device)
    with torch.no_grad():
        compiled(x)
        return torch.equal(compiled(x), chain(x))


@pytest.mark.parametrize("wrong", [0, 2, 6, 8])
def test_execute_finds_a_wrong_segment_by_halves(device, monkeypatch, wrong):
    """Run unrecorded, the half with the wrong segment is right again."""
    plant(monkeypatch, one_too_much, wrong)
    recorded = [0, 2, 4, 6, 8]
    assert not is_right(device, "graphs")
    assert is_right(device, "segments")
    while len(recorded) > 1:
        middle = len(recorded) // 2
        halves = recorded[:middle], recorded[middle:]
        right = [is_right(device, f"segments:{half[0]}-{half[-1]}") for half in halves]
        assert sorted(right) == [False, True]
        recorded = halves[right.index(True)]
    assert recorded == [wrong]
    assert is_right(device, f"segments:{wrong}")
