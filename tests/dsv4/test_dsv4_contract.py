"""How DeepSeek-V4's metadata reaches recorded segments: the lists of #25195, kept and checked."""

import contextlib
import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import torch_bcg
from dsv4.dsv4_batches import LAYOUTS, Work, batch_of
from torch_bcg.dsv4.metadata import (
    CompressorPrefillPlan,
    DSV4AttnMetadata,
    DSV4Metadata,
    OnlineDSV4Metadata,
    PagedIndexerMetadata,
    maybe_copy_inplace,
)
from torch_bcg.errors import BindingError
from torch_bcg.metadata.registration import REGISTERED
from twin import counted

LAYOUT = LAYOUTS["near ratios"]
ONLINE = dataclasses.replace(LAYOUT, online_compress=True)
ROWS = 16
EQUAL = ("page_size", "index_topk")
COPIED = (
    "raw_out_loc", "seq_lens_casual", "positions_casual", "c4_out_loc", "c128_out_loc",
    "c4_topk_lengths_raw", "c4_topk_lengths_clamp1", "c4_sparse_topk_lengths", "swa_out_cache_loc",
)  # fmt: skip
REBOUND = (
    "page_table", "swa_page_indices", "swa_topk_lengths", "c128_page_indices",
    "c128_topk_lengths_clamp1",
)  # fmt: skip
SCHEDULERS = ("c1_flashmla_metadata", "c4_flashmla_metadata", "c128_flashmla_metadata")
WRITTEN = ("c4_sparse_page_indices", "c4_sparse_raw_indices")
PARTS = (
    "core_attn_metadata", "indexer_metadata", "c4_compress_metadata", "c128_compress_metadata"
)  # fmt: skip
# Each has other requests, and another number of them and of tokens, than the one before.
WORKS = [
    [Work(1, 5, 7), Work(2, 40, 3)],
    [Work(3, 180, 9)],  # long after short
    [Work(4, 0, 1)],
    [],
    [Work(s, 11 * s, 4) for s in (1, 2, 3, 4)],  # all rows
    [Work(2, 7, 1), Work(4, 30, 1), Work(1, 0, 0)],
    [Work(2, 0, 16)],
]


def made(works, device="cpu", layout=LAYOUT, seed=0, rows=ROWS):
    return DSV4Metadata.create(batch_of(layout, works, seed, device), layout, rows)


def all_made(device, layout=LAYOUT):
    return [made(works, device, layout, seed) for seed, works in enumerate(WORKS)]


# Recorded segments read what #25195's do; the marked function reads what its attention does.


@torch_bcg.eager_on_graph(mutates_args=("out",), name="dsv4_contract::attend")
def attend(q: Tensor, out: Tensor) -> None:
    """Reads the object that is bound, at the size of the call."""
    md = torch_bcg.current_metadata(DSV4Metadata)
    core, n = md.core_attn_metadata, md.num_token_non_padded
    seen = sum(getattr(core, name).view(len(q), -1)[:n].sum(1) for name in (*REBOUND, *WRITTEN))
    out[:n] = q[:n] + seen + core.c4_sparse_topk_lengths[:n]
    out[n:].zero_()
    if isinstance(md, OnlineDSV4Metadata):
        out += md.c128_compress_metadata.plan_c.sum() % 7


def forward(x, pool):
    """x and the result: float32 [P]; pool: float32 [slots], written where tokens lie."""
    md = torch_bcg.current_metadata(DSV4Metadata)
    core, indexer = md.core_attn_metadata, md.indexer_metadata
    pool[core.swa_out_cache_loc] = x
    q = x * core.positions_casual + core.c4_out_loc + core.c128_out_loc
    q = q + md.c4_compress_metadata.plan_c.sum(1) + md.c4_compress_metadata.plan_w.sum(1)
    core.c4_sparse_page_indices.copy_(indexer.page_table[:, :1] * core.index_topk)
    core.c4_sparse_raw_indices.copy_(indexer.compressed_seq_lens[:, None])
    out = torch.empty_like(q)
    attend(q, out)
    return out + 1


def with_both_plans(x, pool):
    """As `forward`, and reads the heavy branch's plan where it is recorded."""
    md = torch_bcg.current_metadata(DSV4Metadata)
    return forward(x + md.c128_compress_metadata.plan_w.sum(1), pool)


class Twins:
    """A function compiled, beside itself, with a pool each."""

    def __init__(self, device, fn=with_both_plans):
        self.fn, self.device = fn, device
        self.compiled = torch.compile(fn, backend="bcg")
        self.pools = [torch.zeros(LAYOUT.slots, device=device) for _ in range(2)]
        for pool in self.pools:
            torch._dynamo.mark_static_address(pool)

    def __call__(self, md, live=None):
        x = torch.randn(len(md.core_attn_metadata.raw_out_loc), device=self.device)
        with torch.no_grad():
            with torch_bcg.bind_metadata(md):
                got = self.compiled(x, self.pools[0])
            with torch_bcg.bind_metadata(md if live is None else live):
                want = self.fn(x, self.pools[1])
        assert torch.equal(got, want)
        # Padded rows all go to slot 0, in any order.
        assert torch.equal(self.pools[0][1:], self.pools[1][1:])

    def kinds(self):
        outer = next(
            b
            for b in torch_bcg.explain(self.compiled).plans[-1].bindings
            if b.cls.endswith("DSV4Metadata")
        )
        return {f.name: f.kind for f in outer.fields}

    def captured(self, live):
        (program,) = torch_bcg.programs(self.compiled)
        return program.captured(live)


@contextlib.contextmanager
def undeclared():
    """The classes without their lists: what graphs show alone."""
    lists = {cls: dict(REGISTERED[cls].declared) for cls in CLASSES}
    for cls in CLASSES:
        torch_bcg.register_metadata_binding(cls)
    try:
        yield
    finally:
        for cls, declared in lists.items():
            by_kind = {
                kind.lower(): tuple(n for n, k in declared.items() if k == kind)
                for kind in ("EQUAL", "COPY", "REBIND", "WRITTEN")
            }
            torch_bcg.register_metadata_binding(cls, **by_kind)


CLASSES = (
    DSV4AttnMetadata, PagedIndexerMetadata, CompressorPrefillPlan, DSV4Metadata, OnlineDSV4Metadata,
)  # fmt: skip


def assert_refreshed(captured, before, live):
    """`captured`, which held the tensors `before`, has the values of `live` where it should."""
    core, now = captured.core_attn_metadata, live.core_attn_metadata
    for name in COPIED:
        assert getattr(core, name) is before[name]
        assert torch.equal(getattr(core, name), getattr(now, name)), name
    for name in (*REBOUND, *SCHEDULERS):
        assert getattr(core, name) is getattr(now, name), name
    for name in WRITTEN:
        assert getattr(core, name) is before[name]
        assert getattr(core, name) is not getattr(now, name)
    for part, names in (
        ("indexer_metadata", ("page_table", "compressed_seq_lens")),
        ("c4_compress_metadata", ("plan_c", "plan_w")),
        ("c128_compress_metadata", ("plan_c", "plan_w")),
    ):
        for name in names:
            x = getattr(getattr(captured, part), name)
            assert x is before[f"{part}.{name}"]
            assert torch.equal(x, getattr(getattr(live, part), name))
    assert captured.num_token_non_padded == live.num_token_non_padded
    assert captured.sparse_prefill_cache is None


def held(md):
    """The tensors of a metadata object; those of the core by name alone."""
    found = {}
    for part in PARTS:
        prefix = "" if part == "core_attn_metadata" else f"{part}."
        found |= {f"{prefix}{k}": v for k, v in vars(getattr(md, part)).items()}
    return {k: v for k, v in found.items() if isinstance(v, Tensor)}


class TestDSV4BreakableCudaGraphMetadataContract:
    """The contract of #25195, under the names it has there."""

    def test_bcg_is_explicit_and_dsv4_backend_opt_in_only(self, device, monkeypatch):
        md, x = made(WORKS[0], device), torch.randn(ROWS, device=device)
        pool = torch.zeros(LAYOUT.slots, device=device)
        monkeypatch.setenv("TORCH_BCG_EXECUTE", "off")
        others = (
            forward,
            torch.compile(forward, backend="eager"),
            torch.compile(forward, backend="bcg"),  # which is off
        )
        with counted() as counts, torch.no_grad():
            for fn in others:  # without an object that is bound there is none
                with pytest.raises(Exception, match="No DSV4Metadata is bound"):
                    fn(x, pool)
            with torch_bcg.bind_metadata(md):
                assert torch_bcg.current_metadata(DSV4Metadata) is md
                results = [fn(x, pool) for _ in range(3) for fn in others]
        assert (counts.probes, counts.captures, counts.replays) == (0, 0, 0)
        monkeypatch.delenv("TORCH_BCG_EXECUTE")
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend="bcg")
        with counted() as counts, torch.no_grad():
            with pytest.raises(Exception, match="No DSV4Metadata is bound"):
                compiled(x, pool)
            assert counts.captures == 0
            with torch_bcg.bind_metadata(md):
                results += [compiled(x, pool) for _ in range(3)]
        assert (counts.captures, counts.replays) == (1, 2)
        assert all(torch.equal(y, results[0]) for y in results)
        with pytest.raises(BindingError, match="No DSV4Metadata is bound"):
            torch_bcg.current_metadata(DSV4Metadata)

    def test_refresh_replay_metadata_preserves_captured_tensor_storage(self, device):
        """From the lists alone: nothing has been compiled."""
        captured = made([Work(1, 0, ROWS)], device)  # as for a capture
        core = captured.core_attn_metadata
        core.c4_sparse_page_indices.fill_(5)
        core.c4_sparse_raw_indices.fill_(6)
        before = held(captured)
        addresses = {k: v.data_ptr() for k, v in before.items() if k not in REBOUND}
        parts = [getattr(captured, part) for part in PARTS]
        # The engine's own memory, with which each step is made.
        static_out_cache_loc = torch.zeros(ROWS, dtype=torch.int64, device=device)
        for seed, works in enumerate(WORKS):
            batch = batch_of(LAYOUT, works, seed, device)
            slots = static_out_cache_loc[: batch.num_tokens]
            slots.copy_(batch.out_cache_loc)
            batch = dataclasses.replace(batch, out_cache_loc=slots)
            live = DSV4Metadata.create(batch, LAYOUT, ROWS)
            captured.refresh_for_breakable_cuda_graph_replay_(live)
            static_out_cache_loc.fill_(-1)  # the next step may be written already
            assert_refreshed(captured, before, live)
            assert [getattr(captured, part) for part in PARTS] == parts
            assert {k: held(captured)[k].data_ptr() for k in addresses} == addresses
            assert core.c4_sparse_page_indices.eq(5).all()
            assert core.c4_sparse_raw_indices.eq(6).all()
            assert int(core.raw_out_loc.min()) >= 0

    def test_the_core_is_refreshed_alone(self, device):
        captured, live = (made(works, device).core_attn_metadata for works in WORKS[:2])
        before = dict(vars(captured))
        captured.refresh_for_breakable_cuda_graph_replay_(live)
        for name in COPIED:
            assert getattr(captured, name) is before[name]
            assert torch.equal(before[name], getattr(live, name))
        for name in REBOUND:
            assert getattr(captured, name) is getattr(live, name)
        for name in WRITTEN:
            assert getattr(captured, name) is before[name]

    def test_every_field_is_in_one_list(self):
        expected = {
            DSV4AttnMetadata: {
                **dict.fromkeys(EQUAL, "EQUAL"),
                **dict.fromkeys(COPIED, "COPY"),
                **dict.fromkeys((*REBOUND, *SCHEDULERS), "REBIND"),
                **dict.fromkeys(WRITTEN, "WRITTEN"),
            },
            PagedIndexerMetadata: {
                **dict.fromkeys(
                    ("page_size", "compressed_page_size", "compress_ratio", "use_prefill_cuda_graph"),
                    "EQUAL",
                ),
                **dict.fromkeys(
                    ("page_table", "compressed_seq_lens", "deep_gemm_metadata", "topk_metadata"),
                    "COPY",
                ),
                "nonpaged_plan": "REBIND",
            },
            CompressorPrefillPlan: {"compress_ratio": "EQUAL", "plan_c": "COPY", "plan_w": "COPY"},
            DSV4Metadata: {"sparse_prefill_cache": "REBIND"},
            OnlineDSV4Metadata: dict.fromkeys(
                (
                    "c128_compress_metadata",
                    "c128_compress_metadata.compress_ratio",
                    "c128_compress_metadata.plan_c",
                    "c128_compress_metadata.plan_w",
                ),
                "REBIND",
            ),
        }  # fmt: skip
        # Objects with lists of their own, and a number that no recorded segment reads.
        derived = {DSV4Metadata: {*PARTS, "num_token_non_padded"}}
        for cls, kinds in expected.items():
            assert dict(REGISTERED[cls].declared) == kinds
            fields = [f.name for f in dataclasses.fields(cls)]
            if cls is OnlineDSV4Metadata:
                assert fields == [f.name for f in dataclasses.fields(DSV4Metadata)]
                continue
            assert sorted([*kinds, *derived.get(cls, ())]) == sorted(fields)

    def test_a_field_that_is_added_is_handled_or_refused(self, device):
        @dataclass(eq=False)
        class More(DSV4AttnMetadata):
            extra: Tensor | None = None
            heads: int = 1

        def more(works, extra, heads):
            md = made(works, device)
            core = More(**vars(md.core_attn_metadata), extra=extra, heads=heads)
            return dataclasses.replace(md, core_attn_metadata=core)

        old, new = torch.zeros(3, device=device), torch.ones(3, device=device)
        captured, live = more(WORKS[0], old, 1), more(WORKS[1], new, 2)
        before = held(captured)
        with pytest.raises(BindingError, match=r"Nothing is known of .*core_attn_metadata\.extra"):
            captured.refresh_for_breakable_cuda_graph_replay_(live)
        with pytest.raises(BindingError, match=r"Nothing is known of More\.extra"):
            captured.core_attn_metadata.refresh_for_breakable_cuda_graph_replay_(
                live.core_attn_metadata
            )
        assert not torch.equal(before["raw_out_loc"], held(live)["raw_out_loc"])  # nor half of it
        handle = torch_bcg.register_metadata_binding(More, copy=("extra",))
        try:
            captured.refresh_for_breakable_cuda_graph_replay_(live)
        finally:
            handle.remove()
        assert captured.core_attn_metadata.extra is old
        assert torch.equal(old, new)
        assert captured.core_attn_metadata.heads == 2  # a number follows
        assert_refreshed(captured, before, live)

    def test_what_a_step_keeps_starts_anew(self, device):
        captured, live = (made(works, device) for works in WORKS[:2])
        for _ in range(3):
            captured.sparse_prefill_cache = {"gathered": torch.ones(2)}  # as attention leaves it
            captured.indexer_metadata.nonpaged_plan = object()
            live.sparse_prefill_cache = kept = [object()]
            live.indexer_metadata.nonpaged_plan = kept
            captured.refresh_for_breakable_cuda_graph_replay_(live)
            assert captured.sparse_prefill_cache is None
            assert captured.indexer_metadata.nonpaged_plan is None
            assert live.sparse_prefill_cache is live.indexer_metadata.nonpaged_plan is kept

    def test_scheduler_objects_are_those_of_the_step(self, device):
        captured, live = (made(works, device) for works in WORKS[:2])
        for md in (captured, live):
            for name in SCHEDULERS:
                setattr(md.core_attn_metadata, name, object())
        captured.refresh_for_breakable_cuda_graph_replay_(live)
        for name in SCHEDULERS:
            assert getattr(captured.core_attn_metadata, name) is getattr(
                live.core_attn_metadata, name
            )
        live.core_attn_metadata.c4_flashmla_metadata = None
        with pytest.raises(BindingError, match="c4_flashmla_metadata cannot be refreshed"):
            captured.refresh_for_breakable_cuda_graph_replay_(live)

    @pytest.mark.parametrize(
        ("layout", "rows", "says"),
        [
            (dataclasses.replace(LAYOUT, index_topk=64), ROWS, "index_topk is declared equal"),
            (dataclasses.replace(LAYOUT, context=96), ROWS, "page_table"),
            (LAYOUT, ROWS + 1, "raw_out_loc cannot be refreshed"),
            (LAYOUT, 1, "raw_out_loc cannot be refreshed"),  # which would be broadcast
            (ONLINE, ROWS, "DSV4Metadata cannot be refreshed"),
        ],
        ids=["topk", "width", "rows", "one row", "online"],
    )
    def test_another_engine_is_refused_and_nothing_changes(self, device, layout, rows, says):
        captured = made(WORKS[0], device)
        before = {k: v.clone() for k, v in held(captured).items()}
        objects = held(captured)
        with pytest.raises(BindingError, match=says):
            captured.refresh_for_breakable_cuda_graph_replay_(
                made([Work(2, 3, 1)], device, layout, rows=rows)
            )
        for name, x in held(captured).items():
            assert x is objects[name]
            assert torch.equal(x, before[name])

    def test_maybe_copy_inplace(self, device):
        captured, live = (made(works, device) for works in WORKS[:2])
        plan, plan_c = captured.c4_compress_metadata, captured.c4_compress_metadata.plan_c
        maybe_copy_inplace(plan, src=live.c4_compress_metadata)
        assert plan.plan_c is plan_c
        assert torch.equal(plan_c, live.c4_compress_metadata.plan_c)
        maybe_copy_inplace(None, src=None)
        x = torch.zeros(3, device=device)
        maybe_copy_inplace(x, src=torch.ones(3, device=device))
        assert x.eq(1).all()
        for dst, src in (
            (plan, None),
            (None, plan),
            (plan, live.core_attn_metadata),
            (plan, captured.c128_compress_metadata),
            (x, torch.ones(1, device=device)),
            (x, torch.ones(3, device=device).int()),
        ):
            with pytest.raises(BindingError):
                maybe_copy_inplace(dst, src=src)

    # online compression

    def test_online_compress_replaces_the_plan_whole(self, device):
        captured, *lives = all_made(device, ONLINE)
        assert type(captured) is OnlineDSV4Metadata
        before = held(captured)
        for live in lives:
            plan = live.c128_compress_metadata  # made on the host: of another size at each step
            live.c128_compress_metadata = dataclasses.replace(
                plan, plan_c=plan.plan_c[: live.num_token_non_padded]
            )
            captured.refresh_for_breakable_cuda_graph_replay_(live)
            assert captured.c128_compress_metadata is live.c128_compress_metadata
            assert captured.c4_compress_metadata is not live.c4_compress_metadata
            for name in ("plan_c", "plan_w"):
                x = getattr(captured.c4_compress_metadata, name)
                assert x is before[f"c4_compress_metadata.{name}"]
                assert torch.equal(x, getattr(live.c4_compress_metadata, name))
            assert captured.core_attn_metadata.raw_out_loc is before["raw_out_loc"]

    def test_online_compress_in_a_graph(self, device):
        twins = Twins(device, forward)
        lives = all_made(device, ONLINE)
        for live in lives[:2]:
            twins(live)
        assert twins.kinds()["c128_compress_metadata.plan_c"] == "REBIND"
        captured = twins.captured(lives[1])
        with counted() as counts:
            for live in lives:
                captured.refresh_for_breakable_cuda_graph_replay_(live)
                twins(captured, live)
        assert (counts.captures, counts.replays) == (0, len(lives))

    def test_online_compress_refuses_a_segment_that_reads_the_plan(self, device):
        with pytest.raises(BackendCompilerFailed, match=r"plan_w is declared REBIND"):
            Twins(device, with_both_plans)(made(WORKS[0], device, ONLINE))

    # a graph that reads what #25195's does

    def test_any_batch_after_any_other(self, device):
        """Long prefixes after short ones, more and fewer requests and tokens: one recording."""
        twins = Twins(device)
        lives = all_made(device)
        for live in lives[:2]:
            twins(live)
        captured = twins.captured(lives[1])
        before = held(captured)
        with counted() as counts:
            for live in [*lives, *reversed(lives), lives[4], lives[3], lives[4]]:
                captured.refresh_for_breakable_cuda_graph_replay_(live)
                assert_refreshed(captured, before, live)
                twins(captured, live)
        assert counts.probes == counts.captures == 0
        assert counts.replays == 2 * len(lives) + 3

    def test_the_lists_are_those_that_graphs_need(self, device):
        """Derived: read by segments is copied, written is written, and nothing of the rest."""
        with undeclared():
            twins = Twins(device)
            for live in all_made(device)[:2]:
                twins(live)
            derived = twins.kinds()
        declared = {}
        for part in PARTS:
            cls = type(getattr(made([], device), part))
            declared |= {f"{part}.{n}": k for n, k in REGISTERED[cls].declared.items()}
        tensors = [k for k, kind in derived.items() if kind in ("COPY", "WRITTEN")]
        copied = {k for k in tensors if derived[k] == "COPY"}
        assert copied <= {k for k, kind in declared.items() if kind == "COPY"}
        assert {k for k in tensors if derived[k] == "WRITTEN"} == {
            k for k, kind in declared.items() if kind == "WRITTEN"
        }
        core = {k.removeprefix("core_attn_metadata.") for k in copied if k.startswith("core")}
        # As section 5 of the field's notes has it: the others are copied to be safe.
        assert core == {"positions_casual", "c4_out_loc", "c128_out_loc", "swa_out_cache_loc"}

    @pytest.mark.parametrize("name", REBOUND)
    def test_a_segment_that_reads_what_is_rebound_is_refused(self, device, name):
        def fn(x, pool):
            core = torch_bcg.current_metadata(DSV4Metadata).core_attn_metadata
            return forward(x * getattr(core, name).view(ROWS, -1).sum(1), pool)

        with pytest.raises(BackendCompilerFailed, match=f"{name} is declared REBIND"):
            Twins(device, fn)(made(WORKS[0], device))

    def test_in_place_is_what_refresh_does(self, device):
        """Built straight into the captured object, a step is the same one."""
        twins = Twins(device)
        for works in WORKS[:2]:
            twins(made(works, device))
        captured = twins.captured(made(WORKS[1], device))
        addresses = {k: v.data_ptr() for k, v in held(captured).items()}
        with counted() as counts:
            for seed, works in enumerate(WORKS):
                batch = batch_of(LAYOUT, works, seed, device)
                DSV4Metadata.create(batch, LAYOUT, ROWS, captured)
                twins(captured, DSV4Metadata.create(batch, LAYOUT, ROWS))
        assert (counts.captures, counts.replays) == (0, len(WORKS))
        assert {k: v.data_ptr() for k, v in held(captured).items()} == addresses
