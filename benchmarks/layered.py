"""A model of like layers with one marked operation each, and what bcg makes of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from harness import Call, Refused
from torch import Tensor, nn

import torch_bcg
from torch_bcg.handle import ProgramHandle


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

    def inputs(self, n: int, rows: int | None = None) -> list[Tensor]:
        """New ones each time: a stale result must show. ``rows``: how many, if not all tokens."""
        shape = self.shape if rows is None else (rows, self.shape[1])
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(n)]

    def for_buckets(self, name: str, **options: Any) -> Call:
        """Compiled by bcg for a number of rows that varies; ``name`` tells it from others."""
        plain = Model.forward
        code = plain.__code__.replace(co_name=f"forward_{name}")
        own = type(Model.__name__, (Model,), {"forward": FunctionType(code, plain.__globals__)})
        return torch.compile(own(self.layers), backend="bcg", dynamic=True, options=options)

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


def check(case: Case, calls: Mapping[str, Call], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The largest relative error of each variant, against the model in float64.

    Raises:
        Refused: a variant is not as near to it as eager is, within a factor of two.
    """
    exact = Model(copy.deepcopy(case.layers).double())
    worst = dict.fromkeys(calls, 0.0)
    for x in inputs:
        want = exact(x.double())

        def error(result: Any, want: Tensor = want) -> float:
            return float((tensor(result).double() - want).norm() / want.norm())

        limit = 2 * error(case.model(x)) + 1e-6
        for name, call in calls.items():
            found = error(call(x))
            if not found <= limit:  # NaN is refused as well
                raise Refused(f"{name} is wrong: relative error {found:.2e}, limit {limit:.2e}.")
            worst[name] = max(worst[name], found)
    return worst


def tensor(result: Any) -> Any:
    """The one tensor of a result."""
    return tensor(result[0]) if isinstance(result, (tuple, list)) else result


def distinct(width: int, rows: int) -> None:
    """Refuses a first call in which two sizes are equal: Dynamo takes them for one."""
    if width == rows:
        raise Refused(f"the first call has {rows} rows; --width has to be another number.")
