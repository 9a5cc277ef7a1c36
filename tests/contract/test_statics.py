"""Tensors recorded at their own address: parameters, buffers, and what happens when they move."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import torch_bcg
from torch_bcg.errors import BCGWarning, MovedError
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


class Block(nn.Module):
    """Linear, a mark, and a buffer that counts calls."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(6, 6, device=device)
        self.register_buffer("counter", torch.zeros((), device=device))

    def forward(self, x):
        self.counter += 1
        return plus_one(self.linear(x)) * self.counter


def run(compiled, eager, device, calls=3):
    with torch.no_grad(), counted() as counts:
        for _ in range(calls):
            x = rows(device)
            assert_same(compiled(x), eager(x))
    return counts


def compiled_pair(device, **kwargs):
    module, twin = Block(device), Block(device)
    twin.load_state_dict(module.state_dict())
    return module, twin, torch.compile(module, backend="bcg", **kwargs)


def test_parameters_and_buffers(device):
    check(Block(device), lambda i: (rows(device),))


def test_parameters_written_in_place_between_calls(device):
    module, twin, compiled = compiled_pair(device)
    run(compiled, twin, device)
    for i in range(3):
        new = Block(device).state_dict()
        with torch.no_grad():
            module.load_state_dict(new)
            twin.load_state_dict(new)
            module.linear.weight.mul_(i)
            twin.linear.weight.mul_(i)
        assert run(compiled, twin, device).replays == 3


def replace_data(module, value):
    module.linear.weight.data = value.clone()


def replace_parameter(module, value):
    module.linear.weight = nn.Parameter(value.clone())


REPLACE = {"data": replace_data, "parameter": replace_parameter}


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE)
def test_a_replaced_parameter_is_recorded_again_with_one_warning(device, replace):
    module, twin, compiled = compiled_pair(device)
    assert run(compiled, twin, device).replays == 2
    value = rows(device, 6, 6)
    replace(module, value)
    replace(twin, value)
    with pytest.warns(BCGWarning, match="weight") as caught:
        run(compiled, twin, device, calls=1)
    assert len(caught) == 1
    counts = run(compiled, twin, device)
    assert (counts.replays, counts.num_eager) == (3, 0)


@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE)
def test_a_replaced_parameter_is_an_error_when_asked(device, replace):
    module, twin, compiled = compiled_pair(device, options={"on_moved": "error"})
    run(compiled, twin, device)
    before = module.linear.weight.data
    replace(module, rows(device, 6, 6))
    with torch.no_grad(), pytest.raises(MovedError, match="weight"):
        compiled(rows(device))
    module.linear.weight.data = before
    assert_same(module.counter, twin.counter)
    assert run(compiled, twin, device).num_eager == 0


def test_a_dtype_change_of_the_module(device):
    module, twin, compiled = compiled_pair(device)
    run(compiled, twin, device)
    module.double()
    twin.double()
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device, dtype=torch.float64)
            assert_same(compiled(x), twin(x))
    assert counts.replays == 3


def test_tied_weights(device):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 6, device=device)
            self.head = nn.Linear(6, 9, bias=False, device=device)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            self.embed.weight.mul_(1.5)
            return self.head(plus_one(self.embed(ids)))

    check(Tied(), lambda i: (torch.randint(0, 9, (4,), device=device),))


def test_batch_norm_in_training_mode_updates_its_buffers_once_a_call(device):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.BatchNorm1d(6, device=device) for _ in range(2))

        def forward(self, x):
            return self.second(plus_one(self.first(x)))

    check(Norms(), lambda i: (rows(device),))


def test_a_buffer_written_by_an_eager_operation(device):
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(4, 6, device=device))

        def forward(self, x):
            y = self.table + x
            double_into(y, self.table)
            self.table[1:3].add_(1)
            return self.table * y

    check(Owner(), lambda i: (rows(device),))


def test_an_ambient_read_of_a_buffer_that_a_recorded_segment_writes(device):
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.zeros(4, 6, device=device))

    cache = Cache()

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def plus_cache(x: Tensor) -> Tensor:
        cache.rows.add_(1)
        return x + cache.rows

    def fn(cache, x):
        cache.rows.add_(x)
        y = plus_cache(x * 2)
        return y + cache.rows

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x, before = rows(device), cache.rows.clone()
            got = compiled(cache, x)
            assert_same(cache.rows, before + x + 1)
            assert_same(got, (x * 2 + cache.rows) + cache.rows)
    assert counts.replays == 4


def test_mark_static_address_copies_nothing(device):
    caches = [torch.zeros(100, 600, device=device) for _ in range(2)]
    for cache in caches:
        torch._dynamo.mark_static_address(cache)

    def fn(x, cache):
        cache[:4, :6].add_(x)
        return plus_one(cache[:4, :6]) * 2

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for cache in caches:
            compiled(rows(device), cache)
        with counted() as counts:
            for i in range(6):
                x, cache = rows(device), caches[i % 2]
                before = cache[:4, :6].clone()
                assert_same(compiled(x, cache), (before + x + 1) * 2)
                assert_same(cache[:4, :6].clone(), before + x)
    assert (counts.replays, counts.captures) == (6, 0)
    assert counts.copied_bytes < 6 * caches[0].nbytes / 10


class Held(nn.Module):
    """Writes its buffer, which an argument may be a view of."""

    def __init__(self, device, write):
        super().__init__()
        self.register_buffer("table", torch.zeros(6, 6, device=device))
        self.write = write

    def forward(self, x):
        self.write(self.table)
        return plus_one(x * 2) * 2, x + 0, self.table[0] * 3


HELD = {"recorded": lambda table: table.add_(1), "eager": lambda table: add_one_to(table)}


def run_with_views_of_its_table(compiled, module, twin, device):
    with torch.no_grad(), counted() as counts:
        for i in range(10):
            other = rows(device)
            got = compiled(module.table[2:] if i % 2 else other)
            assert_same(got, twin(twin.table[2:] if i % 2 else other))
            assert_same(module.table, twin.table)
    assert counts.replays >= 4
    assert counts.eager_calls["overlapping arguments"] >= 4


@pytest.mark.parametrize("write", HELD.values(), ids=HELD)
def test_an_input_that_is_a_view_of_a_tensor_that_the_graph_holds(device, write):
    module, twin = Held(device, write), Held(device, write)
    with torch._dynamo.config.patch(install_free_tensors=True):
        options = {"on_eager_call": "count"}
        compiled = torch.compile(lambda x: module(x), backend="bcg", options=options)
        run_with_views_of_its_table(compiled, module, twin, device)


def test_an_input_of_an_fx_graph_that_is_a_view_of_its_buffer(device):
    class Tracer(torch.fx.Tracer):
        proxy_buffer_attributes = True

    module, twin = (Held(device, HELD["recorded"]) for _ in range(2))
    traced = torch.fx.GraphModule(module, Tracer().trace(module))
    with torch.no_grad():
        compiled = torch_bcg.bcg(traced, [rows(device)], options={"on_eager_call": "count"})
    run_with_views_of_its_table(compiled, traced, twin, device)


def test_tensors_that_are_no_arguments_and_move(device):
    """A setting of Dynamo's makes weights attributes of the graph."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device)
    with torch._dynamo.config.patch(install_free_tensors=True):
        compiled = torch.compile(lambda x: model[1](plus_one(model[0](x))), backend="bcg")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", BCGWarning)
            for i in range(12):
                if i in (4, 8):
                    layer = model[i // 4 - 1]
                    old = layer.weight.data
                    layer.weight.data = old * 2
                    old.fill_(float("nan"))
                x = rows(device)
                assert_same(compiled(x), model[1](plus_one(model[0](x))))
    assert torch_bcg.stats().replays >= 7
    assert len(torch_bcg.programs(compiled)) == 1
