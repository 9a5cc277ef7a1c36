"""The benchmarks run, refuse to report what is wrong, and say where they ran. No test is of time."""

import collections
import importlib
import json
import types
from pathlib import Path

import pytest
import torch

import torch_bcg

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


def test_memory_of_a_variant_is_measured_in_a_process_of_its_own(module, tmp_path, capsys):
    sizes = ["--device", "cpu", "--layers", "1", "--width", "32", "--sizes", "4", "16", "8"]
    bench = module("bench_memory")
    assert bench.main([*sizes, "--only", "bcg", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "memory.json").read_text())
    records = {r["params"].get("kind", r["name"]): r for r in written["records"]}
    assert records["pool"]["p50"] == records["counted"]["p50"] > 0
    assert list(records["capture"]["params"]["each"]) == ["16", "8", "4"]
    assert written["claims"] == []
    assert "bcg" in capsys.readouterr().out


def memory_row(bench, variant, pool, outside):
    memory = {"pool": pool, "outside": outside, "allocated": 0, "counted": 0, "device": -1}
    return bench.Row(variant, 2, memory, {8: 1.5, 4: 0.5})


def test_memory_claims_compare_pools_and_show_what_lies_outside(module):
    bench = module("bench_memory")
    rows = {n: memory_row(bench, n, *b) for n, b in
            {"bcg": (105, 95), "largest": (100, 100), "meta": (100, 0)}.items()}  # fmt: skip
    claims = bench.judge(rows, claimed=True)
    assert [c["value"] for c in claims] == [1.05, 1.0, 1.05, 2.0]
    assert [c["met"] for c in claims] == [True, None, False, None]
    assert [c["met"] for c in bench.judge(rows, claimed=False)] == [None] * 4
    rows["meta"] = bench.Row("meta", note="not installed")
    assert len(bench.judge(rows, claimed=True)) == 2
    assert "not installed" in bench.text(list(rows.values()))


def test_memory_tells_private_pools_from_the_rest(module, monkeypatch):
    bench = module("bench_memory")
    stand_ins = {
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "memory_snapshot": lambda: [
            {"segment_pool_id": (0, 0), "total_size": 7},
            {"segment_pool_id": (0, 3), "total_size": 20},
            {"segment_pool_id": (1, 0), "total_size": 2},
        ],
        "mem_get_info": lambda device: (60, 100),
        "memory_allocated": lambda device: 25,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    now = bench.Memory.now(torch.device("cuda"))
    assert (now.pool, now.outside, now.allocated, now.device) == (22, 7, 25, 40)
    more = now.since(bench.Memory(2, 3, 5, 0, 30))
    assert (more.pool, more.outside, more.allocated, more.device) == (20, 4, 20, 10)


def test_memory_refuses_a_variant_that_cannot_be_measured(module, monkeypatch, tmp_path, capsys):
    bench = module("bench_memory")
    monkeypatch.setattr(bench, "apart", lambda name, args: bench.Row(name, note="refused: wrong"))
    given = ["--device", "cpu", "--sizes", "8", "4", "--out", str(tmp_path)]
    assert bench.main(given) == 1
    assert "refused: bcg: refused: wrong; largest: refused: wrong" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_memory_of_metas_package_needs_it_and_a_gpu(module, monkeypatch):
    bench = module("bench_memory")
    cpu, cuda = types.SimpleNamespace(device="cpu"), types.SimpleNamespace(device="cuda")
    monkeypatch.setattr(bench, "META", "no_such_package")
    assert bench.apart("meta", cuda).note == "not installed"
    monkeypatch.setattr(bench, "META", "json")
    assert bench.missing("meta", cpu) == "needs a GPU"
    assert bench.missing("meta", cuda) == bench.missing("bcg", cpu) == ""


SMALL = ["--device", "cpu", "--layers", "1", "--repeats", "3", "--width", "32"]


def test_padding_is_timed_beside_exact_calls_of_the_same_program(module, tmp_path, capsys):
    bench = module("bench_padding")
    assert bench.main([*SMALL, "--buckets", "8", "16", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "padding.json").read_text())
    found = {(r["params"]["bucket"], r["params"]["time"], r["variant"]) for r in written["records"]}
    both = {(b, t, v) for b in (8, 16) for t in ("host", "wall")
            for v in ("exact", "again", "near", "far", "moving")}  # fmt: skip
    assert found == both | {(8, "host", "first"), (16, "host", "first")}
    assert {c["met"] for c in written["claims"]} == {None}
    assert len(written["claims"]) == 8
    assert "13..15" in capsys.readouterr().out


def test_padding_chooses_rows_between_two_buckets(module):
    bench = module("bench_padding")
    small, large = bench.buckets_of([1024, 16])
    assert (small.below, large.below) == (12, 960)
    assert small.rows == {"exact": 16, "again": 16, "near": 15, "far": 13}
    assert large.rows["far"] == 976
    assert list(small.padded) == [13, 14, 15]
    assert bench.main([*SMALL, "--buckets", "17"]) == 1


def test_padding_is_refused_where_the_graph_is_not_padded(module, monkeypatch, capsys):
    bench, layered = module("bench_padding"), module("layered")
    for_buckets = layered.Case.for_buckets
    exact = {"buckets": None}
    monkeypatch.setattr(
        layered.Case,
        "for_buckets",
        lambda self, name, **options: for_buckets(self, "exact", **{**options, **exact}),
    )
    assert bench.main([*SMALL, "--buckets", "8"]) == 1
    assert "is not padded" in capsys.readouterr().err


def test_padding_judges_each_bucket_against_its_exact_calls(module):
    judge = module("bench_padding").judge
    p50 = {(8, "host", "exact"): 100.0, (8, "host", "again"): 200.0, (8, "host", "near"): 103.0,
           (8, "host", "far"): 104.0}  # fmt: skip
    near, far = judge(p50, claimed=True)
    assert (near["value"], near["met"]) == (1.03, True)
    assert (far["value"], far["met"]) == (1.04, False)


def test_checks_are_timed_alone_and_together(module, tmp_path, capsys):
    bench = module("bench_checks")
    assert bench.main([*SMALL, "--bucket", "8", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "checks.json").read_text())["records"]
    found = {(r["variant"], r["params"]["call"], r["params"]["time"]) for r in records}
    assert len(records) == len(found) == 5 * 2 * 2
    assert {v for v, _, _ in found} == {"off", "address", "verify", "poison", "all"}
    assert "- off" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bench_padding", "bench_checks"])
def test_refuses_a_wrong_padded_result(module, monkeypatch, tmp_path, capsys, name):
    bench, layered = module(name), module("layered")
    for_buckets = layered.Case.for_buckets

    def wrong(self, *args, **options):
        compiled = for_buckets(self, *args, **options)
        return lambda x: compiled(x) * 1.01 if len(x) == 7 else compiled(x)

    monkeypatch.setattr(bench, "record", lambda case, compiled, buckets: None, raising=False)
    monkeypatch.setattr(layered.Case, "for_buckets", wrong)
    size = ["--buckets" if name == "bench_padding" else "--bucket", "8"]
    assert bench.main([*SMALL, *size, "--out", str(tmp_path)]) == 1
    assert "is wrong: relative error" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class RowWise(torch.nn.Module):
    """Rows stay apart, or all see each other, or the compiled result is another one."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(4, 4), kind

    def forward(self, x):
        y = self.linear(x).relu()
        if self.kind == "mixing":
            y = y + y.sum(1, keepdim=True)
        return y + 1 if self.kind == "wrong" and torch.compiler.is_compiling() else y


@pytest.fixture
def zoo(module, monkeypatch, tmp_path):
    """Runs `pad_zoo` on small models."""
    script = tmp_path / "small_zoo.py"
    script.write_text(
        "import torch\n"
        "MODELS = {n: ('', '', {}, '') for n in ('apart', 'mixing', 'wrong')}\n"
        "def inputs(kind, length, device, batch=1): return (torch.randn(batch, length, 4),)\n"
        "def tensors(result): return [result]\n"
    )
    bench, recompiles = module("pad_zoo"), torch._dynamo.config.recompile_limit
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench, "build", lambda zoo, name, device: RowWise(name))

    def run(*given):
        out = tmp_path / "out"
        status = bench.main(
            ["--zoo", str(script), "--device", "cpu", "--unmarked", "--out", str(out), *given]
        )
        return status, {p.name: p.read_text() for p in out.glob("*")}

    yield run
    torch._dynamo.config.recompile_limit = recompiles
    torch.set_num_threads(threads)


def test_pad_zoo_says_what_is_padded_and_why_not(zoo):
    status, files = zoo("--only", "apart", "mixing", "--sweep", "3", "11", "--batch", "2")
    assert status == 0
    name = "pad_zoo_unmarked_batch2_cpu"
    assert files.keys() == {f"{name}.json", f"{name}.md"}
    apart, mixing = json.loads(files[f"{name}.json"])["records"]
    found = apart["params"]
    assert (found["verdict"], found["padded_graphs"], found["graphs"]) == ("padded", 1, 1)
    assert (found["programs"], found["buckets"], found["eager_calls"]) == (3, 3, {})  # 4, 8, 12
    assert found["pad_rows"] > 0
    assert found["lengths"] == 9
    refused = mixing["params"]
    assert refused["verdict"].startswith("refused: ")
    assert (refused["padded_graphs"], refused["programs"]) == (0, 0)
    assert refused["exact_programs"] == 9
    assert "| apart | padded | 1 | 3 | 3 |" in files[f"{name}.md"]
    assert "1 padded, 1 refused, 0 wrong. Every output" in files[f"{name}.md"]


def test_pad_zoo_reports_nothing_if_a_result_differs(zoo, capsys):
    status, files = zoo("--only", "apart", "wrong", "--sweep", "3", "4")
    assert (status, files) == (1, {})
    out, err = capsys.readouterr()
    assert "differs: at length 3, call 1" in out
    assert "refused: wrong: wrong" in err


def test_pad_zoo_reports_nothing_if_a_bucket_has_two_programs(module):
    bench = module("pad_zoo")
    compiled = torch.compile(RowWise("apart"), backend="bcg", dynamic=True,
                             options={"buckets": "ladder"})  # fmt: skip
    with torch.no_grad():
        for rows in (3, 3, 5, 5):
            compiled(torch.randn(2, rows, 4))
    (plan,) = torch_bcg.explain(compiled).plans
    key = [torch_bcg.programs(compiled)[0].sizes[s] for s, _, _ in plan.symbols]
    row = bench.Row("apart", replays=2, pad_rows=2)
    bench.judge(row, compiled, {plan.name: {tuple(key)}})
    assert row.wrong
    assert f"{plan.name}: 2 programs, 1 buckets" in row.verdict


def test_pad_zoo_spreads_few_lengths_over_the_sweep(module):
    spread = module("pad_zoo").spread
    assert spread(2, 6, None) == [2, 3, 4, 5, 6]
    assert spread(2, 80, 4) == [2, 28, 54, 80]
    assert len(spread(2, 80, 12)) == 12
    assert spread(2, 4, 12) == [2, 3, 4]


def test_refresh_is_timed_beside_a_loop(module, tmp_path, capsys):
    bench = module("bench_metadata_refresh")
    given = ["--device", "cpu", "--repeats", "3", "--rows", "8", "--out", str(tmp_path)]
    assert bench.main(given) == 0
    written = json.loads((tmp_path / "metadata_refresh.json").read_text())
    found = {(r["variant"], r["params"]["time"]) for r in written["records"]}
    assert found == {(v, t) for v in ("refresh", "loop", "foreach") for t in ("host", "wall")}
    (claim,) = written["claims"]
    assert claim["met"] is None
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged on a CPU")


def copies_nothing(captured, live, refresh):
    pass


def moves_a_tensor(captured, live, refresh):
    refresh(captured, live)
    captured.keys = live.keys.clone()


def binds_another(captured, live, refresh):
    refresh(captured, live)
    captured.cache = captured.cache.clone()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (copies_nothing, "refresh is wrong: core.slots"),
        (moves_a_tensor, "a tensor has moved"),
        (binds_another, "is not bound anew"),
    ],
)
def test_refuses_a_wrong_refresh(module, monkeypatch, tmp_path, capsys, wrong, says):
    bench = module("bench_metadata_refresh")
    refresh = bench.refresh
    monkeypatch.setattr(bench, "refresh", lambda captured, live: wrong(captured, live, refresh))
    given = ["--device", "cpu", "--repeats", "2", "--rows", "64", "--out", str(tmp_path)]
    assert bench.main(given) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_refresh_is_judged_by_time_and_launches(module):
    judge = module("bench_metadata_refresh").judge
    p50 = {("refresh", "host"): 26.0, ("loop", "host"): 100.0}
    assert [c["met"] for c in judge(p50, {"refresh": 2}, claimed=True)] == [False, True]
    assert [c["met"] for c in judge(p50, {"refresh": 3}, claimed=True)] == [False, False]
    assert len(judge(p50, {"refresh": None}, claimed=True)) == 1
