"""The benchmarks run, refuse to report what is wrong, and say where they ran. No test is of time."""

import collections
import importlib
import json
import types
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
QUICK = ["--device", "cpu", "--layers", "2", "--repeats", "3", "--width", "32", "--tokens", "4"]
WITHOUT_INDUCTOR = ["--only", "hand", "program", "compiled", "eager"]


@pytest.fixture
def module(monkeypatch):
    """Imports a file of `benchmarks/` as its command line does: the folder comes first."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_replay_overhead_writes_a_record_for_each_variant(module, tmp_path, capsys):
    bench = module("bench_replay_overhead")
    assert bench.main([*QUICK, *WITHOUT_INDUCTOR, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "replay_overhead.json").read_text())
    records = written["records"]
    assert [r["variant"] for r in records] == ["hand", "program", "compiled", "eager"]
    for record in records:
        assert record.keys() == {"name", "variant", "unit", "p20", "p50", "p80", "n", "params"}
        assert (record["unit"], record["n"]) == ("us", 3)
        assert 0 < record["p20"] <= record["p50"] <= record["p80"]
        assert record["params"]["layers"] == 2
    assert {"torch", "torch_bcg", "gpu", "date", "command", "commit"} <= written[
        "environment"
    ].keys()
    (claim,) = written["claims"]
    assert claim["met"] is None
    assert "5 segments" in claim["claim"]
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged on a CPU")


def test_hand_written_loop_follows_its_input(module):
    layered, bench = module("layered"), module("bench_replay_overhead")
    with torch.no_grad():
        case = layered.Case(2, 32, 4, torch.device("cpu"))
        loop = bench.hand(case)
        for x in case.inputs(3):
            torch.testing.assert_close(loop(x), case.model(x))


def stale(model):
    """Gives the result of its first call at every call."""
    results = []

    def call(x):
        results.append(model(x))
        return results[0]

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda case: lambda x: case.model(x) * 1.01, id="a little off"),
        pytest.param(lambda case: lambda x: case.model(x) * float("nan"), id="NaN"),
        pytest.param(lambda case: stale(case.model), id="stale"),
    ],
)
def test_refuses_to_report_a_wrong_variant(module, monkeypatch, tmp_path, capsys, wrong):
    bench = module("bench_replay_overhead")
    monkeypatch.setitem(bench.MAKERS, "hand", wrong)
    assert bench.main([*QUICK, "--only", "hand", "eager", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "refused: hand is wrong: relative error" in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_refuses_a_variant_that_does_not_exist(module, capsys):
    assert module("bench_replay_overhead").main([*QUICK, "--only", "foot"]) == 1
    assert "no such name: foot. There are hand, program" in capsys.readouterr().err


def test_judges_what_was_claimed(module):
    judge = module("bench_replay_overhead").judge
    p50 = {"hand": 100.0, "program": 260.0, "compiled": 300.0, "reduce-overhead": 500.0}
    step, ratio = judge(p50, 100, claimed=True)
    assert (step["value"], step["met"]) == (1.6, False)
    assert (ratio["value"], ratio["met"]) == (0.6, False)
    step, ratio = judge({**p50, "program": 250.0, "compiled": 249.0}, 100, claimed=True)
    assert step["met"] is ratio["met"] is True
    assert judge({"eager": 1.0}, 0, claimed=True) == []


def test_order_moves_on_so_that_every_variant_comes_after_every_other(module):
    harness, after = module("harness"), set()
    called = ["c"]

    def variant(name):
        def call(x):
            after.add((called[-1], name))
            called.append(name)

        return call

    calls = {name: variant(name) for name in "abc"}
    samples = harness.measure(calls, [torch.zeros(1)], 12, torch.device("cpu"))
    assert {name: len(times) for name, times in samples.items()} == dict.fromkeys("abc", 12)
    assert {(p, n) for p in "abc" for n in "abc" if p != n} <= after


def test_records_hold_median_and_percentiles(module):
    record = module("harness").Record.of("x", "y", "us", list(range(101)), layers=2)
    assert (record.p20, record.p50, record.p80, record.n) == (20, 50, 80, 101)
    single = module("harness").Record.of("x", "y", "us", [7.0])
    assert (single.p20, single.p50, single.p80) == (7, 7, 7)


def event(cat, name, correlation, **more):
    return {"ph": "X", "cat": cat, "name": name, "args": {"correlation": correlation, **more}}


def test_kernels_are_counted_by_the_call_that_launched_them(module):
    found = module("watch").count_launches(
        [
            {"ph": "M", "name": "process_name"},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mul"},
            event("cuda_runtime", "cudaGraphLaunch", 1),
            event("cuda_runtime", "cudaLaunchKernel", 2),
            event("cuda_driver", "cuLaunchKernelEx", 3),
            event("cuda_runtime", "cudaMemcpyAsync", 4),
            *(event("kernel", "in_a_graph", 1) for _ in range(5)),
            event("gpu_memset", "Memset", 1),
            event("kernel", "direct", 2),
            event("kernel", "triton", 3),
            event("gpu_memcpy", "Memcpy DtoD", 4),
            event("kernel", "nobody's", 9),
            event("kernel", "nobody's, of a graph", 9, **{"graph node id": 77}),
        ]
    )
    assert found.graphs == 1
    assert found.kernels == {"graph": 6, "direct": 2, "unknown": 1}
    assert found.copies == {"graph": 1, "direct": 1}
    assert found.recorded == 6 / 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so without a GPU only")
def test_profile_zoo_says_that_it_needs_a_gpu(module, capsys):
    assert module("profile_zoo").main(["--zoo", "zoo.py"]) == 1
    assert "this counts launches on a GPU, and torch sees none here" in capsys.readouterr().err


def test_profile_zoo_counts_replayed_calls_only(module, monkeypatch):
    """The GPU's part is played by a stand-in; the rest runs as it is."""
    zoo = types.SimpleNamespace(
        MODELS={"tiny": ("", "", {}, "")},
        inputs=lambda kind, length, device: (torch.randn(length, 4),),
        tensors=lambda result: [result],
    )
    profile, watch = module("profile_zoo"), module("watch")

    def stand_in(call):
        call()
        return watch.Launches(collections.Counter(graph=3), collections.Counter(direct=2), 1)

    monkeypatch.setattr(profile, "launches", stand_in)
    monkeypatch.setattr(profile, "build", lambda zoo, name: torch.nn.Linear(4, 4))
    with torch.no_grad():
        row = profile.look(zoo, "tiny", [3, 5, 7])
    assert (row.note, row.graph, row.direct_copies, row.launches) == ("", 9, 6, 3)
    assert row.recorded == row.kernels > 0
    assert row.enough
    assert "tiny" in profile.text([row])


@pytest.mark.cuda
def test_launches_of_a_replay_come_from_a_graph(module):
    launches = module("watch").launches
    x = torch.ones(8, device="cuda")
    launches(lambda: x.add_(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        x.mul_(2)
    found = launches(graph.replay)
    assert (found.graphs, found.kernels) == (1, {"graph": 2})
    assert launches(lambda: x.add_(1)).kernels == {"direct": 1}
