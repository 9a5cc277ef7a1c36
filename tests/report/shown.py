"""Small models that reports are shown on, and how a test looks at what is said of them."""

import re

import torch
from torch import nn

import torch_bcg
from torch_bcg.explain import Explanation, explain


@torch_bcg.eager_on_graph(mutates_args=("out",), name="shown::attention")
def attention(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q * k)


@torch_bcg.eager_on_graph(fake=torch.empty_like, name="shown::route")
def route(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@torch.library.custom_op("shown::untagged", mutates_args=())
def untagged(x: torch.Tensor) -> torch.Tensor:
    return x * x.max().tolist()


@untagged.register_fake
def _(x):
    return torch.empty_like(x)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        q, k = self.up(x).chunk(2, -1)
        out = torch.empty_like(q)
        attention(q, k, out)
        return x + torch.relu(self.down(out))


class Layers(nn.Module):
    """Marked operations in layers that look alike."""

    def __init__(self, layers=1):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Mixed(nn.Module):
    """A bridge, a written argument, a buffer that counts, a number that follows the call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, total, scale: float):
        self.calls.add_(1)
        total.add_(x.sum())
        y = route(x * scale)
        return {"y": y + 1, "rows": x.shape[0], "x": x, "nothing": None}


class Untagged(nn.Module):
    """An operation that reads the host though nothing says so."""

    def forward(self, x):
        return untagged(x + 1) + 1


def explained(model, *args, **options):
    """What `explain` says before any call."""
    with torch.inference_mode():
        return explain(model.eval(), options)(*args)


def compiled_and_called(model, *calls, dynamic=None, **options):
    """What was compiled, after these calls."""
    compiled = torch.compile(model.eval(), backend="bcg", dynamic=dynamic, options=options)
    with torch.inference_mode():
        for args in calls:
            compiled(*args)
    return compiled


def called(model, *calls, **options):
    """What `explain` says after these calls."""
    return explain(compiled_and_called(model, *calls, **options))


def compiler(refused=0, rows=None):
    """One that changes nothing, and takes no segment of so many tensors (at so many rows)."""

    def compile_segment(code, examples):
        sizes = [x for x in examples if isinstance(x, torch.SymInt)]
        here = rows is None or any(n == rows for n in sizes)
        if here and len(examples) - len(sizes) == refused:
            raise ValueError("<no> room\non the disk")
        return code.forward

    return compile_segment


def mixed():
    """The second graph of `Mixed`, whose number changed."""
    x = torch.ones(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    both = called(Mixed(), (x, torch.zeros(()), 1.5), (x, torch.zeros(()), 2.5))
    return Explanation(both.plans[1:], both.probed)


def shown(text):
    """Text but for lines of source files, numbers of graphs, and what Dynamo calls a symbol."""
    text = re.sub(r"\w+\.py:\d+", "FILE:LINE", str(text))
    text = re.sub(r"\bgraph_(?:0|[1-9]\d*)\b", "graph_N", text)  # graph_000 is a segment
    return re.sub(r"\bs\d+\b", lambda m: "s" + "N" * (len(m[0]) - 1), text)
