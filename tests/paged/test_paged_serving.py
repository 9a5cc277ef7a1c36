"""A paged Llama, served step by step: every step gives what eager gives, and nearly all replay."""

import pytest
import torch
import torch.nn.functional as F

import torch_bcg
from paged.paged_model import Llama, Sizes
from paged.paged_requests import Scheduler
from paged.paged_serving import LADDER, by_calls, by_engine, registered

STEPS = 200
WAYS = {"by calls": by_calls, "by engine": by_engine}


def dense(model, ids, window):
    """Logits of one request without pages: int64 [T] -> float32 [T, vocabulary]."""
    at = torch.arange(len(ids), device=ids.device)
    back = at[:, None] - at
    seen = (back >= 0) & (back < window)
    x = F.embedding(ids, model.embedding)
    for layer in model.layers:
        q, k, v = (t.transpose(0, 1) for t in layer.attention.projected(layer.norms[0](x), at))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        x = x + layer.attention.out(mixed.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.norms[1](x))
    return model.head(model.norm(x))


def test_eager_steps_give_what_whole_requests_give(device):
    """What everything else is compared with: pages and steps change nobody's logits."""
    model, source = Llama(Sizes()).to(device), Scheduler(0, Sizes(), device)
    served = {}
    with registered(), torch.no_grad():
        for _ in range(STEPS):
            step = source.step()
            with torch_bcg.bind_metadata(step.paged):
                logits = model(step.input_ids) / step.paged.sharpness
            lengths = [w.end - w.start for w in step.works]
            for work, rows in zip(step.works, logits.split(lengths), strict=True):
                served.setdefault(id(work.request), (work.request, []))[1].append(rows)
        for request, rows in served.values():
            ids = torch.tensor(request.ids[: request.done], device=device)
            torch.testing.assert_close(torch.cat(rows), dense(model, ids, request.window))


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_that_of_eager(device, way):
    kinds, counts, compiled = WAYS[way](device, STEPS)
    assert set(kinds) == {"prefill", "chunked", "mixed", "decode"}
    assert min(kinds.values()) >= 5
    # Neither an eager call, nor one that never came here.
    assert counts.probes + counts.warming + counts.replays == STEPS
    assert counts.replays >= STEPS - 2 * len(LADDER)
    # One graph; a step of one token has its own, since Dynamo does not vary a size of 1.
    sizes = [tuple(p.sizes.values()) for p in torch_bcg.programs(compiled)]
    expected = {(n,) for n in LADDER} | ({()} if way == "by calls" else set())
    assert len(sizes) == len(expected)
    assert set(sizes) == expected


def test_an_engine_captures_before_and_never_again(device):
    _, counts, _ = by_engine(device, 20)
    assert (counts.captures, counts.replays, counts.pad_rows) == (0, 20, 0)


def test_kinds_are_derived(device):
    compiled = by_calls(device, 10).compiled
    plan = torch_bcg.explain(compiled).plans[0]
    (binding,) = plan.bindings
    assert {f.name: f.kind for f in binding.fields} == {
        "core.slots": "COPY",
        "core.positions": "COPY",
        "query_positions": "REBIND",
        "page_table": "COPY",
        "block_counts": "REBIND",
        "seq_lens": "REBIND",
        "query_starts": "REBIND",
        "window": "REBIND",
        "page_size": "EQUAL",
        "decodes": "FOLLOWS",
        "sharpness": "FOLLOWS",
    }
    assert [f.name for f in binding.fields if f.declared] == ["page_table", "page_size"]
    assert plan.padding.refused is None
