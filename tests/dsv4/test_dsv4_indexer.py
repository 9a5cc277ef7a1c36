"""The indexer's choice: operator, Triton kernel and an obvious loop pick the same entries.

Inputs are small integers, so that float32 sums are exact: the picks are compared one by one, and
nearly all scores tie.
"""

import math
from typing import NamedTuple

import pytest
import torch

from dsv4.interpreted import interpreted
from torch_bcg.dsv4.indexer import select, select_reference


class Scene(NamedTuple):
    heads: int
    dim: int
    page_size: int
    pages: int  # of a row, W
    topk: int
    width: int
    lengths: tuple
    dtype: torch.dtype = torch.float32


SCENES = {
    "lengths": Scene(8, 16, 4, 6, 7, 64, (0, 1, 6, 7, 8, 9, 23, 24)),
    "narrow": Scene(3, 8, 8, 2, 5, 128, (16, 5, 0, 11)),
    "bfloat16": Scene(16, 32, 64, 2, 64, 64, (128, 64, 65, 127), torch.bfloat16),
    "a column": Scene(4, 16, 16, 1, 1, 64, (16, 1, 2)),
    "long": Scene(4, 16, 64, 80, 512, 512, (5120, 4097, 513, 2048)),
    "as it is": Scene(64, 128, 64, 12, 512, 512, (700, 513, 768), torch.bfloat16),
}


def integers(low, high, *shape):
    return torch.randint(low, high + 1, shape).float()


def arguments(scene):
    """Each row has pages of its own. What no row sees: NaN keys, page numbers that are none."""
    rows, pages = len(scene.lengths), scene.pages
    q = integers(-2, 2, rows, scene.heads, scene.dim)
    keys = torch.full(((rows * pages + 1) * scene.page_size, scene.dim), torch.nan)
    table = torch.randperm(rows * pages).view(rows, pages).int() + 1
    lengths = torch.tensor(scene.lengths, dtype=torch.int32)
    for row, n in zip(table, scene.lengths, strict=True):
        for e in range(n):
            slot = int(row[e // scene.page_size]) * scene.page_size + e % scene.page_size
            keys[slot] = integers(-1, 1, scene.dim)
        row[-(-n // scene.page_size) :] = 1 << 30 if n % 2 else -5
    weights = integers(-3, 3, rows, scene.heads)
    q, keys = q.to(scene.dtype), keys.to(scene.dtype)
    return q, weights, keys, table, lengths, scene.topk, scene.page_size, scene.width


def oracle(q, weights, keys, table, lengths, topk, page_size, width):
    """Row by row, entry by entry."""
    slots = torch.full((len(q), width), -1, dtype=torch.int32)
    entries = slots.clone()
    for i, n in enumerate(lengths.tolist()):
        at = [int(table[i, e // page_size]) * page_size + e % page_size for e in range(n)]
        logits = keys[at].double() @ q[i].double().T
        scores = (logits.clamp(min=0) * weights[i].double()).sum(1).tolist()
        best = sorted(range(n), key=lambda e: (-scores[e], e))[:topk]
        for column, e in enumerate(sorted(best)):
            slots[i, column], entries[i, column] = at[e], e
    return slots, entries


@pytest.fixture(params=["cpu", "interpreted", pytest.param("cuda", marks=pytest.mark.cuda)])
def picks(request):
    """`select` on the CPU, its kernel in the interpreter, or on a GPU: results are on the CPU."""

    def run(*args):
        if request.param == "interpreted":
            # It multiplies the bits of bfloat16 as if they were integers.
            halves = [x.half() if getattr(x, "dtype", 0) == torch.bfloat16 else x for x in args]
            return interpreted("indexer:select", *halves)[0]
        moved = [x.to(request.param) if isinstance(x, torch.Tensor) else x for x in args]
        return tuple(x.cpu() for x in select(*moved))

    return run


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", SCENES)
def test_picks_are_those_of_a_loop(picks, name):
    args = arguments(SCENES[name])
    same(picks(*args), oracle(*args))


def test_the_lower_of_equal_entries_wins(picks):
    """Zeros too, of either sign: heads that ReLU cuts off give 0 times their weight."""
    q, weights, keys, *rest = arguments(SCENES["lengths"])
    for cut_off in (False, True):
        keys = torch.where(keys.isnan(), keys, torch.randint_like(keys, 1, 3) if cut_off else 1.0)
        weights = torch.where(weights > 0, 1.0, -1.0)
        weights[::2] = -1.0
        args = (torch.full_like(q, -1.0 if cut_off else 1.0), weights, keys, *rest)
        _, entries = picks(*args)
        for row, n in zip(entries.tolist(), SCENES["lengths"].lengths, strict=True):
            assert row == [*range(min(n, 7)), *[-1] * (64 - min(n, 7))]


def test_rows_that_take_all_do_not_look(picks):
    q, weights, keys, table, lengths, *rest = arguments(SCENES["lengths"])
    short = lengths <= 7
    args = (q, weights * torch.nan, keys * torch.nan, table, lengths, *rest)
    expected = oracle(q, weights, keys, table, lengths, *rest)
    same([x[short] for x in picks(*args)], [x[short] for x in expected])


def test_real_numbers(picks):
    """Sums in another order differ in their last bits: no entry left out is better than one taken."""
    rows, n, topk = 3, 3000, 128
    q, weights = torch.randn(rows, 8, 32), torch.randn(rows, 8)
    keys = torch.randn(4096, 32)
    table = torch.arange(64, dtype=torch.int32).expand(rows, 64).contiguous()
    lengths = torch.full((rows,), n, dtype=torch.int32)
    _, entries = picks(q, weights, keys, table, lengths, topk, 64, 128)
    logits = torch.einsum("phd,ed->phe", q.double(), keys[:n].double()).relu()
    scores = (weights[:, :, None] * logits).sum(1) * 32**-0.5
    assert (scores < 0).any()
    for row, found in zip(scores, entries.long(), strict=True):
        assert (found.diff() > 0).all()
        left = torch.ones(n, dtype=torch.bool).index_fill(0, found, False)
        assert row[found].min() > row[left].max() - 1e-4


def test_repeated_calls_are_equal(picks):
    args = arguments(SCENES["bfloat16"])
    same(picks(*args), picks(*args))


def test_more_rows_than_the_reference_takes_at_a_time():
    args = arguments(Scene(2, 16, 4, 3, 5, 64, tuple(i % 13 for i in range(150))))
    same(select(*args), oracle(*args))


def test_reference_by_name_is_the_operator():
    args = arguments(SCENES["narrow"])
    same(select_reference(*args), select(*args))


def test_operator_is_well_formed():
    args = arguments(SCENES["lengths"])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(select, args, test_utils=checks)


def test_what_cannot_be_served_raises():
    q, weights, keys, table, lengths, topk, page_size, width = arguments(SCENES["lengths"])
    for wrong in (63, 96, 0):
        with pytest.raises(ValueError, match=f"width is {wrong}; expected a multiple of 64"):
            select(q, weights, keys, table, lengths, topk, page_size, wrong)
    with pytest.raises(ValueError, match=r"at least topk \(65\)"):
        select(q, weights, keys, table, lengths, 65, page_size, width)
    with pytest.raises(ValueError, match=r"q is torch\.bfloat16"):
        select(q.bfloat16(), weights, keys, table, lengths, topk, page_size, width)


def test_picks_are_those_of_transformers(picks):
    """Eight index heads: with fewer, exact zeros tie and the model itself breaks ties anyhow."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32, q_lora_rank=24, index_n_heads=8, index_head_dim=32, index_topk=6,
        head_dim=32, num_hidden_layers=4,
    )  # fmt: skip
    indexer = model.DeepseekV4Indexer(config)
    ratio, tokens = indexer.compress_rate, 67
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    seen = []
    indexer.scorer.register_forward_pre_hook(lambda _, args: seen.append(args))
    at = torch.arange(tokens)
    with torch.no_grad():
        x, residual = torch.randn(1, tokens, 32), torch.randn(1, tokens, 24)
        expected = indexer(x, residual, at[None], None, 0)[0]
        q, keys, _ = (t[0] for t in seen[0])
        weights = indexer.scorer.weights_proj(x)[0] * 8**-0.5
    table = torch.zeros(tokens, 1, dtype=torch.int32)
    lengths = ((at + 1) // ratio).int()
    _, entries = picks(q, weights, keys, table, lengths, 6, len(keys), 64)
    found = [sorted(e for e in row if e >= 0) for row in entries.tolist()]
    assert found == [sorted(e for e in row if e >= 0) for row in expected.tolist()]
    assert max(map(len, found)) == 6
    assert math.isfinite(weights.sum())
