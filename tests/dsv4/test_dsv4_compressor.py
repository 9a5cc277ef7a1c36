"""Compressed entries: operator, Triton kernel, an obvious loop and transformers agree, chunk by chunk.

Plans are made here, by the rules of a ring for each request; those of the metadata are tested with
it.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torch_bcg
from dsv4.interpreted import interpreted
from torch_bcg.dsv4.compressor import compress_, compress_reference, write_state
from torch_bcg.dsv4.indexer import select
from twin import counted

NONE = -1  # 0xFFFFFFFF
BRANCHES = [
    (m, c, d, rope)
    for pair, d, rope in (((4, 128), 64, 16), ((2, 8), 16, 8), ((8, 16), 32, 32))
    for m, c in zip(pair, (2, 1), strict=True)
] + [(4, 2, 512, 64), (128, 1, 512, 64), (4, 2, 24, 8), (16, 2, 16, 8)]


@dataclass
class Branch:
    """One compressor's constants. Request r has the ring rows of slot r, and entries from r * 64."""

    ratio: int
    halves: int
    dim: int
    rope: int
    slots: int = 4
    scaling: float = 1.0
    eps: float = 1e-6

    def __post_init__(self):
        m, c, d = self.ratio, self.halves, self.dim
        self.window = c * m
        self.bias = torch.randn(m, c * d)
        self.norm_weight = torch.rand(d) + 0.5
        self.inv_freq = 100.0 ** -(torch.arange(0, self.rope, 2) / self.rope)
        # What nobody wrote is NaN: whoever reads it shows.
        self.ring = torch.full((self.slots * self.window, 2 * c * d), torch.nan)
        self.entries = torch.full((self.slots * 64, d), torch.nan)

    def projections(self, tokens):
        return torch.randn(tokens, 2 * self.halves * self.dim)

    def constants(self):
        return (
            self.bias, self.norm_weight, self.inv_freq, self.ratio, self.scaling, self.eps,
        )  # fmt: skip

    def step(self, chunks, rows):
        """Plans and slots for chunks (request slot, prefix, end), padded to as many rows."""
        m, w = self.ratio, self.window
        compress, write, out_loc, start = [], [], torch.zeros(rows, dtype=torch.int64), 0
        for slot, prefix, end in chunks:
            keep = m * (end // m) - (m if self.halves == 2 else 0)
            for p in range(prefix, end):
                row = start + p - prefix
                first = p - w + 1
                if (p + 1) % m == 0:
                    buffered = max(0, min(w, prefix - first))
                    pages = [(slot * w + q % w) // m for q in (first, p)]
                    compress.append((p + 1, row | buffered << 16, *pages))
                    out_loc[row] = slot * 64 + p // m
                if p >= keep:
                    write.append((row, slot * w + p % w))
            start += end - prefix
        compress += [(NONE, 0, -1, -1)] * (rows - len(compress))
        write += [(NONE, -1)] * (rows - len(write))
        plans = (torch.tensor(x, dtype=torch.int32).view(torch.uint8) for x in (compress, write))
        return *plans, out_loc


def branch_id(branch):
    return "m{}-c{}-d{}-rope{}".format(*branch)


@pytest.fixture(params=["cpu", "interpreted", pytest.param("cuda", marks=pytest.mark.cuda)])
def compress(request):
    """`compress_` on the CPU, its kernel in the interpreter, or on a GPU: entries on the CPU."""

    def run(entries, *args):
        if request.param == "interpreted":
            entries.copy_(interpreted("compressor:compress_", entries, *args)[1][0])
            return
        moved = [
            x.to(request.param) if isinstance(x, torch.Tensor) else x for x in (entries, *args)
        ]
        compress_(*moved)
        entries.copy_(moved[0])

    return run


def rotated(x, position, inv_freq, scaling):
    """The last channels of [d], pair by pair."""
    x = x.clone()
    first = len(x) - 2 * len(inv_freq)
    for i, frequency in enumerate(inv_freq.double()):
        a, b = x[first + 2 * i].clone(), x[first + 2 * i + 1].clone()
        cos, sin = (position * frequency).cos() * scaling, (position * frequency).sin() * scaling
        x[first + 2 * i], x[first + 2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    return x


def oracle(branch, history, end):
    """The entry that closes before `end`, from a request's projections [positions, 2 * c * d]."""
    m, c, d = branch.ratio, branch.halves, branch.dim
    kvs, scores = [], []
    for q in range(max(0, end - branch.window), end):
        part = d if c == 2 and q >= end - m else 0
        kvs.append(history[q, part : part + d].double())
        score = history[q, c * d + part : c * d + part + d].double()
        scores.append(score + branch.bias[q % m, part : part + d].double())
    pooled = (torch.stack(scores).softmax(0) * torch.stack(kvs)).sum(0)
    normed = pooled / (pooled.square().mean() + branch.eps).sqrt() * branch.norm_weight.double()
    return rotated(normed, end - m, branch.inv_freq, branch.scaling).float()


def chunkings(branch):
    """Steps of chunks: windows that one chunk holds, that several make up, that a ring wraps in."""
    m = branch.ratio
    return [
        [[(1, 0, 3 * m + 1)], [(1, 3 * m + 1, 3 * m + 2), (2, 0, m - 1)], [(2, m - 1, 4 * m)]],
        [
            [(3, 0, 1), (1, 0, 2 * m)],
            [(1, 2 * m, 5 * m - 1), (3, 1, 2 * m)],
            [(1, 5 * m - 1, 6 * m)],
        ],
    ]


@pytest.mark.parametrize("branch", BRANCHES, ids=branch_id)
def test_entries_are_those_of_a_loop(compress, branch):
    branch = Branch(*branch, scaling=1.25)
    for steps in chunkings(branch):
        branch = Branch(branch.ratio, branch.halves, branch.dim, branch.rope, scaling=1.25)
        expected, history = branch.entries.clone(), {}
        for step in steps:
            lengths = [end - prefix for _, prefix, end in step]
            plan_c, plan_w, out_loc = branch.step(step, sum(lengths) + 3)
            if branch.ratio == 128:  # the reference takes its time with those that are none
                plan_c = plan_c[:8]
            projected = branch.projections(sum(lengths) + 3)
            projected[-3:] = torch.nan
            for (slot, prefix, end), new in zip(step, projected[:-3].split(lengths), strict=True):
                history[slot] = torch.cat([history.get(slot, new[:0]), new])
                for closing in range(prefix + 1, end + 1):
                    if closing % branch.ratio == 0:
                        place = slot * 64 + closing // branch.ratio - 1
                        expected[place] = oracle(branch, history[slot], closing)
            compress(branch.entries, projected, branch.ring, plan_c, out_loc, *branch.constants())
            write_state(branch.ring, projected, plan_w)
        assert expected[64:].isfinite().any()
        torch.testing.assert_close(branch.entries, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def one_step(branch):
    """Arguments of a step whose windows begin in the ring and before position 0."""
    branch = Branch(*branch)
    branch.ring.normal_()
    m = branch.ratio
    chunks = [(1, m - 1, 2 * m + 1), (2, 0, m), (3, 4 * m - 2, 5 * m)]
    tokens = sum(end - prefix for _, prefix, end in chunks)
    plan_c, plan_w, out_loc = branch.step(chunks, tokens + 2)
    return branch, branch.projections(tokens + 2), plan_c, plan_w, out_loc


@pytest.mark.parametrize("branch", [(2, 2, 16, 8), (8, 1, 16, 8)], ids=branch_id)
def test_order_of_records_does_not_matter(compress, branch):
    branch, projected, plan_c, _, out_loc = one_step(branch)
    plans = (plan_c, plan_c.flip(0), plan_c[torch.randperm(len(plan_c))])
    pools = [branch.entries.clone() for _ in plans]
    for pool, plan in zip(pools, plans, strict=True):
        compress(pool, projected, branch.ring, plan, out_loc, *branch.constants())
    torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pools[2], pools[0], rtol=0, atol=0, equal_nan=True)


def test_a_plan_without_records_writes_nothing(compress):
    branch, projected, plan_c, _, out_loc = one_step((4, 2, 16, 8))
    before = branch.entries.normal_().clone()
    plan_c.view(torch.int32).copy_(torch.tensor([NONE, 0, -1, -1]))
    compress(branch.entries, projected, branch.ring, plan_c, out_loc, *branch.constants())
    torch.testing.assert_close(branch.entries, before, rtol=0, atol=0, equal_nan=True)


def test_a_16_bit_pool(compress):
    branch, projected, plan_c, _, out_loc = one_step((4, 2, 64, 16))
    wide = branch.entries.clone()
    compress(wide, projected, branch.ring, plan_c, out_loc, *branch.constants())
    for dtype in (torch.bfloat16, torch.float16):
        pool = branch.entries.to(dtype)
        compress(pool, projected, branch.ring, plan_c, out_loc, *branch.constants())
        # To the last bit but one: sums in two orders may round apart.
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(pool.float(), wide, rtol=ulp, atol=1e-6, equal_nan=True)


def test_a_late_position_and_large_scores(compress):
    """Angles of 10^6 radians, and scores that overflow an unshifted exp."""
    branch = Branch(4, 2, 64, 16)
    branch.ring.normal_()
    end = 1 << 20
    plan_c, _, out_loc = branch.step([(1, end - 9, end)], 12)
    out_loc[out_loc > 0] = torch.arange(1, 4)
    projected = branch.projections(12)
    projected[:, 128:] *= 100
    branch.ring[:, 128:] *= 100
    expected = branch.entries.clone()
    compress_reference(expected, projected, branch.ring, plan_c, out_loc, *branch.constants())
    assert expected[1:4].isfinite().all()
    compress(branch.entries, projected, branch.ring, plan_c, out_loc, *branch.constants())
    torch.testing.assert_close(branch.entries, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_rows_of_a_wider_tensor(compress):
    """Projections that are columns of a fused product."""
    branch, projected, plan_c, _, out_loc = one_step((4, 2, 16, 8))
    pools = branch.entries.clone(), branch.entries.clone()
    wide = torch.cat([torch.zeros(len(projected), 7), projected], 1)[:, 7:]
    for pool, rows in zip(pools, (projected, wide), strict=True):
        compress(pool, rows, branch.ring, plan_c, out_loc, *branch.constants())
    torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)


def test_state_keeps_what_its_plan_names(device):
    branch, projected, _, plan_w, _ = one_step((4, 2, 16, 8))
    expected = branch.ring.clone()
    for row, place in plan_w.view(torch.int32).tolist():
        if place >= 0:
            expected[place] = projected[row]
    ring = branch.ring.to(device)
    write_state(ring, projected.to(device), plan_w.to(device))
    torch.testing.assert_close(ring[1:].cpu(), expected[1:], rtol=0, atol=0)  # 0 is reserved


def test_more_records_than_the_reference_takes_at_a_time():
    branch = Branch(2, 2, 16, 8, slots=3)
    branch.entries = torch.full((300, 16), torch.nan)
    plan_c, _, out_loc = branch.step([(1, 0, 400)], 401)
    projected = branch.projections(401)
    compress_(branch.entries, projected, branch.ring, plan_c, out_loc, *branch.constants())
    expected = torch.stack([oracle(branch, projected, end) for end in range(2, 401, 2)])
    torch.testing.assert_close(branch.entries[64:264], expected, rtol=2e-5, atol=2e-5)
    assert branch.entries[:64].isnan().all()


def test_operator_is_well_formed():
    branch, projected, plan_c, _, out_loc = one_step((4, 2, 16, 8))
    args = (branch.entries.zero_(), projected, branch.ring, plan_c, out_loc, *branch.constants())
    torch.library.opcheck(compress_, args, test_utils=("test_schema", "test_faketensor"))


def transformers_branch(kind):
    """A compressor of transformers, and the same as `Branch`; its name in the cache; its cache."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=32, q_lora_rank=24, index_n_heads=8, index_head_dim=32, index_topk=6,
        head_dim=64, num_hidden_layers=4,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    )  # fmt: skip
    heavy = kind == "heavy"
    whole = (model.DeepseekV4HCACompressor if heavy else model.DeepseekV4CSACompressor)(config)
    cache = (model.DeepseekV4HCACache if heavy else model.DeepseekV4CSACache)(config)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5)
    module, name = (whole.indexer, "indexer") if kind == "indexer" else (whole, "compressor")
    branch = Branch(module.compress_rate, 1 if heavy else 2, module.head_dim, 2, eps=1e-6)
    branch.bias = module.position_bias.detach()
    branch.norm_weight = module.kv_norm.weight.detach()
    branch.inv_freq = module.rotary_emb.compress_inv_freq
    branch.scaling = module.rotary_emb.compress_attention_scaling
    assert module.kv_norm.variance_epsilon == branch.eps
    return whole, module, branch, name, cache


@pytest.mark.parametrize("chunks", [(70,), (1,) * 70, (15, 1, 16, 3, 35), (3, 4, 5, 31, 27)])
@pytest.mark.parametrize("kind", ["sparse", "heavy", "indexer"])
def test_entries_are_those_of_transformers(kind, chunks):
    """The same chunks: each gives the entries that its positions close."""
    pytest.importorskip("transformers")
    whole, module, branch, name, cache = transformers_branch(kind)
    at, prefix = torch.arange(sum(chunks))[None], 0
    for n in chunks:
        x, residual, end = torch.randn(1, n, 32), torch.randn(1, n, 24), prefix + n
        layers = SimpleNamespace(layers=[cache])
        with torch.no_grad():
            whole(x, residual, at[:, prefix:end], layers, 0)
            projected = torch.cat([module.kv_proj(x[0]), module.gate_proj(x[0])], 1)
        plan_c, plan_w, out_loc = branch.step([(1, prefix, end)], n)
        compress_(branch.entries, projected, branch.ring, plan_c, out_loc, *branch.constants())
        write_state(branch.ring, projected, plan_w)
        prefix = end
    expected = cache.compressed_kv[name][0]
    assert len(expected) == 70 // branch.ratio
    found = branch.entries[64 : 64 + len(expected)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Served(nn.Module):
    """Both operators and the state between them on pools of the module, as a layer has them."""

    def __init__(self, branch, width=24):
        super().__init__()
        self.branch, d = branch, branch.dim
        self.project = nn.Linear(width, 4 * d, bias=False)
        self.query = nn.Linear(width, 8 * d, bias=False)
        self.weigh = nn.Linear(width, 8, bias=False)
        self.register_buffer("ring", branch.ring.clone())
        self.register_buffer("entries", branch.entries.clone())
        for name in ("bias", "norm_weight", "inv_freq"):
            self.register_buffer(name, getattr(branch, name))

    def forward(self, x, plan_c, plan_w, out_loc, page_table, lengths):
        b = self.branch
        projected = self.project(x)
        compress_(
            self.entries, projected, self.ring, plan_c, out_loc,
            self.bias, self.norm_weight, self.inv_freq, b.ratio, b.scaling, b.eps,
        )  # fmt: skip
        write_state(self.ring, projected, plan_w)
        q = self.query(x).unflatten(-1, (8, b.dim))
        slots, entries = select(q, self.weigh(x), self.entries, page_table, lengths, 3, 64, 64)
        return slots, entries + 1, projected


def test_recorded_steps_are_those_of_eager(device):
    """Four steps of two requests in 16 rows: one probe, three replays, pools alike after each."""
    branch = Branch(2, 2, 16, 8)
    eager, recorded = Served(branch).to(device), Served(branch).to(device)
    recorded.load_state_dict(eager.state_dict())
    compiled = torch.compile(recorded, backend="bcg")
    bounds = [(0, 0), (9, 1), (11, 8), (18, 17), (24, 24)]
    with torch.no_grad(), counted() as counts:
        for old, new in itertools.pairwise(bounds):
            chunks = [(slot + 1, *ends) for slot, ends in enumerate(zip(old, new, strict=True))]
            lengths, table = torch.zeros(2, 16, dtype=torch.int32)
            row = 0
            for slot, prefix, end in chunks:
                for position in range(prefix, end):
                    lengths[row], table[row] = (position + 1) // 2, slot
                    row += 1
            step = (*branch.step(chunks, 16), table[:, None].clone(), lengths)
            args = [t.to(device) for t in (torch.randn(16, 24), *step)]
            for found, expected in zip(compiled(*args), eager(*args), strict=True):
                torch.testing.assert_close(found, expected)
            for name, pool in recorded.named_buffers():
                torch.testing.assert_close(pool, eager.get_buffer(name), equal_nan=True)
    assert (counts.replays, counts.num_eager) == (3, 0)
    assert counts.recorded_kernels == counts.kernels
    (plan,) = torch_bcg.explain(compiled).plans
    assert len(plan.segments) == 1
