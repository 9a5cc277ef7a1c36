"""`bench_start.py` runs, refuses what is wrong and judges. No test is of time."""

import argparse
import importlib
import json
import types
from pathlib import Path

import pytest
import torch

from torch_bcg.errors import BCGWarning

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
QUICK = ["--device", "cpu", "--layers", "2", "--width", "32", "--sizes", "8", "4"]
ARGS = argparse.Namespace(device="cpu", layers=4, width=32, sizes=[4, 8], repeats=3, timeout=9)


@pytest.fixture
def bench(monkeypatch):
    """Imported as its command line does: the folder comes first."""
    monkeypatch.syspath_prepend(str(FOLDER))
    with torch.no_grad():
        yield importlib.import_module("bench_start")


def compiler(code, examples):
    return code.forward


def test_a_variant_starts_in_a_process_of_its_own(bench, tmp_path, capsys):
    assert bench.main([*QUICK, "--only", "eager", "second", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "start.json").read_text())
    found = {r["params"]["kind"]: r for r in written["records"]}
    assert found.keys() == bench.FIGURES.keys()
    assert {(r["name"], r["variant"]) for r in written["records"]} == {("start", "eager")}
    assert found["compilations"]["p50"] == found["inner"]["p50"] == 0
    assert found["pool"]["p50"] > 0
    about = {"layers": 2, "sizes": 2, "width": 32, "device": "cpu", "dtype": "float32"}
    assert about.items() <= found["all"]["params"].items()
    assert (written["claims"], written["notes"]) == ([], {"second": "needs first"})
    assert "needs first" in capsys.readouterr().out


def test_a_start_says_where_the_seconds_went(bench, monkeypatch):
    monkeypatch.setitem(bench.STARTS, "first", compiler)
    found = {r.params["kind"]: r.p50 for r in bench.start("first", ARGS)}
    assert found["compilations"] == 3  # the first segment, one of those in between, the last
    assert min(found.values()) > 0
    assert found["dynamo"] + found["inner"] + found["capture"] == pytest.approx(found["all"])


def test_few_layers_have_the_segments_of_many(bench, monkeypatch):
    monkeypatch.setitem(bench.STARTS, "kinds", compiler)
    found = {r.params["kind"]: r for r in bench.start("kinds", ARGS)}
    assert (found["all"].params["layers"], found["compilations"].p50) == (3, 3)


@pytest.mark.parametrize(("variant", "rows"), [("tiny", 16), ("padded", 9), ("once", 16)])
def test_losses_are_timed_beside_eager(bench, variant, rows):
    eager, replay, capture = bench.lose(variant, ARGS)
    assert [r.params["kind"] for r in (eager, replay, capture)] == ["eager", "replay", "capture"]
    assert {r.params["rows"] for r in (eager, replay, capture)} == {rows}
    assert (eager.n, replay.n, capture.unit) == (3, 3, "s")
    pays = capture.params["pays_after"]
    assert (pays is None) == (replay.p50 >= eager.p50)
    assert bench.text([eager, replay, capture], {}).count("never") == (pays is None)


@pytest.mark.parametrize("variant", ["tiny", "padded", "once"])
def test_a_loss_is_recorded_after_another_model(bench, monkeypatch, variant):
    started, seen = bench.started, []

    def noted(case, sizes, **options):
        seen.append(sizes)
        return started(case, sizes, **options)

    monkeypatch.setattr(bench, "started", noted)
    bench.lose(variant, ARGS)
    first, timed = seen
    assert first == [bench.WARM_ROWS]
    assert bench.WARM_ROWS not in timed


def test_tiny_segments_are_one_kernel_each(bench):
    case = bench.Case(0, 32, 4, torch.device("cpu"))
    case.layers = torch.nn.ModuleList(bench.Tiny() for _ in range(3))
    compiled, _ = bench.started(case, [4])
    (plan,) = bench.torch_bcg.explain(compiled).plans
    assert [s.kernels for s in plan.graph_segments] == [1, 1, 1]


@pytest.mark.parametrize("variant", ["eager", "padded"])
def test_refuses_a_wrong_result(bench, monkeypatch, tmp_path, variant):
    started = bench.started

    def off(case, sizes, **options):
        compiled, figures = started(case, sizes, **options)
        return lambda x: compiled(x) * 1.01, figures

    monkeypatch.setattr(bench, "started", off)
    args = argparse.Namespace(**{**vars(ARGS), "variant": variant, "write": tmp_path / "row.json"})
    bench.write(args)
    content = json.loads(args.write.read_text())
    assert content["records"] == []
    assert "is wrong: relative error" in content["note"]


def test_refuses_a_start_that_leaves_segments_uncompiled(bench, monkeypatch):
    def fails(code, examples):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(bench.STARTS, "first", fails)
    with pytest.warns(BCGWarning), pytest.raises(bench.Refused, match=r"not compiled: .*such luck"):
        bench.start("first", ARGS)


def test_second_finds_the_cache_of_first_and_no_other_does(bench, monkeypatch, tmp_path):
    seen = {}

    def run(command, env, **options):
        variant = command[command.index("--variant") + 1]
        seen[variant] = env["TORCHINDUCTOR_CACHE_DIR"]
        assert "TRITON_CACHE_DIR" not in env
        return types.SimpleNamespace(returncode=3)

    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(bench.subprocess, "run", run)
    for name in (*bench.STARTS, *bench.LOSSES):
        assert bench.apart(name, ARGS, tmp_path) == ([], "exit status 3, see its last lines")
    assert seen["first"] == seen["second"]
    assert len(set(seen.values())) == len(seen) - 1


def test_what_is_lost_is_said_beside_the_rest(bench, monkeypatch, tmp_path, capsys):
    def apart(variant, args, caches):
        if variant == "first":
            return [], "more than 9 s"
        made = [bench.Record.of("start", variant, u, [1], kind=k, layers=2, sizes=2)
                for k, u in bench.FIGURES.items()]  # fmt: skip
        return made, ""

    monkeypatch.setattr(bench, "apart", apart)
    only = ["--only", "eager", "first", "second", "--out", str(tmp_path)]
    assert bench.main([*QUICK, *only]) == 1
    written = json.loads((tmp_path / "start.json").read_text())
    assert {r["variant"] for r in written["records"]} == {"eager"}
    assert written["notes"] == {"first": "more than 9 s", "second": "needs first"}
    assert "refused: first: more than 9 s" in capsys.readouterr().err
    assert bench.main([*QUICK, "--only", "second"]) == 1
    assert "refused: second: needs first" in capsys.readouterr().err


def test_judges_what_was_claimed(bench):
    figures = {("eager", "all"): 10.0, ("second", "all"): 15.0, ("first", "compilations"): 5,
               ("first", "inner"): 31.0, ("kinds", "inner"): 20.0}  # fmt: skip
    found = [(c.value, c.limit, c.met) for c in bench.judge(figures)]
    assert found == [
        (1.5, "at most 1.5", True),
        (5, "at most 5", True),
        (1.55, "at most 1.5", False),
    ]
    figures |= {("second", "all"): 16.0, ("first", "compilations"): 6, ("first", "inner"): 30.0}
    assert [c.met for c in bench.judge(figures)] == [False, False, True]
    assert bench.judge({("eager", "all"): 1.0}) == []
