"""What the scenarios of mutants share."""

import torch
from torch import Tensor, nn

import torch_bcg
from twin import plus_one

QUIET = {"on_eager_call": "count"}


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


class Block(nn.Module):
    """Linear, a mark, and a buffer that counts calls."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(6, 6, device=device)
        self.register_buffer("counter", torch.zeros((), device=device))

    def forward(self, x):
        self.counter += 1
        return plus_one(self.linear(x)) * self.counter


class Fragile:
    """A marked function that raises while it is armed."""

    def __init__(self):
        self.armed = False

        @torch_bcg.eager_on_graph(fake=torch.empty_like)
        def fragile(x: Tensor) -> Tensor:
            if self.armed:
                raise ValueError("on demand")
            return x + 1

        self.call = fragile
