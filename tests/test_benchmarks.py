"""The benchmarks run, refuse to report what is wrong, and say where they ran. No test is of time."""

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
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged")


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
    step, ratio = judge(p50, 100)
    assert (step.value, step.limit, step.met) == (1.6, "at most 1.5", False)
    assert (ratio.value, ratio.limit, ratio.met) == (0.6, "below 0.5", False)
    step, ratio = judge({**p50, "program": 250.0, "compiled": 249.0}, 100)
    assert step.met is ratio.met is True
    assert judge({"eager": 1.0}, 0) == []


def test_a_claim_is_judged_on_a_gpu_alone(module, tmp_path):
    harness = module("harness")
    claims = harness.Claim.at_most("a / b", 1.23456, 1.5), harness.Claim.at_least("c", 2, 3)
    assert [str(c.on(torch.device("cuda:1"))) for c in claims] == [
        "a / b = 1.235, at most 1.5: yes",
        "c = 2, at least 3: NO",
    ]
    there = claims[0].on(torch.device("cpu"))
    assert str(there) == "a / b = 1.235, at most 1.5: not judged"
    harness.save(tmp_path, "some", [], claims=[there])
    (written,) = json.loads((tmp_path / "some.json").read_text())["claims"]
    assert written == {"claim": "a / b", "value": 1.23456, "limit": "at most 1.5", "met": None}


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


def test_untimed_calls_come_before_each_timed_one_of_their_variant(module):
    harness, called = module("harness"), []
    calls = {name: lambda x, name=name: called.append(name) for name in "ab"}
    samples = harness.measure(calls, [torch.zeros(1)], 3, torch.device("cpu"), untimed=2)
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3}
    assert "".join(called) == "aaabbb" + "aaabbb" + "aaabbb"


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


def operator(number, name, begin, end, thread=1):
    times = {"ts": begin, "dur": end - begin, "pid": 7, "tid": thread}
    return {"ph": "X", "cat": "cpu_op", "name": name, "args": {"External id": number}, **times}


def launch(correlation, inner=None, name="cudaLaunchKernel", **more):
    named = {} if inner is None else {"External id": inner}
    return {**event("cuda_runtime", name, correlation, **named), "pid": 7, **more}


def kernels(*correlations, **more):
    return [event("kernel", "k", c, **more) for c in correlations]


COMPOSITE = {"aten::to", "aten::einsum"}.__contains__


def test_an_operation_is_the_outermost_operator_that_launched_kernels(module):
    operations = module("profile_zoo").operations
    events = [
        {"ph": "M", "name": "process_name"},
        operator(1, "Torch-Compiled Region: 0/1", 0, 900),
        operator(3, "aten::sort", 110, 150),
        operator(2, "zoo::experts", 100, 200),  # one operation, whatever it calls
        operator(4, "aten::mm", 160, 190),
        operator(5, "zoo::experts", 200, 300),  # another call of it
        operator(6, "aten::mm", 210, 220),
        operator(7, "aten::to", 300, 400),  # never dispatched: what it is made of is
        operator(8, "aten::_to_copy", 310, 390),
        operator(9, "aten::copy_", 320, 380),
        operator(10, "aten::einsum", 400, 500),
        operator(11, "aten::bmm", 410, 420),
        operator(12, "aten::bmm", 430, 440),
        operator(13, "aten::view", 500, 510),
        operator(14, "aten::clone", 520, 530),  # a copy, no kernel
        operator(15, "aten::mul", 100, 200, thread=2),  # at the same time, but not in experts
        *(launch(c, i) for c, i in {21: 3, 22: 3, 23: 4, 24: 6, 25: 9, 26: 11, 27: 12}.items()),
        launch(28, 2),
        launch(29, 14, "cudaMemcpyAsync"),
        launch(30, 15),
        *kernels(21, 22, 23, 24, 25, 26, 27, 28, 28, 30),
        event("gpu_memcpy", "Memcpy DtoD", 29),
        launch(40, 1, "cudaGraphLaunch"),
        *kernels(40, 40, 40),
        *kernels(99, **{"graph node id": 5}),
    ]
    assert operations(events, COMPOSITE) == {
        "zoo::experts": 2,
        "aten::_to_copy": 1,
        "aten::bmm": 2,
        "aten::mul": 1,
    }
    assert operations(events, lambda name: False) == {
        "zoo::experts": 2,
        "aten::to": 1,
        "aten::einsum": 1,
        "aten::mul": 1,
    }


def test_an_operation_is_found_by_time_where_a_launch_names_none(module):
    events = [
        operator(1, "zoo::experts", 100, 200),
        operator(2, "aten::mm", 110, 120),
        operator(3, "aten::mul", 100, 200, thread=2),
        launch(21, ts=115, tid=1),
        launch(22, 77, ts=150, tid=1),
        launch(23, ts=200, tid=1),
        *kernels(21, 22, 23),
    ]
    found = module("profile_zoo").operations(events, COMPOSITE)
    assert found == {"zoo::experts": 1, "no operator": 1}


def test_an_operation_is_never_lost_without_a_word(module):
    events = [
        operator(1, "Torch-Compiled Region: 0/1", 0, 100),
        operator(2, "aten::einsum", 10, 20),  # composite all the way: the outermost
        operator(3, "aten::to", 12, 18),
        launch(21, 3),
        launch(22, 1),
        *kernels(21, 22, 22, 50, 50),  # of 50 there is no launch
    ]
    found = module("profile_zoo").operations(events, COMPOSITE)
    assert found == {"aten::einsum": 1, "no operator": 3}


def test_composite_operators_are_told_from_dispatched_ones(module):
    composite = module("profile_zoo").composite
    assert all(map(composite, ("aten::to", "aten::einsum", "aten::scaled_dot_product_attention")))
    others = ("aten::mm", "aten::_to_copy", "aten::empty", "no_such::operator", "aten::no_such")
    assert not any(map(composite, others))


def test_operators_of_a_real_trace_are_found(module, tmp_path):
    """Kernels are made up, one for each innermost operator; operators and their nesting are not."""
    profile = module("profile_zoo")
    x = torch.ones(4, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        torch.einsum("ij,jk->ik", x, x).to(torch.float64).add_(1)
    watched.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    inner = [e for e in events if e.get("name") in ("aten::bmm", "aten::copy_", "aten::add_")]
    numbers = [e["args"]["External id"] for e in inner]
    made = [e for n in numbers for e in (launch(n, n), *kernels(n))]
    found = profile.operations([*events, *made])
    assert found == {"aten::bmm": 1, "aten::_to_copy": 1, "aten::add_": 1}


@pytest.fixture
def looked_at(module, monkeypatch):
    """A model at three lengths. The GPU's part is played by a stand-in; the rest runs as it is."""
    zoo = types.SimpleNamespace(
        MODELS={"tiny": ("", "", {}, "")},
        inputs=lambda kind, length, device: (torch.randn(length, 4),),
        tensors=lambda result: [result],
    )
    profile = module("profile_zoo")
    replay = [
        launch(1, name="cudaGraphLaunch"),
        *kernels(1, 1, 1),
        operator(2, "zoo::experts", 0, 10),
        *(e for c in range(10, 17) for e in (launch(c, 2), *kernels(c))),
        *(e for c in (20, 21) for e in (launch(c), event("gpu_memcpy", "Memcpy", c))),
    ]
    off = [
        *(operator(n, "zoo::experts", n, n + 1) for n in range(40)),
        *(e for n in range(40) for e in (launch(n, n), *kernels(n))),
        *kernels(99),  # of nobody's: in no total
    ]

    def stand_in(call):
        before = torch_bcg.stats().replays
        call()
        return replay if torch_bcg.stats().replays > before else off

    monkeypatch.setattr(profile, "traced", stand_in)
    monkeypatch.setattr(profile, "build", lambda zoo, name: torch.nn.Linear(4, 4))
    with torch.no_grad():
        return profile.look(zoo, "tiny", [3, 5, 7])


def test_profile_zoo_counts_replayed_calls_only(module, looked_at):
    row = looked_at
    assert (row.note, row.graph, row.direct_copies, row.launches) == ("", 9, 6, 3)
    assert row.recorded == row.kernels > 0
    assert "tiny" in module("profile_zoo").text([row])


def test_profile_zoo_counts_operations_beside_launches(module, looked_at):
    profile, row = module("profile_zoo"), looked_at
    assert (row.graph, row.direct, row.profiled) == (9, 21, 0.3)
    assert row.direct_operators == {"zoo::experts": 3}
    assert (row.operations, row.direct_operations, row.operated) == (120, 3, 0.975)
    assert [row.enough(c) for c in ("profiler", "operations", "stats")] == [False, True, True]
    broken = profile.Row("broken", graph=1, operations=1, recorded=1, kernels=1, note="raised")
    assert profile.verdict([row, broken]) == (
        "of 2 models at least 95% is recorded in 0 by launches, 1 by operations, 1 by stats()"
    )
    written = [json.loads(json.dumps(vars(r))) for r in profile.records([row], {"lengths": [3]})]
    assert {r["params"]["count"]: r["p50"] for r in written} == row.shares
    for record in written:
        assert record["params"]["direct_operators"] == {"zoo::experts": 3}
        assert (record["params"]["operations"], record["params"]["direct_operations"]) == (120, 3)


def test_profile_zoo_gives_no_share_where_operations_are_unknown(module):
    row = module("profile_zoo").Row("x", operations=2, direct_operators={"no operator": 5})
    assert row.operated == 0
    assert module("profile_zoo").Row("x").operated == 0


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
    claims = bench.judge(rows)
    assert [(c.value, c.limit, c.met) for c in claims] == [
        (1.05, "at most 1.1", True), (1.0, "none set", None),
        (1.05, "at most 1.0", False), (2.0, "none set", None),
    ]  # fmt: skip
    rows["meta"] = bench.Row("meta", note="not installed")
    assert len(bench.judge(rows)) == 2
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
    near, far = judge(p50)
    assert (near.value, near.limit, near.met) == (1.03, "at most 1.03", True)
    assert (far.value, far.met) == (1.04, False)


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
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged")


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
    assert [c.met for c in judge(p50, {"refresh": 2})] == [False, True]
    assert [c.met for c in judge(p50, {"refresh": 3})] == [False, False]
    assert len(judge(p50, {"refresh": None})) == 1


def test_dsv4_metadata_is_timed_warm_and_cold(module, tmp_path, capsys):
    bench = module("bench_dsv4_metadata")
    assert bench.main(["--device", "cpu", "--repeats", "3", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "dsv4_metadata.json").read_text())
    found = {(r["params"]["kind"], r["variant"], r["params"]["time"]) for r in written["records"]}
    ways = (("create", "host"), ("torch", "host"), ("create", "cold"))
    assert found == {(kind, *way) for kind in ("mixed", "many") for way in ways}
    assert written["claims"] == []  # they are about the kernel
    assert "cold" in capsys.readouterr().out


def test_refuses_wrong_dsv4_metadata(module, monkeypatch, tmp_path, capsys):
    bench = module("bench_dsv4_metadata")
    create = bench.DSV4Metadata.create

    def wrong(batch, layout, rows, out):
        create(batch, layout, rows, out)
        out.core_attn_metadata.swa_page_indices[-1, -1] += 1

    monkeypatch.setattr(bench.DSV4Metadata, "create", wrong)
    assert bench.main(["--device", "cpu", "--repeats", "2", "--out", str(tmp_path)]) == 1
    assert "create is wrong: core_attn_metadata.swa_page_indices" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_dsv4_metadata_judges_no_cold_call(module):
    bench = module("bench_dsv4_metadata")

    def record(variant, time, us):
        params = {"kind": "mixed", "time": time, "bytes": 43_012_345, "launches": 1}
        return bench.Record.of("dsv4_metadata", variant, "us", [us], **params)

    records = [record("kernel", "host", 40.0), record("kernel", "cold", 90.0),
               record("kernel", "device", 30.5), record("torch", "host", 4000.0)]  # fmt: skip
    found = [(c.claim, c.value, c.limit, c.met) for c in bench.judge(records)]
    assert found == [
        ("mixed: host, us", 40.0, "at most 40", True),
        ("mixed: launches", 1, "at most 3", True),
        ("mixed: device, us", 30.5, "at most 30.01", False),
    ]


def test_sparse_attention_is_timed_beside_ceilings(module, tmp_path, capsys):
    bench = module("bench_sparse_attention")
    given = ["--device", "cpu", "--rows", "4", "--repeats", "2", "--out", str(tmp_path)]
    assert bench.main(given) == 0
    written = json.loads((tmp_path / "sparse_attention.json").read_text())
    found = [(r["variant"], r["params"]["time"]) for r in written["records"]]
    assert found == [("product", "device"), ("copy", "device"),
                     *((v, t) for v in ("window", "both") for t in ("device", "host"))]  # fmt: skip
    assert all(r["params"]["error"] < 2e-2 for r in written["records"][2:])
    (claim,) = written["claims"]
    assert claim["met"] is None
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged")


def test_refuses_wrong_sparse_attention(module, monkeypatch, tmp_path, capsys):
    bench = module("bench_sparse_attention")
    monkeypatch.setattr(bench, "sparse_attention", lambda *args: args[-1].fill_(0.1))
    given = ["--device", "cpu", "--rows", "4", "--repeats", "2", "--out", str(tmp_path)]
    assert bench.main(given) == 1
    assert "refused: window, 4 rows, is wrong: relative error" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sparse_attention_judges_the_best_config_of_the_most_rows(module):
    bench = module("bench_sparse_attention")

    def record(variant, rows, rate):
        params = {"rows": rows, "time": "device", "TFLOP/s": rate}
        return bench.Record.of("sparse_attention", variant, "us", [1.0], **params)

    records = [record("window", 64, 900.0), record("both", 16, 900.0),
               record("both", 64, 100.0), record("both", 64, 250.0)]  # fmt: skip
    claim = bench.judge(records, 1000.0)
    assert (claim.value, claim.met) == (0.25, False)


@pytest.fixture
def stepping(module, monkeypatch):
    """The benchmark of steps, with layers of two kinds only: less to compile."""
    bench = module("bench_dsv4_steps")
    tiny = bench.DSV4Config.tiny
    smaller = types.SimpleNamespace(tiny=lambda **given: tiny(2, **given))
    monkeypatch.setattr(bench, "DSV4Config", smaller)
    monkeypatch.setattr(bench, "TINY", (256, 8, (16, 32)))
    yield bench
    torch._dynamo.reset()


def test_dsv4_steps_are_compared(stepping, tmp_path, capsys):
    given = ["--device", "cpu", "--steps", "5", "--out", str(tmp_path)]
    assert stepping.main(given) == 0
    written = json.loads((tmp_path / "dsv4_steps.json").read_text())
    found = {r["variant"] for r in written["records"]}
    assert found == {"replayed", "segments", "eager", "exact"}
    assert sum(written["kinds"].values()) == written["replays"] == 5
    assert all(c["met"] is None for c in written["claims"])
    said = written["figures"]
    assert said["differ"] == said["differ anywhere"] == 0
    assert 0 < said["rms, all words"] < 1e-4
    assert capsys.readouterr().out.splitlines()[-1].endswith("not judged")


def ulp(lane, hidden):
    return torch.nextafter(hidden, hidden + 1)


def another_row(lane, hidden):
    return hidden.roll(1, 0)


def no_number(lane, hidden):
    return hidden * float("nan")


def entry(lane, hidden):
    lane.pools.layers[1].entries[1] += 1
    return hidden


@pytest.mark.parametrize(
    ("lane", "wrong", "says"),
    [
        ("segments", ulp, "refused: replayed is wrong: there are steps in which"),
        ("segments", entry, "refused: replayed is wrong: there are pools that differ at the end"),
        ("eager", no_number, "refused: eager is wrong"),
        ("eager", another_row, "refused: eager is wrong"),
    ],
)
def test_refuses_wrong_dsv4_steps(stepping, monkeypatch, tmp_path, capsys, lane, wrong, says):
    """No lane compiles: what differs is found in any."""
    made = stepping.lanes_of

    def lanes_of(*args):
        lanes = made(*args)
        for name in ("replayed", "segments"):
            engine = lanes[name].engine
            body = type(lanes["eager"].engine.compiled)
            engine.compiled, engine.backend = body(engine.model, engine.pools), None
        step = lanes[lane].step

        def changed(works):
            hidden, ms = step(works)
            return wrong(lanes[lane], hidden), ms

        lanes[lane].step = changed
        return lanes

    monkeypatch.setattr(stepping, "lanes_of", lanes_of)
    assert stepping.main(["--device", "cpu", "--steps", "3", "--out", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_dsv4_steps_judge_rows_that_are_ahead(stepping):
    found = stepping.Found(replays=1)
    eager = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.3, 0.5], [2.0, 0.0, 0.0]])
    again = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.6, 0.5], [2.0, 0.0, 0.0]])
    found.add(eager, again, eager + 0.1)
    said = found.figures()
    assert said["rms, all words"] == pytest.approx(0.1)
    assert said["largest"] == pytest.approx(0.1)
    assert said["judged"] == pytest.approx(2 / 3)  # 0.2 is less than 4 errors
    assert (said["differ"], said["differ anywhere"]) == (0, 1)
    claims = stepping.judge(found, 1)
    assert [c.met for c in claims] == [True, False, True, True, True]
    assert [c.limit for c in claims] == ["at least 1", "at least 0.95", "none", "none", "none"]
    found.add(eager[:1], again[:1].flip(1).roll(1, 1), eager[:1] + 0.1)
    assert found.figures()["differ"] == 1
    found.unequal, found.pools = 1, ["layers.0.swa"]
    assert not any(c.met for c in stepping.judge(found, 2))


def test_dsv4_steps_are_of_every_kind(module):
    steps = module("steps")
    request = steps.Request(range(9), 6)

    def kind(*spans):
        return steps.kind_of([steps.Work(request, *span) for span in spans])

    assert kind((0, 3), (0, 6)) == "prefill"
    assert kind((0, 3), (3, 6)) == "chunked"
    assert kind((0, 3), (6, 7)) == "mixed"
    assert kind((6, 7), (8, 9)) == "decode"
