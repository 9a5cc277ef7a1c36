"""`bench_transformer.py` runs, refuses what is wrong and judges. No test is of time."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import torch_bcg
from torch_bcg.errors import OptionError

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SMALL = ["--layers", "2", "--repeats", "3", "--tokens", "4", "6"]
QUICK = [*SMALL, "--device", "cpu", "--width", "32"]
OURS = ["eager", "bcg", "program", "hand"]


@pytest.fixture
def bench(monkeypatch):
    """Imported as its command line does: the folder comes first."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("bench_transformer")


@pytest.fixture
def case(bench):
    layers = torch.nn.ModuleList(bench.Layer(32) for _ in range(2)).requires_grad_(False)
    with torch.no_grad():
        yield bench.Case(layers, 32, 5, torch.device("cpu"))


def test_writes_records_of_each_variant_and_number_of_tokens(bench, tmp_path, capsys):
    assert bench.main([*QUICK, "--only", *OURS, "meta", "floor", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "transformer.json").read_text())
    kinds = [(r["params"]["tokens"], r["variant"], r["params"]["time"]) for r in written["records"]]
    times = ["latency", "host", "cold", "cold host", "back to back", "made"]
    assert sorted(kinds) == sorted((t, n, k) for t in (4, 6) for n in OURS for k in times)
    for record in written["records"]:
        made = record["params"]["time"] == "made"
        assert (record["unit"], record["n"] >= 1) == ("s" if made else "us", True)
        assert {"layers": 2, "cuts": 2, "steps": 5}.items() <= record["params"].items()
        assert made or record["params"]["error"] < 1e-5
    assert written["notes"] == dict.fromkeys(["meta", "floor"], "needs a GPU")
    assert [c["met"] for c in written["claims"]] == [None, None]
    out = capsys.readouterr().out
    assert "4 tokens, host: (program - hand) / 5 steps, us" in out
    assert out.count("needs a GPU") == 2


def test_models_of_hugging_face_compute_the_same(case):
    """Written down once more: heads side by side, positions by complex numbers, all in float64."""
    (x,) = case.inputs(1)
    half = torch.arange(case.cos.shape[1] // 2)
    turns = torch.outer(torch.arange(5), 10000.0 ** (-half / len(half))).double()
    turn = torch.polar(torch.ones_like(turns), turns)

    def turned(q):
        a, b = q.unflatten(-1, (2, -1)).unbind(-2)
        turned = torch.complex(a, b) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def heads(x, weight):
        return (x @ weight.double().T).view(5, 16, -1).transpose(0, 1)

    y = x.double()
    for layer in case.layers:
        h = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.before
        q, k, v = heads(h, layer.q), heads(h, layer.k), heads(h, layer.v)
        scores = turned(q) @ turned(k).mT / q.shape[-1] ** 0.5
        scores += torch.full((5, 5), float("-inf")).triu(1)
        y = y + (scores.softmax(-1) @ v).transpose(0, 1).reshape(5, 32) @ layer.o.double().T
        h = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.after
        up = torch.nn.functional.silu(h @ layer.gate.double().T) * (h @ layer.up.double().T)
        y = y + up @ layer.down.double().T
    torch.testing.assert_close(case.exact(x), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.model(x).double(), y, rtol=1e-4, atol=1e-4)


def test_all_that_is_called_follows_its_input(bench, case):
    calls = {name: bench.MAKERS[name](case) for name in OURS}
    errors = bench.check(case, calls, case.inputs(3))
    assert errors.keys() == set(OURS)
    (x,) = case.inputs(1)
    for name in ("program", "hand"):
        assert torch.equal(calls[name](x)[0], calls["bcg"](x))


def stale(call):
    results = []

    def first(x):
        results.append(call(x))
        return results[0]

    return first


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda case: lambda x: case.model(x) * 1.01, id="a little off"),
        pytest.param(lambda case: lambda x: case.model(x) * float("nan"), id="NaN"),
        pytest.param(lambda case: stale(case.model), id="stale"),
    ],
)
def test_refuses_to_report_a_wrong_variant(bench, monkeypatch, tmp_path, capsys, wrong):
    monkeypatch.setitem(bench.MAKERS, "meta", wrong)
    monkeypatch.setattr(bench, "missing", lambda name, gpu: "")
    assert bench.main([*QUICK, "--only", "eager", "meta", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "refused: meta is wrong: relative error" in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def fails(case):
    raise RuntimeError("no such luck\nand more")


def test_leaves_out_what_others_cannot_do(bench, monkeypatch, capsys):
    monkeypatch.setitem(bench.MAKERS, "cudagraphs", fails)
    assert bench.main([*QUICK, "--only", "eager", "cudagraphs"]) == 0
    assert "at 4 tokens RuntimeError: no such luck\n" in capsys.readouterr().out
    monkeypatch.setitem(bench.MAKERS, "bcg", fails)
    with pytest.raises(RuntimeError, match="no such luck"):
        bench.main([*QUICK, "--only", "eager", "bcg"])


def test_leaves_out_an_option_that_is_not_there(bench, monkeypatch, capsys):
    def make(options=None):
        raise OptionError("There is no option inner.", where="", expected="", found="", fix="")

    monkeypatch.setattr(torch_bcg.Options, "make", make)
    assert bench.main([*QUICK, "--only", "eager", "bcg-inductor", "segments-inductor"]) == 0
    assert capsys.readouterr().out.count("There is no option inner.") == 2


def test_what_takes_minutes_to_compile_has_to_be_asked_for(bench, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "missing", lambda name, gpu: "")
    monkeypatch.setattr(bench, "one_size", lambda case, names, *_: seen.append(names) or [])
    for words in ([], ["--full"], ["--only", "full-inductor"]):
        assert bench.main([*QUICK, "--tokens", "4", *words]) == 0
    few, every, one = seen
    assert (set(every) - set(few), one) == (set(bench.SLOW), ["full-inductor"])
    assert bench.main([*QUICK, "--only", "foot"]) == 1


def test_judges_what_was_claimed(bench):
    def record(variant, kind, tokens, us):
        params = {"time": kind, "tokens": tokens, "steps": 87, "cuts": 43}
        return bench.Record.of("transformer", variant, "us", [us], **params)

    records = [
        *(record("meta", "latency", t, us) for t, us in ((16, 2300.0), (1024, 2100.0))),
        *(record("bcg-inductor", "latency", t, 2000.0) for t in (16, 512, 1024, 2048)),
        *(record("floor-inductor", "latency", t, 1900.0) for t in (16, 512, 1024, 2048)),
        *(record(n, "host", 16, us) for n, us in (("program", 1087.0), ("hand", 1000.0))),
    ]
    claims = bench.judge(records)
    assert [(c.claim, round(c.value, 3), c.limit, c.met) for c in claims] == [
        ("16 tokens, latency: meta / bcg-inductor", 1.15, "at least 1.15", True),
        ("1024 tokens, latency: meta / bcg-inductor", 1.05, "at least 1.08", False),
        (
            "16 tokens, latency: (bcg-inductor - floor-inductor) / 43 cuts, us",
            2.326, "at most 5", True,
        ),
        ("1024 tokens, latency: bcg-inductor / floor-inductor", 1.053, "at most 1.05", False),
        ("2048 tokens, latency: bcg-inductor / floor-inductor", 1.053, "at most 1.03", False),
        ("16 tokens, host: (program - hand) / 87 steps, us", 1.0, "at most 0.5", False),
    ]  # fmt: skip


@pytest.mark.cuda
def test_one_graph_of_everything_gives_what_segments_give(bench, tmp_path):
    names = [*OURS, "floor"]
    words = [*SMALL, "--width", "256", "--only", *names, "meta", "--out", str(tmp_path)]
    assert bench.main(words) == 0
    written = json.loads((tmp_path / "transformer.json").read_text())
    assert set(names) <= {r["variant"] for r in written["records"]}
    assert {c["met"] for c in written["claims"]} <= {True, False}
