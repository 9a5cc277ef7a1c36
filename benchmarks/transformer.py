"""A transformer as Hugging Face writes them, with one marked attention in each layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from harness import Call, Refused, plans_of, replayed
from layered import tensor
from torch import Tensor, nn

import torch_bcg
from torch_bcg.graph.ir import Plan
from torch_bcg.handle import ProgramHandle

HEADS = 16
WARM_CALLS = 4


@torch_bcg.eager_on_graph(mutates_args=("out",), name="bench::attention")
def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """The marked operation."""
    out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True))


unmarked: Any = torch.library.custom_op("bench::unmarked_attention", mutates_args=("out",))(
    attention.__wrapped__
)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm; what is in float64 stays there."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """The two halves of each head, turned by 90 degrees."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Layer(nn.Module):
    """Nine parameters, one marked operation."""

    def __init__(self, width: int, **kind: Any) -> None:
        super().__init__()
        inner = width * 11 // 4

        def weight(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, **kind) * columns**-0.5)

        self.q, self.k, self.v, self.o = (weight(width, width) for _ in range(4))
        self.gate, self.up, self.down = (
            weight(inner, width),
            weight(inner, width),
            weight(width, inner),
        )
        self.before, self.after = (nn.Parameter(torch.rand(width, **kind) + 0.5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., None]) -> Tensor:
        """One pass."""
        rows, width = x.shape
        h = norm(x, self.before)
        q, k, v = (
            F.linear(h, w).view(1, rows, HEADS, -1).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        out = torch.empty_like(q)
        attend(q, k, v, out)
        x = x + F.linear(out.transpose(1, 2).reshape(rows, width), self.o)
        h = norm(x, self.after)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Model(nn.Module):
    """The layers in a row, for one number of tokens."""

    def __init__(self, layers: nn.ModuleList, cos: Tensor, sin: Tensor, attend: Any) -> None:
        super().__init__()
        self.layers, self.attend = layers, attend
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        for layer in self.layers:
            x = layer(x, self.cos, self.sin, self.attend)
        return x


class Case:
    """The layers at one number of tokens, and what the backend made of them, by inner."""

    def __init__(
        self, layers: nn.ModuleList, width: int, tokens: int, device: torch.device
    ) -> None:
        self.layers, self.tokens, self.shape = layers, tokens, (tokens, width)
        self.kind: Any = {"device": device, "dtype": next(layers.parameters()).dtype}
        head = width // HEADS
        frequencies = 10000.0 ** (-torch.arange(0, head, 2, device=device) / head)
        angles = torch.outer(torch.arange(tokens, device=device), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(**self.kind), angles.sin().to(**self.kind)
        self.model = self.of(Model)
        self.made: dict[str, Call] = {}

    def of(self, kind: type[Model], attend: Any = attention) -> Model:
        """A model over the same weights."""
        return kind(self.layers, self.cos, self.sin, attend)

    def inputs(self, n: int) -> list[Tensor]:
        """New ones each time: a stale result must show."""
        return [torch.randn(self.shape, **self.kind) for _ in range(n)]

    def exact(self, x: Tensor) -> Tensor:
        """The result in float64, layer by layer: all of them would not fit beside the rest."""
        x, cos, sin = x.double(), self.cos.double(), self.sin.double()
        for layer in self.layers:
            x = copy.deepcopy(layer).double()(x, cos, sin, attention)
        return x

    def compiled(self, name: str, attend: Any = attention, **options: Any) -> Call:
        """The model compiled and warm; Dynamo caches by code object, so each has its own."""
        code = Model.forward.__code__.replace(co_name=f"forward_{name}")
        kind = type("Model", (Model,), {"forward": FunctionType(code, Model.forward.__globals__)})
        model = self.of(kind, attend)
        compiled: Call = torch.compile(model, dynamic=False, fullgraph=True, **options)
        for x in self.inputs(WARM_CALLS):
            compiled(x)
        return compiled

    def by_bcg(self, inner: str, name: str = "", **options: Any) -> Call:
        """Compiled by the backend, and replayed; ``name`` tells it from those of other options."""
        options["on_eager_call"] = "count"  # a floor records an eager call
        if inner != "eager":
            options["inner"] = inner
        compiled = self.compiled(f"{inner}_{name}", backend="bcg", options=dict(options))
        before = torch_bcg.stats()
        compiled(*self.inputs(1))
        if not replayed(before, torch_bcg.stats()):
            raise Refused(f"a call of {self.tokens} tokens is not replayed with {options}.")
        return compiled

    def bcg(self, inner: str) -> Call:
        """The one of which there are a program, a loop over its steps and a floor."""
        if inner not in self.made:
            self.made[inner] = self.by_bcg(inner)
        return self.made[inner]

    def program(self, inner: str) -> ProgramHandle:
        """Its one program."""
        (program,) = torch_bcg.programs(self.bcg(inner))
        return program

    @property
    def plan(self) -> Plan | None:
        """That of all programs: what compiles segments changes none."""
        plans = [plan for compiled in self.made.values() for plan in plans_of(compiled)]
        return plans[0] if plans else None


def check(case: Case, calls: Mapping[str, Call], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The largest relative error of each variant, against the model in float64.

    Raises:
        Refused: a variant is not as near to it as eager is, within a factor of two.
    """
    worst = dict.fromkeys(calls, 0.0)
    for x in inputs:
        want = case.exact(x)

        def error(result: Any, want: Tensor = want) -> float:
            return float((tensor(result).double() - want).norm() / want.norm())

        limit = 2 * error(case.model(x)) + 1e-6
        for name, call in calls.items():
            found = error(call(x))
            if not found <= limit:  # NaN is refused as well
                raise Refused(f"{name} is wrong: relative error {found:.2e}, limit {limit:.2e}.")
            worst[name] = max(worst[name], found)
    return worst
