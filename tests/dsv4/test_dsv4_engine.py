"""Engines: several over one model, and what stays between their steps."""

import pytest
import torch

import torch_bcg
from dsv4 import hf_models
from torch_bcg.dsv4 import DSV4Config, Engine, random_model
from torch_bcg.dsv4.requests import Request, Scheduler, inputs
from torch_bcg.errors import OptionError
from twin import counted

OPTIONS = {"buckets": [4, 12], "on_eager_call": "error"}


@pytest.fixture(scope="module")
def model():
    config = DSV4Config.tiny(2, branches=("c4", "c128"), hc_sinkhorn_iters=1)
    return random_model(config, "cpu", torch.float32)


class Side:
    """An engine with requests of its own."""

    def __init__(self, model, lengths, *backend):
        layout = model.config.layout(max(lengths), 2)
        self.engine = Engine(model, layout, *backend)
        requests = [Request(ids, len(ids) - 3) for ids in hf_models.prompts(lengths)]
        self.scheduler = Scheduler(requests, layout)

    def step(self, most):
        with torch.no_grad():
            works = self.scheduler.step(self.engine.pools, most)
            return self.engine.model.logits(self.engine.step(*inputs(works, self.engine.pools)))


def pair(model, lengths, **more):
    return Side(model, lengths), Side(model, lengths, "bcg", OPTIONS | more)


def same(sides, most):
    eager, replayed = sides
    torch.testing.assert_close(replayed.step(most), eager.step(most), rtol=0, atol=1e-4)


def test_two_engines_of_one_model_in_turn(device, model):
    """Each has programs and pools of its own, and neither moves what the other has."""
    model = model.to(device)
    first, second = pair(model, (40, 31)), pair(model, (25, 50))
    for most in (9, 4, 3, 12):
        same(first, most)
        same(second, most)
    kept = [side.engine.kept for _, side in (first, second)]
    assert [sorted(k) for k in kept] == [[4, 12], [4, 12]]
    second[1].engine.close()
    with counted() as counts:
        for most in (9, 4, 3):
            same(first, most)
    assert not counts.eager_calls


def test_what_is_kept_is_what_the_program_reads(device, model):
    """Nothing of the metadata is copied any more once a size is recorded."""
    eager, replayed = pair(model.to(device), (40, 31))
    for _ in range(3):
        same((eager, replayed), 12)
    with counted() as counts:
        same((eager, replayed), 12)
    (program,) = torch_bcg.programs(replayed.engine.compiled)
    metadata = replayed.engine.kept[12]
    slots = {program._program.slot(f.argument).data_ptr() for f in copied_fields(program)}
    held = {t.data_ptr() for t in tensors(metadata)}
    assert slots <= held
    assert counts.replays == 1


def copied_fields(program):
    binding = next(b for b in program.plan.bindings if b.cls.endswith(".DSV4Metadata"))
    homes = {v.name: v.home for v in program.plan.values}
    return [f for f in binding.fields if homes.get(f.argument) == "slot"]


def tensors(md):
    for part in vars(md).values():
        if hasattr(part, "__dataclass_fields__"):
            yield from (t for t in vars(part).values() if isinstance(t, torch.Tensor))


def test_what_was_never_written_is_never_read(device, model):
    """Pools full of NaN, the reserved rows as well: no logit has any of it."""
    eager, replayed = pair(model.to(device), (40, 31))
    for layer in replayed.engine.pools.layers:
        for pool in layer.buffers():
            pool.fill_(torch.nan)
    for most in (12, 9, 4, 12, 3, 12):
        same((eager, replayed), most)


def test_after_a_reset(device, model):
    """Programs are gone, what the engine kept of them is not: it records again."""
    sides = pair(model.to(device), (40, 31))
    for most in (12, 4, 12):
        same(sides, most)
    torch_bcg.reset()
    for most in (12, 4, 9, 3):
        same(sides, most)


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_engines_than_dynamo_keeps_graphs_of_one_code(device):
    """Each of another shape, all of them compiled."""
    for i in range(4):
        config = DSV4Config.tiny(
            1,
            branches=("swa",),
            hc_mult=1,
            hc_sinkhorn_iters=1,
            hidden_size=32 + 4 * i,
            window=9 + i,
        )
        model = random_model(config, device, torch.float32)
        sides = pair(model, (20, 9))
        with counted() as counts:
            for most in (12, 12, 4):
                same(sides, most)
        assert counts.replays >= 1
        sides[1].engine.close()


def test_an_engine_without_guards_about_modules(model):
    """What `torch.compile` takes reaches it; what the backend does not know is refused."""
    unguarded = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    sides = pair(model, (20, 9), **unguarded)
    with counted() as counts:
        for most in (12, 12, 4):
            same(sides, most)
    assert counts.replays >= 1
    sides[1].engine.close()
    with pytest.raises(OptionError, match="guard_filter"):
        Engine(model, model.config.layout(256, 2), "bcg", {"guard_filter": None})


@pytest.mark.parametrize(
    ("lengths", "context", "pages", "most", "said"),
    [
        ((300,), 256, None, 8, "request of 300 tokens, a layout of 256 positions"),
        ((200, 200), 256, 1, 256, "no page is free of the 1 that requests can have"),
        ((5,), 256, None, 0, "most is 0; expected 1 or more"),
    ],
)
def test_misuse_of_a_scheduler(model, lengths, context, pages, most, said):
    layout = model.config.layout(context, 2, pages)
    pools = Engine(model, layout).pools
    with pytest.raises(ValueError, match=said):
        Scheduler([Request([1] * n, n) for n in lengths], layout).step(pools, most)


def test_a_layout_for_nobody(model):
    with pytest.raises(ValueError, match="requests 0; expected 1 or more"):
        model.config.layout(256, 0)
