"""A call begins with the first segment before all addresses are compared, where that harms nobody.

A weight that only later segments read may turn out to lie elsewhere once the first one has run: then
the call is another program's, or nobody's, and begins anew.
"""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_bcg
from torch_bcg.errors import BCGError, BCGWarning
from torch_bcg.graph import openings
from torch_bcg.runtime.program import Program
from twin import assert_same, counted, plus_one

RUNS = []


@torch.library.custom_op("test_opening::sent", mutates_args=())
def sent(x: torch.Tensor) -> torch.Tensor:
    """Like a collective: somebody else counts how often it is called."""
    RUNS.append(len(x))
    return x * 2


@sent.register_fake
def _(x):
    return torch.empty_like(x)


def rows(device, *shape, **kwargs):
    return torch.randn(*(shape or (4, 6)), device=device, **kwargs)


def pure(model, x):
    return x


def of_a_view(model, x):
    return x @ model.first.weight.view(3, 2, 6)[:, 1].t() @ model.first.weight[:3]


def counting(model, x):
    model.cache.add_(1)
    return x + model.cache


def drawing(model, x):
    return F.dropout(x, 0.5)


def writing(model, x):
    return x.mul_(0.5)


def sending(model, x):
    return sent(x)


class Model(nn.Module):
    def __init__(self, device, begin=pure, first=None):
        super().__init__()
        self.first = first or nn.Linear(6, 6, device=device)
        self.second = nn.Linear(6, 6, device=device)
        self.register_buffer("cache", torch.zeros(4, 6, device=device))
        self.begin = begin

    def forward(self, x):
        h = self.first(self.begin(self, x).tanh())
        return self.second(plus_one(h)), h


def compiled_twins(device, begin=pure, **options):
    model = Model(device, begin)
    return model, copy.deepcopy(model), torch.compile(model, backend="bcg", options=options)


def agree(compiled, twin, device, calls=3, exact=True):
    with torch.no_grad(), counted() as counts:
        for i in range(calls):
            x = rows(device)
            mine = x.clone()
            torch.manual_seed(i)
            want = twin(x)
            after = torch.rand(3, device=device)
            torch.manual_seed(i)
            assert_same((compiled(mine), mine), (want, x), exact=exact)
            assert_same(torch.rand(3, device=device), after)
    assert_same(compiled._orig_mod.state_dict(), twin.state_dict(), exact=exact)
    return counts


def move(linear):
    """Its weight to other memory; what lay there is something else now."""
    old = linear.weight.data
    linear.weight.data = old.clone()
    old.fill_(float("nan"))


def early(compiled):
    """How many steps of its program run before all addresses are compared."""
    (handle,) = torch_bcg.programs(compiled)
    return handle._program.at(handle._program.key).early


BEGINNINGS = {pure: True, of_a_view: True, counting: False, drawing: False, writing: False,
              sending: False}  # fmt: skip


@pytest.mark.parametrize("begin", BEGINNINGS, ids=lambda f: f.__name__)
def test_a_weight_of_a_later_segment_that_moves(device, begin):
    model, twin, compiled = compiled_twins(device, begin)
    agree(compiled, twin, device)
    assert (early(compiled) > 0) is BEGINNINGS[begin]
    for _ in range(3):
        assert agree(compiled, twin, device).replays == 3
        move(model.second)
        RUNS.clear()
        with pytest.warns(BCGWarning, match="moved"):
            first = agree(compiled, twin, device, calls=1)
        assert (first.replays, first.captures, first.num_eager) == (0, 1, 0)
        runs = 2 + (device == "cuda")  # of the twin, of the call, and to record
        assert len(RUNS) == runs * (begin is sending)
    assert len(torch_bcg.programs(compiled)) == 1


@pytest.mark.parametrize("begin", [pure, of_a_view], ids=lambda f: f.__name__)
def test_a_weight_of_the_first_segment_that_moves(device, begin):
    """Its memory may be gone: a GPU that reads there stops."""
    model, twin, compiled = compiled_twins(device, begin)
    agree(compiled, twin, device)
    (handle,) = torch_bcg.programs(compiled)
    steps = handle._program.at(handle._program.key).steps
    ran = []
    steps[:] = [lambda s=s: (ran.append(s), s())[1] for s in steps]
    assert agree(compiled, twin, device).replays == 3
    assert ran
    ran.clear()
    move(model.first)
    with torch.no_grad(), pytest.raises(BCGError, match="moved or gone"):
        handle(rows(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        agree(compiled, twin, device)
    assert not ran


class Adding(nn.Module):
    """Adds to a buffer in its last segment."""

    def __init__(self, device):
        super().__init__()
        self.first = nn.Linear(6, 6, device=device)
        self.register_buffer("cache", torch.zeros(4, 6, device=device))

    def forward(self, x):
        self.cache.add_(plus_one(self.first(x).tanh()))
        return self.cache * 2


def test_memory_where_a_static_tensor_was_is_an_argument_now(device):
    """It overlaps with nothing that is there."""
    model = Adding(device)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="bcg")
    agree(compiled, twin, device)
    assert early(compiled) > 0
    for _ in range(3):
        x = model.cache.detach()
        model.cache.data = x.clone()
        x.copy_(rows(device))
        with (
            pytest.warns(BCGWarning, match="moved"),
            torch.no_grad(),
            counted() as counts,
        ):
            assert_same(compiled(x), twin(x))
        assert (counts.captures, counts.num_eager) == (1, 0)
        assert agree(compiled, twin, device).replays == 3


def test_instances_of_one_first_weight_in_turn(device):
    first = nn.Linear(6, 6, device=device)
    models = [Model(device, first=first) for _ in range(3)]
    compiled = [
        torch.compile(m, backend="bcg", options={"on_moved": "error"}) for m in models
    ]  # fmt: skip
    twins = [copy.deepcopy(m) for m in models]
    for one, twin in zip(compiled, twins, strict=True):
        agree(one, twin, device, calls=2)
    for _ in range(3):
        for one, twin in zip(compiled, twins, strict=True):
            counts = agree(one, twin, device, calls=1)
            assert (counts.replays, counts.captures, counts.num_eager) == (1, 0, 0)


def test_a_program_called_directly_says_what_moved(device):
    model, twin, compiled = compiled_twins(device)
    agree(compiled, twin, device)
    (program,) = torch_bcg.programs(compiled)
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            assert_same(program(x), twin(x))
        move(model.second)
        for _ in range(3):
            with pytest.raises(BCGError, match="moved or gone"):
                program(rows(device))
    amid = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(BCGError, match="moved or gone"):
            program(x)
        amid.append(x)
        return x + 1

    with torch.no_grad():
        torch.compile(lambda x: step(x * 2) * 3, backend="bcg")(rows(device))
    assert amid
    with pytest.warns(BCGWarning, match="moved"):
        agree(compiled, twin, device)


def test_a_program_called_amid_its_own_call(device):
    """Each call has read its arguments before the first eager step."""
    inside = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        if inside:
            call, y, want = inside.pop()
            assert_same(call(y), want)
        return x + 1

    def fn(x):
        return step(x * 2) * x

    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    with torch.no_grad():
        for _ in range(3):
            compiled(rows(device))
        (program,) = torch_bcg.programs(compiled)
        for _ in range(3):
            x, y = rows(device), rows(device)
            want = fn(x)
            inside.append((program, y, (fn(y),)))
            assert_same(program(x), (want,))
            assert not inside
            assert_same(program(y), (fn(y),))


@pytest.mark.parametrize(
    "options",
    [{"check": "address,verify"}, {"check": "address,poison"}, {"outputs": "alias"}],
    ids=str,
)
def test_what_looks_at_segments_sees_none_that_ran_in_vain(device, options):
    model, twin, compiled = compiled_twins(device, **options)
    agree(compiled, twin, device)
    assert early(compiled) == 0
    move(model.second)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BCGWarning)
        agree(compiled, twin, device)


@pytest.mark.parametrize("moment", ["at", "order"])
def test_a_program_of_another_instance_that_is_collected_amid_the_call(device, moment, monkeypatch):
    """It was found by its first segment, and nothing of the call keeps its other tensors."""
    first = nn.Linear(6, 6, device=device)
    models = [Model(device, first=first) for _ in range(2)]
    twin = copy.deepcopy(models[1])
    compiled = [torch.compile(m, backend="bcg") for m in models]
    with torch.no_grad():
        for one in (*compiled, compiled[0]):
            for _ in range(3):
                one(rows(device))
    ran = []
    last = torch_bcg.programs(compiled[0])[0]._program
    steps = last.at(last.key).steps
    steps[:] = [lambda s=s: (ran.append(s), s())[1] for s in steps]
    models[0].itself = [models[0]]  # so that only a collection ends it
    gone, kept = weakref.ref(models[0]), compiled[1]
    kind = {"at": Program, "order": type(last.pool)}[moment]
    plain = getattr(kind, moment)

    def collecting(self, *args):
        gc.collect()
        return plain(self, *args)

    monkeypatch.setattr(kind, moment, collecting)
    gc.disable()
    try:
        del models, compiled, one, last, steps
        assert gone() is not None
        with torch.no_grad():
            for _ in range(3):
                x = rows(device)
                assert_same(kept(x), twin(x))
    finally:
        gc.enable()
    assert gone() is None
    assert not ran


def test_a_tensor_that_is_another_object_over_the_same_memory(device):
    """Its program ended with the object, amid a call of another instance: it is recorded again."""
    happens = []

    @torch_bcg.eager_on_graph(fake=lambda x: torch.empty_like(x))
    def step(x: torch.Tensor) -> torch.Tensor:
        if happens:
            happens.pop()()
        return x + 1

    class Stepping(Model):
        def forward(self, x):
            return self.second(step(self.first(x)))

    models = [Stepping(device).requires_grad_(False) for _ in range(2)]
    compiled = [torch.compile(m, backend="bcg") for m in models]

    def replace():
        models[1].second.weight = nn.Parameter(models[1].second.weight.data, requires_grad=False)

    with torch.no_grad():
        for i in range(9):
            for one, model in zip(compiled, models, strict=True):
                if i in (4, 6) and model is models[0]:
                    happens.append(replace)
                x = rows(device)
                got = one(x)
                assert not happens
                assert_same(got, model(x))


# a first segment that is divided, so that its beginning can be an opening


class Storing(nn.Module):
    """Writes a buffer of its own in the middle of its first segment."""

    def __init__(self, device, begin=pure):
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, device=device) for _ in range(2))
        self.register_buffer("cache", torch.zeros(4, 6, device=device))
        self.begin = begin

    def forward(self, x):
        h = self.begin(self, self.first(x).tanh() * 2)
        self.cache.add_(h)
        return self.second(plus_one(self.cache * h)), h


def rolling(model, h):
    return h.sort(0).values.roll(1, 0)


def forking(model, h):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        h = h + 1
    torch.cuda.current_stream().wait_stream(side)
    return h


def halving(model, h):
    with torch.autocast(h.device.type, dtype=torch.bfloat16):
        h = (h @ model.first.weight).float()
        model.cache.mul_(0.5)
        return h + (h @ model.first.weight).float()


@pytest.fixture
def eagerly_divided(monkeypatch):
    monkeypatch.setattr(openings, "STATICS", 1)
    monkeypatch.setattr(openings, "KERNELS", 1)


def storing_twins(device, begin=pure, **options):
    model = Storing(device, begin)
    return model, copy.deepcopy(model), torch.compile(model, backend="bcg", options=options)


def kinds(compiled):
    (program,) = torch_bcg.programs(compiled)
    return "".join(segment.kind[0] for segment in program.plan.segments)


@pytest.mark.parametrize(
    ("begin", "inner"),
    [*((f, "eager") for f in (pure, rolling, drawing, halving)), (pure, "inductor")],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.usefixtures("eagerly_divided")
def test_a_divided_segment(device, begin, inner):
    """What is written before it is known whose call this is, is written once."""
    model, twin, compiled = storing_twins(device, begin, inner=inner)
    exact = inner == "eager"
    agree(compiled, twin, device, exact=exact)
    assert kinds(compiled) == "ggeg"
    for _ in range(3):
        assert agree(compiled, twin, device, exact=exact).replays == 3
        move(model.second)
        with pytest.warns(BCGWarning, match="moved"):
            first = agree(compiled, twin, device, calls=1, exact=exact)
        assert (first.replays, first.captures, first.num_eager) == (0, 1, 0)
    (program,) = torch_bcg.programs(compiled)
    opening, rest, *_ = program.plan.segments
    assert opening is program.plan.opening
    assert opening.kernels + rest.kernels == sum(s.kernels for s in program.plan.segments[:2])
    assert early(compiled) > 0


@pytest.mark.parametrize(
    "options",
    [{"check": "off"}, {"check": "address,verify"}, {"outputs": "alias"}],
    ids=str,
)
@pytest.mark.usefixtures("eagerly_divided")
def test_nothing_is_divided_where_nothing_is_compared_late(device, options):
    _, twin, compiled = storing_twins(device, **options)
    agree(compiled, twin, device)
    assert kinds(compiled) == "geg"


@pytest.mark.parametrize(("least", "shown"), [(2, "gge"), (3, "ge")])
@pytest.mark.usefixtures("eagerly_divided")
def test_neither_part_has_fewer_kernels_than_a_segment_must_have(device, least, shown):
    """The parts have three and two, the segment behind the cut has one."""
    _, twin, compiled = storing_twins(device, min_segment_kernels=least)
    agree(compiled, twin, device)
    assert kinds(compiled) == shown


@pytest.mark.parametrize(
    ("statics", "kernels", "shown"), [(3, 3, "ggeg"), (4, 1, "geg"), (1, 4, "geg")]
)
def test_only_where_there_is_much_to_compare(device, monkeypatch, statics, kernels, shown):
    """Three static tensors are compared late: two of the last layer, and the buffer."""
    monkeypatch.setattr(openings, "STATICS", statics)
    monkeypatch.setattr(openings, "KERNELS", kernels)
    _, twin, compiled = storing_twins(device)
    agree(compiled, twin, device)
    assert kinds(compiled) == shown


@pytest.mark.cuda
@pytest.mark.usefixtures("eagerly_divided")
def test_nothing_is_divided_where_there_are_streams():
    _, twin, compiled = storing_twins("cuda", forking)
    agree(compiled, twin, "cuda")
    assert kinds(compiled) == "geg"
