"""Experts and hyper-connections against loops in float64 over what the report writes."""

import pytest
import torch
import torch.nn.functional as F

from torch_bcg.dsv4 import DSV4Config
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
