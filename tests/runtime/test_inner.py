"""Segments through another compiler: alike ones once, all sizes once, and nothing but the kernels
differs: what eager keeps apart is apart, what it writes is written, numbers are those it draws."""

import contextlib
import copy
import operator
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import torch_bcg
from mutants.on_padding import dynamic
from torch_bcg.errors import BCGWarning, CheckError, OutputError
from torch_bcg.graph.likeness import code_key
from torch_bcg.graph.lower import Fused
from torch_bcg.runtime import capture
from torch_bcg.runtime.recorders import recorder_for
from twin import add_one_to, assert_same, check, counted, double_into, plus_one


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


class Plain:
    """A compiler that changes nothing, and keeps what it was asked for.

    Args:
        asked: called with the example inputs: what a compiler wants to know of sizes.
        change: (results, operands) -> what is returned in their place.
    """

    def __init__(self, asked=None, change=None):
        self.asked, self.change = asked, change
        self.examples = []

    def __call__(self, code, examples):
        self.examples.append(examples)
        if self.asked is not None:
            self.asked(examples)
        if self.change is None:
            return code.forward
        return lambda *operands: self.change(list(code(*operands)), operands)

    @property
    def compilations(self):
        return len(self.examples)


def aot_eager(code, examples):
    return torch._dynamo.lookup_backend("aot_eager")(code, examples)


@pytest.fixture
def inductor(device):
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("Inductor needs g++")
    with warnings.catch_warnings():  # it has advice about speed on a GPU
        warnings.filterwarnings("ignore", category=UserWarning, module="torch._inductor")
        yield "inductor"


def with_inner(fn, inner, **options):
    return torch.compile(fn, backend="bcg", options={"inner": inner, **options})


def amid_a_replay(device, fn, *args):
    """What `fn` gives inside a marked function, where nothing can be replayed."""
    given = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        given.append(fn(*args))
        return x + 1

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not replayed: re-entry", BCGWarning)
        torch.compile(lambda x: step(x * 2) * 3, backend="bcg")(rows(device))
    assert len(given) == 1
    return given[0]


@contextlib.contextmanager
def compiles(number):
    """The compiler is asked this often, and every segment is fused."""
    before = torch_bcg.stats().inner_compilations
    yield
    assert torch_bcg.stats().inner_compilations - before == number
    assert torch_bcg.stats().unfused == {}


class Layer(nn.Module):
    def __init__(self, device, width=6):
        super().__init__()
        self.a, self.b = (nn.Linear(width, width, device=device) for _ in range(2))

    def forward(self, x):
        return x + self.b(plus_one(F.silu(self.a(x)))).tanh()


def layers(device, number):
    return nn.Sequential(*[Layer(device) for _ in range(number)])


# which segments are alike


@pytest.mark.parametrize("number", [2, 3, 6])
def test_equal_layers_are_compiled_once(device, number):
    inner = Plain()
    with compiles(3):
        check(layers(device, number), lambda i: (rows(device),), options={"inner": inner})
    assert inner.compilations == 3


def test_aot_autograd_is_right_and_compiles_equal_layers_once(device):
    with compiles(3):
        check(
            layers(device, 4), lambda i: (rows(device),), exact=False, options={"inner": aot_eager}
        )


def test_inductor_is_right_and_compiles_equal_layers_once(device, inductor):
    with compiles(3):
        check(
            layers(device, 4), lambda i: (rows(device),), exact=False, options={"inner": inductor}
        )


def test_settings_of_inductor_are_those_it_compiles_with(device, inductor):
    config, lookup = torch._inductor.config, torch._dynamo.lookup_backend
    found = []

    def noted(code, examples):
        found.append((config.max_fusion_size, config.fallback_random, config.triton.cudagraphs))
        return code.forward

    assert config.max_fusion_size != 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch._dynamo, "lookup_backend", lambda n: noted if n == inductor else lookup(n)
        )
        fn = with_inner(lambda x: plus_one(x * 2) + 1, {"max_fusion_size": 7})
        with torch.no_grad():
            fn(rows(device))
    assert set(found) == {(7, True, False)}
    assert config.max_fusion_size != 7


LITERALS = {
    "the same": (2.5, 2.5, 1),
    "int and float": (1, 1.0, 2),
    "int and bool": (1, True, 2),
    "zeros": (0.0, -0.0, 2),
    "numbers": (2, 3, 2),
}


@pytest.mark.parametrize(("first", "second", "number"), LITERALS.values(), ids=LITERALS)
def test_literals_make_segments_unlike(device, first, second, number):
    def fn(x):
        y = plus_one(torch.full_like(plus_one(x), first, dtype=torch.float64))
        z = plus_one(torch.full_like(plus_one(y), second, dtype=torch.float64))
        return y, z

    inner = Plain()
    check(fn, lambda i: (rows(device, dtype=torch.float64),), options={"inner": inner})
    assert inner.compilations == number


def test_a_negative_zero_is_not_the_zero_compiled_before(device):
    def fn(x):
        y = plus_one(plus_one(x) * 0.0 + 0.0)
        return 1 / (plus_one(x.abs()) * 0.0), 1 / (plus_one(x.abs()) * -0.0), y

    check(fn, lambda i: (rows(device),), options={"inner": Plain()})


def test_a_list_is_not_a_tuple():
    """One index picks rows, the other one element."""

    def picked(index):
        graph = fx.Graph()
        graph.output((graph.call_function(operator.getitem, (graph.placeholder("x"), index)),))
        return code_key(fx.GraphModule({}, graph))

    assert picked([0, 1]) == picked([0, 1])
    assert picked([0, 1]) != picked((0, 1))


def test_a_conjugate_view_is_shown_as_one_and_unlike_others(device):
    def fn(x):
        y, z = plus_one(x), plus_one(x * 1j)
        return plus_one(y.conj() * 2), plus_one(z * 2)

    inner = Plain()
    check(fn, lambda i: (rows(device, dtype=torch.complex64),), options={"inner": inner})
    operands = [e for examples in inner.examples for e in examples]
    assert sum(e.is_conj() for e in operands) == 1
    assert inner.compilations == 3  # the first one makes z


def chained(*kinds):
    """One segment `tanh() * 2` between marks for each kind of operand, all in one graph."""

    def fn(*given):
        return tuple(plus_one(plus_one(x).tanh() * 2) for x in given)

    return fn, lambda i: tuple(make() for make in kinds)


def operands(device):
    def x():
        return rows(device, 6, 6)

    return {
        "the same": (x, x, 1),
        "dtypes": (x, lambda: x().double(), 2),
        "sizes": (x, lambda: rows(device, 5, 6), 2),
        "strides": (x, lambda: x().t(), 2),
    }


@pytest.mark.parametrize("kind", ["the same", "dtypes", "sizes", "strides"])
def test_operands_make_segments_unlike(device, kind):
    *kinds, number = operands(device)[kind]
    fn, make = chained(*kinds)
    inner = Plain()
    check(fn, make, options={"inner": inner}, dynamic=False)
    between = [e for e in inner.examples if len(e) == 1]
    assert len(between) == number


class Weighted(nn.Module):
    """Two segments that differ in their operands alone, static ones of the module's."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = (nn.Parameter(p) for p in (first, second))

    def forward(self, x):
        return plus_one(plus_one(plus_one(x) * self.first) * self.second)


@pytest.mark.parametrize(("start", "number"), [(0, 1), (1, 2), (2, 2), (4, 1), (16, 1)])
def test_alignment_makes_segments_unlike(device, start, number):
    inner = Plain()
    model = Weighted(rows(device, 6), rows(device, 32)[start : start + 6])
    twin = Weighted(model.first.data.clone(), model.second.data.clone())
    compiled = with_inner(model, inner)
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), twin(x))
    assert sum(len(e) == 2 for e in inner.examples) == number


class Writes(nn.Module):
    """Pairs of buffers, each read and written in a segment of the same operations."""

    def __init__(self, *pairs):
        super().__init__()
        self.number = len(pairs)
        for i, (a, b) in enumerate(pairs):
            self.register_buffer(f"a{i}", a)
            self.register_buffer(f"b{i}", b)

    def forward(self, x):
        for i in range(self.number):
            a, b = getattr(self, f"a{i}"), getattr(self, f"b{i}")
            x = plus_one(x)
            a.add_(1)
            x = x + a * b
            a.mul_(0.5)
        return plus_one(x)


def pair(device, how):
    """Two tensors of six elements: apart, or over one storage at some offsets."""
    base = torch.arange(32.0, device=device)
    if how is None:
        return base[:6].clone(), base[4:10].clone()
    return tuple(base[start : start + 6] for start in how)


SHARED = {
    "apart, twice": (None, None, 1),
    "apart and overlapping": (None, (0, 4), 2),
    "overlapping and apart": ((0, 4), None, 2),
    "overlapping alike": ((0, 4), (0, 4), 1),
    "overlapping otherwise": ((0, 4), (4, 0), 2),
    "one in the other's place": ((0, 4), (0, 0), 2),
    "side by side": ((0, 4), (0, 8), 2),
}


@pytest.mark.parametrize(("first", "second", "number"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("compiler", ["plain", "aot_eager"])
def test_shared_memory_that_is_written_makes_segments_unlike(
    device, first, second, number, compiler
):
    model = Writes(pair(device, first), pair(device, second))
    with compiles(number):
        check(
            model,
            lambda i: (rows(device, 6),),
            exact=compiler == "plain",
            options={"inner": Plain() if compiler == "plain" else aot_eager},
        )


@pytest.mark.parametrize(
    ("first", "second", "number"), [((0, 6), (0, 6), 0), ((0, 6), (4, 10), 1), ((4, 10), (0, 6), 1)]
)
def test_storages_of_their_own_that_share_memory(device, first, second, number):
    """As tensors of another library are: those that begin elsewhere no compiler knows to share."""

    def model():
        base = torch.arange(32.0, device=device)
        return Writes([torch.from_dlpack(base[slice(*where)]) for where in (first, second)])

    ours, twin = model(), model()
    compiled = with_inner(ours, aot_eager)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            x = rows(device, 6)
            assert_same(compiled(x), twin(x), exact=False)
            assert_same((ours.a0, ours.b0), (twin.a0, twin.b0), exact=False)
    told = [str(w.message) for w in caught if issubclass(w.category, BCGWarning)]
    assert len(told) == number
    assert sum(torch_bcg.stats().unfused.values()) == number
    assert all("two storages share" in reason for reason in torch_bcg.stats().unfused)


def test_shared_memory_is_one_storage_at_every_call(device):
    seen = []

    def noted(results, operands):
        seen.append({o.untyped_storage()._cdata for o in operands if o.shape == (8,)})
        return results

    base = torch.arange(32.0, device=device)
    model = Writes([torch.from_dlpack(base[:8]) for _ in range(2)])
    assert model.a0.untyped_storage()._cdata != model.b0.untyped_storage()._cdata
    compiled = with_inner(model, Plain(change=noted))
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device, 4, 1))
    assert seen
    assert all(len(storages) == 1 for storages in seen)


class Fails(Plain):
    """Raises for the examples that ``when`` picks."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def __call__(self, code, examples):
        self.examples.append(examples)
        if self.when(examples, len(self.examples)):
            raise RuntimeError("no room on the disk")
        return code.forward


def test_a_reset_tries_again_what_failed(device):
    compiler = Fails(lambda examples, number: number == 1)
    compiled = with_inner(lambda x: plus_one(x) * 2, compiler)
    x = rows(device)
    with torch.no_grad():
        with pytest.warns(BCGWarning, match="no room on the disk"):
            compiled(x)
        compiled(x)
        assert compiler.compilations == 1
        torch_bcg.reset(compiled)
        for _ in range(3):
            assert_same(compiled(x), (x + 1) * 2)
    assert compiler.compilations == 2
    assert sum(torch_bcg.stats().unfused.values()) == 1


def test_a_size_that_fails_is_no_reason_for_another(device):
    def is_64(examples, number):
        return any(isinstance(x, torch.SymInt) and x == 64 for x in examples)

    options = {"inner": Fails(is_64), "buckets": [8, 64]}
    compiled = torch.compile(
        lambda x: plus_one(x) * 2, backend="bcg", dynamic=True, options=options
    )
    with torch.no_grad(), pytest.warns(BCGWarning, match="no room on the disk"):
        for n in (8, 7, 64, 60, 8, 5):
            x = rows(device, n, 6)
            assert_same(compiled(x), (x + 1) * 2)
    assert sum(torch_bcg.stats().unfused.values()) == 1


def by_storage(operands):
    """Which tensors among operands lie in one storage, as a compiler sees it."""
    first = {}
    places = [x.untyped_storage()._cdata for x in operands if isinstance(x, torch.Tensor)]
    return [first.setdefault(place, i) for i, place in enumerate(places)]


def test_a_compiler_sees_the_same_storages_at_every_call(device):
    """One that sees written memory shared may order operands by storage, then and later."""

    def looking(code, examples):
        seen = by_storage(examples)

        def call(*operands):
            assert by_storage(operands) == seen
            return code.forward(*operands)

        return call

    def fn(x):
        written, read = x.sin(), x.cos()
        y = plus_one(x)
        rows_of, columns = written.t(), written[:, 1:]
        rows_of.mul_(2)
        columns.add_(y[:, 1:])
        return written + read[:, None, 0] + read.t().reshape(x.shape) + read

    compiled = with_inner(fn, looking)
    with torch.no_grad():
        for _ in range(4):
            x = rows(device)
            assert_same(compiled(x), fn(x))
    assert not torch_bcg.stats().unfused


def test_what_one_segment_reads_another_writes(device):
    def fn(x):
        y = plus_one(x)
        z = plus_one(y * 2)
        y.add_(z)
        return plus_one(z), y

    check(fn, lambda i: (rows(device),), options={"inner": aot_eager})
    assert torch_bcg.stats().unfused == {}


def views_written(x):
    a = x * 2
    b = a[1:]
    add_one_to(b)
    a.add_(1)
    b.mul_(a[:-1] * 1)
    add_one_to(a)
    return b * a[1:], a.sum(0)


def scratch(x):
    out = torch.empty_like(x)
    double_into(x + 1, out)
    y = out.tanh()
    double_into(y, out)
    return out + y, x[1:] * 2


def numbers(x, n):
    y = plus_one(x * n)
    return (y + n) * x.shape[0], n + 1


@pytest.mark.parametrize("compiler", [Plain(), aot_eager], ids=["plain", "aot_eager"])
def test_views_as_operands_are_written(device, compiler):
    check(views_written, lambda i: (rows(device),), options={"inner": compiler})
    assert torch_bcg.stats().unfused == {}


# sizes


SIZES = (8, 8, 5, 5, 5, 12, 12, 12, 5)


def sized(device, *sizes):
    return lambda i: (dynamic(rows(device, sizes[i], 6)),)


def test_all_sizes_are_compiled_once(device):
    inner = Plain()
    with compiles(3):
        check(
            layers(device, 4), sized(device, *SIZES), calls=9, replays=4, options={"inner": inner}
        )
    for examples in inner.examples:
        assert isinstance(examples[0], torch.SymInt)
        assert isinstance(examples[1].shape[0], torch.SymInt)


def test_all_buckets_are_compiled_once(device):
    inner = Plain()
    options = {"inner": inner, "buckets": [4, 8, 16]}
    with compiles(3):
        check(
            layers(device, 4),
            sized(device, 8, 3, 5, 16, 4, 2, 9, 11, 8),
            calls=9,
            replays=range(1, 9),
            exact=False,
            options=options,
        )
    assert torch_bcg.stats().captures == 3


def slices(x):
    n = x.shape[0]
    y = plus_one(x)
    a, b, c = plus_one(y[1:]), plus_one(torch.cat([y, y])), plus_one(y[: n // 2])
    return a * 2, b.tanh(), c + n, a.sum() + b.sum() + c.sum()


@pytest.mark.parametrize("compiler", [Plain(), aot_eager], ids=["plain", "aot_eager"])
def test_sizes_that_follow_from_others_are_compiled_once(device, compiler):
    check(slices, sized(device, 8, 8), calls=2, replays=1, options={"inner": compiler})
    compiled = with_inner(slices, compiler)
    with torch.no_grad():
        for n in (8, 5, 9, 12):
            for _ in range(3):
                x = dynamic(rows(device, n, 6))
                assert_same(compiled(x), slices(x), exact=compiler is not aot_eager)
            if n == 8:
                before = torch_bcg.stats().inner_compilations
    assert torch_bcg.stats().inner_compilations == before
    assert torch_bcg.stats().unfused == {}


def test_sizes_0_and_1_are_compiled_for_themselves(device):
    inner = Plain()
    compiled, made = with_inner(plus_one_twice, inner), []
    # Else Dynamo itself makes another graph for each.
    oblivious = torch.fx.experimental._config.patch(backed_size_oblivious=True)
    with oblivious, torch.no_grad(), counted() as counts:
        for n in (4, 1, 2, 0, 3, 1):
            for _ in range(3):
                x = dynamic(rows(device, n, 6))
                assert_same(compiled(x), plus_one_twice(x))
            made.append(inner.compilations)
    assert counts.probes == 1
    assert made == [2, 4, 4, 6, 6, 6]
    assert torch_bcg.stats().unfused == {}


@pytest.mark.parametrize("asks", [False, True])
def test_symbols_that_are_equal_at_first_are_not_taken_for_one(device, asks):
    """A compiler that asks whether they are compiles again where they are not."""

    def fn(x, y):
        return plus_one(torch.cat([x, y]) * 2).tanh(), y * x.sum()

    def asked(examples):
        sizes = [e for e in examples if isinstance(e, torch.SymInt)]
        if asks and len(sizes) > 1:
            bool(sizes[0] == sizes[1])

    inner = Plain(asked)
    compiled = with_inner(fn, inner)
    made = []
    # One symbol for equal sizes is what Dynamo makes of them otherwise.
    with torch.fx.experimental._config.patch(use_duck_shape=False), torch.no_grad():
        for n, m in ((4, 4), (3, 5), (6, 6), (5, 3)):
            for _ in range(3):
                x, y = dynamic(rows(device, n, 6)), dynamic(rows(device, m, 6))
                assert_same(compiled(x, y), fn(x, y))
            made.append(inner.compilations)
    assert made[0] > 0
    assert (made[1] > made[0]) == asks
    assert made[1:] == [made[1]] * 3
    assert torch_bcg.stats().captures == 4


def test_a_guard_is_asked_again_at_each_size(device):
    def compiler(code, examples):
        made.append(1)
        by_eight = bool(examples[0] % 8 == 0)

        def function(n, *operands):
            assert (n % 8 == 0) == by_eight
            return code(n, *operands)

        return function

    made, found = [], []
    compiled = with_inner(plus_one_twice, compiler)
    with torch.no_grad():
        for n in (16, 24, 12, 20, 8, 7):
            for _ in range(3):
                x = dynamic(rows(device, n, 6))
                assert_same(compiled(x), plus_one_twice(x))
            found.append(len(made))
    assert found == [2, 2, 4, 4, 4, 4]
    assert torch_bcg.stats().unfused == {}


def test_the_largest_size_is_compiled_once_though_it_is_for_no_other(device):
    def asked(examples):
        made.append([int(e) for e in examples if isinstance(e, torch.SymInt)])

    made = []
    compiled = with_inner(lambda x: plus_one(x) * 2, Plain(asked), buckets=[4, 8, 16])
    with torch.no_grad():
        for n in (3, 7, 15, 4, 8):
            x = dynamic(rows(device, n, 6))
            assert_same(compiled(x), (x + 1) * 2)
    assert made == [[16], [4], [8]]


def plus_one_twice(x):
    return plus_one(x.tanh() * 2) * 3


def test_a_size_operand_may_be_called_as_the_size_itself(device):
    def fn(x):
        return plus_one(x * x.shape[0]) * x.shape[0]

    with compiles(1):
        check(
            fn,
            sized(device, *SIZES),
            calls=9,
            replays=4,
            options={"inner": Plain()},
            dynamic=True,
        )


def test_a_size_is_not_compiled_in(device):
    """The compiler is given the sizes themselves: of `n - 1` alone it could not tell `n`."""

    def fn(x):
        y = plus_one(x)[1:]
        return plus_one(y * 2).sum(0) * x.shape[0]

    check(fn, sized(device, *SIZES), calls=9, replays=4, options={"inner": aot_eager}, exact=False)
    assert torch_bcg.stats().unfused == {}


# results stay apart


def one_buffer(results, operands):
    """All results in the memory of the first, which has their values."""
    return [results[0]] * len(results)


def an_operand(results, operands):
    """The operand itself where a result has its values."""
    (x,) = (o for o in operands if isinstance(o, torch.Tensor))
    return [x for _ in results]


def other_strides(results, operands):
    return [r.t().contiguous().t() for r in results]


def equal_results(x):
    y = plus_one(x)
    a, b = y * 2, y + y
    add_one_to(a)
    return a * 1, b * 1


def copies(x):
    y = plus_one(x)
    a, b = y * 1, y + 0
    add_one_to(a)
    add_one_to(y)
    return plus_one(b), plus_one(a), plus_one(y)


def rows_first(x):
    y = plus_one(plus_one(x) * 2)
    return y.view(-1) * 1, y.stride(0)


class Between(Plain):
    """Changes results of the segment that makes two of them from one operand, no other."""

    def __call__(self, code, examples):
        (made,) = (n.args[0] for n in code.graph.find_nodes(op="output"))
        plain = super().__call__(code, examples)
        fits = len(made) == 2 and sum(isinstance(e, torch.Tensor) for e in examples) == 1
        return plain if fits else code.forward


@pytest.mark.parametrize(
    ("fn", "change"),
    [(equal_results, one_buffer), (copies, one_buffer), (copies, an_operand)],
    ids=lambda f: f.__name__,
)
def test_what_eager_keeps_apart_is_apart(device, fn, change):
    changed = []

    def noted(results, operands):
        changed.append(1)
        return change(results, operands)

    compiled = check(fn, lambda i: (rows(device),), options={"inner": Between(change=noted)})
    x = rows(device)
    with torch.no_grad():
        got = amid_a_replay(device, compiled, x)
    assert_same(got, fn(x))
    assert changed


def test_strides_are_those_that_were_planned(device):
    inner = Plain(change=other_strides)
    compiled = check(rows_first, lambda i: (rows(device),), options={"inner": inner})
    x = rows(device)
    with torch.no_grad():
        assert_same(amid_a_replay(device, compiled, x), rows_first(x))
    assert torch_bcg.stats().unfused == {}


@pytest.mark.parametrize("change", [lambda r: r.double(), lambda r: r[:1], lambda r: r.sum()])
def test_a_result_that_is_another_is_no_result(change):
    """On a host it shows in the first replay; on a GPU the segment is recorded as it is."""
    inner = Plain(change=lambda results, operands: [change(r) for r in results])
    compiled = with_inner(plus_one_twice, inner)
    with torch.no_grad(), pytest.raises(TypeError, match="the compiler gives"):
        for _ in range(2):
            compiled(rows("cpu"))


@pytest.mark.cuda
def test_a_result_that_is_another_leaves_the_segment_as_it_is():
    inner = Plain(change=lambda results, operands: [r.double() for r in results])
    with pytest.warns(BCGWarning, match="the compiler gives"):
        check(plus_one_twice, lambda i: (rows("cuda"),), options={"inner": inner})
    assert sum(torch_bcg.stats().unfused.values()) == 2


# what cannot be compiled


class Refuses:
    """Raises, or gives what raises."""

    def __init__(self, later):
        self.later = later

    def __call__(self, code, examples):
        def function(*operands):
            raise ValueError("not this one\nof two lines")

        return function if self.later else function()


@pytest.mark.parametrize(
    ("device", "later"),
    [
        ("cpu", False),
        pytest.param("cuda", False, marks=pytest.mark.cuda),
        pytest.param("cuda", True, marks=pytest.mark.cuda),
    ],
)
def test_what_cannot_be_compiled_is_recorded_as_it_is(device, later):
    """The host recorder runs nothing while it records: a function that raises raises in a replay."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(layers(device, 3), lambda i: (rows(device),), options={"inner": Refuses(later)})
    told = [str(w.message) for w in caught if issubclass(w.category, BCGWarning)]
    assert told == ["Segment 0 is recorded without inner= (ValueError: not this one)."]
    assert torch_bcg.stats().unfused == {"ValueError: not this one": 4}


def test_reasons_are_counted_apart(device):
    reasons = iter("aba")

    def compiler(code, examples):
        raise ValueError(next(reasons))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(layers(device, 4), lambda i: (rows(device),), options={"inner": compiler})
    assert sum(issubclass(w.category, BCGWarning) for w in caught) == 2
    assert torch_bcg.stats().unfused == {"ValueError: a": 2, "ValueError: b": 3}


def test_a_negative_view_is_not_read_as_what_lies_there(device, inductor):
    """Inductor (torch 2.13) takes no notice of the sign."""

    def fn(x):
        y = plus_one(x.real)
        return plus_one(y * x.conj().imag) * 2, y

    with pytest.warns(BCGWarning, match="an operand is a negative view"):
        check(
            fn,
            lambda i: (rows(device, dtype=torch.complex64),),
            exact=False,
            options={"inner": inductor},
        )
    assert torch_bcg.stats().inner_compilations == 1  # what follows is fused


class Cached(nn.Module):
    """Writes a few rows of a large buffer and reads others.

    Args:
        device: of the buffer.
        number: of its rows.
        views: of the buffer -> what is written, and what is read.
    """

    def __init__(self, device, number, views):
        super().__init__()
        self.views = views
        self.register_buffer("cache", torch.zeros(number, 4, device=device))

    def forward(self, x):
        at = torch.arange(3, device=x.device) * 2
        y = plus_one(x)
        written, read = self.views(self.cache)
        written[at] = y
        return plus_one(read[at].view(3, -1, 4).sum(1) + y)


CACHES = {
    "overlapping": (1 << 17, lambda cache: (cache, cache.view(-1, 2, 4)), 1),
    "side by side": (1 << 17, lambda cache: cache.chunk(2), 0),
    "one operand": (1 << 17, lambda cache: (cache, cache), 0),
    "small": (64, lambda cache: (cache, cache.view(-1, 2, 4)), 0),
}


@pytest.mark.parametrize(("number", "views", "unfused"), CACHES.values(), ids=CACHES)
def test_a_large_static_tensor_is_not_copied_to_write_a_part_of_it(device, number, views, unfused):
    """AOTAutograd copies all that overlapping operands are views of, at every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        check(
            Cached(device, number, views),
            lambda i: (rows(device, 3, 4),),
            exact=False,
            options={"inner": aot_eager},
        )
    assert sum(torch_bcg.stats().unfused.values()) == unfused


def test_large_memory_of_the_call_itself_is_fused(device):
    """A result was computed whole in this very call: a copy of it is no surprise."""

    def fn(x):
        y = plus_one(x)
        y[:, 2:].mul_(y[:, :2])
        return plus_one(y.view(-1) * 2)

    with compiles(1):
        check(fn, lambda i: (rows(device, 1 << 17, 4),), exact=False, options={"inner": Plain()})


def test_what_could_not_be_recorded_is_not_tried_again(device, monkeypatch):
    """Of a compiled segment and of those alike, the first one alone."""
    tried = []

    class Recorder:
        def __init__(self, *how):
            self.recorder = recorder_for(*how)

        def record(self, code, *rest):
            if isinstance(code, Fused):
                tried.append(code)
                raise TypeError("not on this stream")
            return self.recorder.record(code, *rest)

    monkeypatch.setattr(capture, "recorder_for", Recorder)
    with pytest.warns(BCGWarning, match="not on this stream"):
        check(layers(device, 4), lambda i: (rows(device),), options={"inner": Plain()})
    assert len(tried) == 3
    assert torch_bcg.stats().unfused == {"TypeError: not on this stream": 5}


@pytest.mark.cuda
def test_a_function_that_cannot_be_recorded_is_left_out():
    def wait(results, operands):
        torch.cuda.current_stream().synchronize()
        return results

    with pytest.warns(BCGWarning, match="is recorded without inner="):
        check(plus_one_twice, lambda i: (rows("cuda"),), options={"inner": Plain(change=wait)})
    assert sum(torch_bcg.stats().unfused.values()) == 2


# hidden writes, random numbers


class Normed(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6, device=device), nn.BatchNorm1d(6, device=device)
        self.register_buffer("calls", torch.zeros((), device=device))

    def forward(self, x):
        self.calls += 1
        return plus_one(self.norm(self.linear(plus_one(x)))) * self.calls


@pytest.mark.parametrize("compiler", [Plain(), aot_eager], ids=["plain", "aot_eager"])
def test_buffers_are_updated_once_a_call(device, compiler):
    with compiles(3):
        check(
            Normed(device).train(),
            lambda i: (rows(device),),
            exact=False,
            options={"inner": compiler},
        )


def test_inductor_draws_the_numbers_of_eager_and_updates_buffers_once(device, inductor):
    class Model(Normed):
        def forward(self, x):
            return F.dropout(plus_one(super().forward(x)) * 2, 0.5, training=True)

    model = Model(device).train()
    twin = copy.deepcopy(model)
    compiled = with_inner(model, inductor)
    with torch.no_grad(), counted() as counts:
        for i in range(4):
            x = rows(device)
            torch.manual_seed(i)
            want = twin(x)
            torch.manual_seed(i)
            assert_same(compiled(x), want, exact=False)
            assert_same(dict(model.named_buffers()), dict(twin.named_buffers()), exact=False)
    assert (counts.replays, counts.num_eager) == (3, 0)
    assert torch_bcg.stats().unfused == {}


# checks, and running without recordings


def rounds(results, operands):
    return [r * (1 + 1e-5) for r in results]


def is_wrong(results, operands):
    return [r + 0.5 for r in results]


def test_verify_accepts_rounding(device):
    options = {"inner": Plain(change=rounds), "check": "verify"}
    model = layers(device, 3)
    compiled = with_inner(model, **options)
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x = rows(device)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-3)
    assert counts.replays == 3


def test_verify_names_what_a_compiler_made_wrong(device):
    class Wrong(Plain):
        def __call__(self, code, examples):
            right = "silu" in str(code.graph)
            return code.forward if right else super().__call__(code, examples)

    compiled = with_inner(Layer(device), Wrong(change=is_wrong), check="verify")
    with torch.no_grad(), pytest.raises(CheckError, match="Segment 2 gives another 'add'"):
        for _ in range(3):
            compiled(rows(device))


def test_poison_does_not_change_a_padded_result(device):
    options = {"inner": Plain(), "check": "poison", "buckets": [8]}
    check(
        layers(device, 3),
        sized(device, 8, 8, 5, 3, 7, 5),
        calls=6,
        replays=range(3, 6),
        exact=False,
        options=options,
    )
    assert torch_bcg.stats().pad_rows > 0


def test_poison_finds_that_a_compiler_reads_padding(device):
    """What is run a second time is what was recorded, not the plain operations."""

    def mixed(results, operands):
        return [r + r[-1:].nan_to_num() for r in results]

    compiled = with_inner(
        layers(device, 2), Plain(change=mixed), check="poison", buckets=[8], on_eager_call="count"
    )
    with torch.no_grad(), pytest.raises(CheckError, match="check='poison'"):
        for n in (8, 8, 5, 3, 7, 5):
            compiled(dynamic(rows(device, n, 6)))


def test_segments_run_unrecorded_give_the_bits_of_a_replay(device, inductor):
    model = layers(device, 3)
    replayed, unrecorded = (
        with_inner(model, inductor, execute=how) for how in ("graphs", "segments")
    )
    with torch.no_grad(), counted() as counts:
        replayed(x := rows(device)), unrecorded(x)
        for _ in range(3):
            x = rows(device)
            assert_same(replayed(x), unrecorded(x))
    assert (counts.replays, counts.num_eager) == (6, 0)
    assert torch_bcg.stats().unfused == {}


# calls amid a replay


CASES = {
    "views": (views_written, ()),
    "scratch outputs": (scratch, ()),
    "numbers": (numbers, (2.5, 3.5, -1.25)),
    "slices": (slices, ()),
}


@pytest.mark.parametrize(("fn", "changing"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("compiler", ["plain", "aot_eager"])
def test_a_call_amid_a_replay_runs_fused_segments(device, fn, changing, compiler):
    runs = []

    def noted(code, examples):
        made = aot_eager(code, examples) if compiler == "aot_eager" else code.forward

        def function(*operands):
            runs.append(1)
            return made(*operands)

        return function

    compiled = with_inner(fn, noted, on_eager_call="count")
    with torch.no_grad():
        for i in range(3):
            x = rows(device)
            compiled(x, *([0.5 + i] if changing else []))
        for n in changing or (None,) * 3:
            x = rows(device)
            more = () if n is None else (n,)
            runs.clear()
            with counted() as counts:
                got = amid_a_replay(device, compiled, x.clone(), *more)
            assert runs
            assert counts.eager_calls == {"re-entry": 1}
            assert_same(got, fn(x.clone(), *more), exact=compiler == "plain")


def test_a_call_amid_a_replay_writes_arguments_and_buffers(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), device=device))

        def forward(self, x):
            self.calls += 1
            x.mul_(2)
            add_one_to(x)
            x[1:].sub_(3)
            return plus_one(x) * self.calls, x.t()

    model = Model()
    twin = copy.deepcopy(model)
    compiled = with_inner(model, Plain(change=lambda r, o: r), on_eager_call="count")
    with torch.no_grad():
        for i in range(6):
            x = rows(device)
            mine = x.clone()
            got = compiled(mine) if i < 3 else amid_a_replay(device, compiled, mine)
            assert_same((got, mine), (twin(x), x))
            assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
            assert got[1].data_ptr() == mine.data_ptr()


def parts_written(x):
    x.mul_(2)
    y = x[1:]
    add_one_to(y)
    y.mul_(3)
    x.add_(1)
    return plus_one(y * 2), x[:-1] * y


@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_call_amid_a_replay_may_have_its_arguments_elsewhere(device, start):
    """A compiler knows where in a storage the operands lie that share it."""
    compiled = with_inner(parts_written, aot_eager, on_eager_call="count")
    with torch.no_grad():
        for _ in range(3):
            mine, x = (t := rows(device)), t.clone()
            assert_same((compiled(mine), mine), (parts_written(x), x))
        for _ in range(2):
            whole = rows(device, 10, 6)
            want = whole.clone()
            mine, x = (t.flatten()[start : start + 24].view(4, 6) for t in (whole, want))
            got = amid_a_replay(device, compiled, mine)
            assert_same((got, whole), (parts_written(x), want))
    assert torch_bcg.stats().unfused == {}


def test_a_call_amid_a_replay_may_have_its_arguments_elsewhere_in_a_storage_as_large(device):
    """Slots of a few rows have the room of those of more rows, which were recorded before."""
    compiled = with_inner(parts_written, aot_eager, on_eager_call="count")
    with torch.no_grad():
        for n in (8, 8, 4, 4):
            compiled(dynamic(rows(device, n, 6)))
        whole = rows(device, 8, 6)
        want = whole.clone()
        got = amid_a_replay(device, compiled, dynamic(whole[4:]))
        assert_same((got, whole), (parts_written(want[4:]), want))


RUNS = []


@torch.library.custom_op("test_inner::noted_double", mutates_args=())
def noted_double(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(len(x))
    return x * 2


@noted_double.register_fake
def _(x):
    return torch.empty_like(x)


def like_a_product(x):
    y = noted_double(x)
    z = torch.empty_like(y)
    z[1:] = y[:-1] * 2
    z[0] = y[-1]
    return plus_one(z * 2) * 3


def test_a_call_amid_a_replay_computes_nothing_twice(device):
    """What is allocated like a value of a segment does not need that value again."""
    compiled = with_inner(like_a_product, Plain(), on_eager_call="count")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x), like_a_product(x))
        for _ in range(3):
            x = rows(device)
            want = like_a_product(x)
            RUNS.clear()
            assert_same(amid_a_replay(device, compiled, x), want)
            assert RUNS == [4]


def same_strides(results, operands):
    assert all(x.is_contiguous() for x in operands)
    return results


@pytest.mark.parametrize(
    "compiler", [Plain(change=same_strides), "inductor"], ids=["any", "inductor"]
)
def test_a_call_amid_a_replay_may_give_a_segment_other_strides(device, compiler, request):
    """An eager result need not have the strides that the compiler was told."""
    if compiler == "inductor":
        request.getfixturevalue("inductor")

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).t().contiguous().t()

    def fn(x):
        return turned(x * 2) * 3 + 1

    exact = compiler != "inductor"  # a GPU multiplies and adds at once
    compiled = with_inner(fn, compiler, on_eager_call="count")
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(compiled(x).contiguous(), fn(x).contiguous(), exact=exact)
        for _ in range(3):
            x = rows(device)
            got = amid_a_replay(device, compiled, x)
            assert_same(got.contiguous(), fn(x).contiguous(), exact=exact)
    assert torch_bcg.stats().unfused == {}


def test_a_call_amid_a_replay_refuses_what_the_fake_does_not_say(device):
    wrong = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.double() if wrong else x + 1

    compiled = with_inner(lambda x: step(x * 2) * 3, Plain(), on_eager_call="count")
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))

        def caught():
            wrong.append(True)
            with pytest.raises(OutputError, match="is not what its fake"):
                compiled(rows(device))

        amid_a_replay(device, caught)


def written_by_parts(x):
    y = torch.empty_like(x)
    double_into(x * 2, y)
    y[:, :2].mul_(3)
    y[:, 2:].add_(1)
    return plus_one(y * 2) * 3


def test_a_call_amid_a_replay_is_fused_at_every_size(device):
    """Memory for a few rows has the room of that for more rows, as it has in their program."""
    inner = Plain(change=lambda results, operands: (RUNS.append(len(operands)), results)[1])
    compiled = with_inner(written_by_parts, inner, on_eager_call="count")
    with torch.no_grad():
        for n in (8, 8, 4, 4, 6, 6):
            x = rows(device, n, 6)
            assert_same(compiled(dynamic(x)), written_by_parts(x))
        for n in (4, 8, 6):
            x = rows(device, n, 6)
            want = written_by_parts(x)
            RUNS.clear()
            assert_same(amid_a_replay(device, compiled, dynamic(x)), want)
            assert len(RUNS) == 3


@pytest.mark.parametrize(
    ("dtype", "first", "later"),
    [
        (torch.int32, 3, (2**31 + 5, -(2**33) - 1, 4)),
        (torch.float32, 3.0, (1e39, -1e39, 4.0)),
        (torch.float32, torch.tensor(3.0), (torch.tensor(5.0), torch.tensor(4.0))),
    ],
    ids=["int32", "float32", "tensor"],
)
def test_a_call_amid_a_replay_takes_numbers_as_a_kernel_does(device, dtype, first, later):
    def fn(x, n):
        return plus_one(x * n) + n

    compiled = torch.compile(
        fn, backend="bcg", dynamic=True, options={"inner": Plain(), "on_eager_call": "count"}
    )
    with torch.no_grad():
        for _ in range(3):
            x = rows(device).mul(9).to(dtype)
            assert_same(compiled(x, first), fn(x, first))
            first = first + 1
        for n in later:
            x = rows(device).mul(9).to(dtype)
            want = fn(x, n)
            assert_same(compiled(x, n), want)
            assert_same(amid_a_replay(device, compiled, x, n), want)


def test_a_call_amid_a_replay_that_raises_leaves_no_mode_behind(device):
    """Of a program called directly: Dynamo puts the modes of a function back itself."""
    raises = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        if raises:
            raise ValueError("no")
        return x + 1

    def fn(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = x @ x
            return step(y) @ x

    compiled = with_inner(fn, Plain(), on_eager_call="count")
    x = rows(device, 6, 6)
    with torch.no_grad():
        for _ in range(3):
            assert_same(compiled(x), fn(x))
        (program,) = torch_bcg.programs(compiled)
        raises.append(1)

        def caught():
            with pytest.raises(ValueError, match="no"):
                program(x)
            return torch.is_autocast_enabled(device)

        assert amid_a_replay(device, caught) is False


@pytest.mark.cuda
def test_an_outer_capture_records_fused_segments():
    model = layers("cuda", 3)
    compiled = with_inner(model, "inductor", on_eager_call="count")
    x = rows("cuda")
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), counted() as counts:
            y = compiled(x)
        assert counts.eager_calls == {"outer capture": 1}
        for _ in range(3):
            x.copy_(rows("cuda"))
            graph.replay()
            assert_same(y, compiled(x))


# what outlives a compilation


def test_a_reset_compiles_again(device):
    inner = Plain()
    model = layers(device, 3)
    compiled = with_inner(model, inner)
    with torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                x = rows(device)
                assert_same(compiled(x), model(x))
            torch_bcg.reset()
        with counted() as counts:
            for _ in range(3):
                x = rows(device)
                assert_same(compiled(x), model(x))
    assert counts.replays > 0
    assert torch_bcg.stats().unfused == {}


def test_instances_share_the_compilation_and_not_the_weights(device):
    inner = Plain()
    models = [layers(device, 3) for _ in range(3)]

    def fn(model, x):
        return model(x) * 2

    compiled = with_inner(fn, inner)
    with torch.no_grad(), compiles(3):
        for _ in range(3):
            for model in models:
                x = rows(device)
                assert_same(compiled(model, x), fn(model, x))
    assert torch_bcg.stats().captures == 3


@pytest.mark.parametrize("which", [slice(None), slice(1), slice(-1, None)])
def test_moved_weights_are_read_where_they_are(device, which):
    model = layers(device, 3)
    compiled, kept = with_inner(model, Plain()), []
    with torch.no_grad(), compiles(3), warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        for _ in range(3):
            for _ in range(3):
                x = rows(device)
                assert_same(compiled(x), model(x))
            for p in list(model.parameters())[which]:
                kept.append(p.data)  # no other weight comes to lie there
                p.data = torch.randn_like(p)
    assert torch_bcg.stats().captures == 3
