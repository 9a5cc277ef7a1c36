"""Instances of one class share a graph of Dynamo; each set of static tensors has its programs."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torch_bcg
from twin import assert_same, check, counted, plus_one


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


def test_six_instances_of_one_class_in_turn(device):
    """Dynamo shares one graph among them: six programs, and not a word about moved tensors."""
    blocks = [Block(device) for _ in range(6)]
    twins = [Block(device) for _ in range(6)]
    for block, twin in zip(blocks, twins, strict=True):
        twin.load_state_dict(block.state_dict())
    compiled = [torch.compile(block, backend="bcg") for block in blocks]

    def one_round():
        with torch.no_grad():
            for one, twin in zip(compiled, twins, strict=True):
                x = rows(device)
                assert_same(one(x), twin(x))

    with counted() as first:
        one_round()
    assert (first.captures, first.probes + first.warming, first.num_eager) == (6, 6, 0)
    with counted() as later:
        for _ in range(4):
            one_round()
    assert (later.captures, later.replays, later.num_eager) == (0, 24, 0)


class OfOneWeight(nn.Module):
    """A state of its own, beside a weight that others have as well."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.register_buffer("state", torch.zeros(4, 6, device=linear.weight.device))

    def forward(self, x):
        self.state += self.linear(x)
        return plus_one(self.state)


def test_instances_that_share_weights_in_turn(device):
    """Two engines over one model: neither's state has moved when the other one is called."""
    linear = nn.Linear(6, 6, device=device)
    pairs = [(OfOneWeight(linear), OfOneWeight(linear)) for _ in range(3)]
    compiled = [
        torch.compile(one, backend="bcg", options={"on_moved": "error"}) for one, _ in pairs
    ]

    def one_round():
        with torch.no_grad():
            for (_, twin), one in zip(pairs, compiled, strict=True):
                x = rows(device)
                assert_same(one(x), twin(x))

    with counted() as first:
        one_round()
    assert first.captures == 3
    with counted() as later:
        for _ in range(4):
            one_round()
    assert (later.captures, later.replays, later.num_eager) == (0, 12, 0)


def test_the_layers_of_one_model(device):
    model = nn.Sequential(*(Block(device) for _ in range(5)))
    check(model, lambda i: (rows(device),))


def test_a_dead_module_frees_its_program(device):
    blocks = [Block(device) for _ in range(3)]
    compiled = torch.compile(lambda block, x: block(x), backend="bcg")
    with torch.no_grad():
        for block in blocks * 2:
            compiled(block, rows(device))
    assert len(torch_bcg.programs(compiled)) == 3
    dead = weakref.ref(blocks.pop().linear.weight)
    del block
    gc.collect()
    assert dead() is None
    with torch.no_grad(), counted() as counts:
        compiled(blocks[0], rows(device))
    assert counts.replays == 1
    assert len(torch_bcg.programs(compiled)) == 2


@pytest.mark.filterwarnings("ignore::torch_bcg.errors.BCGWarning")  # eager or moved: both are right
def test_a_parameter_that_is_a_wrapper_subclass(device):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(rows(device), rows(device)), requires_grad=False)

        def forward(self, x):
            y = plus_one(x * 2)
            return self.weight * y, y + 1

    module = Owner()
    compiled = check(module, lambda i: (rows(device),))
    x, a, b = rows(device), rows(device), rows(device)
    module.weight.a.copy_(a)  # in place
    module.weight = nn.Parameter(TwoTensor(module.weight.a, b), requires_grad=False)
    with torch.no_grad():
        for _ in range(3):
            product, _ = compiled(x)
            assert_same((product.a, product.b), (a * (x * 2 + 1), b * (x * 2 + 1)))
