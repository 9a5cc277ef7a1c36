"""Small calls at padded sizes that a mutant must spoil."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from twin import add_one_to, assert_same, check, counted, double_into, plus_one

SIZES = (8, 8, 5, 3, 7, 5)


def dynamic(x, dim=0):
    torch._dynamo.mark_dynamic(x, dim)
    return x


def rows(device, i, *shape):
    return dynamic(torch.randn(SIZES[i % len(SIZES)], *(shape or (4,)), device=device))


def verdicts(compiled):
    """Of each graph: why it is not padded, or None."""
    found = [p.padding for p in torch_bcg.explain(compiled).plans]
    return [p.refused and p.refused.kind for p in found]


def padded(fn, make, *, verdict=None, calls=6, replays=range(4, 6), **options):
    """Compares all sizes with eager, padded to 8 rows unless the verdict is another one."""
    options = {"buckets": [8], "on_eager_call": "error", **options}
    compiled = check(fn, make, calls=calls, replays=replays, exact=False, options=options)
    assert verdicts(compiled) == [verdict]
    return compiled


@torch_bcg.eager_on_graph(mutates_args=("out",), name="mutants::mix_into")
def mix_into(x: Tensor, out: Tensor) -> None:
    """softmax(x x^T) x, for which the number of rows counts."""
    out.copy_(torch.softmax(x @ x.transpose(-1, -2), -1) @ x)


@torch_bcg.eager_on_graph(fake=lambda x, n: torch.empty_like(x), name="mutants::times")
def times(x: Tensor, n: int) -> Tensor:
    """x n"""
    return x * n


@torch.library.custom_op("mutants::less_total", mutates_args=())
def less_total(x: Tensor) -> Tensor:
    """Every row sees all rows, of which facts know nothing."""
    return x - x.sum(0)


less_total.register_fake(torch.empty_like)


@torch.library.custom_op("mutants::less_mean_of_four", mutates_args=())
def less_mean_of_four(x: Tensor) -> Tensor:
    """Every row sees those of its group of four, of which the last may be smaller."""
    return torch.cat([group - group.mean(0) for group in x.split(4)])


less_mean_of_four.register_fake(torch.empty_like)


# rows of the call, and no others


def stale_rows(device):
    """Zero times what a larger call left behind is not zero."""
    linear = nn.Linear(4, 12, device=device)

    def fn(x):
        q, k, v = linear(x)[None].chunk(3, -1)
        return plus_one(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]) * 2

    def make(i):
        x = rows(device, i)
        x[5:] = float("inf")
        return (x,)

    padded(fn, make, rows="independent", calls=7)  # of which two sizes are tried


def declared_slot(device):
    """Padded rows are written to the slot that is declared, to no other."""
    ours, twin = (torch.zeros(64, 4, device=device) for _ in range(2))

    def store(memory, x, slots):
        memory[slots] = x * 2
        return plus_one(x) + slots[:, None]

    options = {"buckets": [8], "pad": {"slots": 63}}
    compiled = torch.compile(store, backend="bcg", options=options)
    with torch.no_grad(), counted() as counts:
        for i in range(12):
            x = rows(device, i)
            slots = dynamic(torch.randperm(63, device=device)[: len(x)])
            ours.fill_(1)
            twin.fill_(1)
            assert_same(compiled(ours, x, slots), store(twin, x, slots))
            assert_same(ours[:63], twin[:63])
    assert verdicts(compiled) == [None]
    assert counts.replays >= 4


def whole_call(device):
    """A marked function that counts rows, recorded outputs, a number of rows."""

    def fn(x):
        out = torch.empty_like(x)
        mix_into(x * 2, out)
        y = out * 3
        return y, y.t(), times(y, x.shape[0]), x.shape[0] + 1

    padded(fn, lambda i: (rows(device, i),))


def copied_fronts(device):
    """Of batched rows a marked function gets a copy, which follows what others write."""

    def fn(x):
        y = (x * 2).transpose(1, 2)
        z = torch.empty_like(x).transpose(1, 2)
        double_into(y, z)
        y.add_(1)
        double_into(y, z)
        add_one_to(y)
        return (y + z).sum(1)

    padded(fn, lambda i: (dynamic(torch.randn(2, SIZES[i], 4, device=device), 1),))


def strides(device):
    """What a marked function is given has the strides of an unpadded call."""
    seen = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like, name="mutants::look")
    def look(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x + 1

    padded(
        lambda x: look((x * 2).transpose(1, 2)) * 2,
        lambda i: (dynamic(torch.randn(2, SIZES[i], 4, device=device), 1),),
    )
    assert seen[::2] == seen[1::2]


def larger_than_a_bucket(device):
    """A call is padded to a size that takes it."""
    padded(
        lambda x: plus_one(x * 2) * 2,
        lambda i: (rows(device, i),),
        buckets=[4, 8],
        replays=range(3, 6),
    )


# whether


def guarded(device):
    """A graph that Dynamo made for less than 7 rows is recorded as it is, not at 8."""

    def fn(x):
        return plus_one(x * 2) + (1 if x.shape[0] < 7 else 2)

    sizes = (5, 6, 5, 6, 5, 6)
    compiled = check(
        fn,
        lambda i: (dynamic(torch.randn(sizes[i], 4, device=device)),),
        calls=6,
        replays=range(2, 5),
        options={"buckets": [8]},
    )
    assert {n for p in torch_bcg.programs(compiled) for n in p.sizes.values()} == {5, 6}


def refused_by_facts(device):
    def fn(x):
        return plus_one(x - x.mean(0)) * 2

    padded(
        fn,
        lambda i: (rows(device, i % 2 * 2),),
        verdict="reduction over tokens",
        replays=range(2, 6),
    )


def refused_by_a_trial(device):
    padded(
        lambda x: less_total(plus_one(x * 2) + 1) * 2,
        lambda i: (rows(device, i % 2 * 2),),
        verdict="padded rows change others",
        replays=range(1, 6),
    )


def groups_of_rows(device):
    """Four rows are a whole group and so are the four that pad them: three are not."""
    sizes = (4, 4, 4, 3, 5, 7)
    padded(
        lambda x: less_mean_of_four(plus_one(x * 2) + 1) * 2,
        lambda i: (dynamic(torch.randn(sizes[i], 4, device=device)),),
        verdict="padded rows change others",
        replays=range(1, 6),
    )


def rows_left_by_a_segment(device):
    """Padded rows are zero at first, and then what a recorded segment makes of them."""

    def fn(x):
        y = x * 2
        add_one_to(y)
        y.add_(1)
        add_one_to(y)
        return less_total(y) * 2

    padded(
        fn,
        lambda i: (rows(device, i % 2 * 2),),
        verdict="padded rows change others",
        replays=range(1, 6),
    )


@torch.library.custom_op("mutants::which", mutates_args=())
def which(i: Tensor) -> Tensor:
    """Which of four numbers there are, of which facts know nothing."""
    return torch.isin(torch.arange(4, device=i.device), i)


which.register_fake(lambda i: i.new_empty(4, dtype=torch.bool))


def rows_that_hide_padding(device):
    """Padded rows hold a 0, and so does the first call."""

    def make(i):
        x = rows(device, i % 2 * 2)
        index = torch.full(x.shape[:1], 2, device=device)
        index[0] = int(i > 2)
        return x, dynamic(index)

    padded(
        lambda x, i: (which(i), plus_one(x) * 2 + i[:, None]),
        make,
        verdict="padded rows change others",
        replays=range(1, 6),
    )


class Counter(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("total", torch.zeros(4, device=device))

    def forward(self, x, i):
        self.total.add_(1)
        return plus_one(x)[i] + self.total + x


def buffer_in_a_trial(device):
    """Indices are data, so the graph is tried: its buffer counts calls all the same."""

    def make(i):
        x = rows(device, i)
        return x, dynamic(torch.arange(len(x), device=device))

    padded(Counter(device), make, calls=7)  # of which two sizes are tried
