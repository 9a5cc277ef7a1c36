"""What the pass derives of each field, what it accepts of a declaration, and what it refuses."""

import copy
import dataclasses
import re
import types
from dataclasses import dataclass

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import torch_bcg
from metadata.models import Both, Core, Meta, attend, make, pool_on
from torch_bcg import sources
from torch_bcg.errors import BindingError, OptionError
from torch_bcg.graph.ir import Padding, Plan
from twin import counted, plus_one


def test_every_field_and_why(device):
    torch_bcg.register_metadata_binding(Meta, equal=("page_size",))
    both = Both(device)
    for _ in range(3):
        both(make(device))
    (binding,) = torch_bcg.explain(both.compiled).plans[0].bindings
    shown = "\n".join(f"{f.name}: {f.kind}, {f.why or '-'}" for f in binding.fields)
    assert_expected_inline(
        shown,
        """\
slots: COPY, segment 0 reads it, in setitem, models.py:63
scale: COPY, segment 0 reads it, in mul, models.py:62
lengths: REBIND, a marked function reads it by itself
scores: WRITTEN, segment 2 writes it, in copy_, models.py:67
core.table: REBIND, a marked function reads it by itself
core.counts: REBIND, -
page_size: EQUAL, a marked function reads it by itself
heads: FOLLOWS, traced code read it: a constant of this graph
bias: REBIND, traced code read it: a constant of this graph
tags: REBIND, -""",
    )
    assert binding.unread == ("core.counts", "tags")


def test_explain_says_so(device):
    torch_bcg.register_metadata_binding(Meta, equal=("page_size",))
    both = Both(device)
    both(make(device))
    text = str(torch_bcg.explain(both.compiled))
    assert "metadata metadata.models.Meta" in text
    assert re.search(r"\n  slots +COPY +segment 0 reads it, in setitem", text)
    assert "unread    core.counts, tags" in text
    plan = torch_bcg.explain(both.compiled).plans[0]
    assert Plan.from_json(plan.to_json()) == plan


def test_before_a_call_marked_functions_are_not_known(device):
    torch_bcg.register_metadata_binding(Meta)
    with torch_bcg.bind_metadata(make(device)), torch.no_grad():
        found = torch_bcg.explain(Both(device).fn)(
            torch.randn(6, 4, device=device), pool_on(device)
        )
    assert "lengths" in found.plans[0].bindings[0].unread
    assert "metadata\nthat a marked function reads by itself" in str(found)


def test_new_objects_at_every_call_are_one_graph(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    with counted() as counts:
        for i in range(8):
            both(make(device, requests=1 + i % 3))
    assert (counts.probes, counts.captures, counts.replays) == (1, 1, 7)
    assert len(torch_bcg.programs(both.compiled)) == 1


def test_other_classes_come_and_go(device):
    """Where a class stands among those that are registered is no part of what it is."""

    @dataclass
    class Other:
        numbers: Tensor

    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    with counted() as counts:
        for i in range(6):
            if i == 2:
                other = torch_bcg.register_metadata_binding(Other)
            if i == 4:
                other.remove()
            both(make(device))
    assert counts.probes == 1


def test_an_optional_field_that_comes_and_goes(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    for i in range(9):
        both(make(device, bias=torch.rand(6, device=device) if i % 2 else None))
    kinds = [
        {f.name: f.kind for f in b.fields}["bias"]
        for p in torch_bcg.explain(both.compiled).plans
        for b in p.bindings
    ]
    assert sorted(kinds) == ["COPY", "REBIND"]


def test_the_object_as_an_argument(device):
    torch_bcg.register_metadata_binding(Meta)

    def fn(x, md):
        return plus_one(x * md.scale[:, None]) + md.slots[:, None]

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(5):
            x, md = torch.randn(6, 4, device=device), make(device)
            assert torch.equal(compiled(x, md), fn(x, md))
    assert counts.replays == 4
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    kinds = {f.name: f.kind for f in binding.fields}
    assert (kinds["slots"], kinds["scale"], kinds["lengths"]) == ("COPY", "COPY", "REBIND")


def test_an_object_that_holds_the_registered_one(device):
    @dataclass
    class Batch:
        md: Meta

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(lambda x, b: plus_one(x * b.md.scale[:, None]) * 2, backend="bcg")
    with torch.no_grad():
        compiled(torch.randn(6, 4, device=device), Batch(make(device)))
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    assert binding.cls.endswith("Meta")
    assert {f.name: f.kind for f in binding.fields}["scale"] == "COPY"


def test_a_registered_class_inside_another(device):
    """Each has its own fields; what is declared of the inner one holds for both."""

    @dataclass
    class Outer:
        inner: Core
        scale: Tensor

    torch_bcg.register_metadata_binding(Outer)
    torch_bcg.register_metadata_binding(Core, copy=("counts",))
    compiled = torch.compile(
        lambda x, o: plus_one(x * o.scale[:, None]) + o.inner.table.sum(), backend="bcg"
    )
    with torch.no_grad():
        md = make(device)
        compiled(torch.randn(6, 4, device=device), Outer(md.core, md.scale))
    found = {b.cls.rsplit(".")[-1]: b for b in torch_bcg.explain(compiled).plans[0].bindings}
    assert {f.name: f.kind for f in found["Core"].fields} == {"table": "COPY", "counts": "COPY"}
    outer = {f.name: f.kind for f in found["Outer"].fields}
    assert outer == {"inner.table": "COPY", "inner.counts": "COPY", "scale": "COPY"}


def test_containers_of_tensors(device):
    @dataclass
    class Tables:
        pages: list
        plans: dict

    torch_bcg.register_metadata_binding(Tables)
    compiled = torch.compile(lambda x, t: plus_one(x * t.pages[1]) + t.plans["c4"], backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            t = Tables(
                [torch.rand(4, device=device) for _ in range(2)],
                {"c4": torch.rand(4, device=device)},
            )
            x = torch.randn(6, 4, device=device)
            assert torch.equal(compiled(x, t), (x * t.pages[1] + 1) + t.plans["c4"])
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    kinds = {f.name: f.kind for f in binding.fields}
    assert kinds == {"pages[0]": "REBIND", "pages[1]": "COPY", "plans['c4']": "COPY"}


def test_fields_that_share_a_tensor(device):
    """Bound, they are distinct to Dynamo: one copied, one not, and one graph whether or not."""
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    with counted() as counts:
        for i in range(6):
            md = make(device, rows=6, requests=6)
            if i % 2 == 0:
                md.lengths = md.slots
                md.core.counts = md.slots
            before = md.lengths
            both(md)
            assert md.lengths is before
    assert counts.probes == 1
    fields = both.fields()
    assert (fields["slots"].kind, fields["lengths"].kind) == ("COPY", "REBIND")


def test_an_argument_with_a_shared_tensor_shares_its_kind(device):
    """Dynamo shows one of the two paths; what is read through it is read through the other."""

    def fn(x, md):
        return plus_one(x * md.slots[:, None]) + md.lengths[:, None]

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for _ in range(3):
            md = make(device, rows=6, requests=6)
            md.core.counts = md.lengths = md.slots
            x = torch.randn(6, 4, device=device)
            assert torch.equal(compiled(x, md), fn(x, md))
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    kinds = {f.name: f for f in binding.fields}
    for name in ("slots", "lengths", "core.counts"):
        assert kinds[name].kind == "COPY"
        assert len(kinds[name].shares) == 2


def test_an_attribute_that_is_no_field_is_refused(device):
    @dataclass
    class Cached:
        scale: Tensor

        def __post_init__(self):
            self.twice = self.scale * 2

    torch_bcg.register_metadata_binding(Cached)
    compiled = torch.compile(lambda x, md: plus_one(x * md.twice[:, None]) * 2, backend="bcg")
    with (
        torch.no_grad(),
        pytest.raises(BackendCompilerFailed, match=r"Cached\.twice is read, and is no field"),
    ):
        compiled(torch.randn(6, 4, device=device), Cached(torch.rand(6, device=device)))


def test_what_a_property_reads_is_the_field(device):
    class Derived(Meta):
        @property
        def doubled(self):
            return self.scale * 2

    torch_bcg.register_metadata_binding(Derived)
    compiled = torch.compile(lambda x, md: plus_one(x * md.doubled[:, None]) * 2, backend="bcg")
    md = make(device)
    derived = Derived(**{f.name: getattr(md, f.name) for f in dataclasses.fields(md)})
    with torch.no_grad():
        compiled(torch.randn(6, 4, device=device), derived)
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    assert {f.name: f.kind for f in binding.fields}["scale"] == "COPY"


# declarations


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ({"copy": ("lengths",)}, {"lengths": "COPY"}),
        ({"copy": ("core",)}, {"core.table": "COPY", "core.counts": "COPY"}),
        ({"copy": ("core.table",)}, {"core.table": "COPY", "core.counts": "REBIND"}),
        ({"copy": ("scores",)}, {"scores": "COPY"}),
        ({"written": ("scores",)}, {"scores": "WRITTEN"}),
        ({"written": ("core.counts",)}, {"core.counts": "WRITTEN"}),
        ({"rebind": ("lengths", "tags")}, {"lengths": "REBIND", "tags": "REBIND"}),
        ({"rebind": ("heads",)}, {"heads": "FOLLOWS"}),
        ({"equal": ("heads",)}, {"heads": "EQUAL"}),
        ({"rebind": ("bias",)}, {"bias": "REBIND"}),
    ],
    ids=str,
)
def test_a_safe_declaration(device, declared, kind):
    torch_bcg.register_metadata_binding(Meta, **declared)
    both = Both(device)
    for _ in range(4):
        both(make(device))
    fields = both.fields()
    assert {name: fields[name].kind for name in kind} == kind


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"rebind": ("slots",)}, "Meta.slots is declared REBIND.*segment 0 reads it, in setitem"),
        ({"rebind": ("scale",)}, "Meta.scale is declared REBIND"),
        ({"rebind": ("scores",)}, "Meta.scores is declared REBIND.*segment 2 writes it"),
        ({"written": ("slots",)}, "Meta.slots is declared WRITTEN"),
        ({"equal": ("slots",)}, "Meta.slots is declared EQUAL"),
        ({"equal": ("lengths",)}, "Meta.lengths is declared EQUAL"),
        ({"copy": ("heads",)}, "Meta.heads is declared COPY"),
        ({"written": ("page_size",)}, "Meta.page_size is declared WRITTEN"),
    ],
    ids=str,
)
def test_an_unsafe_declaration_is_refused_when_it_is_compiled(device, declared, says):
    torch_bcg.register_metadata_binding(Meta, **declared)
    both = Both(device)
    with pytest.raises(BackendCompilerFailed, match=f"(?s){says}") as raised:
        both(make(device))
    error = raised.value.inner_exception
    assert isinstance(error, BindingError)
    assert "models.py" in error.where or "declared" in str(error)
    with counted() as counts:
        assert counts.captures == 0


def test_a_field_that_a_subclass_adds_is_derived(device):
    @dataclass
    class More(Meta):
        extra: Tensor = None

    def fn(x, md):
        return plus_one(x * md.scale[:, None]) * md.extra[:, None]

    torch_bcg.register_metadata_binding(Meta, rebind=("lengths",))
    compiled = torch.compile(fn, backend="bcg")
    md = make(device)
    more = More(**{f.name: getattr(md, f.name) for f in dataclasses.fields(md)})
    more.extra = torch.rand(6, device=device)
    with torch.no_grad():
        compiled(torch.randn(6, 4, device=device), more)
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    assert binding.cls.endswith("More")
    assert {f.name: (f.kind, f.declared) for f in binding.fields}["extra"] == ("COPY", False)


def test_registering_again_plans_again(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    both(make(device))
    both(make(device))
    handle = torch_bcg.register_metadata_binding(Meta, rebind=("slots",))
    with pytest.raises(BindingError, match=r"Meta\.slots is declared REBIND"):
        both(make(device))
    handle.remove()
    torch_bcg.register_metadata_binding(Meta, copy=("lengths",))
    both(make(device))
    assert both.fields()["lengths"].declared


# numbers


def test_equal_numbers_are_compared_before_dynamo_sees_the_call(device):
    torch_bcg.register_metadata_binding(Meta, equal=("page_size", "heads"))
    both = Both(device)
    both(make(device))
    with counted() as counts:
        with pytest.raises(BindingError, match=r"Meta\.heads is declared equal"):
            both(make(device, heads=3))
        both(make(device))
    assert (counts.probes, counts.replays) == (0, 1)


def test_an_equal_number_may_change_once_nothing_compiled_holds_it(device):
    torch_bcg.register_metadata_binding(Meta, equal=("heads",))
    both = Both(device)
    both(make(device))
    torch._dynamo.reset()
    del both
    Both(device)(make(device, heads=3))


def test_an_argument_with_another_equal_number_is_refused(device):
    torch_bcg.register_metadata_binding(Meta, equal=("heads",))
    compiled = torch.compile(lambda x, md: plus_one(x * md.heads) * 2, backend="bcg")
    x = torch.randn(6, 4, device=device)
    with torch.no_grad():
        compiled(x, make(device))
        with pytest.raises(BackendCompilerFailed, match=r"Meta\.heads is declared equal"):
            compiled(x, make(device, heads=3))


def test_an_equal_number_that_marked_functions_alone_read_changes_with_a_reset(device):
    torch_bcg.register_metadata_binding(Meta, equal=("page_size",))
    both = Both(device)
    for page_size in (16, 8, 4):
        for _ in range(3):
            both(make(device, page_size=page_size))
        with pytest.raises(BindingError, match="page_size is declared equal"):
            both(make(device, page_size=32))
        torch_bcg.reset(both.compiled)


def test_other_numbers_follow_the_call(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device)
    for i in range(9):
        both(make(device, heads=1 + i % 3))


# sizes that only eager segments see


def test_the_number_of_requests_makes_no_program(device):
    """Marked functions take request fields as arguments; their sizes are not those of a key."""

    def fn(x, md):
        y = x * 2
        out = torch.empty_like(y)
        gather(y, md.core.table, md.lengths, out)
        return out + 1

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(10):
            x, md = torch.randn(6, 4, device=device), make(device, requests=2 + i % 4)
            assert torch.equal(compiled(x, md), fn(x, md))
    assert counts.captures <= 2
    assert counts.num_eager == 0


@torch_bcg.eager_on_graph(mutates_args=("out",), name="meta::gather")
def gather(q: Tensor, table: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Reads tables of as many rows as there are requests."""
    out.copy_(q + table.sum() + lengths.sum() * len(table))


REQUEST_SIZED = {
    "an item": lambda md, out: md.core.table[0],
    "a slice": lambda md, out: md.core.table[:2],
    "another shape": lambda md, out: md.core.table.view(-1)[:3],
    "transposed": lambda md, out: md.core.table.t(),
    "of scratch memory": lambda md, out: out[: md.core.table.shape[0]],
    "a number": lambda md, out: md.core.table.shape[0] * out.shape[0],
}


@pytest.mark.parametrize("options", [{}, {"outputs": "alias"}, {"check": "poison"}], ids=str)
@pytest.mark.parametrize("what", REQUEST_SIZED)
def test_outputs_of_the_size_of_requests(device, what, options):
    def fn(x, md):
        y = x * 2
        out = torch.empty_like(y)
        gather(y, md.core.table, md.lengths, out)
        return out + 1, REQUEST_SIZED[what](md, out)

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg", options=options)
    with torch.no_grad(), counted() as counts:
        for i in range(10):
            x, md = torch.randn(6, 4, device=device), make(device, requests=2 + i % 4)
            for got, want in zip(compiled(x, md), fn(x, md), strict=True):
                assert torch.equal(torch.as_tensor(got), torch.as_tensor(want))
    assert counts.num_eager == 0


# passes


def test_a_pass_of_a_project(device):
    seen = []

    def look(plan, context):
        seen.append((plan.name, context.facts.device, len(plan.segments)))
        return dataclasses.replace(plan, name="renamed")

    torch_bcg.register_metadata_binding(Meta)
    both = Both(device, passes=[look])
    both(make(device))
    assert seen[0][2] == 3
    assert torch_bcg.explain(both.compiled).plans[0].name == "renamed"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda plan, context: None,
        lambda plan, context: context,
        lambda plan, context: dataclasses.replace(plan, segments=plan.segments[:1]),
        lambda plan, context: dataclasses.replace(plan, segments=plan.segments[::-1]),
        lambda plan, context: dataclasses.replace(plan, outputs=()),
        lambda plan, context: dataclasses.replace(plan, values=()),
        lambda plan, context: dataclasses.replace(plan, device="cuda:7"),
        lambda plan, context: dataclasses.replace(plan, padding=Padding()),
        lambda plan, context: dataclasses.replace(
            plan, segments=(dataclasses.replace(plan.segments[0], writes=(0,)), *plan.segments[1:])
        ),
    ],
)
def test_a_pass_that_gives_another_program(device, wrong):
    compiled = torch.compile(lambda x: plus_one(x) * 2, backend="bcg", options={"passes": [wrong]})
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="another program") as raised:
        compiled(torch.randn(6, 4, device=device))
    assert isinstance(raised.value.inner_exception, OptionError)


# padded sizes


def test_token_fields_are_padded_with_their_value_and_request_fields_live(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(
        device,
        buckets=[8, 16],
        bucket_dim=("x", 0),
        pad={"slots": 63, "Meta.scale": 1, "scores": 0},
        check="poison",
    )
    with counted() as counts:
        for i, rows in enumerate((5, 7, 6, 9, 12, 3, 8, 16, 5, 7)):
            both(make(device, rows=rows, requests=1 + i % 4))
    assert counts.replays >= 6
    assert counts.pad_rows > 0
    (padding,) = {p.padding for p in torch_bcg.explain(both.compiled).plans if p.padding.symbol}
    assert padding.refused is None
    assert dict(padding.fills) == {"meta_slots": 63, "meta_scale": 1, "meta_scores": 0}


@pytest.mark.parametrize("first", [16, 6])
def test_a_second_graph_is_padded_as_the_first_one(device, first):
    """Dynamo gives sizes that are equal one symbol at first, and symbols of their own later."""
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device, buckets=[8, 16], pad={"slots": 63}, dynamic=True)
    with counted() as counts:
        both(make(device, rows=16, requests=3))
        for rows in (first, 7, 5, 12, 6):  # with another field: another graph
            both(make(device, rows=rows, requests=3, bias=torch.rand(rows, device=device)))
    assert counts.num_eager == 0
    verdicts = [p.padding.refused for p in torch_bcg.explain(both.compiled).plans]
    assert verdicts[-1] is None
    assert counts.pad_rows > 0


def test_sizes_are_warmed_up_with_metadata_of_their_own(device):
    torch_bcg.register_metadata_binding(Meta)
    both = Both(
        device, buckets=[8, 16], bucket_dim=("x", 0), pad={"slots": 63, "scale": 0, "scores": 0}
    )
    with torch.no_grad():
        warmed = torch_bcg.warm_up(
            both.compiled,
            lambda n: (torch.randn(n, 4, device=device), both.pools[0]),
            metadata=lambda n: make(device, rows=n, requests=3),
            progress=False,
        )
    assert [(w.size, w.how) for w in warmed] == [(16, "replay"), (8, "replay")]
    both.pools[1].copy_(both.pools[0])
    with counted() as counts:
        for rows in (5, 12, 16):
            both(make(device, rows=rows))
    assert counts.replays == 3


def test_a_declared_field_with_other_rows_is_another_graph(device):
    """What is declared has the rows of the call; Dynamo compares that at each call."""
    torch_bcg.register_metadata_binding(Meta)

    def fn(x, md, pool):
        pool[md.slots] = 1.0 * md.slots[:, None]
        return plus_one(x) * 2

    pools = pool_on(device), pool_on(device)
    compiled = torch.compile(
        fn, backend="bcg", options={"buckets": [8], "bucket_dim": ("x", 0), "pad": {"slots": 63}}
    )
    with torch.no_grad():
        for rows, slots in ((5, 5), (6, 6), (7, 7), (7, 3), (6, 4), (5, 5), (3, 7)):
            x, md = torch.randn(rows, 4, device=device), make(device, rows=slots)
            assert torch.equal(compiled(x, md, pools[0]), fn(x, md, pools[1]))
            assert torch.equal(pools[0][:63], pools[1][:63])


def test_a_module_that_reads_metadata(device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, device=device)

        def forward(self, x):
            md = torch_bcg.current_metadata(Meta)
            h = self.linear(x) * md.scale[:, None]
            out = torch.empty_like(h)
            attend(h, md.scale, out)
            return out * 2

    torch_bcg.register_metadata_binding(Meta)
    block = Block()
    twin = copy.deepcopy(block)
    compiled = torch.compile(block, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for _ in range(4):
            x, md = torch.randn(6, 4, device=device), make(device)
            with torch_bcg.bind_metadata(md):
                assert torch.equal(compiled(x), twin(x))
    assert counts.replays == 3


# what Dynamo would take for one tensor


@dataclass
class Inherits(Meta):
    """Bound for the class that it inherits from."""


@pytest.mark.parametrize("earlier", [False, True], ids=["first graph", "another graph before"])
@pytest.mark.parametrize("given", ["from outside", "buffer"])
@pytest.mark.parametrize("more", [False, True], ids=["reads one", "reads more"])
@pytest.mark.parametrize("cls", [Meta, Inherits])
def test_a_field_that_is_also_given_in_another_way(device, cls, more, given, earlier):
    """At first one tensor, then two: both are read, each its own."""

    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(6, device=device))

        def forward(self, x, scale):
            md = torch_bcg.current_metadata(Meta)
            other = self.scale if given == "buffer" else scale
            y = plus_one(x * other[:, None]) + md.scale[:, None]
            return y + md.slots[:, None] if more else y

    def other(x):
        return plus_one(x) * torch_bcg.current_metadata(Meta).slots[:, None]

    def metadata():
        md = make(device)
        return cls(**{f.name: getattr(md, f.name) for f in dataclasses.fields(md)})

    torch_bcg.register_metadata_binding(Meta)
    module = Position()
    compiled, compiled_other = (torch.compile(f, backend="bcg") for f in (module, other))
    x = torch.randn(6, 4, device=device)
    with torch.no_grad():
        if earlier:
            with torch_bcg.bind_metadata(metadata()):
                compiled_other(x)
        for i in range(4):
            md, scale = metadata(), torch.rand(6, device=device)
            if i < 2:
                md.scale = module.scale if given == "buffer" else scale
            with torch_bcg.bind_metadata(md):
                assert torch.equal(compiled(x, scale), module(x, scale))


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("cls", [Meta, Inherits])
def test_an_argument_that_was_read_from_the_bound_object_is_refused(device, cls, earlier):
    """Dynamo takes the two for one, and would not see that another call brings two."""

    def reads_one(x, scale):
        return plus_one(x * scale[:, None]) + torch_bcg.current_metadata(Meta).scale[:, None]

    def reads_another(x, scale):
        return plus_one(x) * torch_bcg.current_metadata(Meta).slots[:, None]

    def metadata():
        md = make(device)
        return cls(**{f.name: getattr(md, f.name) for f in dataclasses.fields(md)})

    torch_bcg.register_metadata_binding(Meta)
    one, another = (torch.compile(f, backend="bcg") for f in (reads_one, reads_another))
    x = torch.randn(6, 4, device=device)
    with torch.no_grad():
        if earlier:
            with torch_bcg.bind_metadata(metadata()):
                another(x, torch.rand(6, device=device))
        md = metadata()
        with (
            torch_bcg.bind_metadata(md),
            pytest.raises(BackendCompilerFailed, match="is also an argument"),
        ):
            one(x, md.scale)
        md = metadata()
        scale = md.scale
        with torch_bcg.bind_metadata(md):  # taken from it before
            assert torch.equal(one(x, scale), reads_one(x, scale))


def test_tensors_in_a_tuple(device):
    @dataclass
    class Pair:
        both: tuple

    torch_bcg.register_metadata_binding(Pair)

    def fn(x, p):
        a, b = torch_bcg.current_metadata(Pair).both
        return plus_one(x * a) + p + b

    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for i in range(6):
            x, p = torch.randn(6, 4, device=device), torch.rand(4, device=device)
            pair = (p, p) if i < 2 else (torch.rand(4, device=device), torch.rand(4, device=device))
            with torch_bcg.bind_metadata(Pair(pair)):
                assert torch.equal(compiled(x, p), fn(x, p))


@pytest.mark.parametrize("kind", ["recorded", "marked"])
def test_an_integer_that_changed_once_follows_the_call(device, kind):
    """Dynamo makes constants of integers behind a global name, and gives up after eight."""

    def fn(x):
        md = torch_bcg.current_metadata(Meta)
        if kind == "recorded":
            return plus_one(x * 2) * md.heads
        out = torch.empty_like(x)
        times(x * 2, out, md.heads)
        return out + 1

    registration = torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(14):
            x = torch.randn(6, 4, device=device)
            with torch_bcg.bind_metadata(make(device, heads=2 + i)):
                assert torch.equal(compiled(x), fn(x))
    assert counts.probes <= 3
    assert counts.replays >= 10
    told = torch.compiler.config.dynamic_sources
    registration.remove()
    assert "heads" in told
    assert "heads" not in torch.compiler.config.dynamic_sources


@torch_bcg.eager_on_graph(mutates_args=("out",), name="meta::times")
def times(x: Tensor, out: Tensor, n: int) -> None:
    """A number as an argument."""
    out.copy_(x * n)


def test_a_list_of_numbers_is_one_field(device):
    """As an engine keeps lengths on the host: of another length at each step."""

    @dataclass
    class OnHost:
        scale: Tensor
        lengths: list
        mode: torch.dtype = torch.float32

    torch_bcg.register_metadata_binding(OnHost, equal=("mode",))
    compiled = torch.compile(lambda x, md: plus_one(x * md.scale[:, None]) * 2, backend="bcg")
    with torch.no_grad(), counted() as counts:
        for i in range(5):
            md = OnHost(torch.rand(6, device=device), list(range(i)))
            compiled(torch.randn(6, 4, device=device), md)
    assert counts.replays == 4
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    fields = {f.name: (f.kind, f.value) for f in binding.fields}
    assert fields == {
        "scale": ("COPY", ""), "lengths": ("REBIND", ""), "mode": ("EQUAL", "torch.float32")
    }  # fmt: skip


# what Dynamo no longer says


@pytest.mark.parametrize("gone", ["dynamo_guards", "create_fn_name", "_dynamo_source", "name"])
def test_a_torch_that_says_less_is_an_error(device, monkeypatch, gone):
    torch_bcg.register_metadata_binding(Meta)
    if gone == "dynamo_guards":
        monkeypatch.setattr(sources, "TracingContext", WithoutGuards)
    elif gone == "create_fn_name":
        monkeypatch.setattr(sources, "TracingContext", WithOtherGuards)
    elif gone == "_dynamo_source":
        monkeypatch.setattr(sources, "_placeholders", lambda gm: [fx.Graph().placeholder("x")])
    else:
        monkeypatch.setattr(
            sources, "_text_of", lambda source, real=sources._text_of: real(object())
        )
    compiled = torch.compile(lambda x, md: plus_one(x * md.scale[:, None]), backend="bcg")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="does not say where"):
        compiled(torch.randn(6, 4, device=device), make(device))


class WithoutGuards:
    """A tracing context that keeps no guards."""

    guards_context = None

    @classmethod
    def get(cls):
        return cls

    @classmethod
    def try_get(cls):
        return cls


class WithOtherGuards(WithoutGuards):
    """A tracing context whose guards say something else."""

    guards_context = types.SimpleNamespace(dynamo_guards=[object()])
