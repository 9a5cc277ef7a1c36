"""Mixture of experts: which ones, by token id or by score, and two ways to run them.

Neither way reads the host, so both can be recorded.

Source: the DeepSeek-V4 report, section 2.1, as ``modeling_deepseek_v4`` of transformers has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_bcg.dsv4.configuration import DSV4Config, Score


class Experts(nn.Module):
    """SwiGLU experts with clamped halves, and a shared one that every token has."""

    def __init__(self, config: DSV4Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        n, d, i = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(n, 2 * i, d))
        self.down = nn.Parameter(torch.empty(n, d, i))
        self.shared_gate_up = nn.Linear(d, 2 * i, bias=config.mlp_bias)
        self.shared_down = nn.Linear(i, d, bias=config.mlp_bias)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The shared expert, and the chosen ones weighted; an expert chosen twice counts twice.

        Args:
            x: [P, D].
            experts: int64 [P, k].
            weights: [P, k].

        Returns:
            [P, D]
        """
        routed = self.grouped if _is_grouped(x) else self.dense
        shared = self.shared_down(_swiglu(self.shared_gate_up(x), self.limit))
        mixed: Tensor = routed(x, experts, weights) + shared
        return mixed

    def grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows sorted by expert, one grouped product for all: the work of k experts a row."""
        # A GPU sorts bit by bit, however few the keys; there are fewer than 32,768 experts.
        numbers = torch.arange(len(self.gate_up), dtype=torch.int16, device=x.device)
        chosen, order = experts.flatten().to(torch.int16).sort(stable=True)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        rows = x[order // experts.shape[1]]
        inner = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        outer = F.grouped_mm(_swiglu(inner, self.limit), self.down.transpose(1, 2), offs=ends)
        apart = torch.empty_like(outer)
        apart[order] = outer  # back in place, so that the sum over k has one order in every run
        mixed: Tensor = (apart.unflatten(0, experts.shape) * weights.unsqueeze(-1)).sum(1)
        return mixed.to(x.dtype)

    def dense(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert for every row, left out where not chosen: any device and dtype."""
        numbers = torch.arange(len(self.gate_up), device=x.device)
        chosen = experts.unsqueeze(-1) == numbers  # [P, k, experts]
        mine = (chosen * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        inner = _swiglu(torch.matmul(x, self.gate_up.transpose(1, 2)), self.limit)
        outer = torch.matmul(inner, self.down.transpose(1, 2))  # [experts, P, D]
        # Weight 0 is not enough: an expert may overflow on rows of others.
        outer = outer.where(chosen.any(1).T.unsqueeze(-1), 0)
        return torch.einsum("epd,pe->pd", outer, mine)


def _is_grouped(x: Tensor) -> bool:
    """Whether torch has a grouped product for it that reads no offset on the host."""
    return x.is_cuda and x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[..., 2 I] -> [..., I]: ``silu(gate) * up``, the gate at most, the other within ``limit``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


class Router(nn.Module):
    """Chooses experts. Weights are their scores, divided by their sum, times a factor.

    Args:
        config: of the model.
        by_token: experts are those that a table has for the token id, else the best scores, a bias
            added that is not in the weights.
    """

    tokens: Tensor
    bias: Tensor

    def __init__(self, config: DSV4Config, by_token: bool) -> None:
        super().__init__()
        self.by_token, self.config = by_token, config
        n, k = config.num_experts, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(n, config.hidden_size))
        if by_token:
            self.register_buffer("tokens", torch.zeros(config.vocab_size, k, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(n, dtype=torch.float32))

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[P, D] and int64 [P] -> experts int64 [P, k], weights [P, k]."""
        scores = scored(F.linear(x, self.weight), self.config.scoring)
        if self.by_token:
            experts = self.tokens[input_ids]
        else:
            best = (scores + self.bias).topk(self.config.num_experts_per_tok, dim=-1)
            experts = best.indices
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.config.routed_scaling_factor


def scored(logits: Tensor, scoring: Score) -> Tensor:
    """Scores of experts from their logits."""
    return logits.sigmoid() if scoring == "sigmoid" else F.softplus(logits).sqrt()
