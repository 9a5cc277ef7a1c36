"""README.md says what the code does: what it shows runs, what it names and links is there."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import test_footguns
import torch_bcg
from dsv4 import hf_models
from torch_bcg.metadata import registration
from torch_bcg.options import Options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", README)
LOCAL = sorted({target for _, target in LINKS if not target.startswith(("https://", "#"))})


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def between(marker):
    found = re.search(f"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", README, flags=re.DOTALL)
    return found.group(1)


def options_table():
    """What stands between the markers; after a change of `Options` paste what the test shows."""

    def shown(value):
        return f"`{value!r}`".replace("'", '"')

    def values(option):
        words = option.metadata["valid"]
        return ", ".join(word if " " in word else f"`{word}`" for word in words)

    rows = [
        f"| `{o.name}` | {shown(o.default)} | {values(o)} | {o.metadata['help']} |"
        for o in fields(Options)
    ]
    return "\n".join(["| option | default | values | |", "|---|---|---|---|", *rows]) + "\n"


def test_the_quick_start_runs_and_prints_what_the_text_says():
    quick_start, *_ = blocks("python")
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + quick_start],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "BCGWarning" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert f"`{line}`" in README


@pytest.mark.cuda
def test_the_quick_start_on_a_gpu(capsys):
    exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("2 of 3 calls were replays\n")


def test_padding_is_shown_in_code_that_runs():
    padding = blocks("python")[2]
    model = torch.nn.Sequential(torch.nn.Embedding(3, 8), torch.nn.Linear(8, 8))
    short = padding.replace('"ladder"', "[4, 8]")
    with torch.inference_mode():
        exec(short, {"torch": torch, "torch_bcg": torch_bcg, "model": model})
    assert torch_bcg.stats().captures >= 2


def test_the_binding_of_somebodys_own_metadata_runs():
    (shown,) = [b for b in blocks("python") if "register_metadata_binding" in b]
    given = {
        "dataclasses": dataclasses, "Tensor": torch.Tensor, "torch": torch, "torch_bcg": torch_bcg,
        "x": torch.randn(3, 8), "cache": torch.zeros(16, 8), "slots": torch.tensor([4, 9, 2]),
        "page_table": torch.tensor([[0, 2], [1, 3]]), "__name__": "readme",
    }  # fmt: skip
    exec(compile(shown, "README.md", "exec"), given)
    cls, layer, twin = given["Paged"], given["layer"], given["cache"].clone()
    for requests in (1, 2, 3):
        md = cls(torch.randperm(16)[:3], torch.randint(4, (requests, 2)), 4)
        x = torch.randn(3, 8)
        with torch_bcg.bind_metadata(md), torch.no_grad():
            assert torch.equal(given["compiled"](x, given["cache"]), layer(x, twin))
    assert torch.equal(given["cache"], twin)
    (binding,) = torch_bcg.explain(given["compiled"]).plans[0].bindings
    kinds = {f.name: f.kind for f in binding.fields}
    assert kinds == {"slots": "COPY", "page_table": "REBIND", "page_size": "EQUAL"}
    (program,) = torch_bcg.programs(given["compiled"])
    captured = program.captured(md)
    live = cls(torch.randperm(16)[:3], md.page_table, 4)
    torch_bcg.metadata.refresh(captured, live)
    assert torch.equal(captured.slots, live.slots)
    registration.REGISTERED[cls].remove()


def test_requests_of_a_converted_model_run():
    (shown,) = [b for b in blocks("python") if "run_requests" in b]
    names = {"hf_model": hf_models.model("short windows"), "prompts": hf_models.prompts((6, 9))}
    exec(compile(shown, "README.md", "exec"), names)
    expected = hf_models.logits("short windows", (6, 9))
    for mine, want in zip(names["logits"], expected, strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-4)


def test_the_engine_of_the_docs_runs(capsys):
    text = (ROOT / "docs" / "deepseek_v4.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(shown, "deepseek_v4.md", "exec"), names)
    assert names["logits"].shape == (1, 128)
    assert "dsv4::attention_with_output" in capsys.readouterr().out


def test_the_anchors_are_there():
    anchors = [target[1:] for _, target in LINKS if target.startswith("#")]
    heads = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert set(anchors) <= {head.lower().replace(" ", "-") for head in heads}


def test_marking_is_shown_in_code_that_parses():
    marking = blocks("python")[1]
    decorators = [line for line in marking.splitlines() if line.startswith("@")]
    compile("\n".join([*decorators, "def f(): ..."]), "README.md", "exec")
    compile(
        "\n".join(line for line in marking.splitlines() if line not in decorators),
        "README.md",
        "exec",
    )


def test_the_options_are_those_of_the_dataclass():
    assert between("options") == options_table()


@pytest.mark.parametrize("target", LOCAL)
def test_what_is_linked_is_there(target):
    assert (ROOT / target).exists()


def test_every_footgun_has_its_test_and_every_test_its_row():
    linked = [name for name, _ in LINKS if name.startswith("test_")]
    there = [name for name in vars(test_footguns) if name.startswith("test_")]
    in_docstring = re.findall(r"\| (test_\w+) +\|", test_footguns.__doc__)
    assert sorted(linked) == sorted(there) == sorted(in_docstring)


@pytest.mark.parametrize("name", torch_bcg.__all__)
def test_every_public_name_occurs(name):
    assert re.search(rf"\b(torch_bcg\.)?{name}\b" if name != "bcg" else r"torch_bcg\.bcg\b", README)


def test_the_commands_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (commands,) = (b for b in blocks("") if b.startswith("pip install"))
    assert "pip install '.[demo]' && python -m torch_bcg " in commands
    assert "pip install '.[test]' && pytest -n 2 " in commands
    assert "pytest --require-cuda " in commands
    assert "'.[test]'" in ci
    assert "step pytest -n 2 " in ci


def test_length():
    reports = "<!-- report: .*?<!-- /report -->"
    prose = re.sub(rf"```.*?```|{reports}", "", README, flags=re.DOTALL).splitlines()
    words = sum(len(line.split()) for line in prose if not line.startswith("|"))
    assert 600 <= words <= 1000, words
