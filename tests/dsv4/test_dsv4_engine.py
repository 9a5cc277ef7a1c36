"""Engines: several over one model, and what stays between their steps."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

import torch_bcg
from dsv4 import hf_models
from torch_bcg.compiled import live_graphs
from torch_bcg.dsv4 import DSV4Config, Engine, random_model, run_requests
from torch_bcg.dsv4.requests import Request, Scheduler, inputs
from torch_bcg.errors import BCGError, BindingError, OptionError
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
    assert_reads_what_is_kept(replayed.engine, 12)
    assert counts.replays == 1


def assert_reads_what_is_kept(engine, rows):
    """The program that ran last does, of this number of rows."""
    program = torch_bcg.programs(engine.compiled)[0]
    slots = {program._program.slot(f.argument).data_ptr() for f in copied_fields(program)}
    assert slots <= {t.data_ptr() for t in tensors(engine.kept[rows])}


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


def test_one_mode_of_autograd_after_another(device, model):
    """What was made in inference mode may not be written outside of it; each has its program."""
    with torch.inference_mode():
        sides = pair(model.to(device), (60, 60))
    for mode in (torch.inference_mode, torch.no_grad) * 2:
        with mode():
            same(sides, 12)
            with counted() as counts:
                same(sides, 12)
        assert counts.replays == 1
        assert_reads_what_is_kept(sides[1].engine, 12)


def test_within_autocast(device, model):
    """A step computes in the dtype of the model, whatever is around it."""
    sides = pair(model.to(device), (40, 31))
    want = [sides[0].step(most) for most in (12, 4, 12)]
    for most, logits in zip((12, 4, 12), want, strict=True):
        with torch.autocast(device, dtype=torch.bfloat16):
            torch.testing.assert_close(sides[1].step(most), logits, rtol=0, atol=1e-4)
    prompts = hf_models.prompts((9, 20))
    want = run_requests(model, prompts, chunk_size=7)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run_requests(model, prompts, chunk_size=7)
    for mine, logits in zip(got, want, strict=True):
        torch.testing.assert_close(mine, logits, rtol=0, atol=1e-4)


def refuse(*args):
    raise AssertionError("the compiled function is called")


@pytest.fixture
def known(device, model):
    """Two sides whose program of 12 rows has been replayed past Dynamo."""
    sides = pair(copy.deepcopy(model).to(device), (40, 60))
    for _ in range(2):
        same(sides, 12)
    engine = sides[1].engine
    compiled, engine.compiled = engine.compiled, refuse
    with counted() as counts:
        same(sides, 12)
    assert (counts.replays, counts.eager_calls) == (1, {})
    engine.compiled = compiled
    return sides


def negated(x):
    return torch.nn.Parameter(-x.detach())


def replace_a_weight(model):
    model.layers[1].attention.q_a.weight = negated(model.layers[1].attention.q_a.weight)


def replace_behind_the_module(model):
    held = model.layers[0].attention_mix._parameters
    name = next(iter(held))
    held[name] = negated(held[name])


def replace_a_module(model):
    model.norm = copy.deepcopy(model.norm)
    model.norm.weight.data.mul_(-2)


def move_a_weight(model):
    model.layers[1].attention.o_b.weight.data = -model.layers[1].attention.o_b.weight.data


def write_a_weight(model):
    model.embedding.weight.data.mul_(-1)


def load_a_state(model):
    state = {n: -x if x.is_floating_point() else x for n, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def set_a_number(model):
    model.layers[0].experts_norm.eps = 3.0


def add_a_bias(model):
    weight = model.layers[1].attention.o_b.weight
    model.layers[1].attention.o_b.bias = torch.nn.Parameter(torch.ones_like(weight[:, 0]))


def set_the_configuration(model):
    attention = model.layers[0].attention
    attention.config = dataclasses.replace(attention.config, rms_norm_eps=0.5)


def away_and_back(model):
    device = model.embedding.weight.device
    model.double().to("cpu").to(device).float()


@pytest.mark.parametrize(
    "change",
    [
        replace_a_weight, replace_behind_the_module, replace_a_module, move_a_weight,
        write_a_weight, load_a_state, set_a_number, add_a_bias, set_the_configuration,
        away_and_back,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Static tensors moved")
def test_weights_between_steps(known, change):
    """Both sides are engines of one model, which is what it is in every step."""
    assert known[0].engine.model is known[1].engine.model
    change(known[0].engine.model)
    for _ in range(4):
        same(known, 12)
    if change not in (
        load_a_state,
        set_a_number,
        set_the_configuration,
    ):  # from now on Dynamo fetches these numbers
        known[1].engine.compiled = refuse
        same(known, 12)


def test_settings_of_torch_between_steps(known):
    """Dynamo makes another graph, and its program is the one from then on."""
    engine = known[1].engine
    first = engine.programs[12]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for _ in range(3):
            same(known, 12)
        assert engine.programs[12] != first
    finally:
        torch.set_float32_matmul_precision(before)
    for _ in range(3):
        same(known, 12)
    assert engine.programs[12] == first


def test_a_mark_between_steps(known):
    engine = known[1].engine
    mark = torch_bcg.eager_on_graph(torch.nn.functional.rms_norm)
    try:
        for _ in range(3):
            same(known, 12)
        assert "rms_norm" in {r.detail for r in engine.programs[12].plan.reasons}
    finally:
        mark.remove()
    for _ in range(3):
        same(known, 12)


def test_a_program_that_is_freed_between_steps(known):
    torch_bcg.reset(known[1].engine.compiled)
    for _ in range(3):
        same(known, 12)
    known[1].engine.close()
    assert not known[1].engine.programs
    for _ in range(3):
        same(known, 12)


def test_weights_that_were_replaced_are_freed(known):
    """At the next step, whatever its size: those of other sizes hold nothing back."""
    eager, replayed = known
    for most in (4, 12, 4, 12):
        same(known, most)
    assert sorted(replayed.engine.programs) == [4, 12]
    model = eager.engine.model
    old = [weakref.ref(x) for x in model.parameters()]
    for module in model.modules():
        for name, x in [*module.named_parameters(recurse=False)]:
            setattr(module, name, negated(x))
    del x, module
    for _ in range(2):
        same(known, 12)
    gc.collect()
    assert [ref for ref in old if ref() is not None] == []


def test_metadata_of_somebody_else(known):
    """The fields of a call are those it brings, wherever they lie."""
    replayed = known[1]
    md = replayed.engine.kept[12]
    ids = torch.randint(97, (12,), device=md.core_attn_metadata.positions_casual.device)
    for _ in range(3):
        with torch.no_grad():
            own = copy.deepcopy(md)
            memory = [x.clone() for x in replayed.engine.pools.buffers()]
            got = replayed.engine.forward(ids, own)
            for x, before in zip(replayed.engine.pools.buffers(), memory, strict=True):
                x.copy_(before)
            assert torch.equal(replayed.engine.forward(ids, md), got)
        ids = ids.roll(1)


SMALL = {"branches": ("c4",), "hc_mult": 1, "hc_sinkhorn_iters": 1}


def test_an_engine_that_is_dropped(device):
    """Nothing of it stays, and a model with other numbers can be run at once."""
    of_others = {g.number for g in live_graphs()}

    def left():
        return {g.number for g in live_graphs()} - of_others

    model = random_model(DSV4Config.tiny(1, **SMALL), device, torch.float32)
    other = random_model(DSV4Config.tiny(1, **SMALL, index_topk=3), device, torch.float32)
    side = Side(model, (20, 9), "bcg", OPTIONS)
    side.step(12)
    assert torch_bcg.programs(side.engine.compiled)
    assert torch_bcg.explain(side.engine.compiled).plans
    assert left()
    with pytest.raises(BindingError, match="index_topk"):
        Side(other, (20, 9), "bcg", OPTIONS).step(12)
    del side
    gc.collect()  # what the error held
    assert not left()
    prompts = hf_models.prompts((9,))
    (got,) = run_requests(other, prompts, chunk_size=9, backend="bcg")
    assert not left()
    (want,) = run_requests(other, prompts, chunk_size=9)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("field", ["window", "index_topk", "c4_ratio", "c128_ratio"])
def test_a_layout_of_another_model(model, field):
    layout = model.config.layout(256, 2)
    other = dataclasses.replace(layout, **{field: getattr(layout, field) // 2})
    with pytest.raises(BCGError, match=f"not one of the model: {field}") as e:
        Engine(model, other)
    assert e.value.expected.startswith(str(getattr(layout, field)))


def test_larger_buckets_than_a_step(model):
    with pytest.raises(ValueError, match="buckets has 65537; expected sizes up to 65536"):
        Engine(model, model.config.layout(256, 2), "bcg", {"buckets": [4, 65_537]})


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


@pytest.mark.parametrize("backend", [None, "bcg"])
@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_tokens_than_the_batch_has(model, backend, change):
    """One less would store padding for a token that is there."""
    layout = model.config.layout(256, 2)
    engine = Engine(model, layout, backend)
    ids, batch = inputs(
        Scheduler([Request([1] * 9, 9)], layout).step(engine.pools, 3), engine.pools
    )
    for given in (ids.new_ones(3 + change), ids.new_ones(3, 1)):
        with pytest.raises(ValueError, match=r"expected \[3\]"):
            engine.step(given, batch)


@pytest.mark.parametrize("other", [("c128", "c4"), ("c4",), ("c128", "swa", "c4", "c128")])
def test_engines_whose_branches_come_in_another_order(device, model, other):
    """Both have one ratio of each branch, each at its own place in the metadata."""
    config = DSV4Config.tiny(len(other), branches=other, hc_sinkhorn_iters=1)
    second = random_model(config, device, torch.float32)
    sides, others = pair(model.to(device), (40, 31)), pair(second, (40, 31))
    for most in (12, 4, 12):
        same(sides, most)
        same(others, most)


def test_requests_of_another_scheduler(model):
    """Pages and slots are given by one; one request has one place in it."""
    layout = model.config.layout(256, 2)
    pools = Engine(model, layout).pools
    requests = [Request([1] * 9, 9), Request([2] * 9, 9)]
    first, other = Scheduler(requests, layout), Scheduler(requests, layout)
    first.step(pools, 4)
    with pytest.raises(ValueError, match="Make a new Request of its ids"):
        other.step(pools, 4)
    with pytest.raises(ValueError, match="has slot 2 and 1 pages"):
        Scheduler(requests, layout)
    while first.step(pools, 4):
        pass
    with pytest.raises(ValueError, match="has slot 2 and 1 pages"):
        Scheduler(requests, layout)
    twice = Scheduler([Request([1] * 9, 9)] * 2, layout)
    with pytest.raises(ValueError, match="Make a new Request of its ids"):
        twice.step(pools, 4)


def test_a_layout_for_nobody(model):
    with pytest.raises(ValueError, match="requests 0; expected 1 or more"):
        model.config.layout(256, 0)
