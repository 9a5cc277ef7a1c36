"""A model of like layers with one marked operation each, and what bcg makes of it."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from harness import Call, Refused
from torch import Tensor, nn

import torch_bcg
from torch_bcg.programs import ProgramHandle


@torch_bcg.eager_on_graph(mutates_args=("out",), name="bench::gate")
def gate(q: Tensor, v: Tensor, out: Tensor) -> None:
    """The marked operation: one kernel."""
    torch.mul(q, v, out=out)


class Layer(nn.Module):
    """Seven parameters, eleven to seventeen kernels, one marked operation."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        for name in ("q", "k", "v", "o", "up", "down"):
            weight = torch.randn(width, width, device=device, dtype=dtype) * width**-0.5
            setattr(self, name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        h = F.rms_norm(x, (x.shape[-1],), self.norm)
        q, k, v = F.linear(h, self.q), F.linear(h, self.k), F.linear(h, self.v)
        out = torch.empty_like(q)
        gate(q * torch.sigmoid(k), v, out)
        x = x + F.linear(out, self.o)
        return x + F.linear(F.silu(F.linear(x, self.up)), self.down)


class Model(nn.Module):
    """The layers in a row. Dynamo caches by code object, so each compiled variant has its own."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        for layer in self.layers:
            x = layer(x)
        return x


class ForBcg(Model):
    """The same model."""

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        for layer in self.layers:
            x = layer(x)
        return x


class ForInductor(Model):
    """The same model."""

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        for layer in self.layers:
            x = layer(x)
        return x


class Case:
    """One model with its inputs and, once asked for, what bcg made of it."""

    def __init__(self, layers: int, width: int, tokens: int, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.shape = (tokens, width)
        self.layers = nn.ModuleList(Layer(width, device, self.dtype) for _ in range(layers))
        self.layers.requires_grad_(False).eval()
        self.model = Model(self.layers)

    def inputs(self, n: int) -> list[Tensor]:
        """New ones each time: a stale result must show."""
        return [torch.randn(self.shape, device=self.device, dtype=self.dtype) for _ in range(n)]

    @functools.cached_property
    def compiled(self) -> Call:
        """Compiled by bcg and recorded."""
        compiled = torch.compile(ForBcg(self.layers), backend="bcg")
        for x in self.inputs(3):
            compiled(x)
        return compiled

    @functools.cached_property
    def program(self) -> ProgramHandle:
        """The one program of `compiled`, to be called directly."""
        made = torch_bcg.programs(self.compiled)
        if len(made) != 1:
            raise Refused(f"bcg made {len(made)} programs of the model; it must be one.")
        return made[0]

    @property
    def segments(self) -> int:
        """Steps of the program without its copies."""
        return len(self.program.plan.segments)
