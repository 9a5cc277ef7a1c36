"""Attention over listed pool rows: the reference against a loop, the kernel against the reference,
and the marked operation, eagerly and in compiled programs."""

import dataclasses

import pytest
import torch
from torch import nn

import torch_bcg
from dsv4.interpreted import interpreted
from torch_bcg.dsv4.attention import (
    deepseek_v4_attention_with_output,
    sparse_attention,
    sparse_attention_reference,
)
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata, empty

SLOTS = 70
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def listed(rows, width, device):
    """Indices and lengths with everything that may occur; what must not be read is far outside."""
    slots = torch.randint(1, SLOTS, (rows, width), dtype=torch.int32)
    slots[torch.rand(rows, width) < 0.2] = -1
    lengths = torch.randint(2, width + 1, (rows,), dtype=torch.int32)
    special = [0, 1, width, width, width + 5]  # the last one is longer than its row
    lengths[: len(special)] = torch.tensor(special[:rows], dtype=torch.int32)
    if rows > 3:
        slots[3] = -1
        slots[2, width // 2 :] = -1
    slots[torch.arange(width) >= lengths[:, None]] = 2**30
    return slots.to(device), lengths.to(device)


def case(rows=7, heads=4, d=32, widths=(64, 128), dtype=torch.float32, device="cpu"):
    """Arguments of `sparse_attention_reference`; pool rows that nobody lists hold NaN.

    Rows 0, 3 and 6 have no key in the first pool, rows 1, 4 and 6 none in the second.
    """
    q = torch.randn(rows, heads, d, device=device).to(dtype)
    pools = []
    for width in widths:
        slots, lengths = (x.roll(len(pools) // 3, 0) for x in listed(rows, width, device))
        lengths[6:7] = 0
        pool = torch.randn(SLOTS, d, device=device).to(dtype)
        inside = torch.arange(width, device=device) < lengths[:, None]
        read = torch.zeros(SLOTS, dtype=torch.bool, device=device)
        read[slots[inside & (slots >= 0)].long()] = True
        pool[~read] = torch.nan
        pools += [pool, slots, lengths]
    pools += [None] * (6 - len(pools))
    return [q, *pools, torch.randn(heads, device=device), d**-0.5]


def in_float64(args):
    return [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args]


def by_hand(q, swa, slots, lengths, extra, more, more_lengths, sinks, scale):
    """One row, one head, one key at a time."""
    out = torch.zeros_like(q)
    for i in range(len(q)):
        keys = [swa[s] for s in slots[i, : lengths[i]].tolist() if s >= 0]
        if extra is not None:
            keys += [extra[s] for s in more[i, : more_lengths[i]].tolist() if s >= 0]
        for h in range(q.shape[1]):
            scores = torch.stack([*[scale * (q[i, h] @ k) for k in keys], sinks[h]])
            weights = scores.softmax(0)
            out[i, h] = sum((w * k for w, k in zip(weights, keys, strict=False)), out[i, h])
    return out


def by_kernel(args, out, *config):
    """Runs the kernel, interpreted on a CPU."""
    if out.device.type == "cpu":
        _, given = interpreted("attention:sparse_attention", *args, out, *config)
        return given[9]
    from torch_bcg.dsv4.kernels import attention

    attention.sparse_attention(*args, out, *config)
    return out


def error(got, args):
    """Relative norm of the distance from the reference in float64."""
    want = sparse_attention_reference(*in_float64(args))
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("widths", [(64, 128), (64,)])
def test_reference_is_the_formula(widths, device):
    args = in_float64(case(widths=widths, device=device))
    got = sparse_attention_reference(*args)
    torch.testing.assert_close(got, by_hand(*args), rtol=1e-12, atol=1e-12)
    without = [6] if len(widths) == 2 else [0, 3, 6]
    assert [i for i in range(7) if got[i].count_nonzero() == 0] == without


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_reference_gives_the_dtype_of_q(dtype):
    args = case(rows=130, dtype=dtype)  # more rows than it takes at a time
    got = sparse_attention_reference(*args)
    assert got.dtype == dtype
    assert error(got, args) < max(torch.finfo(dtype).eps, 1e-6)  # rounded once, at the end


def test_what_is_not_a_number_shows(device):
    args = case(device=device)
    args[0][2, 1, 5] = torch.nan
    want = torch.zeros_like(args[0], dtype=torch.bool)
    want[2, 1] = True
    assert sparse_attention_reference(*args).isnan().equal(want)
    assert by_kernel(args, torch.zeros_like(args[0])).isnan().equal(want)


def test_rows_without_a_key_are_zero_also_without_a_sink(device):
    args = case(widths=(64,), device=device)
    args[7] = torch.full((4,), -torch.inf, device=device)
    want = sparse_attention_reference(*args)
    assert want[[0, 3, 6]].count_nonzero() == 0
    got = by_kernel(args, torch.full_like(args[0], torch.nan))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ON_BOTH = [  # without bf16, whose products the interpreter gets wrong
    (7, 4, 32, (64, 128), FP32),
    (7, 4, 32, (64,), FP32),
    (2, 4, 32, (64, 64), FP32),
    (7, 16, 64, (64, 128), FP16),
    (7, 64, 128, (128, 64), FP16),
    (100, 40, 32, (64, 64), FP16),  # more heads than half a block, and rows enough for one
    (7, 4, 48, (64, 64), FP32),  # no power of two
    (5, 128, 32, (64, 64), FP16),
    (5, 64, 512, (64, 64), FP16),
    (5, 4, 512, (64,), FP32),
]
ON_GPU = [
    *(
        (rows, heads, d, (128, 512), BF16)
        for rows in (7, 200)
        for heads in (4, 16, 64, 128)
        for d in (32, 64, 128, 448, 512)
    ),
    *((rows, 64, 512, (128,), dtype) for rows in (7, 200) for dtype in (BF16, FP16)),
]


@pytest.mark.parametrize(("rows", "heads", "d", "widths", "dtype"), ON_BOTH)
def test_kernel_equals_reference(rows, heads, d, widths, dtype, device):
    args = case(rows, heads, d, widths, dtype, device)
    got = by_kernel(args, torch.full_like(args[0], torch.nan))
    assert error(got, args) < TOLERANCE[dtype]
    without = [6] if len(widths) == 2 else [0, 3, 6]
    assert all(got[i].count_nonzero() == 0 for i in without if i < rows)


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "heads", "d", "widths", "dtype"), ON_GPU)
def test_kernel_equals_reference_on_a_gpu(rows, heads, d, widths, dtype):
    args = case(rows, heads, d, widths, dtype, "cuda")
    got = by_kernel(args, torch.full_like(args[0], torch.nan))
    assert error(got, args) < TOLERANCE[dtype]


@pytest.mark.parametrize("config", [(64, 32, 8, 3), (32, 64, 8, 3), (16, 64, 8, 3), (16, 16, 4, 1)])
def test_every_config_gives_the_same(config, device):
    args = case(5, 64, 64, (64, 128), FP16, device)
    assert error(by_kernel(args, torch.empty_like(args[0]), config), args) < TOLERANCE[FP16]


def test_kernel_takes_views_of_larger_buffers(device):
    args = case(device=device)
    rows, heads, d = args[0].shape
    buffers = [torch.full((2, rows + 3, 2 * heads, d + 16), torch.nan, device=device)] * 2
    q, out = (b.clone()[1, :rows, ::2, :d] for b in buffers)
    q.copy_(args[0])
    swa = torch.full((SLOTS, 2 * d), torch.nan, device=device)[:, d:]
    swa.copy_(args[1])
    slots = torch.full((rows + 2, 100), 2**30, dtype=torch.int32, device=device)[:rows, :64]
    slots.copy_(args[2])
    want = sparse_attention_reference(*args)
    got = by_kernel([q, swa, slots, *args[3:]], out)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_pools_beyond_2_31_elements():
    args = case(7, 16, 512, (64,), BF16, "cuda")
    pool = torch.empty(2**22 + SLOTS, 512, dtype=BF16, device="cuda")
    pool[2**22 :] = args[1]
    slots = torch.where(args[2] >= 0, args[2] + 2**22, -1)
    out = torch.empty_like(args[0])
    got = by_kernel([args[0], pool, slots, *args[3:]], out)
    assert error(got, args) < TOLERANCE[BF16]


def test_kernel_refuses_what_it_would_misread():
    attention = pytest.importorskip("torch_bcg.dsv4.kernels.attention")
    args = case()
    with pytest.raises(ValueError, match="one dtype expected, found"):
        attention.sparse_attention(args[0], args[1].bfloat16(), *args[2:], args[0])
    with pytest.raises(ValueError, match="not contiguous"):
        attention.sparse_attention(args[0].mT.contiguous().mT, *args[1:], args[0])


def test_sparse_attention_writes_out(device):
    args = case(device=device)
    out = torch.full_like(args[0], torch.nan)
    assert sparse_attention(*args, out) is None
    torch.testing.assert_close(out, sparse_attention_reference(*args), rtol=1e-5, atol=1e-5)


# The marked operation.

LAYOUT = Layout(context=512, requests=2, pages=2, page_size=256, index_topk=64)
FIELDS = {
    "swa": ("swa_page_indices", "swa_topk_lengths"),
    "c4": ("c4_sparse_page_indices", "c4_sparse_topk_lengths"),
    "c128": ("c128_page_indices", "c128_topk_lengths_clamp1"),
}


def step(rows, real, device):
    """Metadata of a step that lists anything; what the others need is arbitrary."""
    md = empty(LAYOUT, rows, torch.device(device))
    for tensor in tensors_of(md):
        tensor.zero_()
    for indices, lengths in FIELDS.values():
        slots, lens = listed(rows, getattr(md.core_attn_metadata, indices).shape[1], device)
        slots = torch.where(
            slots == 2**30, -1, slots
        )  # padded rows are never looked at, others are
        getattr(md.core_attn_metadata, indices).copy_(slots)
        getattr(md.core_attn_metadata, lengths).copy_(lens)
    md.num_token_non_padded = real
    return md


def tensors_of(md):
    for part in (md.core_attn_metadata, md.indexer_metadata):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if torch.is_tensor(value):
                yield value


def attended(md, q, swa, extra, sinks, branch, rows):
    """What the first rows have to be."""
    core = md.core_attn_metadata
    fields = [getattr(core, name)[:rows] for name in FIELDS["swa"]]
    more = [None, None] if branch == "swa" else [getattr(core, n)[:rows] for n in FIELDS[branch]]
    return sparse_attention_reference(q[:rows], swa, *fields, extra, *more, sinks, 0.25)


def operands(rows, branch, device):
    q = torch.randn(rows, 4, 32, device=device)
    swa, extra = torch.randn(2, SLOTS, 32, device=device)
    return q, swa, None if branch == "swa" else extra, torch.randn(4, device=device)


@pytest.mark.parametrize("branch", list(FIELDS))
@pytest.mark.parametrize("real", [8, 5, 1, 0])
def test_marked_operation_attends_to_real_rows_and_zeroes_the_others(branch, real, device):
    md = step(8, real, device)
    q, swa, extra, sinks = operands(8, branch, device)
    q[real:] = torch.nan
    out = torch.full_like(q, torch.nan)
    with torch_bcg.bind_metadata(md):
        deepseek_v4_attention_with_output(q, swa, extra, sinks, out, branch, 0.25)
    want = attended(md, q, swa, extra, sinks, branch, real)
    torch.testing.assert_close(out[:real], want, rtol=1e-5, atol=1e-5)
    assert out[real:].count_nonzero() == 0
    assert out.isfinite().all()


@pytest.mark.parametrize("real", [5, 8])
def test_marked_operation_takes_rows_cut_already(real, device):
    md = step(8, real, device)
    q, swa, extra, sinks = operands(5, "c4", device)
    out = torch.full_like(q, torch.nan)
    with torch_bcg.bind_metadata(md):
        deepseek_v4_attention_with_output(q, swa, extra, sinks, out, "c4", 0.25)
    want = attended(md, q, swa, extra, sinks, "c4", 5)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_no_real_row_reads_nothing():
    q, swa, extra, sinks = operands(3, "c128", "cpu")
    out = torch.full_like(q, torch.nan)
    md = step(3, 0, "cpu")
    md.core_attn_metadata = None
    with torch_bcg.bind_metadata(md):
        deepseek_v4_attention_with_output(q, swa, extra, sinks, out, "c128", 0.25)
    assert out.count_nonzero() == 0


@pytest.mark.parametrize(("branch", "pool"), [("swa", True), ("c4", False), ("hca", True)])
def test_marked_operation_refuses_a_branch_without_its_pool(branch, pool):
    q, swa, extra, sinks = operands(3, "c4", "cpu")
    with (
        torch_bcg.bind_metadata(step(3, 3, "cpu")),
        pytest.raises(ValueError, match=f"branch is '{branch}' and extra"),
    ):
        given = extra if pool else None
        deepseek_v4_attention_with_output(q, swa, given, sinks, q.clone(), branch, 0.25)


class Small(nn.Module):
    """A layer of each branch between recorded segments, which also read and write the metadata."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, device=device) for _ in FIELDS)
        self.sinks = nn.Parameter(torch.randn(4, device=device))
        for name in ("swa", "extra"):
            self.register_buffer(name, torch.randn(SLOTS, 32, device=device))

    def forward(self, x, picked):
        core = torch_bcg.current_metadata(DSV4Metadata).core_attn_metadata
        core.c4_sparse_page_indices.copy_(picked)
        for branch, layer in zip(FIELDS, self.layers, strict=True):
            q = layer(x).view(-1, 4, 32)
            mixed = torch.empty_like(q)
            extra = None if branch == "swa" else self.extra
            deepseek_v4_attention_with_output(q, self.swa, extra, self.sinks, mixed, branch, 0.25)
            x = x + mixed.flatten(1) + core.positions_casual[:, None]
        return x


def inputs(device):
    picked = torch.randint(-1, SLOTS, (8, LAYOUT.sparse_width), dtype=torch.int32, device=device)
    return torch.randn(8, 128, device=device), picked


@pytest.mark.parametrize("reals", [(8, 8, 8), (8, 5, 0)])
def test_replay_equals_eager(reals, device):
    with torch.no_grad():
        model = Small(device)
        compiled = torch.compile(model, backend="bcg")
        captured = step(8, 8, device)
        with torch_bcg.bind_metadata(captured):
            for _ in range(4):
                compiled(*inputs(device))
        before = torch_bcg.stats()
        for turn, real in enumerate(reals):
            live = step(8, real, device)
            live.core_attn_metadata.positions_casual.fill_(turn)
            captured.refresh_for_breakable_cuda_graph_replay_(live)
            captured.num_token_non_padded = real
            given = inputs(device)
            with torch_bcg.bind_metadata(live):
                want = model(*given)
            with torch_bcg.bind_metadata(captured):
                got = compiled(*given)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        after = torch_bcg.stats()
    assert after.replays - before.replays == len(reals)
    assert after.captures == before.captures
    assert after.eager_calls == before.eager_calls
