"""`refresh`: what is copied, bound, compared and left alone; and that a mistake changes nothing."""

import copy
import dataclasses
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_bcg
from metadata.models import Both, Core, Meta, attend, make
from torch_bcg.errors import BCGError, BindingError
from torch_bcg.metadata import refresh, refreshing
from twin import counted, no_synchronisation, plus_one

ALL = {"copy": ("slots", "scale", "core.table", "bias"), "rebind": ("lengths", "core.counts"),
       "written": ("scores",), "equal": ("page_size",)}  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_each_kind(device):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, live = make(device), make(device, requests=5, heads=7, tags=["a"])
    live.core.table = torch.randint(9, (2, 5), device=device)
    before = dataclasses.replace(captured), captured.core
    table, scores = captured.core.table, captured.scores.fill_(3)
    with Operators() as operators:
        refresh(captured, live)
    assert operators.found == {"_foreach_copy_": 2}  # float32 and int64
    assert captured.slots is before[0].slots
    assert captured.core is before[1]
    assert captured.core.table is table
    assert torch.equal(captured.slots, live.slots)
    assert torch.equal(captured.core.table, live.core.table)
    assert captured.lengths is live.lengths
    assert captured.core.counts is live.core.counts
    assert captured.scores is scores
    assert scores.eq(3).all()
    assert (captured.heads, captured.tags) == (7, ["a"])


def test_what_graphs_have_shown(device):
    torch_bcg.register_metadata_binding(Meta, equal=("page_size",))
    both = Both(device)
    captured = make(device)
    pointers = None
    for i in range(5):
        live = make(device, requests=1 + i)
        if i:
            refresh(captured, live)
        both(captured, live=live if i else None)
        now = captured.slots.data_ptr(), captured.scale.data_ptr(), captured.scores.data_ptr()
        assert pointers in (None, now)
        pointers = now
        if i:
            assert captured.lengths is live.lengths


def test_a_thousand_refreshes(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    for _ in range(2):
        both(make(device))
    (program,) = torch_bcg.programs(both.compiled)
    captured = program.captured(make(device))
    pointers = [t.data_ptr() for t in (captured.slots, captured.scale, captured.scores)]
    with counted() as counts:
        for i in range(1000):
            live = make(device)
            refresh(captured, live)
            if i % 100 == 0:
                live.scores = torch.empty_like(live.scores)
                both(captured, live=live)
    assert [t.data_ptr() for t in (captured.slots, captured.scale, captured.scores)] == pointers
    assert (counts.probes, counts.captures, counts.replays) == (0, 0, 10)


@pytest.mark.cuda
def test_no_host_synchronisation():
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, live = make("cuda"), make("cuda")
    torch.cuda.synchronize()
    with no_synchronisation():
        for _ in range(3):
            refresh(captured, live)


def test_slots_are_not_copied_twice(device, monkeypatch):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    for _ in range(2):
        both(make(device))
    (program,) = torch_bcg.programs(both.compiled)
    live = make(device)
    captured = program.captured(live)
    assert torch.equal(captured.slots, live.slots)
    assert captured.slots.data_ptr() != live.slots.data_ptr()
    assert captured.core is not live.core
    assert captured.core.table is live.core.table
    x = torch.randn(6, 4, device=device)
    copied = []
    together = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda a, b: copied.append(len(a)) or together(a, b)
    )
    for md in (make(device), captured):
        with torch_bcg.bind_metadata(md), torch.no_grad():
            both.compiled(x, both.pools[0])
    assert copied == [3, 1]  # x, scale and scores; then x alone


def test_only_a_program_that_reads_the_class(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    for _ in range(2):
        both(make(device))
    (program,) = torch_bcg.programs(both.compiled)
    with pytest.raises(BCGError, match="no slots for a Core"):
        program.captured(make(device).core)
    with pytest.raises(BindingError, match=r"Meta\.(slots|scale|scores) cannot be refreshed"):
        program.captured(make(device, rows=5))
    torch_bcg.reset(both.compiled)
    with pytest.raises(BCGError, match="it was freed"):
        program.captured(make(device))


# mistakes


def another(device, **more):
    return dataclasses.replace(make(device), **more)


MISTAKES = {
    "another class": (lambda d: make(d).core, "Meta cannot be refreshed"),
    "a subclass": (
        lambda d: type("Sub", (Meta,), {})(**vars(make(d))), "Meta cannot be refreshed"
    ),
    "another number": (lambda d: another(d, page_size=8), "page_size is declared equal"),
    "fewer rows": (lambda d: another(d, slots=make(d).slots[:5]), "slots cannot be refreshed"),
    "one row, which would be broadcast": (
        lambda d: another(d, scale=make(d).scale[:1]), "scale cannot be refreshed"
    ),
    "another width": (
        lambda d: another(d, core=Core(make(d).core.table[:, :3], make(d).core.counts)),
        r"core\.table cannot be refreshed",
    ),
    "another dtype": (lambda d: another(d, slots=make(d).slots.int()), "slots cannot be refreshed"),
    "another device": (
        lambda d: another(d, slots=make(d).slots.to("meta")), "slots cannot be refreshed"
    ),
    "None": (lambda d: another(d, slots=None), "slots cannot be refreshed"),
    "no longer None": (lambda d: another(d, bias=torch.ones(6)), "bias cannot be refreshed"),
    "None where it is bound": (lambda d: another(d, lengths=None), "lengths cannot be refreshed"),
    "no nested object": (lambda d: another(d, core=None), "core cannot be refreshed"),
    "a number for a tensor": (lambda d: another(d, slots=3), "slots cannot be refreshed"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_names_the_field_and_changes_nothing(device, name):
    make_live, says = MISTAKES[name]
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured = make(device)
    before = copy.deepcopy(captured)
    lengths = captured.lengths
    with pytest.raises(BindingError, match=says):
        refresh(captured, make_live(device))
    assert captured.lengths is lengths
    for name in ("slots", "scale", "scores"):
        assert torch.equal(getattr(captured, name), getattr(before, name))
    assert captured.page_size == 16


def test_nothing_known_is_an_error():
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "scale", "core"))
    with pytest.raises(BindingError, match=r"Nothing is known of Meta\.lengths"):
        refresh(make("cpu"), make("cpu"))


def test_a_new_field_is_handled_or_refused(device):
    @dataclass
    class More(Meta):
        extra: Tensor | None = None

    torch_bcg.register_metadata_binding(Meta, **ALL)

    def more(value):
        md = make(device)
        return More(**{f.name: getattr(md, f.name) for f in dataclasses.fields(md)}, extra=value)

    with pytest.raises(BindingError, match=r"Nothing is known of More\.extra"):
        refresh(more(torch.ones(2)), more(torch.ones(2)))
    torch_bcg.register_metadata_binding(More, copy=("extra",))
    captured, live = more(torch.ones(2)), more(torch.zeros(2))
    refresh(captured, live)
    assert torch.equal(captured.extra, live.extra)
    assert captured.lengths is live.lengths  # as the class it inherits from declares


# memory that is shared


def test_one_tensor_under_two_names(device):
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    captured, live = make(device, requests=6), make(device, requests=6)
    refresh(captured, live)
    captured.lengths = captured.slots
    with pytest.raises(BindingError, match=r"lengths cannot be refreshed"):
        refresh(captured, live)
    live.lengths = live.slots
    refresh(captured, live)
    assert torch.equal(captured.slots, live.slots)


def test_a_copied_and_a_bound_name_of_one_tensor(device):
    torch_bcg.register_metadata_binding(Meta, copy=("slots",), rebind=("lengths", "core"),
                                        written=("scores", "scale"))  # fmt: skip
    captured, live = make(device, requests=6), make(device, requests=6)
    captured.lengths = slots = captured.slots
    refresh(captured, live)
    assert captured.slots is slots
    assert torch.equal(slots, live.slots)
    assert captured.lengths is live.lengths


def test_what_was_captured_crosswise(device):
    """Each field's new value is the other's memory."""
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    captured = make(device, requests=6)
    slots, lengths = captured.slots.clone(), captured.lengths.clone()
    live = dataclasses.replace(captured, slots=captured.lengths, lengths=captured.slots)
    refresh(captured, live)
    assert torch.equal(captured.slots, lengths)
    assert torch.equal(captured.lengths, slots)


def test_the_object_itself(device):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured = make(device)
    before = copy.deepcopy(captured)
    refresh(captured, captured)
    assert torch.equal(captured.slots, before.slots)


def test_captured_tensors_that_are_replaced(device):
    """Whoever replaces a tensor of the captured object is served at the new one."""
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured = make(device)
    for rows in (6, 6, 4, 6):
        captured.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        live = make(device)
        live.slots = live.slots[:rows].clone()
        refresh(captured, live)
        assert torch.equal(captured.slots, live.slots)


# containers


@dataclass
class Tables:
    pages: list
    names: list
    plans: dict
    pair: tuple


def tables(device, n=2, names=2, key="c4"):
    return Tables(
        [torch.rand(3, device=device) for _ in range(n)], [f"request {i}" for i in range(names)],
        {key: torch.rand(2, device=device)}, (torch.rand(2, device=device), 1),
    )  # fmt: skip


def test_containers(device):
    torch_bcg.register_metadata_binding(Tables, copy=("pages", "plans"), rebind=("pair", "names"))
    captured = tables(device)
    pages, plans = list(captured.pages), captured.plans
    for names in (2, 5, 0):
        live = tables(device, names=names)
        refresh(captured, live)
        assert all(a is b for a, b in zip(captured.pages, pages, strict=True))
        assert captured.plans is plans
        assert torch.equal(captured.pages[1], live.pages[1])
        assert torch.equal(captured.plans["c4"], live.plans["c4"])
        assert captured.names is live.names
        assert captured.pair is live.pair
    for wrong in (tables(device, n=3), tables(device, key="c128")):
        with pytest.raises(BindingError, match="cannot be refreshed"):
            refresh(captured, wrong)


def test_an_item_of_a_list_that_is_copied(device):
    torch_bcg.register_metadata_binding(
        Tables, copy=("pages[0]",), rebind=("pages", "plans", "pair")
    )
    captured, live = tables(device), tables(device)
    first = captured.pages[0]
    refresh(captured, live)
    assert captured.pages[0] is first
    assert torch.equal(first, live.pages[0])
    assert captured.pages[1] is live.pages[1]


def test_an_object_that_is_bound_as_one(device):
    torch_bcg.register_metadata_binding(Meta, **{**ALL, "copy": ("slots", "scale", "bias"),
                                                 "rebind": ("lengths", "core")})  # fmt: skip
    captured, live = make(device), make(device, requests=4)
    refresh(captured, live)
    assert captured.core is live.core


@pytest.mark.parametrize("inference", [False, True])
def test_the_object_of_a_program_is_used_in_the_mode_it_was_made_for(device, inference):
    """Dynamo tells inference tensors from others; a refresh may come in either mode."""
    torch_bcg.register_metadata_binding(Meta, copy=("lengths",))
    both = Both(device)
    mode = torch.inference_mode if inference else torch.no_grad
    with mode():
        for _ in range(2):
            both(make(device))
        (program,) = torch_bcg.programs(both.compiled)
        live = make(device)
        captured = program.captured(live)
        lengths = live.lengths.clone()
    refresh(captured, make(device))
    assert torch.equal(live.lengths, lengths)  # a copy of its own: nobody's but the captured one's
    with mode(), counted() as counts:
        for _ in range(3):
            live = make(device)
            refresh(captured, live)
            live.scores = torch.empty_like(live.scores)
            both(captured, live=live)
    assert (counts.probes, counts.replays) == (0, 3)


def test_a_source_that_lies_across_a_target(device):
    """Of one buffer, shifted: torch would read what it has written already."""
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    buffer = torch.arange(20, device=device)
    captured, live = make(device), make(device, requests=6)
    captured.lengths = torch.zeros(6, dtype=torch.int64, device=device)
    for shift, step in ((4, 1), (8, 1), (6, 1), (0, 2)):
        captured.slots = buffer[5:11]
        live.slots = buffer[shift : shift + 6 * step : step]
        expected = live.slots.clone()
        refresh(captured, live)
        assert torch.equal(captured.slots, expected)


def test_keys_that_are_no_names(device):
    keys = ("a.b", "a[b", 0.5, torch.int32, "c'd")

    def plans():
        return Tables([], [], {key: torch.rand(2, device=device) for key in keys}, ())

    torch_bcg.register_metadata_binding(Tables, copy=("plans",), rebind=("pages", "names", "pair"))
    captured, live = plans(), plans()
    before = dict(captured.plans)
    refresh(captured, live)
    for key in keys:
        assert captured.plans[key] is before[key]
        assert torch.equal(captured.plans[key], live.plans[key])
    with torch_bcg.bind_metadata(captured):
        pass


@pytest.mark.parametrize(
    "value", [torch.ones(2), object(), [1, 2]], ids=["tensor", "object", "list"]
)
def test_only_numbers_are_compared(value):
    torch_bcg.register_metadata_binding(Meta, **{**ALL, "equal": ("tags",)})
    with pytest.raises(BindingError, match=r"Meta\.tags cannot be refreshed"):
        refresh(make("cpu", tags=value), make("cpu", tags=value))


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (True, 1), (2, 3), ("a", "b")])
def test_numbers_of_two_types_are_not_equal(one, other):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    refresh(make("cpu", page_size=one), make("cpu", page_size=one))
    with pytest.raises(BindingError, match="page_size is declared equal"):
        refresh(make("cpu", page_size=one), make("cpu", page_size=other))
    refresh(make("cpu", page_size=float("nan")), make("cpu", page_size=float("nan")))


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_field_that_was_rebound_and_is_copied_now(device, refreshed):
    """An object that was bound to another one's tensor lets it be; a new one keeps its own."""
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, first = make(device), make(device)
    refresh(captured, first)
    torch_bcg.register_metadata_binding(
        Meta, **{**ALL, "copy": ("lengths", *ALL["copy"]), "rebind": ("core.counts",)}
    )
    if not refreshed:
        captured = make(device)
    mine, theirs, before = captured.lengths, first.lengths, first.lengths.clone()
    assert (mine is theirs) is refreshed
    place = None if refreshed else mine.data_ptr()
    for _ in range(3):
        live = make(device)
        refresh(captured, live)
        assert torch.equal(captured.lengths, live.lengths)
        assert captured.lengths.data_ptr() not in (theirs.data_ptr(), live.lengths.data_ptr())
        assert place in (None, captured.lengths.data_ptr())
        place = captured.lengths.data_ptr()
        assert torch.equal(theirs, before)


# two views of one buffer, as starts and ends of requests are


VIEWS = {
    "all but the last": lambda b: (b[:-1], b),
    "starts and ends": lambda b: (b[:-1], b[1:]),
    "of two buffers": lambda b: (b[:-1], b.clone()[1:]),
    "the other way round": lambda b: (b[1:], b[:-1]),
}


@pytest.mark.parametrize("ours", VIEWS)
@pytest.mark.parametrize("theirs", VIEWS)
def test_views_of_one_buffer(device, ours, theirs):
    """What shares memory in the captured object has to share it likewise in every other one."""
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    captured, live = make(device), make(device)
    captured.slots, captured.lengths = VIEWS[ours](torch.arange(7, device=device))
    live.slots, live.lengths = VIEWS[theirs](torch.randperm(7, device=device))
    expected = live.slots.clone(), live.lengths.clone()
    if ours == theirs or (ours == "of two buffers" and len(live.lengths) == 6):
        refresh(captured, live)
        assert torch.equal(captured.slots, expected[0])
        assert torch.equal(captured.lengths, expected[1])
    else:
        with pytest.raises(BindingError, match=r"lengths cannot be refreshed"):
            refresh(captured, live)


def test_the_same_start_with_other_strides_is_another_place(device):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, live = make(device), make(device)
    captured.core.table = buffer = torch.arange(16, device=device).view(4, 4)
    live.core.table = buffer.t()
    expected = buffer.t().clone()
    refresh(captured, live)
    assert torch.equal(captured.core.table, expected)


@pytest.mark.parametrize(("ours", "theirs"), [(0, 8), (8, 0)])
def test_a_view_in_a_view_is_shifted(device, ours, theirs):
    """The longer target is met by a source behind the shorter one."""
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    captured, live, buffer = make(device), make(device), torch.arange(40, device=device)
    for md, at in ((captured, ours), (live, theirs)):
        md.slots, md.lengths = buffer[at : at + 20], buffer[at + 2 : at + 4]
    expected = live.slots.clone()
    refresh(captured, live)
    assert torch.equal(captured.slots, expected)
    assert torch.equal(captured.lengths, expected[2:4])


@pytest.mark.parametrize("gap", [0, 1, 6])
def test_sources_between_targets(device, gap):
    """Of one buffer, in turn: what lies between targets is read where it is."""
    torch_bcg.register_metadata_binding(Meta, copy=("slots", "lengths"), rebind=("core",),
                                        written=("scores", "scale"))  # fmt: skip
    captured, live, buffer = make(device), make(device), torch.arange(40, device=device)
    live.slots, live.lengths = buffer[6 - gap : 12 - gap], buffer[18 + gap : 24 + gap]
    captured.slots, captured.lengths = buffer[:6], buffer[12:18]
    for _ in range(2):
        expected = live.slots.clone(), live.lengths.clone()
        refresh(captured, live)
        assert torch.equal(captured.slots, expected[0])
        assert torch.equal(captured.lengths, expected[1])


MODES = {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", MODES)
def test_in_every_mode(device, made, mode, monkeypatch):
    """The captured object may be of another mode; what comes is looked at closely only once."""
    torch_bcg.register_metadata_binding(Meta, **ALL)
    with MODES[made]():
        captured = make(device)
        refresh(captured, make(device))
    closely, checked = [], refreshing._checked
    monkeypatch.setattr(refreshing, "_checked", lambda *a: closely.append(a) or checked(*a))
    for _ in range(4):
        with MODES[mode]():
            live = make(device)
            live.scale.requires_grad_(mode == "grad")
            refresh(captured, live)
        assert torch.equal(captured.scale, live.scale)
        assert not captured.scale.requires_grad
    assert len(closely) <= 1


def test_what_comes_differs_in_strides(device):
    """From what is captured, and from step to step."""
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, live = make(device), make(device)
    for i in range(6):
        table = torch.randint(9, captured.core.table.shape, device=device)
        live.core.table = table.t().contiguous().t() if i % 3 else table
        refresh(captured, live)
        assert torch.equal(captured.core.table, table)


def test_a_number_for_what_is_bound_is_bound(device):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured = make(device)
    for lengths in (torch.ones(2), 3, torch.ones(2)):
        refresh(captured, make(device, lengths=lengths))
        assert captured.lengths is lengths
    captured.lengths = None
    with pytest.raises(BindingError, match="lengths cannot be refreshed"):
        refresh(captured, make(device))


def test_an_expanded_target_is_refused(device):
    torch_bcg.register_metadata_binding(Meta, **ALL)
    captured, live = make(device), make(device)
    captured.scale = torch.ones(1, device=device).expand(6)
    with pytest.raises(BindingError, match=r"scale cannot be refreshed"):
        refresh(captured, live)


def test_what_was_bound_before_it_is_copied_is_not_written(device):
    """Another graph reads it in a recorded segment, and so its kind changes."""
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    both(make(device))
    captured, first, second = (make(device, requests=6) for _ in range(3))
    refresh(captured, first)
    lengths = first.lengths.clone()
    other = torch.compile(
        lambda x: plus_one(x) * torch_bcg.current_metadata(Meta).lengths[:, None], backend="bcg"
    )
    with torch.no_grad(), torch_bcg.bind_metadata(make(device, requests=6)):
        other(torch.randn(6, 4, device=device))
    for live in (second, make(device, requests=6)):
        refresh(captured, live)
        assert torch.equal(captured.lengths, live.lengths)
    assert torch.equal(first.lengths, lengths)


# objects that programs give


def served(device, fn, **options):
    """The function compiled and called twice, and its last program."""
    both = Both(device, fn, **options)
    for _ in range(2):
        both(make(device))
    return both, torch_bcg.programs(both.compiled)[0]


def written_by_index(md, new):
    md.scores[md.slots % 3] = 1.0 * md.scale[0]


def written_from_itself(md, new):
    md.scores.view(2, 3)[:1].copy_(md.scores.view(2, 3)[1:])


# Writes after which something is left of what a call brings.
WRITES = {
    "a sum": lambda md, new: md.scores.add_(new),
    "out": lambda md, new: torch.add(md.scores, new, out=md.scores),
    "in part": lambda md, new: md.scores[:3].copy_(new[:3]),
    "by index": written_by_index,
    "from itself": written_from_itself,
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_not_all_overwritten_comes_along(device, how):
    def fn(x, pool):
        md = torch_bcg.current_metadata(Meta)
        out = torch.empty_like(x)
        attend(x * 2, md.scale, out)
        WRITES[how](md, out.sum(1))
        return md.scores[:, None] + out

    torch_bcg.register_metadata_binding(Meta)
    both, program = served(device, fn)
    assert both.fields()["scores"].kind == "COPY"
    captured = program.captured(make(device))
    for _ in range(3):
        live = make(device, scores=torch.rand(6, device=device))
        refresh(captured, live)
        both(captured, live=copy.deepcopy(live))


def test_slots_that_were_lent_are_filled_behind_the_rows_of_each_call(device):
    """Whoever has them writes there too."""
    torch_bcg.register_metadata_binding(Meta)
    both = Both(
        device, buckets=[8], bucket_dim=("x", 0), pad={"slots": 63, "scale": 0, "scores": 0}
    )
    for rows in (8, 5, 5, 6, 8, 5):
        both(make(device, rows=rows))
    program = next(p for p in torch_bcg.programs(both.compiled) if 8 in p.sizes.values())
    captured = program.captured(make(device, rows=8))
    for rows in (5, 5, 6, 5):
        refresh(captured, make(device, rows=8))
        both(make(device, rows=rows))


def test_two_objects_of_one_class_in_a_graph(device):
    def fn(x, a, b):
        return plus_one(x * a.scale[:, None]) * b.scale[:, None]

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            x, a, b = torch.randn(6, 4, device=device), make(device), make(device)
            assert torch.equal(compiled(x, a, b), fn(x, a, b))
    with pytest.raises(BCGError, match="2 objects of Meta"):
        torch_bcg.programs(compiled)[0].captured(a)


def test_a_static_pool_stays_the_callers(device):
    def fn(x, pool):
        md = torch_bcg.current_metadata(Meta)
        md.bias[md.slots] = x * md.scale[:, None]
        return plus_one(x * 2) * 2

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    pool, twin = torch.zeros(64, 4, device=device), torch.zeros(64, 4, device=device)
    torch._dynamo.mark_static_address(pool)
    with torch.no_grad():
        for _ in range(2):
            md = make(device, bias=pool)
            with torch_bcg.bind_metadata(md):
                compiled(torch.randn(6, 4, device=device), None)
        captured = torch_bcg.programs(compiled)[0].captured(md)
        assert captured.bias is pool
        pool.zero_()
        with counted() as counts:
            for _ in range(3):
                live, x = make(device, bias=pool), torch.randn(6, 4, device=device)
                refresh(captured, live)
                with torch_bcg.bind_metadata(captured):
                    compiled(x, None)
                twin[live.slots] = x * live.scale[:, None]
                assert torch.equal(pool, twin)
    assert (counts.captures, counts.replays) == (0, 3)


def test_a_field_in_the_memory_of_a_pool_is_not_taken_apart(device):
    def fn(x, pool):
        pool.mul_(0.5)
        md = torch_bcg.current_metadata(Meta)
        return plus_one(x * md.scale[:, None]) * 2

    torch_bcg.register_metadata_binding(Meta)
    both, program = served(device, fn)
    with pytest.raises(BCGError, match="at its own address"):
        program.captured(make(device, scale=both.pools[0].view(-1)[:6]))
