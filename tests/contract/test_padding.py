"""Padded sizes: a call gives what it gives unpadded, whatever larger call was replayed before it.

Every test calls sizes up and down the ladder, so that rows of larger calls lie where the smaller
ones have padding, and most run under ``poison``, which fills padded rows and raises where one of
them is read.
"""

import copy
import dataclasses
import gc
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from torch_bcg.errors import BCGWarning
from twin import add_one_to, assert_same, check, counted, double_into, plus_one

SIZES = (5, 7, 3, 8, 13, 9, 2, 30, 5, 6, 29, 3)
LADDER = [4, 8, 16, 32]
CHECKS = ["address", "poison", "verify"]


@pytest.fixture(params=CHECKS)
def options(request):
    return {"buckets": LADDER, "max_padding": 8.0, "check": request.param}


def rows(device, i, *width):
    """Rows of call ``i``, of which only the first dim varies."""
    x = torch.randn(SIZES[i % len(SIZES)], *width, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


CALLS = len(SIZES)


def padded(fn, make, options, calls=CALLS, replays=None, **more):
    """`check` over all sizes: replays after one real run a bucket, and no eager call."""
    replays = range(calls - len(LADDER) - 1, calls) if replays is None else replays
    more.setdefault("exact", False)  # a kernel for more rows may round otherwise
    compiled = check(fn, make, calls=calls, replays=replays, options=options, **more)
    graphs = verdicts(compiled)  # Python numbers may make Dynamo compile again
    assert graphs == [None] * len(graphs)
    assert len(torch_bcg.programs(compiled)) <= len(LADDER) * len(graphs)
    return compiled


def verdicts(compiled):
    """Of each graph: why it is not padded, or None."""
    found = [p.padding for p in torch_bcg.explain(compiled).plans]
    return [p.refused and p.refused.kind for p in found]


SEEN = []


@torch_bcg.eager_on_graph(mutates_args=("out",))
def attend(q: Tensor, k: Tensor, out: Tensor) -> None:
    """softmax(q k^T) k"""
    SEEN.append([(tuple(t.shape), t.stride()) for t in (q, k, out)])
    out.copy_(torch.softmax(q @ k.transpose(-1, -2), -1) @ k)


class Attention(nn.Module):
    def __init__(self, device, width=8):
        super().__init__()
        self.into, self.out = (nn.Linear(width, width, device=device) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), device=device))

    def forward(self, x):
        self.calls += 1
        h = self.into(x)
        out = torch.empty_like(h)
        attend(h, x * 2, out)
        return self.out(out) + x


def test_a_marked_function_that_writes(device, options):
    padded(Attention(device), lambda i: (rows(device, i, 8),), options)


def test_marked_functions_see_shapes_and_strides_of_an_unpadded_call(device):
    """Of batched heads the batch stride follows the number of rows, so a view would not do."""

    def fn(x):
        q = (x * 2).view(2, -1, 2, 4).transpose(1, 2)
        out = torch.empty_like(x).view(2, -1, 2, 4).transpose(1, 2)
        attend(q, q + 1, out)
        return out.transpose(1, 2).reshape(2, -1, 8) * 2

    def make(i):
        x = torch.randn(2, SIZES[i % len(SIZES)], 8, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        return (x,)

    SEEN.clear()
    padded(fn, make, {"buckets": LADDER, "max_padding": 8.0, "check": "poison"})
    eager, ours = SEEN[::2], SEEN[1::2]
    assert len(eager) == len(SIZES)
    assert eager == ours


def test_bridges_arguments_that_are_written_and_numbers(device, options):
    def fn(x, y, n, f):
        y.add_(x * n)
        z = plus_one(y * f) * 2
        y.mul_(2)
        add_one_to(y)
        return z, y.sum(-1), n + 1, x.shape[0]

    def make(i):
        return rows(device, i, 4), rows(device, i, 4), 2 + i, 0.5 * i

    padded(fn, make, options, replays=range(5, 12))


def test_outputs(device, options):
    """Views of one storage, reversed dims, parts, arguments and views of them."""

    def fn(x):
        y = plus_one(x) * 2
        return y, y.t(), y[0], y[:, 1:], x, x.t(), y.view(-1, 2, 2), y.shape[0] * 2, None

    padded(fn, lambda i: (rows(device, i, 4),), options)


def test_two_dims_of_rows(device, options):
    """A mask has two, and its row stride follows their number: the marked function gets a copy."""

    @torch_bcg.eager_on_graph(fake=lambda m, x: torch.empty_like(x), name="padding::masked")
    def masked(m: Tensor, x: Tensor) -> Tensor:
        """m x"""
        assert m.is_contiguous()
        return m.to(x.dtype) @ x

    def fn(x):
        n = torch.arange(x.shape[0], device=x.device)
        mask = n[:, None] >= n[None, :]
        return masked(mask, masked(mask, x * 2) + 1) * 2

    padded(fn, lambda i: (rows(device, i, 4),), options, exact=False)


def test_an_expanded_value_is_copied_once(device, options):
    """A mask for every head of a batch is one mask in memory."""

    @torch_bcg.eager_on_graph(fake=lambda m, x: torch.empty_like(x), name="padding::each")
    def each(m: Tensor, x: Tensor) -> Tensor:
        """m x, head by head"""
        assert m.stride()[:2] == (0, 0)
        return m.to(x.dtype) @ x

    def fn(x):
        n = torch.arange(x.shape[-2], device=x.device)
        mask = (n[:, None] >= n[None, :])[None, None].expand(2, 3, -1, -1)
        return each(mask, each(mask, x * 2) + 1) * 2

    def make(i):
        x = torch.randn(2, 3, SIZES[i % len(SIZES)], 4, device=device)
        torch._dynamo.mark_dynamic(x, 2)
        return (x,)

    padded(fn, make, options)


def test_expanded_arguments(device, options):
    """One batch in memory that is seen twice, also by a trial."""

    def fn(x, i):
        return plus_one(x * 2) + x, x[:, i] * 2

    def make(i):
        x = torch.randn(1, SIZES[i % len(SIZES)], 4, device=device).expand(2, -1, -1)
        index = torch.arange(x.shape[1], device=device)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(index, 0)
        return x, index

    def tied(x, i):
        a, b = fn(x, i)
        return a + b

    padded(tied, make, options, replays=range(5, 12))


def test_a_copied_value_that_is_written_between_two_readers(device, options):
    """The copies that marked functions see follow what recorded segments and they themselves write."""

    def fn(x):
        y = (x * 2).transpose(1, 2)
        z = torch.empty_like(x).transpose(1, 2)
        double_into(y, z)
        y.add_(1)
        double_into(y, z)
        add_one_to(y)
        double_into(y, z)
        return y + z

    def make(i):
        x = torch.randn(2, SIZES[i % len(SIZES)], 4, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        return (x,)

    padded(fn, make, options)


def test_prefix_scans_and_shifts_towards_the_tail(device, options):
    def fn(x):
        positions = torch.diff(x[:, 0], prepend=x[:1, 0] - 1)
        late = F.pad(x, (0, 0, 1, 0))[:-1]
        return plus_one(x.cumsum(0) + late) + positions[:, None], x.cummax(0)[0]

    padded(fn, lambda i: (rows(device, i, 4),), options)


def test_a_size_that_fits_is_not_padded(device):
    with counted() as counts:
        check(
            Attention(device),
            lambda i: (rows(device, 3, 8),),
            replays=3,
            options={"buckets": LADDER},
        )
    assert (counts.captures, counts.pad_rows) == (1, 0)
    assert counts.rows == counts.replayed_rows == 3 * SIZES[3]


def test_rows_are_counted(device):
    """Those of the calls that were replayed, and what was filled up."""
    with counted() as counts:
        padded(Attention(device), lambda i: (rows(device, 0, 8),), {"buckets": [8]}, calls=4)
    assert (counts.rows, counts.replayed_rows, counts.pad_rows) == (15, 15, 9)


@pytest.mark.parametrize(
    ("buckets", "size", "reason"),
    [([4, 8], 9, "above the ladder"), ([4, 128], 40, "max_padding"), ([64], 20, "max_padding")],
)
def test_calls_that_no_bucket_takes(device, buckets, size, reason):
    compiled = torch.compile(Attention(device), backend="bcg", options={"buckets": buckets})
    with torch.no_grad(), warnings.catch_warnings(), counted() as counts:
        warnings.simplefilter("ignore", BCGWarning)
        for n in (size, size):
            x = torch.randn(n, 8, device=device)
            torch._dynamo.mark_dynamic(x, 0)
            compiled(x)
    assert counts.eager_calls == {reason: 2}


def test_the_smallest_buckets_take_any_call(device):
    padded(Attention(device), lambda i: (rows(device, 6, 8),), {"buckets": [32]}, calls=4)


def test_guards_of_the_graph_bound_what_it_is_padded_to(device):
    """Dynamo traced a branch on the size: a graph for less than 8 rows is not padded to 8."""

    def fn(x):
        return plus_one(x * 2) + (1 if x.shape[0] < 7 else 2)

    sizes = (5, 6, 5, 7, 9, 13, 6, 5, 9)

    def make(i):
        x = torch.randn(sizes[i % len(sizes)], 4, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    compiled = check(fn, make, calls=18, replays=range(8, 18), options={"buckets": LADDER})
    sizes_of = [dict(p.sizes) for p in torch_bcg.programs(compiled)]
    assert sorted(n for s in sizes_of for n in s.values()) == [5, 6, 8, 16]


MIXING = {
    "contraction over tokens": lambda x: x @ (x.t() @ x),
    "reduction over tokens": lambda x: x - x.mean(0),
    "softmax over tokens": lambda x: x.softmax(0),
    "size used as a value": lambda x: x / x.shape[0],
    "row counted from the end": lambda x: x + x[-1],
}


@pytest.mark.parametrize("kind", MIXING)
def test_rows_that_mix_are_not_padded(device, kind):
    def fn(x):
        return plus_one(MIXING[kind](x)) * 2

    compiled = check(
        fn,
        lambda i: (rows(device, i % 3, 4),),
        calls=9,
        replays=range(3, 6),
        options={"buckets": LADDER},
    )
    assert verdicts(compiled) == [kind]


def merged(x):
    """Rows of two batches one after the other: the first rows are not those of the call."""
    return plus_one((x * 2).view(-1, 4)) * 2


def twice_as_many(x):
    return plus_one(torch.cat([x, x], 1) * 2)


@pytest.mark.parametrize("fn", [merged, twice_as_many])
def test_what_cannot_be_cut_is_not_padded(device, fn):
    def make(i):
        x = torch.randn(2, SIZES[i % 3], 4, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        return (x,)

    compiled = check(fn, make, calls=9, replays=range(3, 6), options={"buckets": LADDER})
    assert verdicts(compiled) == ["rows cannot be cut"]


# tried


def reordered(x, i):
    return plus_one(x * 2)[i] * 2 + x


def test_what_facts_cannot_tell_is_tried_once(device, options):
    """Indices that are data: here every row picks a row of the call."""

    def make(i):
        x = rows(device, i, 4)
        index = torch.randint(0, 2, x.shape[:1], device=device)
        torch._dynamo.mark_dynamic(index, 0)
        return x, index

    padded(reordered, make, options, replays=range(6, 12))


def test_a_trial_that_fails_refuses(device):
    """Facts know nothing of a custom operator; here the first row comes from the last one."""

    @torch.library.custom_op("padding::last_first", mutates_args=())
    def last_first(x: Tensor) -> Tensor:
        return torch.roll(x, 1, 0)

    last_first.register_fake(lambda x: torch.empty_like(x))

    compiled = check(
        lambda x: last_first(plus_one(x * 2)) * 2,
        lambda i: (rows(device, i % 3, 4),),
        calls=12,
        replays=range(4, 9),
        options={"buckets": LADDER},
    )
    assert verdicts(compiled) == ["padded rows change others"]


@torch.library.custom_op("padding::less_mean_of_four", mutates_args=())
def less_mean_of_four(x: Tensor, reverse: bool) -> Tensor:
    """Rows less the mean of their group of four, counted from the first row or from the last."""
    rows = x.flip(0) if reverse else x
    rows = torch.cat([group - group.mean(0) for group in rows.split(4)])
    return rows.flip(0) if reverse else rows


less_mean_of_four.register_fake(lambda x, reverse: torch.empty_like(x))


@pytest.mark.parametrize("reverse", [False, True])
def test_groups_of_rows_are_tried_until_one_would_hold_padded_rows(device, reverse):
    """At 4 and 12 rows of 8 and 16 all groups are whole, those of padded rows as well."""
    sizes = (4, 4, 4, 12, 12, 4, 11, 5, 12, 7, 3)

    def make(i):
        x = torch.randn(sizes[i], 4, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    compiled = check(
        lambda x: less_mean_of_four(plus_one(x * 2), reverse) * 2,
        make,
        calls=len(sizes),
        replays=range(3, 9),
        exact=False,
        options={"buckets": [8, 16]},
    )
    assert verdicts(compiled) == ["padded rows change others"]


def test_sizes_without_a_common_divisor_end_the_trials(device):
    """4 and 12 are both of groups of four; with 13 and its padding of 3 nothing is left."""

    @torch.library.custom_op("padding::times_three", mutates_args=())
    def times_three(x: Tensor) -> Tensor:
        return x * 3

    times_three.register_fake(torch.empty_like)
    compiled = torch.compile(
        lambda x: times_three(x + 1), backend="bcg", dynamic=True, options={"buckets": [8, 16]}
    )
    tried = []
    for size in (8, 4, 4, 12, 4, 12, 13, 5, 11, 14, 6):
        x = torch.randn(size, 4, device=device)
        with torch.inference_mode(), counted() as counts:
            assert_same(compiled(x), (x + 1) * 3)
        if counts.warming:
            tried.append(size)
    assert tried == [4, 12, 13]
    assert verdicts(compiled) == [None]


def test_a_trial_repeats_no_side_effect(device):
    counts = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x), name="padding::counting")
    def counting(x: Tensor) -> Tensor:
        counts.append(len(x))
        return x + 1

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4, device=device))

        def forward(self, x, i):
            self.total.add_(1)
            x.add_(1)
            return counting(x * 2)[i] + self.total + x

    def make(i):
        x = rows(device, i, 4)
        index = torch.arange(len(x), device=device)
        torch._dynamo.mark_dynamic(index, 0)
        return x, index

    module = Counter()
    padded(module, make, {"buckets": LADDER, "max_padding": 8.0}, replays=range(6, 12))
    assert len(counts) == 2 * len(SIZES)
    assert module.total[0] == len(SIZES)


def test_a_trial_compares_no_memory_that_nobody_has_written(device):
    """The out buffer of a marked function holds anything before it runs."""

    def fn(x, i):
        out = torch.empty_like(x)
        double_into(x * 2, out)
        return out[i] + x

    def make(i):
        torch.full((64,), float("nan"), device=device)  # what the allocator may give out again
        x = rows(device, i, 4)
        index = torch.randint(0, 2, x.shape[:1], device=device)
        torch._dynamo.mark_dynamic(index, 0)
        return x, index

    padded(fn, make, {"buckets": LADDER, "max_padding": 8.0}, replays=range(6, 12))


@torch.library.custom_op(
    "padding::inverse", mutates_args=(), tags=[torch.Tag.data_dependent_output]
)
def inverse(x: Tensor, y: Tensor) -> Tensor:
    """1 / x; nobody marked it, and y cannot be cut, so it sees all rows"""
    return 1 / x


inverse.register_fake(lambda x, y: torch.empty_like(x))


def test_rows_that_an_eager_segment_fills_are_nobody_elses_padding(device):
    """Its bridge is full of infinities where the next one has padding, which is multiplied by 0."""

    def fn(x):
        a = inverse(x, (x * 2).view(-1, 4)) * 2
        b = (plus_one(a) * 1)[:, None]
        return F.scaled_dot_product_attention(b, b, b, is_causal=True)

    def make(i):
        x = torch.rand(2, SIZES[i % len(SIZES)], 4, device=device) + 1
        torch._dynamo.mark_dynamic(x, 1)
        return (x,)

    options = {"buckets": LADDER, "rows": "independent", "max_padding": 8.0}
    padded(fn, make, options, replays=range(5, 12))


# the author's word


class Causal(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.qkv = nn.Linear(8, 24, device=device)

    def forward(self, x):
        q, k, v = self.qkv(plus_one(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        return y[0] * 2


def test_causal_attention_is_padded_on_the_word_of_its_author(device):
    facts = check(
        Causal(device),
        lambda i: (rows(device, i % 3, 8),),
        calls=9,
        replays=range(3, 6),
        exact=False,
        options={"buckets": LADDER},
    )
    assert verdicts(facts) == ["contraction over tokens"]
    torch._dynamo.reset()
    options = {"buckets": LADDER, "rows": "independent", "max_padding": 8.0, "check": "poison"}
    padded(
        Causal(device), lambda i: (rows(device, i, 8),), options, replays=range(6, 12), exact=False
    )


class Encoder(nn.Module):
    """Every row sees all others, a little, behind a norm."""

    def __init__(self, device):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8, device=device), nn.Linear(8, 24, device=device)

    def forward(self, x):
        x = plus_one(x)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + 1e-3 * F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def test_a_norm_does_not_hide_from_a_trial_what_is_read(device):
    """Rows of one number are zero behind it, whichever number it is."""
    compiled = check(
        Encoder(device),
        lambda i: (rows(device, i % 3, 8),),
        calls=12,
        replays=range(4, 9),
        options={"buckets": LADDER, "rows": "independent"},
    )
    assert verdicts(compiled) == ["padded rows change others"]


def test_top_k_is_padded_on_nobodys_word(device):
    """Among equal numbers it chooses by how many there are."""
    compiled = check(
        lambda x: plus_one(x)[:2] * 2 + x.relu().topk(2, 0)[0],
        lambda i: (rows(device, i % 3, 4),),
        calls=9,
        replays=range(3, 6),
        options={"buckets": LADDER, "rows": "independent"},
    )
    assert verdicts(compiled) == ["top-k over tokens"]


def test_a_word_that_is_not_true_is_found_out(device):
    compiled = check(
        lambda x: plus_one(x - x.mean(0)) * 2,
        lambda i: (rows(device, i % 3, 4),),
        calls=12,
        replays=range(4, 9),
        options={"buckets": LADDER, "rows": "independent"},
    )
    assert verdicts(compiled) == ["padded rows change others"]


# writes to memory that is not padded


class Pool(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.register_buffer("keys", torch.zeros(64, 4, device=device))

    def forward(self, x, slots):
        self.keys[slots] = x * 2
        return plus_one(x) * 2 + slots[:, None]


def slots_of(device, i):
    x = rows(device, i, 4)
    slots = 1 + torch.randperm(63, device=device)[: len(x)]
    torch._dynamo.mark_dynamic(slots, 0)
    return x, slots


def test_padded_rows_are_not_written_to_memory(device):
    compiled = check(
        Pool(device),
        lambda i: slots_of(device, i % 3),
        calls=9,
        replays=range(3, 6),
        options={"buckets": LADDER},
    )
    assert verdicts(compiled) == ["padded rows are written"]


def test_padded_rows_are_written_to_a_slot_that_is_declared(device):
    ours, twin = Pool(device), Pool(device)
    options = {"buckets": LADDER, "pad": {"slots": 0}, "max_padding": 8.0, "check": "poison"}
    compiled = torch.compile(ours, backend="bcg", options=options)
    with torch.no_grad(), counted() as counts:
        for i in range(len(SIZES)):
            x, slots = slots_of(device, i)
            assert_same(compiled(x, slots), twin(x, slots))
            assert_same(ours.keys[1:], twin.keys[1:])
    assert verdicts(compiled) == [None]
    assert counts.replays >= 6
    assert counts.num_eager == 0


# Names that the option takes.


@dataclasses.dataclass
class Places:
    """``slots`` and ``others``: int64 ``[rows]``."""

    slots: Tensor
    others: Tensor


@pytest.fixture
def places():
    handle = torch_bcg.register_metadata_binding(Places)
    yield
    handle.remove()


POOL = torch.zeros(64, 4)


def put(x, slots):
    POOL[slots] = x * 2
    return plus_one(x) * 2


def put_behind_a_break(x, slots):
    y = x * 2
    torch._dynamo.graph_break()
    return put(y, slots)


def put_before_a_break(x, slots):
    y = put(x, slots)
    torch._dynamo.graph_break()
    return plus_one(y) * 2


def put_by_another_name(x, slots):
    def inner(y, rows):
        torch._dynamo.graph_break()
        return put(y, rows)

    return inner(x * 2, slots) + 1


def made_on_the_way(x, slots):
    rows = slots - 1
    torch._dynamo.graph_break()
    return put(x, rows)


def put_out_of(batch):
    return put(batch["x"], batch["slots"])


def of_metadata(x):
    return put(x, torch_bcg.current_metadata(Places).slots)


def called(fn, pad, calls=4, buckets=(8,)):
    """What is warned of while a function is called; nothing may be in its first call."""
    compiled = torch.compile(fn, backend="bcg", options={"buckets": buckets, "pad": pad})
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        for i in range(calls):
            warnings.simplefilter("always")
            x, slots = slots_of("cpu", i % 3)
            if fn is put_out_of:
                compiled({"x": x, "slots": slots, "others": slots + 0})
            elif fn is of_metadata:
                with torch_bcg.bind_metadata(Places(slots, slots + 0)):
                    compiled(x)
            else:
                compiled(x, slots)
            assert i > 0 or not told
    assert all(w.category is BCGWarning for w in told)
    return [re.sub(r"graph_\d+", "graph_N", str(w.message)) for w in told]


def test_a_key_of_pad_that_names_nothing_is_told_once():
    slot, w = called(put, {"slots": 0, "slot": 15, "w": 1}, calls=9)
    assert slot == (
        "pad={'slot': 15} names no argument and no field of metadata of graph_N; those that are "
        "read: POOL, slots, x; did you mean slots? Padded rows of what is not named are 0."
    )
    assert w == (
        "pad={'w': 1} names no argument and no field of metadata of graph_N; those that are read: "
        "POOL, slots, x; use one of those, or leave it out. Padded rows of what is not named are 0."
    )
    (again,) = called(put, {"slot": 15})  # another compile
    assert "did you mean slots?" in again
    assert called(put, {"slot": 15}, buckets=None) == []  # no row is padded


MISNAMED = [
    (put_behind_a_break, "slot", "of graph_N, graph_N; those that are read: POOL, slots, x, y; "),
    (put_before_a_break, "slot", "of graph_N, graph_N; those that are read: POOL, slots, x, y; "),
    (put_out_of, "slots", "read: POOL, batch['slots'], batch['x']; use one of those"),
    (put_out_of, "batch['slot']", "did you mean batch['slots']?"),
    (of_metadata, "slot", "read: POOL, slots, x; did you mean slots?"),
    (of_metadata, "md.slots", "did you mean slots?"),
]


@pytest.mark.parametrize(
    ("fn", "key", "told"), MISNAMED, ids=[f"{fn.__name__} {key}" for fn, key, _ in MISNAMED]
)
def test_keys_of_pad_that_name_nothing(places, fn, key, told):
    (warning,) = called(fn, {key: 0}, calls=9)
    assert told in warning


NAMED = [
    (put, "slots"),
    (put, "l_slots_"),
    (put, "POOL"),  # read, and has no padded rows
    (lambda x, slots: plus_one(x) * 2, "slots"),  # not read
    (put_behind_a_break, "slots"),
    (put_before_a_break, "slots"),
    (put_by_another_name, "rows"),
    (made_on_the_way, "rows"),
    (put_out_of, "batch['slots']"),
    (put_out_of, "batch['others']"),
    (lambda *args: put(*args), "args[1]"),
    (of_metadata, "slots"),
    (of_metadata, "Places.slots"),
    (of_metadata, "others"),
    (of_metadata, "Places.others"),
]


@pytest.mark.parametrize(("fn", "key"), NAMED, ids=[f"{fn.__name__} {key}" for fn, key in NAMED])
def test_keys_of_pad_that_name_something(places, fn, key):
    """In some graph: Dynamo may make many of one function, with arguments of their own."""
    assert called(fn, {key: 0}, calls=9) == []


def test_an_interrupted_call_leaves_no_rows_to_a_later_one(device, monkeypatch):
    """What it copied in before it ended lies behind the rows of the next call."""
    ours, twin = Pool(device), Pool(device)
    compiled = torch.compile(ours, backend="bcg", options={"buckets": [8], "pad": {"slots": 0}})
    real = torch.Tensor.copy_

    def call(size):
        x = torch.randn(size, 4, device=device)
        slots = 1 + torch.randperm(63, device=device)[:size]
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(slots, 0)
        assert_same(compiled(x, slots), twin(x, slots))
        assert_same(ours.keys[1:], twin.keys[1:])

    def interrupted(target, source):
        real(target, source)
        if target.dtype == torch.int64:
            raise KeyboardInterrupt

    with torch.no_grad():
        for size in (8, 7, 5, 5, 5):
            call(size)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(torch.Tensor, "copy_", interrupted)
            compiled(torch.randn(8, 4, device=device), torch.arange(40, 48, device=device))
        with counted() as counts:
            for size in (5, 5):
                call(size)
    assert counts.replays == 2


STORES = {
    "fewer rows": lambda pool, i, x: pool.__setitem__(i[:-1], x[:-1]),
    "a counter": lambda pool, i, x: pool.index_add_(0, i * 0, x),
    "a mark": lambda pool, i, x: pool.index_fill_(0, i * 0 + 3, 1.0),
}


@pytest.mark.parametrize("name", STORES)
def test_a_declared_slot_allows_no_other_write(device, name):
    class Store(Pool):
        def forward(self, x, slots):
            STORES[name](self.keys, slots, x * 2)
            return plus_one(x) * 2 + slots[:, None]

    compiled = check(
        Store(device),
        lambda i: slots_of(device, i % 3),
        calls=9,
        replays=range(3, 6),
        options={"buckets": LADDER, "pad": {"slots": 0}},
    )
    assert verdicts(compiled) == ["padded rows are written"]


def test_an_index_that_counts_from_the_end_for_some_calls(device):
    """Once it varies, Dynamo asks for its sign no more."""
    sizes, last = (7, 7, 7, 5, 5, 7), (-1, -2, -3, -3, -2, 0)

    def make(i):
        x = torch.randn(sizes[i], 4, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        return x, last[i]

    check(
        lambda x, n: plus_one(x * 2) * 2 + x[n],
        make,
        calls=6,
        replays=range(6),
        options={"buckets": [8, 16]},
    )


IDEMPOTENT = {
    "set": lambda x, i: torch.zeros(8, device=x.device).scatter(0, i, 1.0)[:4] + x,
    "least": lambda x, i: (
        x + torch.full((4,), 9, device=x.device).scatter_reduce(0, i * 0, -i, "amin")
    ),
}


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_padded_rows_that_would_repeat_a_real_one(device, name):
    """A trial that gives padded rows the numbers of real ones would not see these."""

    def make(i):
        x = rows(device, i % 3, 4)
        index = torch.randint(1, 8, x.shape[:1], device=device)
        torch._dynamo.mark_dynamic(index, 0)
        return x, index

    check(
        lambda x, i: plus_one(IDEMPOTENT[name](x, i)) * 2 + i[:, None],
        make,
        calls=12,
        replays=range(12),
        options={"buckets": LADDER},
    )


@torch.library.custom_op("padding::over_least", mutates_args=())
def over_least(x: Tensor) -> Tensor:
    """By how much rows are over the least of them"""
    return x - torch.nan_to_num(x, nan=float("inf")).amin(0)


over_least.register_fake(lambda x: torch.empty_like(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_trial_finds_a_minimum(device, dtype):
    """Neither what is not a number nor a large one changes it."""

    def make(i):
        x = torch.randint(1, 9, (SIZES[i % 3], 4), device=device)
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    compiled = check(
        lambda x: over_least(plus_one(x.to(dtype).abs()) * 2) * 2,
        make,
        calls=12,
        replays=range(4, 9),
        options={"buckets": LADDER},
    )
    assert verdicts(compiled) == ["padded rows change others"]


TABLES = {
    "positions": lambda table, x: F.embedding(torch.arange(x.shape[0], device=x.device), table),
    "counted": lambda table, x: F.embedding((x[:, 0] < 9).long().cumsum(0), table),
    "before": lambda table, x: table[(x[:, 0] > -9).long() - 1],
}


@pytest.mark.parametrize("name", TABLES)
def test_padded_rows_do_not_index_outside_a_table(device, name):
    """Of 31 rows, which 29 of a call do not leave and 32 of a program would."""
    table = torch.randn(31, 4, device=device)
    compiled = check(
        lambda x: plus_one(x * 2) + TABLES[name](table, x),
        lambda i: (rows(device, i, 4),),
        calls=24,
        replays=range(8, 20),
        exact=False,
        options={"buckets": LADDER, "max_padding": 8.0},
    )
    sizes = {n for p in torch_bcg.programs(compiled) for n in p.sizes.values()}
    assert {4, 8, 16} <= sizes
    assert name == "before" or 32 not in sizes


def ends_before(x):
    b = torch.zeros_like(x)
    b[:-1] = x[1:] * 2 + 1
    return b[:3] * 1


def half(x):
    b = torch.zeros_like(x)
    b[: x.shape[0] // 2] = 1
    return b[2] * 1


def counted_positions(x):
    n, m = x.shape[:2]
    return (torch.arange(n * m, device=x.device).view(n, m) < 10).float()[..., None] * x


# Places counted from the first row: with 13 rows in front of all that padding moves, with 3 not.
PLACES = {
    "a write that ends before the last row": (ends_before, 0),
    "a write of half the rows": (half, 0),
    "rows of two merged": (lambda x: (x * 2).flatten(0, 1)[:5] * 1, 1),
    "a row of two merged": (lambda x: (x * 2).flatten(0, 1)[4] * 1, 1),
    "rows repeated": (lambda x: (x * 2).repeat(2, 1)[:5] * 1, 0),
    "columns after rows": (lambda x: (x * 2).t().reshape(-1)[:7] * 1, 0),
    "positions counted through": (counted_positions, 1),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_a_trial_shows_of_many_rows_it_does_not_show_of_few(device, name):
    fn, dim = PLACES[name]
    compiled = torch.compile(
        fn, backend="bcg", dynamic=True, options={"buckets": LADDER, "bucket_dim": ("x", dim)}
    )
    with torch.no_grad():
        for n in (13, 13, 7, 11, 5, 5, 5, 13):
            x = torch.randn(*(2,) * dim, n, 3, device=device)
            assert_same(compiled(x), fn(x))


AT = {
    "index": lambda x, i: x.flatten(0, 1)[i],
    "index_select": lambda x, i: x.flatten(0, 1).index_select(0, i),
    "gather": lambda x, i: x.flatten(0, 1).gather(0, i[:, None]),
    "take": lambda x, i: x.take(i),
    "embedding": lambda x, i: F.embedding(i, x.flatten(0, 1)),
    "index_put": lambda x, i: x.flatten(0, 1).index_put((i,), x.new_ones(())).view_as(x),
    "index_fill": lambda x, i: x.flatten(0, 1).index_fill(0, i, 1.0).view_as(x),
    "scatter": lambda x, i: x.flatten(0, 1).scatter(0, i[:, None], 1.0).view_as(x),
}


@pytest.mark.parametrize("rows_are", ["facts", "independent"])
@pytest.mark.parametrize("name", AT)
def test_given_places_in_merged_rows(device, name, rows_are):
    """They are those of the call, of which a trial shows nothing while they lie in front."""

    def fn(x, i):
        return AT[name](x * 2, i)

    compiled = torch.compile(
        fn, backend="bcg", dynamic=True,
        options={"buckets": LADDER, "bucket_dim": ("x", 1), "rows": rows_are},
    )  # fmt: skip
    with torch.no_grad():
        for n, places in ((13, (1, 5)), (13, (0, 4)), (11, (1, 5)), (13, (12, 25)), (5, (2, 9))):
            x, i = torch.randn(2, n, 3, device=device), torch.tensor(places, device=device)
            assert_same(compiled(x, i), fn(x, i))
    assert "rows counted through" in verdicts(compiled)


def test_places_that_are_found_in_merged_rows(device):
    """Those of the padded run are in its own order."""

    def fn(x):
        flat = (x * 2).flatten(0, 1)
        return flat[flat[:, 0].sigmoid().add(1).log().argsort(stable=True).argsort()].view_as(x)

    compiled = torch.compile(
        fn, backend="bcg", dynamic=True,
        options={"buckets": LADDER, "bucket_dim": ("x", 1), "rows": "independent"},
    )  # fmt: skip
    with torch.no_grad():
        for n in (13, 7, 5, 3, 13):
            x = torch.randn(2, n, 3, device=device)
            assert_same(compiled(x), fn(x))


@torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x[:, 0], dtype=torch.int64))
def one_to_four(x: Tensor) -> Tensor:
    """Which is never 0, but for padded rows."""
    return torch.arange(x.shape[0], device=x.device) % 4 + 1


# Right for rows of a call, whose ``i`` is 1 to 4; padded rows hold 0.
DOMAINS = {
    "gather": lambda x, i: x.gather(1, (i - 1)[:, None]),
    "scatter": lambda x, i: (x * 2).scatter(1, (i - 1)[:, None], 7.0),
    "index_put": lambda x, i: (x.t() * 2).index_put((i - 5,), x.new_ones(())),
    "one_hot": lambda x, i: F.one_hot(i - 1, 4) + x,
    "floor_divide": lambda x, i: 8 // i,
    "remainder": lambda x, i: torch.arange(x.shape[0], device=x.device) % i,
    "div": lambda x, i: torch.div(i * 3, i, rounding_mode="trunc"),
    "of a marked function": lambda x, i: 8 // one_to_four(x),
    "place of a marked function": lambda x, i: x.gather(1, (one_to_four(x) - 1)[:, None]),
    "gather of positions": lambda x, i: x[:, 0] + _table(x).gather(0, _places(x)),
    "take of positions": lambda x, i: x[:, 0] + _table(x).take(_places(x)),
}


def _table(x):
    return torch.linspace(0, 1, 13, device=x.device)


def _places(x):
    return torch.arange(x.shape[0], device=x.device)


@pytest.mark.parametrize("name", DOMAINS)
def test_padded_rows_do_not_leave_the_domain_of_an_operator(device, name):
    fn = DOMAINS[name]
    compiled = torch.compile(fn, backend="bcg", dynamic=True, options={"buckets": LADDER})
    with torch.no_grad():
        for n in (5, 5, 7, 7, 3, 13, 13, 13):
            x, i = torch.randn(n, 4, device=device), torch.randint(1, 5, (n,), device=device)
            assert_same(compiled(x, i), fn(x, i))


@pytest.mark.parametrize("choose", ["topk", "argsort", "argmax", "looked up"])
def test_places_that_are_chosen_are_inside(device, choose):
    """Nothing has to be tried: what a router chooses is a place of what it chose from."""
    features, table = (torch.randn(31, 4, device=device), torch.arange(31, device=device) % 4)
    chosen = {
        "topk": lambda x, i: x.topk(2).indices,
        "argsort": lambda x, i: x.argsort(1),
        "argmax": lambda x, i: x.argmax(1, keepdim=True),
        "looked up": lambda x, i: table[i][:, None],
    }[choose]

    def fn(i):
        x = plus_one(F.embedding(i, features))
        return x.gather(1, chosen(x, i)) * 2

    def make(i):
        ids = torch.randint(0, 31, (SIZES[i % len(SIZES)],), device=device)
        torch._dynamo.mark_dynamic(ids, 0)
        return (ids,)

    compiled = padded(fn, make, {"buckets": LADDER, "max_padding": 8.0})
    assert [p.padding.tried for p in torch_bcg.explain(compiled).plans] == [()]


# what the first call hides


def numbered(device, i, first=(0, 0, 0, 1, 1, 1, 2, 0)):
    """Ones, and a 2 in every row but the first: padded rows hold 0, as some calls do."""
    x = torch.ones(SIZES[i % 3], 4, device=device)
    index = torch.full(x.shape[:1], 2, device=device)
    index[0] = first[i % len(first)]
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(index, 0)
    return x, index


@torch.library.custom_op("padding::which", mutates_args=())
def which(i: Tensor) -> Tensor:
    """Which of four numbers there are"""
    return torch.isin(torch.arange(4, device=i.device), i)


which.register_fake(lambda i: i.new_empty(4, dtype=torch.bool))


@torch.library.custom_op("padding::any_positive", mutates_args=())
def any_positive(x: Tensor) -> Tensor:
    """Whether there is a positive number in a column"""
    return (x > 0).any(0)


any_positive.register_fake(lambda x: x.new_empty(x.shape[1:], dtype=torch.bool))

SET = {
    "isin": lambda x, i: torch.isin(torch.arange(4, device=x.device), i),
    "scatter": lambda x, i: torch.zeros_like(x[:, 0]).scatter(0, i, 1.0),
    "scatter_": lambda x, i: torch.zeros_like(x[:, 0]).scatter_(0, i, 1.0),
    "index_fill": lambda x, i: torch.zeros_like(x).index_fill(0, i, 1.0),
    "scatter_reduce": lambda x, i: torch.zeros_like(x[:, 0]).scatter_reduce(0, i, x[:, 1], "amax"),
    "put": lambda x, i: torch.zeros_like(x).put(i, x[:, 0]),
    "of their own": lambda x, i: torch.zeros_like(i).scatter(0, i, i + 1),
    "unknown": lambda x, i: which(i),
    "unknown, of chosen": lambda x, i: which(F.one_hot(i, 4).argmax(1)),
}


@pytest.mark.parametrize("rows_are", ["facts", "independent"])
@pytest.mark.parametrize("name", SET)
def test_padded_rows_do_what_rows_of_the_first_calls_do(device, name, rows_are):
    """Writing, or being, a 0 shows nothing while a row of the call does so itself."""
    compiled = check(
        lambda x, i: (SET[name](x, i), plus_one(x) * 2 + i[:, None]),
        lambda i: numbered(device, i),
        calls=12,
        replays=range(4, 9),
        options={"buckets": [8], "rows": rows_are},
    )
    (kind,) = verdicts(compiled)
    assert (
        kind
        in {
            "facts": (
                "padded rows are written",
                "reduction over tokens",
                "padded rows change others",
            ),
            "independent": ("padded rows change others", "padded rows as an index"),
        }[rows_are]
    )


def test_a_positive_number_of_the_first_calls_hides_none_of_padding(device):
    """A trial fills padded rows with large numbers, which show nothing where there are others."""

    def make(i):
        x = torch.randn(SIZES[i % 3], 4, device=device)
        x[0] = 1
        x = -x.abs() - 1 if i > 4 else x
        torch._dynamo.mark_dynamic(x, 0)
        return (x,)

    compiled = check(
        lambda x: (any_positive(x * 1 + 0.5), plus_one(x) * 2),
        make,
        calls=12,
        replays=range(4, 9),
        options={"buckets": [8]},
    )
    assert verdicts(compiled) == ["padded rows change others"]


def test_calls_of_zeros_hide_nothing(device):
    """As sizes are warmed up: padded rows are the very rows of the call."""
    compiled = torch.compile(
        lambda x, i: (which(i), plus_one(x) * 2 + i[:, None]),
        backend="bcg",
        options={"buckets": [8]},
    )
    with torch.no_grad():
        for i in range(6):
            x, index = numbered(device, i)
            index = index if i > 2 else index * 0
            torch._dynamo.mark_dynamic(index, 0)
            assert_same(compiled(x, index)[0], which(index))
    assert verdicts(compiled) == ["padded rows change others"]


# outputs


def test_outputs_of_one_storage_with_other_dtypes(device, options):
    def fn(x):
        y = plus_one(x) * 2
        pairs = torch.view_as_complex(y.view(-1, 2, 2))
        return y[:, 1:], y.view(torch.float64)[:, 1:], pairs[:, 1:]

    padded(fn, lambda i: (rows(device, i, 4),), options)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: plus_one(x * 2).view_as(x * 3),
        lambda x: plus_one(x * 2)[:, :1].expand_as(x * 3),
    ],
)
def test_outputs_that_take_their_shape_from_a_padded_value(device, fn, options):
    padded(fn, lambda i: (rows(device, i, 4),), options)


# memory


def test_all_sizes_lie_in_one_set_of_slots(device):
    """The largest size is expected from the start, so the others add none."""
    compiled = torch.compile(
        Attention(device), backend="bcg", options={"buckets": LADDER, "max_padding": 8.0}
    )
    with torch.no_grad():
        for n in (32, 16, 8, 4):
            x = torch.randn(n, 8, device=device)
            torch._dynamo.mark_dynamic(x, 0)
            compiled(x)
    added = [p.bytes for p in torch_bcg.programs(compiled)]
    assert len(added) == 4
    assert sum(1 for b in added if b) == 1


def test_views_are_not_made_again_where_a_size_repeats(device):
    objects = []

    @torch_bcg.eager_on_graph(mutates_args=("out",), name="padding::keeping")
    def keeping(x: Tensor, out: Tensor) -> None:
        objects.append(x)
        out.copy_(x)

    def fn(x):
        out = torch.empty_like(x)
        keeping(x * 2, out)
        return out * 2

    compiled = torch.compile(fn, backend="bcg", options={"buckets": [8]})
    with torch.no_grad():
        for n in (5, 5, 6, 5, 6):
            x = torch.randn(n, 4, device=device)
            torch._dynamo.mark_dynamic(x, 0)
            compiled(x)
    real, five, six, again, six_again = objects
    assert real is not five
    assert five is again
    assert six is six_again
    assert five.data_ptr() == six.data_ptr()


def test_handles_take_every_size_of_their_bucket(device):
    compiled = padded(
        Attention(device),
        lambda i: (rows(device, i, 8),),
        {"buckets": [8, 32]},
        replays=range(6, 12),
    )
    program = next(p for p in torch_bcg.programs(compiled) if 8 in p.sizes.values())
    twin = copy.deepcopy(compiled._orig_mod)
    with torch.no_grad():
        for n in (3, 8, 5):
            x = torch.randn(n, 8, device=device)
            got = next(t for t in program(x) if t.dim() == 2)
            assert_same(got, twin(x), exact=False)
        with pytest.raises(torch_bcg.BCGError, match="not recorded for this call"):
            program(torch.randn(9, 8, device=device))


def test_dead_modules_free_their_padded_programs(device):
    compiled = torch.compile(lambda m, x: m(x), backend="bcg", options={"buckets": LADDER})
    module = Attention(device)
    with torch.no_grad():
        compiled(module, rows(device, 0, 8))
        compiled(module, rows(device, 0, 8))
    held = torch_bcg.stats().pool_bytes
    del module
    gc.collect()
    assert torch_bcg.programs(compiled) == []
    assert torch_bcg.stats().pool_bytes < held
