"""``python -m torch_bcg``: what it says, and its exit codes: 0 all right, 1 not, 2 misuse."""

import json
import re
import subprocess
import sys

import pytest
import torch

import torch_bcg
from report.shown import Layers, Untagged
from torch_bcg.__main__ import main
from torch_bcg.commands import doctor
from torch_bcg.commands.cases import case_of
from torch_bcg.commands.results import Asked, Result, Row
from torch_bcg.dsv4 import DeepseekV4, DSV4Metadata
from torch_bcg.dsv4.requests import AT_A_TIME

TINY = ("--layers", "1", "--lengths", "8", "12", "--calls", "4")
LLAMA = ("--model", "llama", "--layers", "1", "--lengths", "8", "9", "--calls", "4")
KINDS = ("prefill", "mixed", "decode")


def said(capsys, *argv):
    """Exit code, stdout and stderr of one run in this process."""
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


def in_a_process(*command):
    """What a run of its own finds, as ``--json`` has it."""
    command = [sys.executable, *command, "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def perturb(monkeypatch, owner, change):
    """A model that computes something else where Dynamo does not trace it."""
    forward = owner.forward

    def other(self, *args):
        result = forward(self, *args)
        return result if torch.compiler.is_compiling() else change(result)

    monkeypatch.setattr(owner, "forward", other)


# demo


def test_the_default_is_the_demo_in_a_process_of_its_own():
    few = ("--layers", "3", "--lengths", "8", "24", "--calls", "6")
    found = in_a_process("-m", "torch_bcg", *few)
    assert found["passed"]
    assert found["verdict"].startswith("equal: all 12 calls agree with eager")
    assert (found["model"], found["recorder"]) == ("deepseek_v4", "HostRecorder")
    assert found["marked"] == "deepseek_v4_attention_with_output"
    assert sum(found["kinds"].values()) == sum(row["calls"] for row in found["rows"]) == 12
    assert all(found["kinds"][kind] for kind in KINDS)
    assert [row["length"] for row in found["rows"]] == [4, 8, 24]
    assert [row["length"] for row in found["rows"] if row["calls"] > 2 and not row["replays"]] == []
    (graph,) = found["graphs"]
    assert graph["cuts"] == {"mark": 3}
    assert graph["recorded_kernels"] == graph["kernels"] - 3
    stats = found["stats"]
    assert (stats["probes"], stats["eager_calls"]) == (1, {})
    assert stats["replays"] == sum(row["replays"] for row in found["rows"]) > 0
    assert stats["coverage"]["calls"] == 1


def test_the_built_in_model_needs_no_extra():
    absent = "import sys; sys.modules.update(transformers=None, rich=None)"
    run = "from torch_bcg.__main__ import main; sys.exit(main(sys.argv[1:]))"
    found = in_a_process("-c", f"{absent}; {run}", "demo", *TINY)
    assert found["passed"]
    assert found["layers"] == 1


def test_a_model_of_transformers(capsys):
    pytest.importorskip("transformers")
    code, out, _ = said(capsys, "--device", "cpu", "--json", *LLAMA)
    assert code == 0
    found = json.loads(out)
    assert found["marked"] == "LlamaAttention"
    assert found["kinds"] == {}
    assert [row["length"] for row in found["rows"]] == [8, 9]
    assert all(row["bitwise"] for row in found["rows"])
    assert [row["replays"] for row in found["rows"]] == [3, 2]
    assert found["graphs"][0]["cuts"]["mark"] == 1
    stats = found["stats"]
    assert (stats["probes"], stats["replays"], stats["eager_calls"]) == (1, 5, {})
    assert stats["coverage"]["calls"] == 1


@pytest.mark.slow
def test_deepseek_v4_of_transformers(capsys):
    pytest.importorskip("transformers")
    code, out, _ = said(capsys, "--device", "cpu", "--model", "hf-deepseek-v4")
    assert code == 0
    assert out.startswith("DeepseekV4 of transformers: 4 layers, random weights, on cpu\n")
    assert "4 x mark: DeepseekV4Attention" in out


@pytest.mark.cuda
@pytest.mark.parametrize("argv", [TINY, (*TINY, "--layers", "3"), LLAMA])
def test_the_demo_on_a_gpu(capsys, argv):
    if argv is LLAMA:
        pytest.importorskip("transformers")
    code, out, _ = said(capsys, "demo", "--json", "--device", "cuda", *argv)
    assert code == 0, out
    assert json.loads(out)["recorder"] == "CudaRecorder"


def test_the_text_of_the_demo(capsys):
    code, out, err = said(capsys, "demo", "--device", "cpu", *TINY)
    assert code == 0
    assert err == ""  # no progress bar where nobody looks
    assert out.startswith("DeepSeek-V4, mixed steps: 1 layer, random weights, on cpu\n")
    assert "deepseek_v4_attention_with_output is marked" in out
    assert "the host recorder replays" in out
    assert "say nothing about CUDA graphs" in out
    assert "1 x mark: dsv4::attention_with_output" in out
    assert "rows" in out
    (steps,) = re.findall(r"^steps: (\d+) prefill, (\d+) mixed, (\d+) decode$", out, re.MULTILINE)
    assert sum(map(int, steps)) == 8
    assert "size apart: 100% of calls" in out
    assert out.splitlines()[-1].startswith("verdict: equal: all 8 calls agree with eager")


@pytest.mark.slow
def test_the_demo_as_the_readme_has_it(capsys):
    code, out, _ = said(capsys, "--device", "cpu")
    assert code == 0
    assert "4 x mark: dsv4::attention_with_output" in out
    assert "all 24 calls agree with eager" in out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", [(2,), (5,), (5, 2), (16, 48)])
def test_no_step_is_empty_or_larger_than_asked(lengths, seed):
    asked = Asked("deepseek_v4", 1, lengths, 8, "cpu", seed, None)
    sizes = {*lengths, 4} if len(lengths) > 1 else lengths
    with torch.inference_mode():
        for most, call in zip(lengths * 8, case_of(asked).calls, strict=True):
            tokens = len(call.eager())
            assert 1 <= tokens <= most
            assert call.size == min(size for size in sizes if size >= tokens)
            assert call.kind in KINDS
            assert call.kind != "decode" or tokens <= AT_A_TIME


def test_a_difference_is_exit_code_1(capsys, monkeypatch):
    perturb(monkeypatch, DeepseekV4, lambda hidden: hidden + 0.01)
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *TINY)
    assert code == 1
    found = json.loads(out)
    assert not found["passed"]
    assert found["verdict"].startswith("different from eager by more than 0.0001 at rows ")
    assert not any(row["close"] for row in found["rows"])


def test_a_difference_of_a_model_of_transformers(capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")

    def other(result):
        result.logits += 0.01
        return result

    perturb(monkeypatch, transformers.LlamaForCausalLM, other)
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *LLAMA)
    assert code == 1
    found = json.loads(out)
    assert found["verdict"] == "different from eager by more than 0.0001 at length 8, 9"
    assert found["rows"][0]["largest_difference"] == pytest.approx(0.01, rel=0.1)


def test_a_step_that_goes_wrong_is_found(capsys, monkeypatch):
    """Metadata that stays that of an earlier step, in the compiled engine alone."""
    create = DSV4Metadata.create

    def stale(batch, layout, rows, out=None):
        return out or create(batch, layout, rows)

    monkeypatch.setattr(DSV4Metadata, "create", stale)
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *TINY)
    assert code == 1
    rows = json.loads(out)["rows"]
    assert [row["close"] for row in rows if row["replays"]] == [False] * sum(
        row["replays"] > 0 for row in rows
    )


def test_no_replay_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_BCG_EXECUTE", "off")
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *TINY)
    assert code == 1
    assert "never replayed" in json.loads(out)["verdict"]


@pytest.mark.parametrize(
    ("calls", "replays", "passed"),
    [((8, 2), (7, 0), True), ((8, 3), (7, 0), False), ((2, 2), (0, 0), False)],
)
def test_a_size_of_few_calls_need_not_be_replayed(calls, replays, passed):
    rows = tuple(
        Row(size, n, replayed, 1.0, None, None, 0.0, True, True)
        for size, n, replayed in zip((4, 8), calls, replays, strict=True)
    )
    asked = Asked("deepseek_v4", 1, (4, 8), 8, "cpu", 0, None)
    result = Result(asked, "", "", "rows", {}, 1.0, (), rows, torch_bcg.stats())
    assert result.passed is passed


def test_dump(capsys, tmp_path):
    code, _, _ = said(capsys, "demo", "--device", "cpu", "--dump", str(tmp_path / "new"), *TINY)
    assert code == 0
    assert len(list(tmp_path.rglob("02_plan.txt"))) == 1


# doctor


def test_doctor(capsys):
    code, out, err = said(capsys, "doctor")
    assert (code, err) == (0, "")
    assert torch.__version__.split("+")[0] in out
    assert "found    entry point 'bcg'" in out
    assert out.splitlines()[-1].startswith("all right")


def test_doctor_as_json(capsys):
    code, out, _ = said(capsys, "doctor", "--json")
    found = json.loads(out)
    assert (code, found["healthy"]) == (0, True)
    assert found["versions"]["torch_bcg"] == torch_bcg.__version__
    assert {"trial", "entry point 'bcg'"} <= {c["name"] for c in found["checks"]}


def test_doctor_finds_a_backend_that_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_BCG_EXECUTE", "off")
    code, out, _ = said(capsys, "doctor")
    assert code == 1
    assert "MISSING  trial" in out


# explain


def make():
    return Layers(2).eval(), (torch.ones(4, 16),)


def make_with_keywords():
    return (lambda x, *, scale: x * scale + 1), [torch.ones(3)], {"scale": 2.0}


def make_compiled():
    return torch.compile(Untagged(), backend="bcg"), (torch.ones(3),)


def make_nothing():
    return 3


NOT_EVEN_A_FUNCTION = 3


def test_explain(capsys, tmp_path):
    code, out, err = said(capsys, "explain", "test_main:make", "--dump", str(tmp_path))
    assert (code, err) == (0, "")
    assert "2 times mark: shown::attention" in out
    assert "Not probed" in out
    assert "gradients are needed" not in out
    assert list(tmp_path.rglob("page.html"))


def test_explain_with_keywords(capsys):
    code, out, _ = said(capsys, "explain", "test_main:make_with_keywords")
    assert code == 0
    assert "2 of 2 kernels recorded" in out


def test_explain_of_what_is_compiled_already(capsys):
    code, out, _ = said(capsys, "explain", "test_main:make_compiled")
    assert code == 0
    assert "1 time host read" in out


# misuse

MISUSE = {
    "an unknown subcommand": (("demonstrate",), "invalid choice: 'demonstrate'"),
    "an unknown option": (("--fast",), "unrecognized arguments: --fast"),
    "an unknown model": (("--model", "gpt5"), "invalid choice: 'gpt5'"),
    "no layers": (("demo", "--layers", "0"), "'0' is no integer from 1 up"),
    "too short": (("demo", "--lengths", "8", "1"), "'1' is no integer from 2 up"),
    "too few calls": (("demo", "--calls", "two"), "'two' is no integer from 3 up"),
    "a dump into a file": (("demo", "--dump", __file__), "cannot be made"),
    "no target": (("explain", "test_main"), "is not of the form pkg.module:make"),
    "no module": (("explain", "no_such_module:make"), "cannot be imported"),
    "no function": (("explain", "test_main:no_such"), "'no_such' is not there in 'test_main'"),
    "a number": (("explain", "test_main:NOT_EVEN_A_FUNCTION"), "is no function"),
    "not what is asked for": (("explain", "test_main:make_nothing"), "of type int"),
}


@pytest.mark.parametrize(("argv", "sentence"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_exit_code_2_and_a_sentence(capsys, argv, sentence):
    code, out, err = said(capsys, *argv)
    assert (code, out) == (2, "")
    assert sentence in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    code, _, err = said(capsys, "demo", "--device", "cuda")
    assert code == 2
    assert "no GPU here" in err


@pytest.mark.parametrize(
    ("missing", "argv"),
    [
        ("rich", ()),
        ("rich", LLAMA),
        ("transformers", ("--model", "hf-deepseek-v4", "--json")),
        ("transformers", LLAMA),
    ],
)
def test_an_extra_that_is_not_installed(capsys, monkeypatch, missing, argv):
    monkeypatch.setitem(sys.modules, missing, None)
    code, out, err = said(capsys, "demo", "--device", "cpu", *argv)
    assert (code, out) == (2, "")
    assert f"needs {missing}: pip install '.[demo]'" in err


def test_a_wrong_variable(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_BCG_EXECUTE", "graph")
    code, out, err = said(capsys, "doctor")
    assert (code, out) == (2, "")
    assert "did you mean graphs?" in err


def test_an_interrupt(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert said(capsys, "doctor") == (130, "", "interrupted\n")


def test_version(capsys):
    assert said(capsys, "--version") == (0, f"torch_bcg {torch_bcg.__version__}\n", "")
