"""Experts and hyper-connections against loops in float64 over what the report writes."""

import pytest
import torch
import torch.nn.functional as F

from torch_bcg.dsv4 import DSV4Config, Layout
from torch_bcg.dsv4.experts import Experts
from torch_bcg.dsv4.hyper import expanded

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def experts_by_hand(model, x, experts, weights):
    def swiglu(x, gate_up, down):
        gate, up = (gate_up @ x).chunk(2)
        inner = F.silu(gate.clamp(max=model.limit)) * up.clamp(-model.limit, model.limit)
        return down @ inner

    rows = []
    for row, chosen, shares in zip(x, experts, weights, strict=True):
        parts = (swiglu(row, model.gate_up[e], model.down[e]) for e in chosen)
        rows.append(sum(share * part for share, part in zip(shares, parts, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("form", ["dense", "grouped"])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_experts(device, form, rows):
    """Also experts that nobody chose, and one that a row chose twice."""
    dtype = torch.bfloat16 if form == "grouped" else torch.float32
    config = DSV4Config.tiny(num_experts=6)
    model = Experts(config).to(device, dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        x = torch.randn(rows, config.hidden_size, device=device, dtype=dtype)
        experts = torch.randint(0, 3, (rows, config.num_experts_per_tok), device=device) * 2
        experts[:, -1] = experts[:, 0]
        weights = torch.rand(experts.shape, device=device)
        got = getattr(model, form)(x, experts, weights)
        exact = Experts(config).to(device, torch.float64)
        exact.load_state_dict(model.state_dict())
        want = experts_by_hand(exact, x.double(), experts, weights.double())
    assert (got.shape, got.dtype) == (x.shape, dtype)
    assert error(got, want) < LIMITS[dtype]


def test_an_expert_that_overflows_where_nobody_chose_it(device):
    """Nothing of it is in any row, as it is not with experts that are run for their rows alone."""
    config = DSV4Config.tiny(num_experts=6)
    model = Experts(config).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
        x = torch.randn(5, config.hidden_size, device=device)
        experts = torch.tensor([[0, 1], [1, 1], [2, 0], [0, 2], [2, 1]], device=device)
        weights = torch.rand(experts.shape, device=device)
        want = model.dense(x, experts, weights)
        model.down[3], model.down[4], model.gate_up[5] = torch.inf, torch.nan, torch.nan
        assert torch.equal(model.dense(x, experts, weights), want)
        model.down[2] = torch.inf
        finite = model.dense(x, experts, weights).isfinite().all(1)
    assert finite.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("dtype", list(LIMITS))
def test_the_next_streams(device, dtype):
    """Stream j of the next ones takes share [i, j] of stream i."""
    block = torch.randn(5, 16, device=device, dtype=dtype)
    streams = torch.randn(5, 4, 16, device=device, dtype=dtype)
    post, mix = torch.rand(5, 4, device=device), torch.rand(5, 4, 4, device=device)
    got = expanded(block, streams, post, mix)
    want = torch.einsum("pj,pd->pjd", post.double(), block.double())
    want += torch.einsum("pij,pid->pjd", mix.double(), streams.double())
    assert (got.shape, got.dtype) == (streams.shape, dtype)
    assert error(got, want) < LIMITS[dtype]


def test_more_experts_than_16_bits_can_number():
    with pytest.raises(ValueError, match="num_experts is 32768; expected less than 32768"):
        DSV4Config.tiny(num_experts=1 << 15)


@pytest.mark.parametrize("name", ["context", "requests", "pages", "page_size", "index_topk"])
@pytest.mark.parametrize("value", [0, -1])
def test_layouts_of_nothing(name, value):
    with pytest.raises(ValueError, match=f"Layout: {name} is {value}; expected 1 or more"):
        Layout(**{"context": 256, "requests": 2, "pages": 2, name: value})


@pytest.mark.parametrize(
    "wrong",
    [{"window": 0}, {"window": -1}, {"c4_ratio": 0}, {"c4_ratio": 32_769}, {"c128_ratio": 65_537}],
)
def test_windows_that_there_cannot_be(wrong):
    """A plan counts tokens before a step in 16 bits: more would wrap around."""
    with pytest.raises(
        ValueError, match=r"DSV4Config: window is .* expected 1 or more, and ratios"
    ):
        DSV4Config.tiny(**wrong)
    with pytest.raises(ValueError, match=r"Layout: window is .* up to 32768 and 65536"):
        Layout(256, 2, 2, **wrong)
