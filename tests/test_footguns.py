"""Every behaviour that surprises, one test a row: it shows what happens, and what to do instead.

SILENT: another result than eager's, or eager speed, and not a word. WARNED, RAISED: it is said.

| what                                                             |              | test                          |
|------------------------------------------------------------------|--------------|-------------------------------|
| a marked function keeps a tensor: the next replay overwrites it  | SILENT       | test_kept_argument            |
| a marked function writes, past its arguments, a caller's tensor  | SILENT       | test_ambient_write            |
|   that recorded code reads too                                   |              |                               |
| a marked function writes an argument not in mutates_args         | SILENT       | test_undeclared_write         |
| Python inside a recorded custom operator: runs never again on a  | SILENT       | test_python_in_an_operator    |
|   GPU, at each replay on the host                                |              |                               |
| an operator reads the host for some values only                  | RAISED (CPU) | test_rare_host_read           |
|                                                                  | SILENT (GPU) |                               |
| outputs="alias": an output after the next call                   | SILENT (CPU) | test_alias_outputs            |
|                                                                  | RAISED (GPU) |                               |
| more shapes than recompile_limit: Dynamo runs the code as it is  | SILENT       | test_recompile_limit          |
| a new shape is not replayed before its third call                | SILENT       | test_new_shapes               |
| the fake of a marked function does not see autocast              | RAISED       | test_fake_under_autocast      |
| the fake gives another shape than the function                   | RAISED       | test_wrong_fake               |
| a mark that meets nothing in a graph                             | SILENT       | test_mark_that_meets_nothing  |
| torch.utils.swap_tensors of a recorded parameter                 | RAISED       | test_swapped_parameter        |
| a parameter is replaced: recorded again                          | WARNED       | test_replaced_parameter       |
| gradients are needed: nothing is recorded                        | WARNED       | test_gradients                |
| more shapes than max_programs: eager calls                       | WARNED       | test_max_programs             |
| instances share the weights of their first segment: called in    | SILENT       | test_shared_first_weights     |
|   turn they launch it twice a call                               |              |                               |
| a program called directly: hooks and code of the module are those| SILENT       | test_program_called_directly  |
|   of its recording                                               |              |                               |
| arguments overlap and one is written: eager calls                | WARNED       | test_overlapping_arguments    |
| a marked function calls the compiled function: that call is eager| WARNED       | test_re_entry                 |
| mode=                                                            | RAISED       | test_mode                     |
| padded: an index past the rows of the call finds padding, where  | SILENT       | test_index_into_padding       |
|   eager raises; check="poison" does                              |              |                               |
| padded: a negative index in a tensor counts from the end of the  | SILENT       | test_negative_index           |
|   padded rows; check="poison" raises                             |              |                               |
| padded: an operator that nobody knows is tried with the numbers  | SILENT       | test_turned_off_in_a_trial    |
|   of a few calls; what `where` turns off there joins rows later; |              |                               |
|   check="poison" raises                                          |              |                               |
| padded: positions that grow from call to call leave a table with | RAISED       | test_growing_positions        |
|   their padded rows before its end is reached                    |              |                               |
| padded: the place declared with pad= holds what was written      | SILENT       | test_reserved_place           |
| padded: two sizes vary: exact shapes                             | SILENT       | test_two_sizes                |
| padded: the first program takes slots for the largest size       | SILENT       | test_slots_of_the_largest_size |
| metadata: a class registered after what reads it was compiled is | SILENT       | test_registered_too_late      |
|   derived, compared and refused nothing of                       |              |                               |
| metadata: an argument that was read from the bound object        | RAISED       | test_argument_from_metadata   |
"""

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import torch_bcg
from torch_bcg.errors import BCGWarning, CheckError, HostReadError, OutputError
from twin import assert_same, counted, plus_one


def rows(device, *shape):
    return torch.randn(*(shape or (4, 6)), device=device)


def calls(compiled, device, times):
    """Results of some calls under inference mode, each on new rows."""
    with torch.inference_mode():
        return [compiled(rows(device)) for _ in range(times)]


def test_kept_argument(device):
    kept, cloned = [], []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        cloned.append(x.clone())  # the remedy
        return x + 1

    compiled = torch.compile(lambda x: keep(x * 2) + 1, backend="bcg")
    calls(compiled, device, 4)
    assert_same(kept[2], kept[3])
    assert not torch.equal(cloned[2], cloned[3])


@pytest.mark.parametrize("static", [False, True])
def test_ambient_write(device, static):
    cache = torch.zeros(4, 6, device=device)
    if static:
        torch._dynamo.mark_static_address(cache)  # the remedy; so is passing it as an argument

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def write_cache(x: Tensor) -> Tensor:
        cache.add_(10)
        return x + 1

    def fn(x, cache):
        cache.add_(1)
        y = write_cache(x * 2)
        cache.add_(1)
        return y + cache

    compiled = torch.compile(fn, backend="bcg")
    with torch.inference_mode(), counted() as counts:
        for _ in range(4):
            cache.zero_()
            x = rows(device)
            got = compiled(x, cache)
    assert counts.replays == 3
    # Recorded code works on a copy, which is copied back over what the function wrote.
    end = 12.0 if static else 2.0
    assert_same(cache, torch.full_like(cache, end))
    assert_same(got, x * 2 + 1 + end)


def test_undeclared_write(device):
    def write(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    liar = torch_bcg.eager_on_graph(write, fake=torch.empty_like, name="footguns::liar")
    compiled = torch.compile(lambda x, y: liar(x) + x * y, backend="bcg")
    with torch.inference_mode(), counted() as counts:
        for _ in range(4):
            got, y = torch.zeros(4, 6, device=device), rows(device)
            compiled(got, y)
    assert counts.replays == 3
    assert got.sum() == 0  # eager: 24

    honest = torch_bcg.eager_on_graph(
        write, fake=torch.empty_like, mutates_args=("x",), name="footguns::honest"
    )
    compiled = torch.compile(lambda x, y: honest(x) + x * y, backend="bcg")
    with torch.inference_mode():
        for _ in range(4):
            got, y = torch.zeros(4, 6, device=device), rows(device)
            compiled(got, y)
    assert got.sum() == 24


@pytest.fixture
def times_setting():
    """An operator nobody marked, whose Python reads a setting and counts its calls."""
    state = {"setting": 2.0, "runs": 0, "reads": False}

    def times(x):
        state["runs"] += 1
        if state["reads"]:
            x.sum().item()
        return x * state["setting"]

    with torch.library._scoped_library("footguns_operators", "FRAGMENT") as library:
        library.define("times_setting(Tensor x) -> Tensor")
        library.impl("times_setting", times, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "footguns_operators::times_setting", torch.empty_like, lib=library
        )
        yield torch.ops.footguns_operators.times_setting, state


def test_python_in_an_operator(device, times_setting):
    operator, state = times_setting
    compiled = torch.compile(lambda x: operator(x + 1) - 1, backend="bcg")
    calls(compiled, device, 2)
    state.update(setting=3.0, runs=0)
    with torch.inference_mode(), counted() as counts:
        x = torch.zeros(4, 6, device=device)
        got = compiled(x)
    assert counts.replays == 1
    frozen = device == "cuda"
    assert state["runs"] == (0 if frozen else 1)
    assert_same(got, torch.full_like(x, 1.0 if frozen else 2.0))

    handle = torch_bcg.eager_on_graph(operator)  # the remedy, on both
    with torch.inference_mode():
        got = [compiled(x) for _ in range(3)][-1]
    handle.remove()
    assert_same(got, torch.full_like(x, 2.0))


def test_rare_host_read(device, times_setting):
    operator, state = times_setting
    compiled = torch.compile(lambda x: operator(x + 1) - 1, backend="bcg")
    calls(compiled, device, 2)
    state["reads"] = True
    if device == "cuda":
        with counted() as counts:
            calls(compiled, device, 1)
        assert counts.replays == 1
    else:
        with pytest.raises(HostReadError, match="item"):
            calls(compiled, device, 1)


def test_alias_outputs(device):
    options = {"outputs": "alias"}
    compiled = torch.compile(lambda x: plus_one(x) * 2, backend="bcg", options=options)
    first, second, third = calls(compiled, device, 3)
    if device == "cuda":
        with pytest.raises(RuntimeError, match="replay"):
            second + 1
    else:
        assert_same(second, third)  # overwritten
    assert not torch.equal(first, third)  # the probe's result is the caller's own


def test_recompile_limit(device):
    def fn(x):
        return plus_one(x * 2)

    compiled = torch.compile(fn, backend="bcg", dynamic=False)
    limit = torch._dynamo.config.patch(recompile_limit=2)
    with limit, torch.inference_mode(), counted() as counts:
        for length in (2, 3, 4, 5):
            for _ in range(4):
                x = rows(device, length, 6)
                assert_same(compiled(x), fn(x))
    assert counts.replays == 2 * 3
    assert counts.num_eager == 0  # Dynamo never called the backend, so nothing is counted
    assert counts.probes == 2


def test_new_shapes(device):
    compiled = torch.compile(lambda x: plus_one(x * 2), backend="bcg", dynamic=True)
    with torch.inference_mode():
        compiled(rows(device, 4, 6))
        with counted() as counts:
            for _ in range(3):
                compiled(rows(device, 5, 6))
    assert (counts.warming, counts.replays) == (2, 1)


def test_fake_under_autocast(device):
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    def product_float32(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # the remedy
            return x @ y

    def like(x, y):
        return x.new_empty(x.shape[0], y.shape[1])

    def compiled_with(function):
        marked = torch_bcg.eager_on_graph(function, fake=like)

        def fn(x):
            with torch.autocast(device, dtype=torch.bfloat16):
                return marked(x, x).relu()

        return torch.compile(fn, backend="bcg")

    with torch.inference_mode():
        with pytest.raises(OutputError, match="product"):
            compiled_with(product)(rows(device, 6, 6))
        compiled = compiled_with(product_float32)
        for _ in range(3):
            x = rows(device, 6, 6)
            assert_same(compiled(x), (x @ x).relu())


def test_wrong_fake(device):
    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def first_half(x: Tensor) -> Tensor:
        return x[:2] + 1

    compiled = torch.compile(lambda x: first_half(x * 2) * 2, backend="bcg")
    with torch.inference_mode(), pytest.raises(OutputError, match="first_half"):
        compiled(rows(device))


def test_replaced_parameter(device):
    model = nn.Linear(6, 6, device=device)
    compiled = torch.compile(model, backend="bcg")
    calls(compiled, device, 3)
    model.weight.data = model.weight.data.clone()
    with pytest.warns(BCGWarning, match="weight"):
        calls(compiled, device, 1)
    with torch.inference_mode(), counted() as counts:
        model.weight.copy_(rows(device, 6, 6))  # the remedy: its address stays
        x = rows(device)
        assert_same(compiled(x), model(x))
    assert (counts.replays, counts.captures) == (1, 0)


def test_mark_that_meets_nothing(device):
    compiled = torch.compile(lambda x: x * 2 + 1, backend="bcg", options={"mark": ["aten::mm"]})
    calls(compiled, device, 2)
    explanation = torch_bcg.explain(compiled)  # the remedy
    assert explanation.unmet == ("aten::mm",)
    assert "Marks that met nothing here: aten::mm." in str(explanation)


def test_swapped_parameter(device):
    model = nn.Linear(6, 6, device=device)
    compiled = torch.compile(model, backend="bcg")
    calls(compiled, device, 3)
    new = nn.Parameter(torch.zeros(6, 6, device=device))
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.weight, new)
    torch_bcg.reset(compiled)  # the remedy: nothing watches the parameter any more
    gc.collect()
    torch.utils.swap_tensors(model.weight, new)
    with torch.inference_mode():
        x = rows(device)
        assert_same(compiled(x), model(x))


def test_gradients(device):
    model = nn.Linear(6, 6, device=device)
    compiled = torch.compile(model, backend="bcg")
    with pytest.warns(BCGWarning, match="inference_mode") as caught, counted() as counts:
        for _ in range(3):
            assert compiled(rows(device)).requires_grad
    assert len(caught) == 1
    assert (counts.replays, counts.eager_calls) == (0, {"gradients": 3})


def test_max_programs(device):
    options = {"max_programs": 2}
    compiled = torch.compile(plus_one_twice, backend="bcg", dynamic=True, options=options)
    with torch.inference_mode(), counted() as counts, pytest.warns(BCGWarning, match="max_prog"):
        for length in (3, 4, 5):
            for _ in range(4):
                compiled(rows(device, length, 6))
    assert counts.captures == 2
    assert counts.eager_calls == {"max_programs": 4}


def plus_one_twice(x):
    return plus_one(plus_one(x * 2) * 2)


def test_shared_first_weights(device):
    embedding = nn.Embedding(16, 6, device=device)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = embedding, nn.Linear(6, 6, device=device)

        def forward(self, ids):
            return self.head(plus_one(self.embedding(ids)))

    models = [Model(), Model()]
    compiled = [torch.compile(model, backend="bcg") for model in models]
    ids, launched, programs = torch.arange(4, device=device), [], []
    with torch.inference_mode():
        for one in compiled:
            for _ in range(3):
                one(ids)
            programs.append(torch_bcg.programs(one)[0])  # the last one that was used
        for program in (p._program for p in programs):
            bound = program.at(program.key)
            launch = bound.steps[bound.early - 1]  # of the first segment
            bound.steps[bound.early - 1] = lambda f=launch: (launched.append(1), f())[1]

        def launches(*calls):
            launched.clear()
            for call in calls:
                call(ids)
            return len(launched)

        first, second = compiled
        assert launches(first, second, first, second) == 2 * 4
        assert launches(first, first, first) == 2 + 1 + 1  # another instance came before
        assert launches(*programs, *programs) == 4  # the remedy, where two launches matter
        for program, model in zip(programs, models, strict=True):
            assert_same(program(ids), (model(ids),), exact=False)


def test_program_called_directly(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6, device=device)

        def forward(self, x):
            return plus_one(self.linear(x)) * 2

    def later(self, x):
        return plus_one(self.linear(x)) * 3

    model = Model()
    compiled = torch.compile(model, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            before = compiled(x)
        (program,) = torch_bcg.programs(compiled)
        model.linear.register_forward_hook(lambda module, args, output: output + 1)
        model.forward = later.__get__(model)
        assert_same(program(x), (before,))
        for _ in range(3):  # the remedy
            x = rows(device)
            assert_same(torch.compile(model, backend="bcg")(x), model(x))


def test_overlapping_arguments(device):
    def fn(x, y):
        x.add_(1)
        return plus_one(x) + y

    compiled = torch.compile(fn, backend="bcg")
    with torch.inference_mode(), counted() as counts:
        for _ in range(3):
            compiled(rows(device), rows(device))
        flat = rows(device, 6, 6)
        with pytest.warns(BCGWarning, match="overlap"):
            compiled(flat[:4], flat[1:5])
    assert counts.num_eager == 1


def test_re_entry(device):
    depth = []

    @torch_bcg.eager_on_graph(fake=torch.empty_like)
    def again(x: Tensor) -> Tensor:
        if depth:
            return x + 1
        depth.append(1)
        y = compiled(x)
        depth.pop()
        return y

    compiled = torch.compile(lambda x: again(x * 2) * 2, backend="bcg")
    with pytest.warns(BCGWarning, match="re-entry"), counted() as counts:
        calls(compiled, device, 3)
    assert (counts.replays, counts.eager_calls) == (2, {"re-entry": 3})


def test_mode(device):
    compiled = torch.compile(plus_one_twice, backend="bcg", mode="max-autotune")
    with torch.inference_mode(), pytest.raises(BackendCompilerFailed, match="takes no mode="):
        compiled(rows(device))


def tokens(device, n):
    x = rows(device, n, 6)
    torch._dynamo.mark_dynamic(x, 0)
    return x


@torch.library.custom_op("footguns::row_of", mutates_args=())
def row_of(x: Tensor, i: Tensor) -> Tensor:
    """x, with one of its rows added"""
    return x + x.index_select(0, i.clamp(max=len(x) - 1))


row_of.register_fake(lambda x, i: torch.empty_like(x))


def finds_padding(fn, right, wrong):
    """Whatever rows the call has: silently, and raised by ``check="poison"``."""
    for check in ("address", "poison"):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="bcg", options={"buckets": [8], "check": check})
        with torch.inference_mode():
            for _ in range(4):
                x = tokens(right.device, 5)
                assert_same(compiled(x, right), fn(x, right), exact=False)
            if check == "poison":
                with pytest.raises(CheckError, match="replayed than run eagerly"):
                    compiled(x, wrong)
            else:
                assert not torch.equal(compiled(x, wrong), fn(x, wrong))


def test_index_into_padding(device):
    def fn(x, i):
        return row_of(plus_one(x), i) * 2

    # Row 6 of 8 is padding; eager takes the last of 5.
    finds_padding(fn, *(torch.tensor([i], device=device) for i in (0, 6)))


def test_negative_index(device):
    def fn(x, i):
        return plus_one(x)[i] * 2

    # Row 7 of 8 is padding; eager takes row 4 of 5.
    finds_padding(fn, *(torch.tensor([i, 0], device=device) for i in (1, -1)))


@torch.library.custom_op("footguns::less_total", mutates_args=())
def less_total(x: Tensor) -> Tensor:
    """Every row sees all rows, of which facts know nothing."""
    return x - x.sum(0)


less_total.register_fake(torch.empty_like)


def test_turned_off_in_a_trial(device):
    def fn(x, on):
        return torch.where(on, less_total(plus_one(x) + 1), x) * 2

    finds_padding(fn, *(torch.tensor(on, device=device) for on in (False, True)))


def test_growing_positions():
    """On the host: what an index outside does to a GPU ends its process."""
    table = torch.randn(20, 6)

    def fn(x, start):
        return plus_one(x) + table[start + torch.arange(x.shape[0])]

    compiled = torch.compile(fn, backend="bcg", options={"buckets": [8]})
    with torch.inference_mode():
        for start in (1, 0, 2, 3, 12):
            x, at = tokens("cpu", 5), torch.tensor(start)
            assert_same(compiled(x, at), fn(x, at), exact=False)
        with pytest.raises(IndexError):  # 14 to 18 are there, the 21 of padding is not
            compiled(x, torch.tensor(14))
        assert_same(compiled(x, at), fn(x, at), exact=False)


def test_reserved_place(device):
    class Store(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("pool", torch.zeros(16, 6, device=device))

        def forward(self, x, places):
            self.pool[places] = x + 1
            return plus_one(x) * 2 + places[:, None]

    store = Store()
    options = {"buckets": [8], "pad": {"places": 0}}
    compiled = torch.compile(store, backend="bcg", options=options)
    with torch.inference_mode():
        for _ in range(4):
            places = torch.arange(1, 6, device=device)
            torch._dynamo.mark_dynamic(places, 0)
            compiled(tokens(device, 5), places)
    assert torch.equal(store.pool[0], torch.ones(6, device=device))  # of padded rows of zeros


def test_two_sizes(device):
    compiled = torch.compile(
        lambda x, y: plus_one(x).sum() + y, backend="bcg", options={"buckets": [8]}
    )
    with torch.inference_mode():
        compiled(tokens(device, 5), tokens(device, 3))
    (plan,) = torch_bcg.explain(compiled).plans
    assert "several sizes vary" in plan.padding.refused.detail
    assert "bucket_dim" in plan.padding.refused.detail


def test_slots_of_the_largest_size(device):
    added = []
    for ladder in ([8], [8, 1024]):
        torch._dynamo.reset()
        compiled = torch.compile(plus_one_twice, backend="bcg", options={"buckets": ladder})
        with torch.inference_mode():
            compiled(tokens(device, 5))
        (program,) = torch_bcg.programs(compiled)
        added.append(program.bytes)
    assert added[1] - added[0] >= 1000 * 6 * 4


@dataclass
class Scales:
    """float32 ``[4]`` each."""

    first: Tensor
    second: Tensor


def scaled_by(x, md):
    return plus_one(x * md.first) + md.second


def test_registered_too_late(device):
    compiled = torch.compile(scaled_by, backend="bcg")
    md = Scales(*(torch.rand(4, device=device) for _ in range(2)))
    x = torch.randn(6, 4, device=device)
    with torch.inference_mode():
        compiled(x, md)
        handle = torch_bcg.register_metadata_binding(Scales, rebind=("first",))
        assert_same(compiled(x, md), scaled_by(x, md))
        assert torch_bcg.explain(compiled).plans[0].bindings == ()
        torch._dynamo.reset()  # what is compiled from now on is checked
        with pytest.raises(BackendCompilerFailed, match="declared REBIND"):
            compiled(x, md)
    handle.remove()


def test_argument_from_metadata(device):
    handle = torch_bcg.register_metadata_binding(Scales)
    compiled = torch.compile(
        lambda x, scale: plus_one(x * scale) + torch_bcg.current_metadata(Scales).first,
        backend="bcg",
    )
    md = Scales(*(torch.rand(4, device=device) for _ in range(2)))
    x, first = torch.randn(6, 4, device=device), md.first
    with torch.inference_mode():
        with (
            torch_bcg.bind_metadata(md),
            pytest.raises(BackendCompilerFailed, match="is also an argument"),
        ):
            compiled(x, md.first)
        with torch_bcg.bind_metadata(md):
            assert_same(compiled(x, first), (x * first + 1) + first)
    handle.remove()
