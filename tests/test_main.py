"""``python -m torch_bcg``: what it says, and its exit codes: 0 all right, 1 not, 2 misuse."""

import json
import subprocess
import sys

import pytest
import torch

import torch_bcg
from report.shown import Layers, Untagged
from torch_bcg.__main__ import main
from torch_bcg.commands import demo, doctor

TINY = ("--model", "llama", "--layers", "1", "--lengths", "8", "9", "--calls", "4")


def said(capsys, *argv):
    """Exit code, stdout and stderr of one run in this process."""
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


@pytest.fixture
def perturbed(monkeypatch):
    """A model that computes something else where Dynamo does not trace it."""
    transformers = pytest.importorskip("transformers")
    forward = transformers.LlamaForCausalLM.forward

    def other(self, ids):
        result = forward(self, ids)
        if not torch.compiler.is_compiling():
            result.logits += 0.01
        return result

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", other)


# demo


def test_the_default_is_the_demo_in_a_process_of_its_own():
    command = [sys.executable, "-m", "torch_bcg", "--device", "cpu", "--json", *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["recorder"] == "HostRecorder"
    assert found["marked"] == "LlamaAttention"
    assert [row["length"] for row in found["rows"]] == [8, 9]
    assert all(row["bitwise"] for row in found["rows"])
    assert [row["replays"] for row in found["rows"]] == [3, 2]
    assert found["graphs"][0]["cuts"]["mark"] == 1
    stats = found["stats"]
    assert (stats["probes"], stats["replays"], stats["eager_calls"]) == (1, 5, {})
    assert stats["coverage"]["calls"] == 1


@pytest.mark.cuda
def test_the_demo_on_a_gpu(capsys):
    code, out, _ = said(capsys, "demo", "--json", "--device", "cuda", *TINY)
    assert code == 0
    assert json.loads(out)["recorder"] == "CudaRecorder"


def test_the_text_of_the_demo(capsys):
    code, out, err = said(capsys, "demo", "--device", "cpu", *TINY)
    assert code == 0
    assert err == ""  # no progress bar where nobody looks
    assert "the host recorder replays" in out
    assert "say nothing about CUDA graphs" in out
    assert "1 x mark: LlamaAttention" in out
    assert "coverage: 100% of calls" in out
    assert out.splitlines()[-1].startswith("verdict: equal: all 8 calls agree with eager")


@pytest.mark.slow
def test_the_demo_as_the_readme_has_it(capsys):
    code, out, _ = said(capsys, "--device", "cpu")
    assert code == 0
    assert "4 x mark: DeepseekV4Attention" in out


def test_a_difference_is_exit_code_1(capsys, perturbed):
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *TINY)
    assert code == 1
    found = json.loads(out)
    assert not found["passed"]
    assert found["verdict"].startswith("different from eager")
    assert found["rows"][0]["largest_difference"] == pytest.approx(0.01, rel=0.1)


def test_no_replay_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("TORCH_BCG_EXECUTE", "off")
    code, out, _ = said(capsys, "demo", "--device", "cpu", "--json", *TINY)
    assert code == 1
    assert "never replayed" in json.loads(out)["verdict"]


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


@pytest.mark.parametrize("missing", ["transformers", "rich"])
def test_an_extra_that_is_not_installed(capsys, monkeypatch, missing):
    found = demo.build.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else found(name)
    )
    code, _, err = said(capsys, "demo", "--device", "cpu")
    assert code == 2
    assert "pip install '.[demo]'" in err


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
