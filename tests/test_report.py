"""`report.py` fills marked places of pages with what the results say, gains and losses alike."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
ENVIRONMENT = {
    "torch": "2.11.0", "gpu": "H200", "cpu": "Xeon", "date": "2026-11-30T03:26:06+00:00",
    "command": "bench_transformer.py --out o", "commit": "1808f0d3aa+changes",
}  # fmt: skip
HEADING = (
    "H200, torch 2.11.0, commit 1808f0d with changes, 2026-11-30: "
    "`python benchmarks/bench_transformer.py --out o`, layers 43, dtype bfloat16."
)
# us by variant, at 16 and 2,048 tokens
LATENCY = {"eager": (8032.7, 9000.0), "meta": (1604.0, 9600.0), "bcg": (535.5, 7000.0),
           "bcg-inductor": (400.0, 6300.0), "floor": (500.0, 6800.0)}  # fmt: skip


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    # By its file: there is a folder of tests that is called report as well.
    spec = importlib.util.spec_from_file_location("benchmarks_report", FOLDER / "report.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmarks_report", module)
    spec.loader.exec_module(module)
    return module


def record(variant, p50, unit="us", name="transformer", **params):
    params |= {"layers": 43, "device": "cuda", "dtype": "bfloat16"}
    spread = {"p20": p50 * 0.98, "p50": p50, "p80": p50 * 1.05}
    return {"name": name, "variant": variant, "unit": unit, "n": 9, "params": params} | spread


TIMES = [
    record(variant, us / (10 if kind == "host" else 1), time=kind, tokens=tokens)
    for variant, each in LATENCY.items()
    for tokens, us in zip((16, 2048), each, strict=True)
    for kind in ("latency", "host")
]
CLAIMS = [
    {"claim": "meta / bcg", "value": 2.99533, "limit": "at least 1.15", "met": True},
    {"claim": "|bcg - floor|, us", "value": 35.5, "limit": "at most 5", "met": False},
    {"claim": "launches", "value": 2, "limit": "none set", "met": None},
]


@pytest.fixture
def fill(report, tmp_path):
    """Writes results and a page with one place, and gives the exit status and what is in it."""
    page, folder = tmp_path / "pages" / "page.md", tmp_path / "results"
    page.parent.mkdir()
    folder.mkdir()

    def run(what, *options, old="old\n", environment=ENVIRONMENT, **content):
        if content:
            text = json.dumps({"environment": environment, **content})
            (folder / "some.json").write_text(text)
        page.write_text(f"# Head\n<!-- report: some {what} -->\n{old}<!-- /report -->\ntail\n")
        status = report.main([str(page), "--results", str(folder), *options])
        text = page.read_text()
        assert text.startswith(f"# Head\n<!-- report: some {what} -->\n")
        assert text.endswith("<!-- /report -->\ntail\n")
        return status, text.split("-->\n")[1].removesuffix("<!-- /report ")

    return run


def test_a_table_has_medians_beside_eager_and_says_what_is_slower(fill):
    status, text = fill("latency", records=TIMES, notes={"program": "needs luck."})
    assert status == 0
    assert text == (
        f"{HEADING}\n\n"
        "| latency, ms (eager / it) | 16 tokens | 2,048 tokens |\n"
        "| --- | ---: | ---: |\n"
        "| eager | 8.03 (1.00) | 9.00 (1.00) |\n"
        "| meta | 1.60 (5.01) | 9.60 (0.94) |\n"
        "| bcg | 0.535 (15.00) | 7.00 (1.29) |\n"
        "| bcg-inductor | 0.400 (20.08) | 6.30 (1.43) |\n"
        "| floor | 0.500 (16.07) | 6.80 (1.32) |\n\n"
        "p20 is at most 2% below a median, p80 5% above. Slower than eager: meta at 2,048.\n\n"
        "Left out: program: needs luck.\n"
    )


def test_a_table_without_eager_compares_nothing(fill):
    some = [r for r in TIMES if r["variant"] == "bcg"][:2]
    some.append(record("meta", 1.5, "ms", time="host", tokens=256))
    _, text = fill("host", records=some)
    assert "| host, ms | 16 tokens | 256 tokens |" in text
    assert "| bcg | 0.0536 | - |\n| meta | - | 1.50 |" in text
    assert "Slower" not in text


def test_claims_that_are_not_met_stand_beside_the_others(fill):
    _, text = fill("claims", records=TIMES, claims=CLAIMS)
    assert "| meta / bcg | 2.995 | at least 1.15 | yes |" in text
    assert "| \\|bcg - floor\\|, us | 35.50 | at most 5 | NO |" in text
    assert "| launches | 2 | none set | not judged |\n\nMet: 1 of 2.\n" in text
    _, text = fill("claims", records=TIMES, claims=CLAIMS[2:])
    assert text.endswith("\n\nNone is judged.\n")


def test_starts_and_losses(fill):
    figures = {"all": 15.0, "dynamo": 2.5, "inner": 0.0, "capture": 12.5, "pool": 3 * 2**20}
    starts = [record("eager", s, "s", "start", kind=k, sizes=42) for k, s in figures.items()]
    starts.append(record("eager", 0, "segments", "start", kind="compilations", sizes=42))
    losses = [
        record(variant, value, unit, "losses", kind=kind, rows=16, pays_after=after)
        for variant, replay, after in (("tiny", 2000.0, None), ("once", 500.0, 1234.5))
        for kind, value, unit in (("eager", 1000.0, "us"), ("replay", replay, "us"),
                                  ("capture", 0.25, "s"))
    ]  # fmt: skip
    _, text = fill("start, losses", records=starts + losses)
    assert "| eager | 43 | 42 | 15.00 | 2.50 | 0.00 | 12.50 | 0 | 3.00 |" in text
    assert "| tiny | 16 | 1,000 | 2,000 | 0.50 | 0.250 | never |" in text
    assert "| once | 16 | 1,000 | 500 | 2.00 | 0.250 | 1,234 replays |" in text
    assert text.count("bfloat16.") == 1


def test_real_claims_are_shown(report):
    for path in sorted(report.RESULTS.glob("*_h200.json")):
        results = report.Results.of(path)
        if results.claims:
            assert report.claims(results).count("\n| ") == len(results.claims) + 1
            assert results.heading.startswith("NVIDIA H200, torch 2.11.0+cu130, commit ")


def test_a_missing_file_leaves_its_place(fill, capsys):
    assert fill("claims") == (0, "old\n")
    assert "page.md: some stays as it is, there is no some.json" in capsys.readouterr().err


def test_check_writes_nothing_and_says_what_would_change(fill, capsys):
    given = {"records": TIMES, "claims": CLAIMS}
    assert fill("claims", "--check", **given) == (1, "old\n")
    assert "page.md would change" in capsys.readouterr().err
    _, text = fill("claims", **given)
    assert fill("claims", "--check", old=text, **given) == (0, text)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("step", "some has no time step by tokens."),
        ("start", "some has no name start by kind."),
        ("claims", "some has no claims."),
    ],
)
def test_refuses_what_the_results_do_not_have(fill, capsys, what, says):
    assert fill(what, records=TIMES) == (1, "old\n")
    assert f"refused: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "<!-- report: some claims -->\nno end\n",
        "<!-- report: some -->\n<!-- /report -->\n",
        "<!-- report: a claims -->\n<!-- report: b claims -->\n<!-- /report -->\n",
    ],
)
def test_refuses_a_place_that_is_not_one(report, tmp_path, capsys, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert report.main([str(page), "--results", str(tmp_path)]) == 1
    assert "refused: page.md: a place says not what" in capsys.readouterr().err


def test_a_heading_says_what_is_known(report):
    cpu = [report.Record(**record("bcg", 1.0) | {"params": {"device": "cpu", "layers": n}})
           for n in (3, 4)]  # fmt: skip
    results = report.Results("some", ENVIRONMENT | {"commit": None}, cpu)
    assert results.heading.startswith("Xeon, torch 2.11.0, commit unknown, 2026-11-30: ")
    assert results.heading.endswith("`.")  # not of how many layers: there are two numbers


def test_figures_have_no_exponent(report):
    given = (8032.74, 533.0, 0.012345, 0, 0.0, 2, float("nan"), -0.25, 1e6)
    shown = ["8,033", "533", "0.0123", "0", "0", "2", "nan", "-0.250", "1,000,000"]
    assert [report.figure(x) for x in given] == shown


def results_of(report, records):
    return report.Results("some", ENVIRONMENT, [report.Record(**r) for r in records])


def test_latency_is_plotted_over_that_of_the_floor(report, tmp_path):
    plot = report.plot_of(results_of(report, TIMES), "latency", tmp_path)
    assert (plot.path.name, plot.label) == ("some_latency.svg", "latency / latency of floor")
    assert plot.lines["floor"] == [(n, *map(pytest.approx, (0.98, 1.0, 1.05))) for n in (16, 2048)]
    assert plot.lines["bcg"][0][2] == pytest.approx(1.071)
    some = [r for r in TIMES if r["variant"] != "floor"]
    assert report.plot_of(results_of(report, some), "latency", tmp_path).label.endswith("of eager")
    host = report.plot_of(results_of(report, TIMES), "host", tmp_path)
    assert (host.label, host.lines["floor"][0][2]) == ("host, ms", pytest.approx(0.05))


def test_plots_are_the_same_for_the_same_figures(fill, tmp_path):
    pytest.importorskip("matplotlib")
    what = "latency plot, host plot"
    status, text = fill(what, records=TIMES)
    assert status == 0
    assert "](../results/some_latency.svg)\n\n![host, ms, by tokens" in text
    path = tmp_path / "results" / "some_latency.svg"
    first = path.read_text()
    assert "date" not in first
    assert all(f">{name}<" in first for name in LATENCY)
    assert fill(what, "--check", old=text, records=TIMES)[0] == 0
    path.unlink()
    assert fill(what, "--check", old=text, records=TIMES)[0] == 1
    fill(what, records=TIMES)
    assert path.read_text() == first
    assert fill(what, "--check", old=text, records=TIMES[1:])[0] == 1
    fill(what, records=TIMES[2:])
    assert path.read_text() != first


def test_plots_need_matplotlib_only_to_be_drawn(fill, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fill("host plot", records=TIMES) == (1, "old\n")
    assert "refused: plots need matplotlib: pip install '.[bench]'." in capsys.readouterr().err
    assert fill("host plot", "--check", records=TIMES) == (1, "old\n")
