"""Chunked, mixed and whole runs give the logits of transformers, eagerly and replayed."""

import copy

import pytest
import torch

from dsv4 import hf_models
from torch_bcg.dsv4 import Engine, convert_from_transformers, requests, run_requests
from torch_bcg.errors import BCGError
from twin import counted

CHUNKS = (1, 3, 4, 5, 20)
BUCKETS = {"buckets": [4, 12, 20], "on_eager_call": "error"}


def check(name, lengths, chunk_size, device, **given):
    """Every logit of every prompt, to 1e-4."""
    hf = copy.deepcopy(hf_models.model(name)).to(device)
    model = convert_from_transformers(hf)
    got = run_requests(model, hf_models.prompts(lengths), chunk_size=chunk_size, **given)
    for mine, want in zip(got, hf_models.logits(name, lengths), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.cpu(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk_size", [*CHUNKS, 10_000])
@pytest.mark.parametrize("name", ["published ratios", "short windows"])
def test_eager(device, name, chunk_size):
    check(name, hf_models.FEW, chunk_size, device)


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_every_configuration(device, name):
    check(name, hf_models.FEW, 20, device)


@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [
        ("published ratios", 1),
        ("published ratios", 20),
        ("short windows", 3),
        ("short windows", 4),
        ("short windows", 5),
    ],
)
def test_replayed(device, name, chunk_size):
    with counted() as counts:
        check(name, hf_models.FEW, chunk_size, device, backend="bcg", options=BUCKETS)
    assert counts.replays >= 10 or chunk_size == 20
    assert counts.replays > 0
    assert not counts.eager_calls


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [*range(1, 21), 10_000])
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_every_boundary(device, name, chunk_size):
    check(name, hf_models.LENGTHS, chunk_size, device)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", range(1, 21))
@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_every_boundary_replayed(device, name, chunk_size):
    check(name, hf_models.LENGTHS, chunk_size, device, backend="bcg", options=BUCKETS)


def test_sizes_of_their_own(device):
    """Without buckets each number of rows has its program."""
    check("short windows", hf_models.FEW, 3, device, backend="bcg")


def test_prompts_that_come_one_by_one():
    model = convert_from_transformers(hf_models.model("short windows"))
    prompts = hf_models.prompts((5, 9))
    got = run_requests(model, (p for p in prompts), chunk_size=4)
    assert [len(logits) for logits in got] == [5, 9]


def test_a_step_has_no_more_rows_than_a_plan_can_number(monkeypatch):
    """Here 8 of them, for 65,536: any chunk size is one that can be run."""
    sizes = []
    step = Engine.step
    monkeypatch.setattr(requests, "MOST_ROWS", 8)
    monkeypatch.setattr(Engine, "step", lambda *a: (sizes.append(len(a[1])), step(*a))[1])
    check("short windows", (5, 21), 10_000, "cpu")
    assert max(sizes) == 8 < sum(sizes)


def test_no_prompt():
    assert run_requests(convert_from_transformers(hf_models.model("yarn")), [], chunk_size=3) == []


@pytest.mark.parametrize(
    ("prompts", "chunk_size", "said"),
    [
        ([[1], []], 4, r"prompts\[1\] is empty"),
        ([[1, 97]], 4, r"prompts\[0\] has the token 97; .*from 0 to 96"),
        ([[1.5]], 4, r"prompts\[0\] has the token 1.5"),
        ([1, 2], 4, r"prompts\[0\] is a int; expected a list of token ids"),
        (torch.ones(1, 2), 4, r"prompts\[0\] is a Tensor"),
        ([[1]], 0, "chunk_size is 0"),
        ([[1]], "4", "chunk_size is '4'; expected an int from 1 up"),
    ],
)
def test_misuse_of_run_requests(prompts, chunk_size, said):
    model = convert_from_transformers(hf_models.model("yarn"))
    with pytest.raises(ValueError, match=said):
        run_requests(model, prompts, chunk_size=chunk_size)


def test_options_without_a_backend():
    model = convert_from_transformers(hf_models.model("yarn"))
    with pytest.raises(ValueError, match="or None without options"):
        run_requests(model, [[1]], chunk_size=1, options={"buckets": "ladder"})
    with pytest.raises(ValueError, match="backend is 'aot_eager'"):
        run_requests(model, [[1]], chunk_size=1, backend="aot_eager")


def test_a_model_that_is_not_converted():
    with pytest.raises(BCGError, match="DeepseekV4ForCausalLM cannot be run here") as e:
        run_requests(hf_models.model("yarn"), [[1]], chunk_size=1)
    assert "convert_from_transformers" in str(e.value)


def test_what_cannot_be_converted():
    hf = copy.deepcopy(hf_models.model("yarn"))
    for other in (hf.model, torch.nn.Linear(2, 2)):
        with pytest.raises(BCGError, match="cannot be converted"):
            convert_from_transformers(other)
    hf.model.rotary_emb.rope_type["compress"] = "dynamic"  # follows the length of a call
    with pytest.raises(BCGError, match="rope_type") as e:
        convert_from_transformers(hf)
    assert "yarn" in str(e.value)
    hf.config.hidden_act = "gelu"
    with pytest.raises(BCGError, match="hidden_act") as e:
        convert_from_transformers(hf)
    assert "silu" in str(e.value)
