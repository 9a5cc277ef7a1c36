"""Which operators let a row see a later one, and which tensors can be cut to their real rows."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graph.traced import traced

S = 13  # as many rows as no other size here


def varying(x, *dims):
    """A tensor whose other dims have a size for ever; equal sizes that vary are one symbol."""
    for dim in set(range(x.dim())) - set(dims):
        torch._dynamo.mark_static(x, dim)
    return x


def symbol_of(sizes):
    """The first size that varies."""
    return next((s for shape in sizes.values() for s in shape if s.isidentifier()), "")


def followed(fn, *args):
    """The graph of ``fn``, its rows followed."""
    one = traced(fn, *args, rows_of=symbol_of, dynamic=True)
    assert one.guards == 0
    return one


def mixing(one):
    return [m for n in one.facts.nodes.values() for m in n.mixing]


def kinds(one):
    """Kinds found; with a question mark where they have to be tried."""
    return {m.kind + ("" if m.decided else "?") for m in mixing(one)}


def cuts(one):
    """Of every tensor returned: dims, or why not, with s for the symbol."""
    (output,) = (n for n in one.gm.graph.nodes if n.op == "output")
    facts = [t for n in output.all_input_nodes for t in one.facts.nodes[n.name].tensors]
    return [t.uncut.replace(one.facts.rows, "s") or t.row_dims for t in facts]


def x():
    """(s, 4)"""
    return (varying(torch.randn(S, 4), 0),)


def xy():
    return (*x(), *x())


def batched():
    """(2, s, 4)"""
    return (varying(torch.randn(2, S, 4), 1),)


def ids():
    return (varying(torch.arange(S), 0),)


def indexed():
    return (*x(), *ids())


def table():
    return (varying(torch.randn(64, 4)), *ids())


def square():
    """(s, s)"""
    return (varying(torch.randn(S, S), 0, 1),)


def weighted(*shape):
    return lambda: (*batched(), varying(torch.randn(*shape)))


def into(target):
    """Rows written into a buffer of as many rows, both cut by ``target``."""

    def run(x):
        buffer = torch.zeros_like(x)
        target(buffer, x)
        return buffer + 1

    return run


ROWS = [(0,)]
NONE = [()]
LOST = ["dim 0 is s, rows rearranged"]
# name: function, arguments, kinds found, cuts of what it returns
CLEAN = {
    "pointwise": (lambda x: x * 2 + x.relu(), x, ROWS),
    "broadcast": (lambda x: x + x[3], x, ROWS),
    "where": (lambda x: torch.where(x > 0, x, 0.0), x, ROWS),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 1.0), x, ROWS),
    "to": (lambda x: x.to(torch.float64).clone().clamp(0, 1), x, ROWS),
    "positions": (lambda x: x + torch.arange(x.shape[0])[:, None], x, ROWS),
    "zeros": (lambda x: torch.zeros(x.shape[0], 3) + x[:, :1], x, ROWS),
    "like": (lambda x: torch.ones_like(x), x, ROWS),
    "a_table_of_another_size": (lambda x, t: x + t[:, : x.shape[1]], weighted(1, 64, 4), [(1,)]),
    "expand": (lambda x: x[:1].expand(x.shape[0], 4) + x, x, ROWS),
    "permute": (lambda x: x.permute(2, 1, 0).unsqueeze(0).squeeze(0), batched, [(1,)]),
    "t": (lambda x: x.t(), x, [(1,)]),
    "split_heads": (lambda x: x.view(2, -1, 2, 2).transpose(1, 2), batched, [(2,)]),
    "merge_heads": (
        lambda x: x.view(2, -1, 2, 2).transpose(1, 2).transpose(1, 2).reshape(2, -1, 4),
        batched,
        [(1,)],
    ),
    "merged_outermost": (lambda x: x.view(-1) + 1, x, ROWS),
    "merged_inside": (lambda x: x.view(-1, 4) * 2, batched, ["dim 0 is 2*s, merged inside"]),
    "merged_and_back": (lambda x: (x.view(-1, 4) * 2).view(2, -1, 4), batched, [(1,)]),
    "a_row_counted_from_the_first": (lambda x: x[3], x, NONE),
    "first_rows": (lambda x: x[:4], x, NONE),
    "first_part": (lambda x: x[: x.shape[0] // 4], x, ["dim 0 is (s//4)"]),
    "towards_the_head": (lambda x: x[1:] * 2, x, ["dim 0 is s - 1"]),
    "every_other": (lambda x: x[::2], x, ["dim 0 is ((s + 1)//2)"]),
    "causal_shift": (lambda x: F.pad(x, (0, 0, 1, 0))[:-1], x, ROWS),
    "difference": (lambda p: torch.diff(p, prepend=p[:1] - 1), ids, ROWS),
    "constants_in_front": (lambda x: torch.cat([x[:2], x])[:-2], x, ROWS),
    "columns_joined": (lambda x: torch.cat([x, x + 1], -1), x, ROWS),
    "stack": (lambda x: torch.stack([x, x + 1], 1), x, ROWS),
    "columns_padded": (lambda x: F.pad(x, (1, 2)), x, ROWS),
    "repeated_columns": (lambda x: x.repeat(1, 2), x, ROWS),
    "repeated_outermost": (lambda x: x.repeat_interleave(2, 0), x, ROWS),
    "split_columns": (lambda x: x.split(2, 1), x, [(0,), (0,)]),
    "first_of_a_split": (lambda x: x.split(5, 0)[1], x, NONE),
    "diagonal_of_columns": (lambda x: x.view(-1, 2, 2).diagonal(0, 1, 2), x, ROWS),
    "complex": (lambda x: torch.view_as_complex(x.view(-1, 2, 2)).abs(), x, ROWS),
    "sum_of_a_row": (lambda x: x.sum(-1) + x.amax(1) + x.std(-1), x, ROWS),
    "max_of_a_row": (lambda x: x.max(-1), x, [(0,), (0,)]),
    "softmax_of_a_row": (lambda x: x.softmax(-1), x, ROWS),
    "sort_of_a_row": (lambda x: x.sort(-1)[0], x, ROWS),
    "topk_of_a_row": (lambda x: x.topk(2)[1], x, ROWS),
    "flip_of_a_row": (lambda x: x.flip(-1).roll(1, 1), x, ROWS),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), x, ROWS),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), x, ROWS),
    "group_norm_of_a_row": (lambda x: F.group_norm(x, 2), x, ROWS),
    "max_pool_of_a_row": (lambda x: F.max_pool2d(x.view(-1, 1, 2, 2), 2), x, ROWS),
    "avg_pool_of_a_row": (lambda x: F.avg_pool1d(x[:, None], 2), x, ROWS),
    "mse_loss_of_each": (lambda x: F.mse_loss(x, x + 1, reduction="none"), x, ROWS),
    "renorm_of_a_row": (lambda x: x.renorm(2, 0, 1.0), x, ROWS),
    "batch_norm_frozen": (
        lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
        x,
        ROWS,
    ),
    "cumsum": (lambda x: x.cumsum(0), x, ROWS),
    "cummax": (lambda x: x.cummax(0)[0], x, ROWS),
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), weighted(5, 4), [(1,)]),
    "mv": (lambda x, w: torch.mv(x[0], w), weighted(4), ROWS),
    "scores": (lambda x: x @ x.transpose(1, 2), batched, [(1, 2)]),
    "attention_of_the_other_dim": (
        lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)[:, None]] * 3),
        batched,
        ROWS,
    ),
    "conv_of_a_row": (
        lambda x, w: F.conv1d(x.transpose(0, 1), w, padding=1),
        weighted(3, 2, 3),
        ROWS,
    ),
    "embedding": (lambda t, i: F.embedding(i, t), table, ROWS),
    "index_of_a_table": (lambda t, i: t[i], table, ROWS),
    "index_select_of_a_table": (lambda t, i: t.index_select(0, i), table, ROWS),
    "index_of_columns": (lambda x: x[:, torch.tensor([2, 0])], x, ROWS),
    "index_at_own_position": (lambda x: x[torch.arange(x.shape[0])], x, ROWS),
    "gather_of_a_row": (lambda x: x.gather(1, x.argsort(1)), x, ROWS),
    "scatter_of_a_row": (lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x), x, ROWS),
    "one_hot": (lambda i: F.one_hot(i, 16), ids, ROWS),
    "triangle": (lambda x: x.tril(-1) + x.triu(1), square, [(0, 1)]),
    "vmap": (lambda x: torch.vmap(lambda a: a.sum() + a)(x), x, ROWS),
    "in_place": (lambda x: x.clone().add_(x).mul_(2), x, ROWS),
    "written_column": (lambda x: x.clone().index_fill_(1, torch.tensor([1]), 0), x, ROWS),
    "written_rows": (into(lambda b, x: b.copy_(x)), x, ROWS),
    "written_towards_the_tail": (into(lambda b, x: b[1:].copy_(x[:-1])), x, ROWS),
    "written_where_they_were": (into(lambda b, x: b[2:].copy_(x[2:])), x, ROWS),
}


@pytest.mark.parametrize("name", CLEAN)
def test_rows_that_stay_apart(name):
    fn, args, expected = CLEAN[name]
    one = followed(fn, *args())
    assert one.facts.rows
    assert kinds(one) == set()
    assert cuts(one) == expected


VALUE = "size used as a value"
BOUND = "slice bound holds the size"
REDUCED = "reduction over tokens"
CONTRACTED = "contraction over tokens"
SORTED = "sort over tokens"
REFUSED = {
    "number": (lambda x: x / x.shape[0], x, VALUE),
    "number_in_place": (lambda x: x.clone().mul_(x.shape[0]), x, VALUE),
    "root": (lambda x: x * x.shape[0] ** 0.5, x, VALUE),
    "tensor_of_a_size": (lambda x: x * torch.tensor(x.shape[0]), x, VALUE),
    "tensor_of_sizes": (lambda x: x * torch.tensor([x.shape[0], 1, 2, 3]), x, VALUE),
    "full": (lambda x: x + torch.full((4,), x.shape[0]), x, VALUE),
    "where": (lambda x: torch.where(x > 0, x, x.shape[0]), x, VALUE),
    "masked_fill": (lambda x: x.masked_fill(x > 0, x.shape[0]), x, VALUE),
    "arange_downwards": (
        lambda x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
        x,
        VALUE,
    ),
    "a_row_of_a_table": (lambda x, t: x + t[x.shape[1]], weighted(64, 4), VALUE),
    "diagonal_of_a_triangle": (lambda x: x.tril(x.shape[0] - 9), square, VALUE),
    "last_row": (lambda x: x[-1], x, "row counted from the end"),
    "row_before_the_last": (lambda x: x[x.shape[0] - 2], x, "row counted from the end"),
    "last_rows": (lambda x: x[-2:], x, BOUND),
    "rows_from_the_middle": (lambda x: x[x.shape[0] // 2 :], x, BOUND),
    "a_window_of_a_table": (lambda x, t: (x + 1, t[x.shape[1] :]), weighted(64, 4), BOUND),
    "second_chunk": (lambda x: x.chunk(2)[1], x, BOUND),
    "padded_in_front_by_a_size": (lambda x: F.pad(x, (0, 0, x.shape[0], 0)), x, BOUND),
    "appended_rows": (lambda x, y: torch.cat([x, y]), xy, "rows appended"),
    "appended_constant": (lambda x: torch.cat([x, x[:1]]), x, "rows appended"),
    "padded_behind": (lambda x: F.pad(x, (0, 0, 0, 1)), x, "rows appended"),
    "sum": (lambda x: x.sum(), x, REDUCED),
    "mean": (lambda x: x.mean(1), batched, REDUCED),
    "amax": (lambda x: x.amax(0), x, REDUCED),
    "max": (lambda x: x.max(0)[0], x, REDUCED),
    "argmax": (lambda x: x.argmax(), x, REDUCED),
    "any": (lambda x: (x > 0).any(0), x, REDUCED),
    "all": (lambda x: (x > 0).all(), x, REDUCED),
    "prod": (lambda x: x.prod(0), x, REDUCED),
    "logsumexp": (lambda x: x.logsumexp(0), x, REDUCED),
    "var": (lambda x: x.var(0), x, REDUCED),
    "std_mean": (lambda x: torch.std_mean(x, 0), x, REDUCED),
    "norm": (lambda x: x.norm(dim=0), x, REDUCED),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x), x, REDUCED),
    "median": (lambda x: x.median(0)[0], x, REDUCED),
    "merged": (lambda x: x.view(-1, 4).sum(0), batched, REDUCED),
    "sum_of_positions": (lambda x: x[0] + torch.arange(x.shape[0]).sum(), x, REDUCED),
    "histc": (lambda x: x.histc(4), x, REDUCED),
    "layer_norm": (lambda x: F.layer_norm(x.t(), (x.shape[0],)), x, REDUCED),
    "group_norm": (lambda x: F.group_norm(x.transpose(1, 2), 2), batched, REDUCED),
    "batch_norm_training": (lambda x: F.batch_norm(x, None, None, training=True), x, REDUCED),
    "vmap": (lambda x: torch.vmap(lambda a: a.sum(), in_dims=1)(x), x, REDUCED),
    "mse_loss": (lambda x: x - F.mse_loss(x, x + 1), x, REDUCED),
    "sum_of_smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, x + 1, reduction="sum"), x, REDUCED),
    "renorm_of_columns": (lambda x: x.renorm(2, 1, 1.0), x, REDUCED),
    "avg_pool": (lambda x: F.avg_pool1d(x.t(), 2, ceil_mode=True), x, "pooling over tokens"),
    "max_pool": (lambda x: F.max_pool2d(x, (2, 1)), batched, "pooling over tokens"),
    "lp_pool": (lambda x: F.lp_pool1d(x.transpose(1, 2), 2, 2), batched, "pooling over tokens"),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 3), batched, "pooling over tokens"),
    "softmax": (lambda x: x.softmax(0), x, "softmax over tokens"),
    "log_softmax": (lambda x: x.t().log_softmax(-1), x, "softmax over tokens"),
    "scan_over_batches": (lambda x: x.view(-1, 4).cumsum(0), batched, "scan over merged rows"),
    "flip": (lambda x: x.flip(0), x, "reversed rows"),
    "roll": (lambda x: x.roll(1, 0), x, "rolled rows"),
    "sort": (lambda x: x.sort(0)[0], x, SORTED),
    "argsort": (lambda x: x.argsort(0), x, SORTED),
    "searchsorted": (lambda i: torch.searchsorted(i, i[:1]), ids, SORTED),
    "topk": (lambda x: x.topk(2, 0)[0], x, "top-k over tokens"),
    "kthvalue": (lambda x: x.kthvalue(2, 0)[0], x, "top-k over tokens"),
    "mm": (lambda x: x.t() @ x, x, CONTRACTED),
    "bmm": (lambda x: x.transpose(1, 2) @ x, batched, CONTRACTED),
    "addmm": (lambda x: torch.addmm(x[:4], x.t(), x), x, CONTRACTED),
    "baddbmm": (lambda x: torch.baddbmm(x[:, :4], x.transpose(1, 2), x), batched, CONTRACTED),
    "mv": (lambda x: torch.mv(x.t(), x[:, 0]), x, CONTRACTED),
    "dot": (lambda x: torch.dot(x[:, 0], x[:, 1]), x, CONTRACTED),
    "einsum": (lambda x: torch.einsum("bsh,bsk->bhk", x, x), batched, CONTRACTED),
    "attention": (
        lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True),
        batched,
        CONTRACTED,
    ),
    "conv": (
        lambda x, w: F.conv1d(x.transpose(1, 2), w, padding=1),
        weighted(4, 4, 3),
        "convolution over tokens",
    ),
    "conv_of_channels": (
        lambda x: F.conv1d(
            x, x.transpose(0, 1)[:3, :, :1].transpose(0, 1)[:, :1].expand(2, x.shape[1], 1)
        ),
        batched,
        CONTRACTED,
    ),
    "rand": (lambda x: x + torch.rand_like(x), x, "random numbers"),
    "dropout": (lambda x: F.dropout(x, 0.5), x, "random numbers"),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), x, "random numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_mix(name):
    fn, args, kind = REFUSED[name]
    one = followed(fn, *args())
    assert kind in kinds(one)
    assert {k for k in kinds(one) if not k.endswith("?")} == {kind}
    assert all(m.operator.startswith("aten::") for m in mixing(one))


TRIED = {
    "batch_and_rows_swapped": (
        lambda x: x.view(x.shape[1], 2, 4) + 1,
        batched,
        "view?",
        LOST,
    ),
    "rows_divided": (
        lambda x: x[: x.shape[0] // 4 * 4].view(x.shape[0] // 4, 4, 4) + 1,
        x,
        "view?",
        ["dim 0 is (s//4)"],
    ),
    "both_of_a_square": (lambda x: x.view(-1) + 1, square, "view?", ["dim 0 is s**2"]),
    "merged_with_positions": (
        lambda x: x.view(-1, 4) + torch.arange(2 * x.shape[1])[:, None],
        batched,
        "unlike rows?",
        ["dim 0 is 2*s"],
    ),
    "merged_both_ways": (
        lambda x: x.view(-1, 4) + x.transpose(0, 1).reshape(-1, 4),
        batched,
        "unlike rows?",
        ["dim 0 is 2*s"],
    ),
    "first_of_merged": (lambda x: x.view(-1, 4)[:20], batched, "slice?", NONE),
    "one_of_merged": (lambda x: x.view(-1, 4)[20], batched, "select?", NONE),
    "every_other_and_first": (
        lambda x: x[::2] + x[: (x.shape[0] + 1) // 2],
        x,
        "unlike rows?",
        ["dim 0 is ((s + 1)//2)"],
    ),
    "repeat": (lambda x: x.repeat(2, 1), x, "repeat?", ["dim 0 is 2*s"]),
    "unfold": (lambda x: x.unfold(0, 2, 1), x, "unfold?", ["dim 0 is s - 1"]),
    "diagonal": (lambda x: x.diagonal() + 1, square, "diagonal?", LOST),
    "as_strided": (lambda x: x.as_strided((x.shape[0],), (1,)), x, "as_strided?", LOST),
    "index": (lambda x, i: x[i], indexed, "index?", ROWS),
    "index_shifted": (
        lambda x: x[torch.arange(x.shape[0])[1:]],
        x,
        "index?",
        ["dim 0 is s - 1"],
    ),
    "index_by_mask": (lambda x: x[:, x[0] > 0] if False else x[x.argmax(1)], x, "index?", ROWS),
    "index_select": (lambda x, i: x.index_select(0, i), indexed, "index_select?", ROWS),
    "embedding": (lambda x, i: F.embedding(i, x), indexed, "embedding?", ROWS),
    "gather": (lambda x, i: x.gather(0, i[:, None]), indexed, "gather?", ROWS),
    "scatter": (
        lambda x, i: x.scatter(0, i[:, None].expand(-1, 4), x),
        indexed,
        "padded rows are written",
        ROWS,
    ),
    "scatter_to_experts": (
        lambda x, i: torch.zeros(64, 4).scatter_add(0, i[:, None].expand(-1, 4), x),
        indexed,
        "padded rows are written",
        NONE,
    ),
    "index_put": (lambda x, i: x.index_put((i,), x), indexed, "padded rows are written", ROWS),
    "index_put_to_experts": (
        lambda x, i: torch.zeros(64, 4).index_put((i,), x),
        indexed,
        "padded rows are written",
        NONE,
    ),
    "index_add": (lambda x, i: x.index_add(0, i, x), indexed, "padded rows are written", ROWS),
    "index_copy": (lambda x, i: x.index_copy(0, i, x), indexed, "padded rows are written", ROWS),
    "written_towards_the_head": (
        into(lambda b, x: b[:-1].copy_(x[1:])),
        x,
        {"some rows are written?", "shifted rows are written?"},
        ["dim 0 is s, shifted towards the head"],
    ),
    "written_but_the_last": (
        into(lambda b, x: b[:-1].copy_(x[:-1])),
        x,
        "some rows are written?",
        ROWS,
    ),
    "written_every_other": (
        into(lambda b, x: b[::2].copy_(x[::2])),
        x,
        "unlike rows?",
        ROWS,
    ),
    "unknown_to_the_table": (lambda x: torch.cdist(x, x), x, "operator?", [(0, 1)]),
}


@pytest.mark.parametrize("name", TRIED)
def test_rows_of_which_facts_cannot_tell(name):
    fn, args, kind, expected = TRIED[name]
    one = followed(fn, *args())
    assert kinds(one) == ({kind} if isinstance(kind, str) else kind)
    assert cuts(one) == expected


# Memory that is not padded.

STORES = {
    "index_put": (lambda pool, slots, x: pool.index_put_((slots,), x), "slots"),
    "setitem": (lambda pool, slots, x: pool.__setitem__(slots, x), "slots"),
    "cast": (lambda pool, slots, x: pool.__setitem__(slots.to(torch.int32).long(), x), "slots"),
    "reshaped": (lambda pool, slots, x: pool.__setitem__(slots.view(-1, 1)[:, 0], x), "slots"),
    "index_copy": (lambda pool, slots, x: pool.index_copy_(0, slots, x), "slots"),
    "index_add": (lambda pool, slots, x: pool.index_add_(0, slots, x), "slots"),
    "scatter": (
        lambda pool, slots, x: pool.scatter_(0, slots[:, None].expand(-1, 4), x),
        "slots",
    ),
    "computed": (lambda pool, slots, x: pool.__setitem__(slots + 1, x), ""),
    "fewer": (lambda pool, slots, x: pool.__setitem__(slots[:-1], x[:-1]), ""),
    "moved": (lambda pool, slots, x: pool.__setitem__(slots[:-1], x[1:]), ""),
    "positions": (lambda pool, slots, x: pool.__setitem__(torch.arange(x.shape[0]), x), ""),
    "prefix": (lambda pool, slots, x: pool[: x.shape[0]].copy_(x), ""),
    "prefix_of_columns": (lambda pool, slots, x: pool.t()[:, : x.shape[0]].copy_(x.t()), ""),
    "view": (lambda pool, slots, x: pool.view(16, 4, 4)[0].index_put_((slots % 4,), x), ""),
}


@pytest.mark.parametrize("name", STORES)
def test_stores_into_a_pool(name):
    fn, index = STORES[name]

    def run(pool, slots, x):
        fn(pool, slots, x)
        return x + slots[:, None]

    one = followed(run, varying(torch.zeros(64, 4)), *ids(), *x())
    (found,) = mixing(one)
    assert (found.kind, found.decided) == ("padded rows are written", True)
    assert one.facts.origin[found.storage] == "l_pool_"
    assert found.index == (index and f"l_{index}_")


def test_an_index_that_was_written_is_no_argument_any_more():
    def run(pool, slots, x):
        slots.add_(1)
        pool[slots] = x

    (found,) = mixing(followed(run, varying(torch.zeros(64, 4)), *ids(), *x()))
    assert (found.kind, found.index) == ("padded rows are written", "")


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pool", varying(torch.zeros(64, 4)))

    def forward(self, x):
        self.pool[: x.shape[0]].add_(x)
        return x + 1


def test_a_store_into_a_buffer_of_the_module():
    (found,) = mixing(followed(Counter(), *x()))
    assert (found.kind, found.decided, found.index) == ("padded rows are written", True, "")


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: torch.zeros(64, 4).index_put_((i,), x),
        lambda x, i: torch.zeros(64, 4).index_copy_(0, i, x),
        lambda x, i: torch.zeros(64, 4)[: x.shape[0]].copy_(x) + i[:, None],
    ],
)
def test_a_store_into_memory_of_the_graph(fn):
    (found,) = mixing(followed(fn, *indexed()))
    assert (found.kind, found.decided) == ("padded rows are written", True)


def test_columns_of_padded_memory_are_not_padded():
    """The memory has rows, but it is its columns that are written."""

    def run(x, i):
        buffer = torch.zeros(x.shape[0], 64)
        buffer[:, : x.shape[0]].copy_(x @ x.t())
        return buffer, i + 1

    (found,) = mixing(followed(run, *indexed()))
    assert (found.kind, found.decided) == ("padded rows are written", True)


# Operators of others.


def test_an_operator_nobody_knows():
    with torch.library._scoped_library("rows_test", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.define("g(Tensor x, SymInt n) -> Tensor")
        for name in ("f", "g"):
            library.impl(name, lambda x, n=0: x.clone(), "CompositeExplicitAutograd")
        ops = torch.ops.rows_test
        one = followed(lambda x: (ops.f(x[3]), ops.f(x), ops.g(x[3], x.shape[0])), *x())
    found = {(m.kind, m.operator, m.decided) for m in mixing(one)}
    # A number given to it may be anything: it is told apart from a tensor with rows.
    assert found == {
        ("operator", "rows_test::f", False),
        ("operator", "rows_test::g", False),
        (VALUE, "rows_test::g", True),
    }
    assert cuts(one) == [(), (0,), ()]


def test_a_higher_order_operator():
    def run(x):
        return torch.cond(x[0, 0] > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))

    found = mixing(followed(run, *x()))
    assert [(m.kind, m.operator, m.decided) for m in found] == [("operator", "cond", False)]


# Facts as they were.


def test_nothing_is_followed_unasked():
    plain, silent = (
        traced(lambda x: x.sum(0), *x()),
        traced(lambda x: x.sum(0), *x(), rows_of=lambda sizes: ""),
    )
    for one in (plain, silent):
        assert one.facts.rows == ""
        assert mixing(one) == []
        assert all(t.row_dims == () for n in one.facts.nodes.values() for t in n.tensors)


def test_other_facts_do_not_depend_on_rows():
    def run(pool, slots, x):
        pool[slots] = x.mul_(2)
        buffer = torch.zeros_like(x)
        buffer[:-1].copy_(x[1:])
        return buffer.add_(1), x.sum(0)

    def bare(facts):
        return [
            (n.kind, n.reads, n.writes, n.same_as, n.kernels, [t.spec for t in n.tensors])
            for n in facts.nodes.values()
        ]

    args = (varying(torch.zeros(64, 4)), *ids(), *x())
    plain, rows = traced(run, *args, dynamic=True), followed(run, *args)
    assert bare(plain.facts) == bare(rows.facts)
    assert (plain.facts.origin, plain.facts.written) == (rows.facts.origin, rows.facts.written)


def test_rows_are_asked_for_once_with_all_placeholders():
    asked = []

    def rows_of(sizes):
        asked.append(dict(sizes))
        return sizes["l_x_"][1]

    one = traced(lambda x, w: x @ w, *weighted(4, 3)(), rows_of=rows_of, dynamic=True)
    assert asked == [{"l_x_": ("2", one.facts.rows, "4"), "l_w_": ("4", "3")}]
    placeholders = {n: f.tensors[0].row_dims for n, f in one.facts.nodes.items() if "l_" in n}
    assert placeholders == {"l_x_": (1,), "l_w_": ()}
    assert cuts(one) == [(1,)]


# Random programs: what facts call clean is the same with more rows behind.

LIVE, PADDED = 13, 19


def shift(x, d, k):
    buffer = torch.zeros_like(x)
    size = x.shape[d]
    buffer.narrow(d, k % 2, size - 1).copy_(x.narrow(d, (k + 1) % 2 if k < 4 else 0, size - 1))
    return buffer


def positions(x, d):
    shape = [-1 if i == d else 1 for i in range(x.dim())]
    return torch.arange(x.shape[d], dtype=x.dtype).view(shape)


def cut_slice(x, d, k):
    cuts = [slice(k), slice(k, None), slice(None, -k), slice(-k, None), slice(None, None, 2)]
    cuts += [slice(x.shape[d] // 2)]
    return x[(slice(None),) * d + (cuts[k % len(cuts)],)]


def padded(x, d, k):
    amounts = [0, 0] * x.dim()
    amounts[2 * (x.dim() - 1 - d) + k % 2] = k if k < 3 else -1
    return F.pad(x, amounts)


OPERATORS = [
    lambda x, y, d, k: x.tanh() * 2,
    lambda x, y, d, k: x + y,
    lambda x, y, d, k: torch.where(x > y, x, y),
    lambda x, y, d, k: x + positions(x, d),
    lambda x, y, d, k: x.transpose(d, k % x.dim()),
    lambda x, y, d, k: x.transpose(d, k % x.dim()).contiguous(),
    lambda x, y, d, k: x.unsqueeze(d),
    lambda x, y, d, k: x.flatten(min(d, k % x.dim()), max(d, k % x.dim())),
    lambda x, y, d, k: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]),
    lambda x, y, d, k: x.reshape(*x.shape[:-1], 2, 2),
    lambda x, y, d, k: x.reshape(2, -1, *x.shape[1:]),
    lambda x, y, d, k: x.reshape(y.shape),
    lambda x, y, d, k: x.select(d, k - 1),
    lambda x, y, d, k: cut_slice(x, d, k),
    lambda x, y, d, k: cut_slice(x, d, k),
    lambda x, y, d, k: padded(x, d, k),
    lambda x, y, d, k: torch.cat([x.narrow(d, 0, 1), x], d),
    lambda x, y, d, k: torch.cat([x, y], d),
    lambda x, y, d, k: torch.diff(x, dim=d),
    lambda x, y, d, k: torch.stack([x, y], d),
    lambda x, y, d, k: x.chunk(2, d)[k % 2],
    lambda x, y, d, k: x.cumsum(d),
    lambda x, y, d, k: x.softmax(d),
    lambda x, y, d, k: [x.sum, x.amax, x.mean][k % 3](d),
    lambda x, y, d, k: x.sort(d)[0] if k % 2 else x.flip(d),
    lambda x, y, d, k: x @ y.transpose(-1, -2),
    lambda x, y, d, k: x @ torch.ones(x.shape[-1], 4),
    lambda x, y, d, k: shift(x, d, k),
    lambda x, y, d, k: shift(x, d, k),
    lambda x, y, d, k: x.tril(k - 2),
    lambda x, y, d, k: x.index_select(d, torch.arange(x.shape[d])),
    lambda x, y, d, k: x.movedim(d, 0)[torch.arange(x.shape[d])[k:]],
    lambda x, y, d, k: x.gather(d, x.argsort(d)),
    lambda x, y, d, k: torch.zeros_like(x).scatter(d, x.argsort(d), y),
    lambda x, y, d, k: x.narrow(d, 0, 1).expand_as(x) + x,
    lambda x, y, d, k: x.repeat_interleave(2, d),
    lambda x, y, d, k: torch.vmap(lambda a: a.cumsum(-1) + a.sum(), d, d)(x),
    lambda x, y, d, k: x.clone().add_(y).narrow(d, 0, 2).mul_(x.shape[d] if k > 3 else 2),
    lambda x, y, d, k: F.layer_norm(x, x.shape[-1:]),
    lambda x, y, d, k: x / x.shape[d],
]
STEPS = st.tuples(
    st.integers(0, len(OPERATORS) - 1),
    st.integers(0, 9),
    st.integers(0, 9),
    *[st.integers(0, 5)] * 2,
)


def fitting(steps, inputs):
    """Steps that can be done, as functions of all values so far."""
    values, program = list(inputs), []
    for number, first, second, dim, k in steps:
        i, j = (-1 - n % len(values) for n in (first, second))

        def step(values, number=number, i=i, j=j, dim=dim, k=k):
            return OPERATORS[number](values[i], values[j], dim % max(values[i].dim(), 1), k)

        try:
            result = step(values)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        if result.dim() and result.numel() and result.numel() < 5000:
            values.append(result)
            program.append(step)
    return program


def run_program(program):
    def run(x, y):
        values = [x, y]
        for step in program:
            values.append(step(values))
        return tuple(values[2:])

    return run


def grown(x, dim):
    """The tensor with more, and large, rows behind."""
    shape = list(x.shape)
    shape[dim] = PADDED - LIVE
    return torch.cat([x, 50 * torch.randn(shape)], dim)


def compare(one, live, padded):
    (output,) = (n for n in one.gm.graph.nodes if n.op == "output")
    compared = 0
    for node, real, other in zip(output.args[0], live, padded, strict=True):
        (fact,) = one.facts.nodes[node.name].tensors
        if fact.uncut:
            continue
        for dim in fact.row_dims:
            other = other.narrow(dim, 0, real.shape[dim])
        torch.testing.assert_close(real, other)
        compared += 1
    return compared


def test_what_is_called_clean_is_so_whatever_stands_behind():
    seen = {"clean": 0, "compared": 0, "mixed": 0}

    @settings(max_examples=60)
    @given(st.lists(STEPS, min_size=1, max_size=5))
    def check(steps):
        torch.manual_seed(0)
        torch._dynamo.reset()
        inputs = (torch.randn(LIVE, 4), torch.randn(2, LIVE, 4))
        program = fitting(steps, inputs)
        assume(program)
        run = run_program(program)
        given = [varying(x.clone(), dim) for dim, x in enumerate(inputs)]
        one = traced(run, *given, rows_of=symbol_of, dynamic=True)
        if not one.facts.rows or mixing(one):
            seen["mixed"] += 1
            return
        seen["clean"] += 1
        padded = run(*(grown(x, dim) for dim, x in enumerate(inputs)))
        seen["compared"] += compare(one, run(*inputs), padded)

    check()
    assert seen["clean"] > 15
    assert seen["compared"] > 15
    assert seen["mixed"] > 15
