"""Numbers follow the call: Python numbers, 0-dim CPU tensors, values read from the device."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from twin import add_one_to, assert_same, check, counted, double_into, plus_one

INTS = (7, 3, 11, 5, 9, 4)
FLOATS = (0.5, 0.25, -1.5, 2.75, 0.1, 3.0)


def rows(device):
    return torch.randn(4, 6, device=device)


@torch_bcg.eager_on_graph(fake=lambda x, n: torch.empty_like(x))
def times(x: Tensor, n: float) -> Tensor:
    return x * n


@torch_bcg.eager_on_graph(fake=lambda x, n: torch.empty_like(x))
def times_int(x: Tensor, n: int) -> Tensor:
    return x * n


INT_USES = {
    "multiply": lambda x, n: x * n,
    "reverse": lambda x, n: n - x,
    "divide": lambda x, n: x / n,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "power": lambda x, n: x**n,
    "clamp": lambda x, n: x.clamp(max=n),
    "full": lambda x, n: x + torch.full((6,), n, device=x.device),
    "tensor": lambda x, n: x + torch.tensor(n, device=x.device),
    "fill": lambda x, n: torch.empty_like(x).fill_(n) + x,
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "compare": lambda x, n: (x * 8 > n).float(),
    "sums": lambda x, n: (x * n + 1) @ x.t(),
    "integer_tensor": lambda x, n: (x * 8).int() * n,
    "number_arithmetic": lambda x, n: x * ((n * 3 + 1) // 2),
    "roll": lambda x, n: x.roll(n, 1),
}
FLOAT_USES = {
    "multiply": lambda x, s: x * s,
    "divide": lambda x, s: s / (x.abs() + 1),
    "alpha": lambda x, s: torch.add(x, x, alpha=s),
    "power": lambda x, s: x.abs() ** s,
    "square_root_base": lambda x, s: (abs(s) + 1) ** x,
    "integer_tensor": lambda x, s: (x * 8).int() * s,
    "half": lambda x, s: x.half() * s,
    "bfloat16": lambda x, s: x.bfloat16() + s,
    "double": lambda x, s: x.double() * s,
    "full_like": lambda x, s: torch.full_like(x, s) + x,
    "tensor": lambda x, s: x + torch.tensor(s, device=x.device),
    "clamp": lambda x, s: x.clamp(min=s),
    "lerp": lambda x, s: torch.lerp(x, x + 1, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "leaky_relu": lambda x, s: F.leaky_relu(x, abs(s)),
    "softmax": lambda x, s: (x * s).softmax(-1),
}
BAKED_USES = {
    "attention_scale": lambda x, s: F.scaled_dot_product_attention(
        x[None], x[None], x[None], scale=s
    ),
    "layer_norm_eps": lambda x, s: F.layer_norm(x, (6,), eps=abs(s)),
    "marked_function": lambda x, s: times(x + 1, s) - 1,
}


def around_a_mark(use):
    """`use` in a recorded segment before a marked operation, and again after it."""

    def fn(x, number):
        y = use(x, number)
        z = plus_one(x)
        return y, use(z, number)

    return fn


@pytest.mark.parametrize("use", INT_USES.values(), ids=INT_USES)
def test_a_changing_int_is_never_frozen(device, use):
    check(
        around_a_mark(use),
        lambda i: (rows(device), INTS[i]),
        calls=6,
        replays=5,
        dynamic=True,
    )


@pytest.mark.parametrize("use", FLOAT_USES.values(), ids=FLOAT_USES)
def test_a_changing_float_is_never_frozen(device, use):
    """Dynamo specialises the first float and passes the later ones: two graphs, two probes."""
    check(around_a_mark(use), lambda i: (rows(device), FLOATS[i]), calls=6, replays=4)


@pytest.mark.parametrize("use", BAKED_USES.values(), ids=BAKED_USES)
def test_a_float_that_dynamo_bakes_in_makes_a_graph_a_value(device, use):
    check(around_a_mark(use), lambda i: (rows(device), FLOATS[i % 2]), calls=6, replays=4)


def test_special_floats(device):
    values = (0.5, math.inf, -math.inf, math.nan, -0.0, 1e-40)
    check(
        around_a_mark(lambda x, s: x.relu() * s),
        lambda i: (rows(device), values[i]),
        calls=6,
        replays=range(1, 5),  # infinities and nan may get graphs of their own
    )


def test_int_around_the_specialised_values_zero_and_one(device):
    values = (5, 1, 0, 7, 1, 0, 5, 8)
    check(
        around_a_mark(lambda x, n: x * n + 1),
        lambda i: (rows(device), values[i]),
        calls=8,
        replays=range(5, 8),  # at most three graphs: for any int, for 1 and for 0
        dynamic=True,
    )


def test_a_bool_makes_two_graphs_that_both_replay(device):
    def fn(x, negate):
        return plus_one(-x if negate else x) * 3

    check(fn, lambda i: (rows(device), i % 2 == 1), calls=6, replays=4)


def test_an_int_that_sizes_an_intermediate_is_part_of_the_key(device):
    def fn(x, n):
        return plus_one(x).sum() + torch.arange(n, device=x.device), x[:, :n] * 2

    sizes = (4, 4, 5, 5, 5, 4, 5)  # probe, replay, warming twice, then replays of both
    check(fn, lambda i: (rows(device), sizes[i]), calls=7, replays=4, dynamic=True)


def test_a_marked_function_gets_the_live_number(device):
    def fn(x, n):
        return times_int(x + 1, n) - 1

    check(fn, lambda i: (rows(device), INTS[i]), calls=6, replays=5, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16, torch.int32])
def test_a_0_dim_cpu_tensor_promotes_and_follows_the_call(device, x_dtype, dtype):
    def fn(x, scalar):
        y = x * scalar
        return plus_one(y) + scalar, y + 1

    check(fn, lambda i: ((rows(device) * 8).to(x_dtype), torch.tensor(i + 1.5).to(dtype)))


def test_a_0_dim_cpu_tensor_that_the_caller_rewrites(device):
    scalar = torch.tensor(2.0)
    x = rows(device)

    @torch.compile(backend="bcg")
    def fn(x, scalar):
        return plus_one(x * scalar) * scalar

    with torch.no_grad(), counted() as counts:
        for value in (2.0, 3.0, 5.0, 7.0):
            scalar.fill_(value)
            assert_same(fn(x, scalar), (x * value + 1) * value)
    assert counts.replays == 3


def test_item_of_a_cpu_argument(device):
    def fn(x, scalar):
        return plus_one(x * scalar.item()) - scalar.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(fn, lambda i: (rows(device), torch.tensor(i + 0.5)))


READS = {
    "item": lambda z, x: z * x.item() + 1,
    "item_in_an_eager_segment": lambda z, x: z / x.item(),
    "returned": lambda z, x: (x.item(), z + 1),
    "operand": lambda z, x: z * x + 1,  # a number to a CUDA kernel
}


def checked_now_and_then(fn, apart, over):
    """`fn` with what lies apart and what overlaps in turn: the first are replayed."""
    check_ = {"options": {"on_eager_call": "count"}, "eager_calls": None, "replays": range(2, 5)}
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(fn, lambda i: over() if i % 2 else apart(), calls=8, **check_)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_number_in_an_argument_that_an_eager_operation_writes(device, read):
    def fn(y, x, z):
        add_one_to(y)
        return read(z, x), plus_one(z)

    def apart():
        return torch.randn(3), torch.randn(()), rows(device)

    def over():
        y = torch.randn(3)
        return y, y[0], rows(device)

    checked_now_and_then(fn, apart, over)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_number_in_a_written_buffer(device, read):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(4))

        def forward(self, x, z):
            self.steps.add_(1)
            return read(z, x), plus_one(z)

    module, twin = Steps(), Steps()
    options = {"on_eager_call": "count"}
    compiled = torch.compile(module, backend="bcg", options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for i in range(8):
            z, other = rows(device), torch.randn(())
            got = compiled(module.steps[0] if i % 2 else other, z)
            assert_same(got, twin(twin.steps[0] if i % 2 else other, z))
    assert torch_bcg.stats().replays >= 2


def test_a_number_in_a_buffer_that_an_argument_overlaps(device):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, y, z):
            add_one_to(y)
            return z * self.scale.item(), plus_one(z)

    module, twin = Scale(), Scale()
    options = {"on_eager_call": "count"}
    compiled = torch.compile(module, backend="bcg", options=options)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        for i in range(8):
            z, other = rows(device), torch.randn(1)
            got = compiled(module.scale.view(1) if i % 2 else other, z)
            assert_same(got, twin(twin.scale.view(1) if i % 2 else other.clone(), z))
    assert torch_bcg.stats().replays >= 2


def test_item_of_a_device_value(device):
    def fn(x):
        total = (x * 2).sum().item()
        return (x + total).relu() * 3, total

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(fn, lambda i: (rows(device),))


def test_tolist_and_branch_outside_the_graph(device):
    """Without the switches these are graph breaks: several graphs, each replayed."""

    def fn(x):
        y = x * 2 + 1
        if y.sum() > 0:
            return y.relu() * 3
        return y.abs() * 4

    check(fn, lambda i: (rows(device) + (9 if i % 2 else -9),), calls=6, replays=9)


def test_nonzero_and_what_inherits_its_size(device):
    def fn(x):
        index = (x * 2).flatten().nonzero().squeeze(-1)
        picked = x.flatten()[index] * 3
        return picked.sum() + x, index.shape[0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(fn, lambda i: (rows(device).relu() * (rows(device) > 0.1 * i),))


def test_boolean_index(device):
    def fn(x):
        y = x + 1
        return y[y > 0] * 2, y * 3

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(fn, lambda i: (rows(device),))


def test_number_outputs(device):
    def fn(x, n):
        return x.shape[0] * 2, plus_one(x) * n, n + 1, x.shape[1]

    check(fn, lambda i: (rows(device), INTS[i]), calls=6, replays=5, dynamic=True)


def test_a_module_attribute_that_is_a_number(device):
    class Scale(torch.nn.Module):
        factor = 1.5

        def forward(self, x):
            return plus_one(x * self.factor) * self.factor

    module, twin = Scale(), Scale()
    x = rows(device)
    compiled = torch.compile(module, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for factor in (1.5, 2.5, 3.5, 4.5, 5.5):
            module.factor = twin.factor = factor
            assert_same(compiled(x), twin(x))
    assert counts.replays == 3


def test_a_number_written_into_caller_memory(device):
    def fn(x, s):
        x.mul_(s)
        double_into(x, x)
        return x + s

    check(fn, lambda i: (rows(device), FLOATS[i]), calls=6, replays=4)


def test_an_integer_beyond_the_dtype_wraps_as_in_eager(device):
    def fn(x, n):
        return plus_one(x) * n

    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad(), counted() as counts:
        for n in (3, 5, 2**31 + 5, -(2**31) - 7, 2**40 + 1, 4):
            x = torch.arange(6, dtype=torch.int32, device=device)
            assert torch.equal(compiled(x, n), fn(x, n))
    assert counts.replays >= 4


def test_a_float_beyond_the_dtype_is_infinite_as_in_eager(device):
    def fn(x, n):
        return plus_one(x * n) + n

    compiled = torch.compile(fn, backend="bcg", dynamic=True)
    with torch.no_grad(), counted() as counts:
        for n in (3.0, 5.0, 1e39, -1e300, 3.4028235e38, 3.40282356e38, 3.5e38, math.inf, 4.0):
            x = rows(device)
            assert_same(compiled(x, n), fn(x, n))
    assert counts.replays >= 6
