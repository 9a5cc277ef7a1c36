"""What the pass derives of a DeepSeek-V4, beside the lists that engines keep by hand."""

import pytest
import torch
from expecttest import assert_expected_inline

import torch_bcg
from dsv4 import hf_models
from torch_bcg.dsv4 import Engine, convert_from_transformers
from torch_bcg.dsv4.fields import CompressorPrefillPlan, DSV4AttnMetadata, PagedIndexerMetadata
from torch_bcg.dsv4.metadata import DSV4Metadata
from torch_bcg.dsv4.requests import Request, Scheduler, inputs
from torch_bcg.metadata.registration import REGISTERED

CLASSES = (DSV4AttnMetadata, PagedIndexerMetadata, CompressorPrefillPlan, DSV4Metadata)


@pytest.fixture
def declared():
    """The lists as declared; what a test registers instead is gone after it."""
    lists = {cls: dict(REGISTERED[cls].declared) for cls in CLASSES}
    yield lists
    for cls, kinds in lists.items():
        names = {kind: [n for n, k in kinds.items() if k == kind] for kind in set(kinds.values())}
        torch_bcg.register_metadata_binding(cls, **{k.lower(): v for k, v in names.items()})


def binding_of_the_model(device):
    """The binding of the one graph of a model with layers of every kind, after four steps."""
    model = convert_from_transformers(hf_models.model("short windows")).to(device)
    engine = Engine(model, model.config.layout(512, 2), "bcg", {"buckets": [8]})
    prompts = hf_models.prompts((20, 16))
    scheduler = Scheduler([Request(ids, len(ids)) for ids in prompts], engine.layout)
    with torch.no_grad():
        for _ in range(4):
            engine.step(*inputs(scheduler.step(engine.pools, 7), engine.pools))
    (plan,) = torch_bcg.explain(engine.compiled).plans
    assert [str(r.kind) for r in plan.reasons] == ["mark"] * 3
    return next(b for b in plan.bindings if b.cls.endswith(".DSV4Metadata"))


def test_derived_and_declared(device, declared):
    """Nothing is declared here. Of the lists of SGLang #25195 none is unsafe, and some copy more."""
    for cls in CLASSES:
        torch_bcg.register_metadata_binding(cls)
    fields = {f.name: f for f in binding_of_the_model(device).fields}
    lists = {}
    for prefix, cls in (
        ("core_attn_metadata.", DSV4AttnMetadata),
        ("indexer_metadata.", PagedIndexerMetadata),
        ("c4_compress_metadata.", CompressorPrefillPlan),
        ("c128_compress_metadata.", CompressorPrefillPlan),
        ("", DSV4Metadata),
    ):
        lists |= {prefix + name: kind for name, kind in declared[cls].items()}

    def named(kinds, kind):
        return {name for name in kinds if kinds[name] == kind}

    derived = {name: f.kind for name, f in fields.items()}
    assert named(derived, "COPY") <= named(lists, "COPY")
    assert named(derived, "WRITTEN") == named(lists, "WRITTEN")
    read = {name for name, f in fields.items() if f.why.startswith("segment")}
    assert not named(lists, "REBIND") & read
    text = "\n".join(
        f"{name.replace('_metadata', ''):40} {derived[name]:8} {lists.get(name, '-'):8} "
        f"{'unread' if not f.why else ''}".rstrip()
        for name, f in fields.items()
    )
    assert_expected_inline(
        text,
        """\
core_attn.page_size                      FOLLOWS  EQUAL    unread
core_attn.index_topk                     FOLLOWS  EQUAL
core_attn.raw_out_loc                    REBIND   COPY     unread
core_attn.seq_lens_casual                REBIND   COPY     unread
core_attn.positions_casual               COPY     COPY
core_attn.page_table                     REBIND   REBIND   unread
core_attn.swa_page_indices               REBIND   REBIND
core_attn.swa_topk_lengths               REBIND   REBIND
core_attn.c4_out_loc                     COPY     COPY
core_attn.c4_topk_lengths_raw            REBIND   COPY     unread
core_attn.c4_topk_lengths_clamp1         REBIND   COPY     unread
core_attn.c4_sparse_topk_lengths         REBIND   COPY
core_attn.c4_sparse_page_indices         WRITTEN  WRITTEN
core_attn.c4_sparse_raw_indices          WRITTEN  WRITTEN
core_attn.c128_out_loc                   COPY     COPY
core_attn.c128_topk_lengths_clamp1       REBIND   REBIND
core_attn.c128_page_indices              REBIND   REBIND
core_attn.swa_out_cache_loc              COPY     COPY
core_attn.c1_flashmla                    REBIND   REBIND   unread
core_attn.c4_flashmla                    REBIND   REBIND   unread
core_attn.c128_flashmla                  REBIND   REBIND   unread
indexer.page_size                        FOLLOWS  EQUAL    unread
indexer.compressed_page_size             FOLLOWS  EQUAL
indexer.compress_ratio                   FOLLOWS  EQUAL    unread
indexer.use_prefill_cuda_graph           FOLLOWS  EQUAL    unread
indexer.page_table                       COPY     COPY
indexer.compressed_seq_lens              COPY     COPY
indexer.deep_gemm                        REBIND   COPY     unread
indexer.topk                             REBIND   COPY     unread
indexer.nonpaged_plan                    REBIND   REBIND   unread
c4_compress.compress_ratio               FOLLOWS  EQUAL    unread
c4_compress.plan_c                       COPY     COPY
c4_compress.plan_w                       COPY     COPY
c128_compress.compress_ratio             FOLLOWS  EQUAL    unread
c128_compress.plan_c                     COPY     COPY
c128_compress.plan_w                     COPY     COPY
sparse_prefill_cache                     REBIND   REBIND   unread
num_token_non_padded                     FOLLOWS  -""",
    )


def test_kinds_as_declared(device):
    """With the lists the binding is that of #25195; what only moves more is left as declared."""
    kinds = {f.name: f.kind for f in binding_of_the_model(device).fields}
    for name in ("raw_out_loc", "seq_lens_casual", "c4_topk_lengths_clamp1"):
        assert kinds[f"core_attn_metadata.{name}"] == "COPY"
    assert kinds["core_attn_metadata.page_table"] == "REBIND"


def test_a_list_that_would_be_silently_wrong(device, declared):
    kinds = declared[DSV4AttnMetadata]
    names = {k: [n for n in kinds if kinds[n] == k] for k in ("EQUAL", "COPY", "WRITTEN")}
    names["COPY"].remove("c4_out_loc")
    rebound = [n for n in kinds if kinds[n] == "REBIND"]
    torch_bcg.register_metadata_binding(
        DSV4AttnMetadata,
        rebind=[*rebound, "c4_out_loc"],
        **{k.lower(): v for k, v in names.items()},
    )
    with pytest.raises(Exception, match=r"c4_out_loc is declared REBIND, which would be wrong"):
        binding_of_the_model(device)
