"""What each field of the metadata is: an example value for value, and any step row by row."""

import dataclasses
import random
import struct

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.dsv4_batches import CLASSIC, LAYOUTS, Work, batch_of, random_works, worked_example
from torch_bcg.dsv4.building import _expand_prefill_casually_vectorized, build, build_into
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, OnlineDSV4Metadata, empty, match_num_queries
from twin import no_synchronisation

NOTHING = 0xFFFFFFFF
DTYPES = {
    "raw_out_loc": torch.int64, "c4_out_loc": torch.int64, "c128_out_loc": torch.int64,
    "plan_c": torch.uint8, "plan_w": torch.uint8,
}  # fmt: skip


def tensors_of(md):
    """Every tensor of a metadata object by path."""
    parts = (
        "core_attn_metadata", "indexer_metadata", "c4_compress_metadata", "c128_compress_metadata"
    )  # fmt: skip
    return {
        f"{part}.{name}": value
        for part in parts
        for name, value in vars(getattr(md, part)).items()
        if isinstance(value, Tensor)
    }


def records_c(plan):
    """Records that close a window: (seq_len, ragged_id, buffer_len, read_page_0, read_page_1)."""
    return [struct.unpack("<IHHii", bytes(r)) for r in plan.plan_c.tolist()]


def records_w(plan):
    """Records that keep a row: (ragged_id, write_loc)."""
    return [struct.unpack("<Ii", bytes(r)) for r in plan.plan_w.tolist()]


# the example


def filled(numbers, width):
    return [*numbers, *[-1] * (width - len(numbers))]


def down(first, last):
    return list(range(first, last - 1, -1))


def test_the_worked_example():
    layout, batch = worked_example()
    md = DSV4Metadata.create(batch, layout, 16)
    core = md.core_attn_metadata
    lens = [6, 7, 8, 9, 10, 11, 12, 131, 132, 133, *[1] * 6]
    c4 = [1, 1, 2, 2, 2, 2, 3, 32, 33, 33]
    expected = {
        "raw_out_loc": [261, 262, 263, 264, 265, 266, 267, 642, 643, 644, *[0] * 6],
        "seq_lens_casual": lens,
        "positions_casual": [n - 1 for n in lens],
        "page_table": [*[[1, 0]] * 7, *[[2, 0]] * 9],
        "swa_topk_lengths": [6, 7, 8, 9, 10, 11, 12, 128, 128, 128, *[1] * 6],
        "swa_page_indices": [
            *[filled(down(773 + i, 768), 128) for i in range(7)],
            *[down(386, 259), down(387, 260), down(388, 261)],
            *[filled([256], 128)] * 6,
        ],
        "c4_out_loc": [0, 0, 65, 0, 0, 0, 66, 0, 160, 0, *[0] * 6],
        "c4_topk_lengths_raw": [*c4, *[0] * 6],
        "c4_topk_lengths_clamp1": [*c4, *[1] * 6],
        "c4_sparse_topk_lengths": [*c4, *[1] * 6],
        "c4_sparse_page_indices": [filled([], 512)] * 16,
        "c4_sparse_raw_indices": [filled([], 512)] * 16,
        "c128_out_loc": [0] * 16,
        "c128_topk_lengths_clamp1": [1] * 16,
        "c128_page_indices": [
            *[filled([], 64)] * 7, *[filled([4], 64)] * 3, *[filled([], 64)] * 6
        ],
        "swa_out_cache_loc": [*range(773, 780), 386, 387, 388, *[0] * 6],
        "page_size": 256,
        "index_topk": 512,
        "c1_flashmla_metadata": None,
        "c4_flashmla_metadata": None,
        "c128_flashmla_metadata": None,
    }  # fmt: skip
    got = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(core).items()}
    assert got == expected
    indexer = {
        k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(md.indexer_metadata).items()
    }
    assert indexer == {
        "page_size": 256, "compressed_page_size": 64, "compress_ratio": 4,
        "use_prefill_cuda_graph": True, "page_table": expected["page_table"],
        "compressed_seq_lens": expected["c4_topk_lengths_raw"], "deep_gemm_metadata": None,
        "topk_metadata": None, "nonpaged_plan": None,
    }  # fmt: skip
    assert (md.num_token_non_padded, md.sparse_prefill_cache) == (10, None)
    assert type(md) is DSV4Metadata


def test_the_plans_of_the_worked_example():
    layout, batch = worked_example()
    md = DSV4Metadata.create(batch, layout, 16)
    c4, c128 = md.c4_compress_metadata, md.c128_compress_metadata
    assert (c4.compress_ratio, c128.compress_ratio) == (4, 128)
    no_entry, no_row = (NOTHING, 0, 0, -1, -1), (NOTHING, -1)
    assert records_c(c4) == [
        (8, 2, 5, 6, 7), (12, 6, 1, 7, 6), (132, 8, 6, 3, 2), *[no_entry] * 13
    ]  # fmt: skip
    assert records_w(c4) == [
        *[(3, 24), (4, 25), (5, 26), (6, 27), (7, 10), (8, 11), (9, 12)], *[no_row] * 9
    ]  # fmt: skip
    assert records_c(c128) == [no_entry] * 16
    assert records_w(c128) == [
        *[(i, 133 + i) for i in range(7)], (7, 258), (8, 259), (9, 260), *[no_row] * 6
    ]  # fmt: skip


def test_a_window_of_the_heavy_branch_that_closes():
    layout, batch = worked_example([Work(1, 126, 3)])
    md = DSV4Metadata.create(batch, layout, 4)
    core, plan = md.core_attn_metadata, md.c128_compress_metadata
    assert core.c128_topk_lengths_clamp1.tolist() == [1, 1, 1, 1]
    assert core.c128_page_indices[:, 0].tolist() == [-1, 2, 2, -1]
    assert core.c128_out_loc.tolist() == [0, 2, 0, 0]
    assert records_c(plan) == [(128, 1, 126, 1, 1), *[(NOTHING, 0, 0, -1, -1)] * 3]
    assert records_w(plan) == [(2, 128), *[(NOTHING, -1)] * 3]


# any step, row by row


def row_oracle(layout, batch, rows):
    """Fields of every row in plain Python, from what each is for."""
    table, to_swa = batch.req_to_token.tolist(), batch.full_to_swa.tolist()
    requests = list(
        zip(
            batch.req_pool_indices.tolist(),
            batch.seq_lens.tolist(),
            batch.extend_seq_lens.tolist(),
            strict=True,
        )
    )
    every = [(slot, p, True) for slot, end, n in requests for p in range(end - n, end)]
    last = every[-1][0] if every else 0
    every += [(last, 0, False)] * (rows - len(every))
    found = []
    for i, (slot, position, real) in enumerate(every):
        seen = position + 1
        out = int(batch.out_cache_loc[i]) if real else 0
        pages = [
            table[slot][c * layout.page_size] // layout.page_size
            for c in range(layout.context // layout.page_size)
        ]
        heavy = layout.page_size // layout.c128_ratio
        window = [to_swa[table[slot][p]] for p in range(position, -1, -1)][: layout.window]
        c128 = [pages[e // heavy] * heavy + e % heavy for e in range(seen // layout.c128_ratio)]
        found.append({
            "raw_out_loc": out,
            "swa_out_cache_loc": to_swa[out] if real else 0,
            "seq_lens_casual": seen,
            "positions_casual": position,
            "page_table": pages,
            "swa_page_indices": filled(window, layout.window_width),
            "swa_topk_lengths": len(window),
            "c4_out_loc": out // layout.c4_ratio if seen % layout.c4_ratio == 0 else 0,
            "c4_topk_lengths_raw": seen // layout.c4_ratio,
            "c4_topk_lengths_clamp1": max(seen // layout.c4_ratio, 1),
            "c4_sparse_topk_lengths": min(max(seen // layout.c4_ratio, 1), layout.index_topk),
            "c4_sparse_page_indices": [-1] * layout.sparse_width,
            "c4_sparse_raw_indices": [-1] * layout.sparse_width,
            "c128_out_loc": out // layout.c128_ratio if seen % layout.c128_ratio == 0 else 0,
            "c128_topk_lengths_clamp1": max(len(c128), 1),
            "c128_page_indices": filled(c128, layout.heavy_width),
        })  # fmt: skip
    return found


def plan_oracle(layout, batch, ratio, overlap):
    """Records of one branch: windows that close here, and rows that the next window will read."""
    table, to_swa = batch.req_to_token.tolist(), batch.full_to_swa.tolist()
    window = 2 * ratio if overlap else ratio
    closing, kept, i = [], [], 0

    def state_row(slot, position):
        if not overlap:
            return slot * ratio + position % ratio
        swa = to_swa[table[slot][position]]
        return swa // layout.page_size * 2 * ratio + swa % (2 * ratio)

    for slot, end, n in zip(
        batch.req_pool_indices.tolist(),
        batch.seq_lens.tolist(),
        batch.extend_seq_lens.tolist(),
        strict=True,
    ):
        next_to_close = next(p for p in range(end, end + ratio) if (p + 1) % ratio == 0)
        will_be_read = range(next_to_close - window + 1, next_to_close + 1)
        for position in range(end - n, end):
            if (position + 1) % ratio == 0:
                items = range(position - window + 1, position + 1)
                from_state = sum(q < end - n for q in items)
                halves = items[0], items[-ratio]
                read = [state_row(slot, max(q, 0)) // ratio for q in halves]
                closing.append((position + 1, i, from_state, *read))
            if position in will_be_read:
                kept.append((i, state_row(slot, position)))
            i += 1
    return closing, kept


def check_against_oracle(md, layout, batch, rows):
    core = md.core_attn_metadata
    expected = row_oracle(layout, batch, rows)
    tensors = {k: v for k, v in vars(core).items() if isinstance(v, Tensor)}
    assert tensors.keys() == expected[0].keys() if expected else True
    for name, got in tensors.items():
        assert got.tolist() == [row[name] for row in expected], name
    indexer = md.indexer_metadata
    assert torch.equal(indexer.page_table, core.page_table)
    assert torch.equal(indexer.compressed_seq_lens, core.c4_topk_lengths_raw)
    for name, x in tensors_of(md).items():
        assert x.dtype == DTYPES.get(name.rpartition(".")[2], torch.int32), name
        assert x.is_contiguous()
        assert len(x) == rows
    for plan, ratio, overlap in (
        (md.c4_compress_metadata, layout.c4_ratio, True),
        (md.c128_compress_metadata, layout.c128_ratio, False),
    ):
        closing, kept = plan_oracle(layout, batch, ratio, overlap)
        assert plan.compress_ratio == ratio
        assert records_c(plan) == closing + [(NOTHING, 0, 0, -1, -1)] * (rows - len(closing))
        assert records_w(plan) == kept + [(NOTHING, -1)] * (rows - len(kept))
        rows_written = [row for _, row in kept]
        assert len(set(rows_written)) == len(rows_written)  # else it is undefined who wins
    assert md.num_token_non_padded == batch.num_tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_steps(name):
    layout = LAYOUTS[name]
    rng = random.Random(name)
    kinds = {"empty step": 0, "full": 0, "empty request": 0, "single": 0, "longest": 0}
    for seed in range(12 if layout is CLASSIC else 60):
        works = random_works(layout, rng, rng.choice((4, 40)))
        tokens = sum(w.extend for w in works)
        rows = tokens + rng.choice((0, 0, 1, 7))
        batch = batch_of(layout, works, seed)
        check_against_oracle(DSV4Metadata.create(batch, layout, rows), layout, batch, rows)
        kinds["empty step"] += not tokens
        kinds["full"] += rows == tokens > 0
        kinds["empty request"] += any(w.extend == 0 for w in works)
        kinds["single"] += any(w.extend == 1 for w in works)
        kinds["longest"] += any(w.prefix + w.extend == layout.context for w in works)
    assert min(kinds.values()) > 0, kinds


STEPS = {
    "nobody": [],
    "nobody with anything to do": [Work(3, 40, 0), Work(1, 0, 0)],
    "one token": [Work(1, 0, 1)],
    "the last one has nothing": [Work(2, 3, 5), Work(4, 30, 0)],
    "the first one has nothing": [Work(4, 30, 0), Work(2, 3, 5)],
    "one in the middle has nothing": [Work(4, 30, 2), Work(3, 9, 0), Work(2, 3, 5)],
    "decodes alone": [Work(s, 7 * s + 15, 1) for s in (1, 2, 3, 4)],
    "from the start over a page": [Work(1, 0, 33)],
    "up to the end of a page": [Work(1, 14, 2), Work(2, 47, 1)],
    "all that a request can hold": [Work(1, 191, 1)],
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_particular_steps(name, padding):
    layout, works = LAYOUTS["near ratios"], STEPS[name]
    batch = batch_of(layout, works)
    rows = batch.num_tokens + padding
    check_against_oracle(DSV4Metadata.create(batch, layout, rows), layout, batch, rows)


def test_what_closes_is_read_from_where_it_was_kept():
    """Over many steps each item of each window is found under the row that its position left."""
    layout = LAYOUTS["other ratios"]
    whole = batch_of(layout, [Work(3, 0, layout.context)])
    for ratio, overlap in ((layout.c4_ratio, True), (layout.c128_ratio, False)):
        window, start, state, closed = ratio * (1 + overlap), 0, {}, []
        rng = random.Random(ratio)
        while start < layout.context:
            n = min(rng.choice((1, 1, 2, 5, 13)), layout.context - start)
            step = dataclasses.replace(
                whole, seq_lens=torch.tensor([start + n]).int(), num_tokens=n,
                extend_seq_lens=torch.tensor([n]).int(),
                out_cache_loc=whole.out_cache_loc[start : start + n],
            )  # fmt: skip
            md = DSV4Metadata.create(step, layout, n + 2)
            plan = md.c4_compress_metadata if overlap else md.c128_compress_metadata
            for seq_len, i, from_state, page_0, page_1 in records_c(plan):
                if seq_len == NOTHING:
                    break
                first = seq_len - window
                for o in range(max(-first, 0), window):
                    page, row = (page_0, o) if o < window - ratio else (page_1, o - window + ratio)
                    if o < from_state:
                        assert state[page * ratio + row] == first + o
                    else:
                        assert 0 <= i - window + 1 + o < n
                closed.append(seq_len)
            state |= {row: start + i for i, row in records_w(plan) if i != NOTHING}
            start += n
        assert closed == list(range(ratio, layout.context + 1, ratio))


def test_requests_to_rows():
    _, batch = worked_example()
    lens, requests = _expand_prefill_casually_vectorized(batch, 16)
    assert lens.tolist() == [6, 7, 8, 9, 10, 11, 12, 131, 132, 133, *[1] * 6]
    assert requests.tolist() == [*[1] * 7, *[2] * 9]
    assert (lens.dtype, requests.dtype) == (torch.int32, torch.int64)


# nothing is read on the host, nothing is shared, widths are those of the engine


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def faked(mode, batch):
    return dataclasses.replace(
        batch,
        **{k: mode.from_tensor(v) for k, v in vars(batch).items() if isinstance(v, Tensor)},
    )


@pytest.mark.parametrize("name", STEPS)
def test_no_value_is_needed_on_the_host(name):
    layout = LAYOUTS["near ratios"]
    batch = batch_of(layout, STEPS[name])
    rows = batch.num_tokens + 2
    with FakeTensorMode() as mode:  # whose tensors have no values: to read one is an error
        fake = faked(mode, batch)
        md = DSV4Metadata.create(fake, layout, rows)
        assert DSV4Metadata.create(fake, layout, rows, md) is md
    with Operators() as operators:
        real = DSV4Metadata.create(batch, layout, rows)
    assert not operators.names & {"_local_scalar_dense", "nonzero", "masked_select"}
    assert {k: v.shape for k, v in tensors_of(md).items()} == {
        k: v.shape for k, v in tensors_of(real).items()
    }


@pytest.mark.cuda
def test_no_host_synchronisation():
    layout, batch = worked_example(device="cuda")
    build(batch, layout, 16)
    torch.cuda.synchronize()
    with no_synchronisation():
        build(batch, layout, 16)


def test_widths_are_those_of_the_engine():
    """A short request needs the same memory as the longest one there may be."""
    layout = CLASSIC
    short, long = batch_of(layout, [Work(1, 0, 4)]), batch_of(layout, [Work(1, 2044, 4)])
    shapes = [
        {k: tuple(v.shape) for k, v in tensors_of(DSV4Metadata.create(b, layout, 8)).items()}
        for b in (short, long)
    ]
    assert shapes[0] == shapes[1]
    core = {k: v for k, v in shapes[0].items() if len(v) == 2}
    assert core == {
        "core_attn_metadata.page_table": (8, 8),
        "core_attn_metadata.swa_page_indices": (8, 128),
        "core_attn_metadata.c4_sparse_page_indices": (8, 512),
        "core_attn_metadata.c4_sparse_raw_indices": (8, 512),
        "core_attn_metadata.c128_page_indices": (8, 64),
        "indexer_metadata.page_table": (8, 8),
        "c4_compress_metadata.plan_c": (8, 16),
        "c4_compress_metadata.plan_w": (8, 8),
        "c128_compress_metadata.plan_c": (8, 16),
        "c128_compress_metadata.plan_w": (8, 8),
    }


def test_every_field_has_memory_of_its_own():
    layout, batch = worked_example()
    md = DSV4Metadata.create(batch, layout, 10)
    inputs = [v for v in vars(batch).values() if isinstance(v, Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in [*tensors_of(md).values(), *inputs]]
    assert len(set(storages)) == len(storages)


# into an object that is there


@pytest.mark.parametrize("online", [False, True])
def test_a_step_is_built_in_place(online):
    layout = dataclasses.replace(LAYOUTS["near ratios"], online_compress=online)
    md = DSV4Metadata.create(batch_of(layout, []), layout, 24)
    assert type(md) is (OnlineDSV4Metadata if online else DSV4Metadata)
    held = tensors_of(md)
    core = md.core_attn_metadata
    core.c4_sparse_page_indices.fill_(7)
    core.c4_sparse_raw_indices.fill_(8)
    for seed in range(8):
        rng = random.Random(seed)
        batch = batch_of(layout, random_works(layout, rng, 24), seed)
        md.sparse_prefill_cache = md.indexer_metadata.nonpaged_plan = object()
        assert DSV4Metadata.create(batch, layout, 24, md) is md
        fresh = DSV4Metadata.create(batch, layout, 24)
        for name, x in tensors_of(md).items():
            assert x is held[name]
            if "sparse_page_indices" in name or "raw_indices" in name:
                assert x.unique().tolist() == [7 if "page" in name else 8]
            else:
                assert torch.equal(x, tensors_of(fresh)[name]), name
        assert md.num_token_non_padded == batch.num_tokens
        assert md.sparse_prefill_cache is md.indexer_metadata.nonpaged_plan is None


def test_all_is_written():
    """Whatever lies in the memory before, what `empty` allocates holds nothing of it."""
    layout, batch = worked_example()
    md = empty(layout, 16, "cpu")
    written = {k: v for k, v in tensors_of(md).items() if "c4_sparse_p" in k or "sparse_raw" in k}
    for x in tensors_of(md).values():
        x.fill_(99)
    build_into(md, batch, layout)
    fresh = DSV4Metadata.create(batch, layout, 16)
    for name, x in tensors_of(md).items():
        assert torch.equal(x, tensors_of(fresh)[name]) or name in written, name
    assert all(x.eq(99).all() for x in written.values())


def test_what_does_not_fit_is_refused():
    layout, batch = worked_example()
    with pytest.raises(ValueError, match=r"num_tokens is 10, len.* 10 and rows 9"):
        DSV4Metadata.create(batch, layout, 9)
    with pytest.raises(ValueError, match="num_tokens is 9"):
        DSV4Metadata.create(dataclasses.replace(batch, num_tokens=9), layout, 16)
    with pytest.raises(ValueError, match="rows 65537"):
        DSV4Metadata.create(batch, layout, 65537)
    with pytest.raises(ValueError, match="req_to_token has 512 columns"):
        DSV4Metadata.create(batch, dataclasses.replace(layout, context=768), 16)
    md = DSV4Metadata.create(batch, layout, 16)
    before = {k: v.clone() for k, v in tensors_of(md).items()}
    other = worked_example([Work(1, 0, 2)])[1]
    with pytest.raises(ValueError, match=r"raw_out_loc is \(torch.int64, .*16.*for 15 rows"):
        DSV4Metadata.create(other, layout, 15, md)
    with pytest.raises(ValueError, match="index_topk is 512, not 64"):
        DSV4Metadata.create(other, dataclasses.replace(layout, index_topk=64), 16, md)
    with pytest.raises(ValueError, match=r"class is .*DSV4Metadata.*, not .*Online"):
        DSV4Metadata.create(other, dataclasses.replace(layout, online_compress=True), 16, md)
    with pytest.raises(ValueError, match="it is on meta"):
        DSV4Metadata.create(other, layout, 16, empty(layout, 16, "meta"))
    assert all(torch.equal(v, before[k]) for k, v in tensors_of(md).items())
    with pytest.raises(ValueError, match="Layout: page_size is 64"):
        Layout(context=128, requests=2, pages=4, page_size=64)


def test_rows_for_queries():
    x = torch.arange(6).view(3, 2)
    assert match_num_queries(None, 2, -1) is None
    assert match_num_queries(x, 3, -1) is x
    cut = match_num_queries(x, 2, -1)
    assert cut.tolist() == [[0, 1], [2, 3]]
    assert cut.data_ptr() == x.data_ptr()
    assert match_num_queries(x, 4, -1).tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1]]
    assert match_num_queries(x[:, 0], 4, 1).tolist() == [0, 2, 4, 1]
