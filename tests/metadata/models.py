"""A metadata class and a function that reads it, for the tests of this folder."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

import torch_bcg


@dataclass
class Core:
    """The nested part.

    Attributes:
        table: int64 ``[requests, width]``, read by the marked function alone.
        counts: int64 ``[requests]``, read by nobody.
    """

    table: Tensor
    counts: Tensor


@dataclass
class Meta:
    """What the function below reads.

    Attributes:
        slots: int64 ``[rows]``, read by a recorded segment.
        scale: float32 ``[rows]``, read by both kinds of segment.
        lengths: int64 ``[requests]``, read by the marked function alone.
        scores: float32 ``[rows]``, written by a recorded segment.
        core: see `Core`.
        page_size: the same in all calls.
        heads: a number that traced code reads.
        bias: float32 ``[rows]`` or None; recorded code reads it where there is one.
        tags: read by nobody.
    """

    slots: Tensor
    scale: Tensor
    lengths: Tensor
    scores: Tensor
    core: Core
    page_size: int = 16
    heads: int = 2
    bias: Tensor | None = None
    tags: list = field(default_factory=list)


@torch_bcg.eager_on_graph(mutates_args=("out",), name="meta::attend")
def attend(q: Tensor, scale: Tensor, out: Tensor) -> None:
    """Reads what it needs by itself, and ``scale`` as an argument."""
    md = torch_bcg.current_metadata(Meta)
    out.copy_(q * scale[:, None] + md.lengths.sum() + md.core.table.sum() * md.page_size)


def forward(x, pool):
    """x and the result: float32 ``[rows, 4]``; pool: float32 ``[64, 4]``, written at slots."""
    md = torch_bcg.current_metadata(Meta)
    q = x * md.scale[:, None] * md.heads
    pool[md.slots] = q
    out = torch.empty_like(q)
    attend(q, md.scale, out)
    y = out + 1
    md.scores.copy_(y.sum(1))
    if md.bias is not None:
        y = y + md.bias[:, None]
    return y


def make(device, rows=6, requests=2, **more):
    """Metadata with other numbers at each call."""
    numbers = {
        "slots": torch.randperm(63, device=device)[:rows],
        "scale": torch.rand(rows, device=device),
        "lengths": torch.randint(9, (requests,), device=device),
        "scores": torch.zeros(rows, device=device),
        "core": Core(
            torch.randint(9, (requests, 5), device=device), torch.ones(requests, device=device)
        ),
        **more,
    }
    return Meta(**numbers)


def pool_on(device):
    """A pool at its own address."""
    pool = torch.zeros(64, 4, device=device)
    torch._dynamo.mark_static_address(pool)
    return pool


class Both:
    """The function compiled and as it is, with a pool each, called with the same metadata."""

    def __init__(self, device, fn=forward, dynamic=None, **options):
        self.device, self.fn = device, fn
        self.pools = pool_on(device), pool_on(device)
        self.compiled = torch.compile(fn, backend="bcg", dynamic=dynamic, options=options)

    def __call__(self, md, x=None, live=None):
        """Compares the two to the bit; ``live``: what eager is given, ``md`` itself if None."""
        live = copy.deepcopy(md) if live is None else live
        x = torch.randn(len(live.slots), 4, device=self.device) if x is None else x
        with torch.no_grad():
            with torch_bcg.bind_metadata(md):
                got = self.compiled(x, self.pools[0])
            with torch_bcg.bind_metadata(live):
                want = self.fn(x, self.pools[1])
        assert torch.equal(got, want)
        assert torch.equal(md.scores[: len(x)], live.scores[: len(x)])
        assert torch.equal(self.pools[0][:63], self.pools[1][:63])
        return got

    def fields(self):
        """Field by name, of the last graph."""
        (binding,) = torch_bcg.explain(self.compiled).plans[-1].bindings
        return {f.name: f for f in binding.fields}
