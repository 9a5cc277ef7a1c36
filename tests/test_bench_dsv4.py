"""The benchmark of whole steps runs, refuses what is wrong, and judges what it claims."""

import contextlib
import importlib
import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("bench_dsv4")
    torch._dynamo.reset()


@pytest.fixture
def variants(bench):
    return importlib.import_module("variants")


@pytest.fixture
def model(bench):
    return bench.random_model(bench.DSV4Config.tiny(2), "cpu", torch.float32)


def as_recorded(lane, ids):
    """What a floor gives, without a CUDA graph: replays write one result."""
    result = lane.forward(ids).clone()
    replay = lane.engine.compiled.__call__
    return result, lambda: result.copy_(replay(ids))


def test_variants_are_compared_and_timed(bench, variants, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(variants, "missing", lambda name, gpu: "no GPU" if name == "meta" else "")
    monkeypatch.setitem(bench.RECORDED, "floor", as_recorded)
    given = ["--device", "cpu", "--layers", "2", "--tokens", "16", "--repeats", "2"]
    only = ["--only", "eager", "meta", "bcg", "floor", "--out", str(tmp_path)]
    with torch.no_grad():
        assert bench.main([*given, *only]) == 0
    written = json.loads((tmp_path / "dsv4.json").read_text())
    found = {(r["variant"], r["params"]["time"]): r for r in written["records"]}
    times = ("latency", "host", "cold", "cold host", "back to back")
    calls = {(n, t) for n in ("eager", "bcg", "floor") for t in times}
    steps = {(n, t) for n in ("eager", "bcg") for t in ("step", "step host")}
    assert found.keys() == calls | steps | {("bcg", "record"), ("floor", "record")}
    assert all(found[key]["params"]["error"] == 0 for key in calls)  # float32 is exact's
    assert (found["bcg", "latency"]["params"]["cuts"], found["bcg", "latency"]["n"]) == (2, 2)
    assert found["bcg", "record"]["params"]["16"] > 0
    assert (written["claims"], written["notes"]) == ([], {"meta": "no GPU"})
    assert "no GPU" in capsys.readouterr().out


def test_steps_are_mixed_and_the_same_in_all_lanes(bench, model):
    lanes, notes = bench.lanes_of(["eager", "meta"], model, [40])
    assert (list(lanes), notes) == (["eager"], {"meta": "needs a GPU"})
    lanes["other"] = bench.lanes_of(["eager"], model, [40])[0]["eager"]
    with torch.no_grad():
        for lane in lanes.values():
            lane.take(torch.arange(40))
            lane.fill()
    one, other = lanes.values()
    lengths = one.batch.extend_seq_lens.tolist()
    done = (one.batch.seq_lens - one.batch.extend_seq_lens).tolist()
    assert lengths == [1, 1, 1, 1, 9, 9, 9, 9]
    assert (max(done), min(done)) == (256 + 6, 0)
    assert all(map(torch.equal, one.engine.pools.buffers(), other.engine.pools.buffers()))
    assert all(pool.any() for pool in one.engine.pools.buffers())


def test_leaves_out_what_is_no_option(bench, model, monkeypatch):
    monkeypatch.setitem(bench.ENGINES, "inductor", {"inner": "foot"})
    lanes, notes = bench.lanes_of(["bcg", "inductor"], model, [16])
    assert list(lanes) == ["eager", "bcg"]
    assert list(notes) == ["inductor"]
    assert "inner" in notes["inductor"]


def test_meta_is_given_the_plain_function(bench, variants, model, monkeypatch):
    called = []

    def no_graph(fn):
        def noted(*args):
            called.append(fn)
            fn(*args)

        return noted

    graph = types.SimpleNamespace(replay=lambda: called.append("replay"))
    package = types.SimpleNamespace(
        no_graph=no_graph, BreakableCUDAGraph=lambda: graph,
        breakable_graph=lambda given: contextlib.nullcontext(),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, variants.META, package)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    marked = getattr(variants.marking, variants.MARKED)
    lane = bench.lanes_of(["eager"], model, [16])[0]["eager"]
    with torch.no_grad():
        lane.take(ids := torch.arange(16))
        call = bench.static("meta", lane, ids)
        assert called == [marked.__wrapped__] * 8  # two layers, three runs before it is recorded
        assert getattr(variants.marking, variants.MARKED) is marked
        call(ids)
    assert called[-1] == "replay"


WANT = torch.tensor([3.0, 4.0])
GOOD = {"eager": 1e-2, "segments": 1e-2, "bcg": 1e-2, "inductor": -1.5e-2}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"bcg": 1.001e-2}, "bcg is wrong: it is not equal to segments"),
        ({"inductor": 2.1e-2}, "inductor is wrong: relative error 2.10e-02, limit 2.00e-02"),
        ({"inductor": float("nan")}, "inductor is wrong"),
        ({"eager": 2.0}, "eager is wrong"),
        ({"eager": float("nan")}, "eager is wrong"),
        ({}, ""),
    ],
)
def test_refuses_what_differs(bench, changed, says):
    calls = {n: lambda x, e=e: x * (1 + e) for n, e in (GOOD | changed).items()}
    given = [WANT, WANT + 1]
    with pytest.raises(bench.Refused, match=says) if says else contextlib.nullcontext():
        errors = bench.check(calls, {n: MagicMock() for n in calls}, given, WANT)
        assert errors["inductor"] == pytest.approx(1.5e-2, rel=1e-3)


def test_refuses_a_stale_result(bench):
    first = []

    def stale(x):
        first.append(x * 1)
        return first[0]

    lanes = {"eager": MagicMock()}
    with pytest.raises(bench.Refused, match="eager is wrong"):
        bench.check({"eager": stale}, lanes, [WANT, -WANT], WANT)


def test_judges_the_faster_of_ours(bench):
    p50 = {("eager", 256): 100.0, ("meta", 256): 35.0, ("meta", 2048): 300.0,
           ("bcg", 256): 25.0, ("bcg", 2048): 250.0, ("inductor", 256): 20.0,
           ("unchecked", 256): 18.0, ("inductor-floor", 256): 4.0}  # fmt: skip
    claims = bench.judge(p50, {"inductor": 2, "unchecked": 4})
    found = [(c.value, c.limit, c.met) for c in claims]
    assert found == [
        (5.0, "at least 5", True), (1.75, "at least 1.8", False),
        (1.2, "at least 1.3", False), (8.0, "at most 6", False), (3.5, "at most 6", True),
    ]  # fmt: skip


def test_refuses_to_run_nothing(bench, capsys):
    assert bench.main(["--device", "cpu", "--only", "meta"]) == 1
    assert "refused: meta: needs a GPU" in capsys.readouterr().err
