"""Bounds of integers hold whatever the numbers are."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.rows.integers import Integers
from torch_bcg.graph.rows.table import base_name, entry_for

OPERATORS = [
    lambda x, y, k: x + y * k,
    lambda x, y, k: x - y,
    lambda x, y, k: torch.add(x, y, alpha=k - 3),
    lambda x, y, k: torch.sub(x, y, alpha=k - 3),
    lambda x, y, k: k - x,
    lambda x, y, k: -x,
    lambda x, y, k: x * (y % 3),
    lambda x, y, k: x.abs(),
    lambda x, y, k: x.relu(),
    lambda x, y, k: x.clamp(min=k - 2),
    lambda x, y, k: x.clamp(max=k - 2),
    lambda x, y, k: x.clamp(k - 4, k - 1),
    lambda x, y, k: torch.maximum(x, y),
    lambda x, y, k: torch.minimum(x, y),
    lambda x, y, k: x // (k + 1),
    lambda x, y, k: x.abs() // (k + 1),
    lambda x, y, k: x % (k + 1),
    lambda x, y, k: x & k,
    lambda x, y, k: torch.where(x > y, x, y),
    lambda x, y, k: torch.where(x > y, x, k),
    lambda x, y, k: x.masked_fill(x > y, k),
    lambda x, y, k: (x > y).long(),
    lambda x, y, k: (x > y).long().cumsum(0),
    lambda x, y, k: (x > y).sum(0, keepdim=True).expand(8),
    lambda x, y, k: x.cumsum(0),
    lambda x, y, k: x.argsort(),
    lambda x, y, k: x.sort()[k % 2],
    lambda x, y, k: x.topk(8)[k % 2],
    lambda x, y, k: x.argmax().expand(8),
    lambda x, y, k: x.gather(0, y % 8),
    lambda x, y, k: x[y % 8],
    lambda x, y, k: F.embedding(y % 8, x[:, None])[:, 0],
    lambda x, y, k: torch.cat([x[:k], y[k:]]),
    lambda x, y, k: torch.stack([x, y])[k % 2],
    lambda x, y, k: F.pad(x[: 8 - k], (0, k), value=k),
    lambda x, y, k: torch.searchsorted(x.sort()[0], y),
    lambda x, y, k: torch.arange(k, k + 8),
    lambda x, y, k: torch.arange(k, k + 16, 2),
    lambda x, y, k: torch.full_like(x, k),
    lambda x, y, k: x.view(2, 4).tril().view(8),
    lambda x, y, k: torch.empty_like(x).copy_(y),
    lambda x, y, k: torch.empty_like(x).index_put_((y.argsort(),), x),
    lambda x, y, k: x.clone().add_(y),
    lambda x, y, k: x.clone().index_fill_(0, torch.tensor([k]), -k),
    lambda x, y, k: x.clone().fill_(k),
    lambda x, y, k: x.scatter(0, y % 8, y),
    lambda x, y, k: x.to(torch.int32).long(),
    lambda x, y, k: x.flip(0).roll(k),
    lambda x, y, k: F.one_hot(x % 8, 8).argmax(1),
]


class Follow(TorchDispatchMode):
    """Follows real numbers, and compares them with their bounds."""

    def __init__(self):
        super().__init__()
        self.integers, self.bounded = Integers(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = base_name(func)
        out = func(*args, **kwargs)
        schema = func._schema.arguments
        arguments = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(schema)
        }
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        written = [
            arguments[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write
        ]
        if entry_for(func, name).is_known:
            self.integers.follow(name, arguments, made, written, None)
        else:
            self.integers.forget((*made, *written))
        for x in made:
            self.compare(x)
        return out

    def compare(self, x):
        known = self.integers.whole(x).range
        if not x.numel() or x.is_floating_point():
            return
        if known.low is not None and known.low < 1 << 40:  # memory that nobody has written to
            assert int(x.min()) >= known.low
            self.bounded += 1
        if known.high is not None and known.high > -(1 << 40):
            assert int(x.max()) <= known.high
            self.bounded += 1


def test_numbers_are_within_their_bounds():
    seen = {"bounded": 0}
    step = st.tuples(st.integers(0, len(OPERATORS) - 1), *[st.integers(0, 5)] * 3)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(step, min_size=1, max_size=8), st.integers(0, 99))
    def check(steps, seed):
        torch.manual_seed(seed)
        values = [torch.randint(-9, 9, (8,)), torch.arange(8), torch.randint(-3, 3, (8,))]
        values += [values[0] % 5]
        with Follow() as follow:
            values += [values[0] % 5, torch.arange(8), torch.full((8,), 3)]
            for number, i, j, k in steps:
                values.append(OPERATORS[number](values[-1 - i], values[-1 - j], k))
        seen["bounded"] += follow.bounded

    check()
    assert seen["bounded"] > 2000
