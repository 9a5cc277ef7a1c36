"""Registration and `bind_metadata`: what is refused, what is seen inside, what is left behind."""

import copy
import dataclasses
import pickle
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import torch_bcg
from metadata.models import Both, Core, Meta, make
from torch_bcg.errors import BindingError
from torch_bcg.metadata import schema
from torch_bcg.metadata.registration import BOUND
from torch_bcg.metadata.watching import reads_noted
from twin import plus_one

# registration


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        ({"copy": ("slot",)}, "Meta has no field 'slot'"),
        ({"rebind": ("core.tables",)}, "Meta has no field 'core.tables'"),
        ({"equal": ("page_size",), "rebind": ("page_size",)}, "Meta.page_size is declared twice"),
        ({"copy": ("core.",)}, "Meta has no field 'core.'"),
        ({"equal": "heads"}, "'heads' is no list of fields"),
    ],
    ids=str,
)
def test_a_wrong_list(lists, says):
    with pytest.raises(BindingError, match=says.replace(".", r"\.")):
        torch_bcg.register_metadata_binding(Meta, **lists)
    assert not hasattr(Meta, BOUND)


@pytest.mark.parametrize("cls", [int, object(), lambda: 0], ids=["int", "object", "function"])
def test_only_dataclasses(cls):
    with pytest.raises(BindingError, match="is no metadata class"):
        torch_bcg.register_metadata_binding(cls)


def test_a_name_that_only_an_object_can_tell(device):
    """An annotation that cannot be resolved is looked at when an object is there."""

    @dataclass
    class Loose:
        scale: Tensor
        inner: "NoSuchName"  # noqa: F821

    torch_bcg.register_metadata_binding(Loose, copy=("inner.missing",))
    compiled = torch.compile(lambda x, md: x * md.scale * 2, backend="bcg")
    md = Loose(torch.rand(4, device=device), Core(torch.ones(1), torch.ones(1)))
    with torch.no_grad(), pytest.raises(Exception, match=r"Loose has no field 'inner\.missing'"):
        compiled(torch.randn(3, 4, device=device), md)


def test_registering_again_replaces():
    first = torch_bcg.register_metadata_binding(Meta, equal=("heads",))
    second = torch_bcg.register_metadata_binding(Meta)
    first.remove()  # of which nothing is left
    with torch_bcg.bind_metadata(make("cpu")):
        pass
    second.remove()
    with (
        pytest.raises(BindingError, match="Meta is not registered"),
        torch_bcg.bind_metadata(make("cpu")),
    ):
        pass
    assert not hasattr(Meta, BOUND)


def test_what_is_bound_stays_registered():
    handle = torch_bcg.register_metadata_binding(Meta)
    with torch_bcg.bind_metadata(make("cpu")):
        with pytest.raises(BindingError, match="Meta is bound"):
            handle.remove()
        with pytest.raises(BindingError, match="Meta is bound"):
            torch_bcg.register_metadata_binding(Meta)


# binding


def test_inside_and_outside():
    torch_bcg.register_metadata_binding(Meta)
    md = make("cpu")
    with torch_bcg.bind_metadata(md):
        assert torch_bcg.current_metadata(Meta) is md
    with pytest.raises(BindingError, match="No Meta is bound"):
        torch_bcg.current_metadata(Meta)
    with pytest.raises(BindingError, match="Core is not registered"):
        torch_bcg.current_metadata(Core)


def test_nested_binding_is_refused():
    torch_bcg.register_metadata_binding(Meta)
    torch_bcg.register_metadata_binding(Core)
    md = make("cpu")
    with torch_bcg.bind_metadata(md):
        with (
            pytest.raises(BindingError, match="A Meta is bound already"),
            torch_bcg.bind_metadata(make("cpu")),
        ):
            pass
        with torch_bcg.bind_metadata(md.core):  # another class
            assert torch_bcg.current_metadata(Core) is md.core
        assert torch_bcg.current_metadata(Meta) is md


def test_concurrent_binding_is_refused():
    torch_bcg.register_metadata_binding(Meta)
    found = []

    def other():
        try:
            with torch_bcg.bind_metadata(make("cpu")):
                pass
        except BindingError as error:
            found.append(error)

    with torch_bcg.bind_metadata(make("cpu")):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1


def test_an_error_inside_leaves_nothing_bound():
    torch_bcg.register_metadata_binding(Meta)
    md = make("cpu")
    with pytest.raises(ZeroDivisionError), torch_bcg.bind_metadata(md):
        raise ZeroDivisionError
    assert vars(Meta)[BOUND] is None
    with torch_bcg.bind_metadata(md):
        pass


def test_fields_hold_other_tensors_inside_and_what_they_held_outside():
    torch_bcg.register_metadata_binding(Meta)
    md = make("cpu", tags=[torch.ones(1), (torch.ones(2), 1)])
    md.lengths = md.core.table = slots = md.slots
    torch._dynamo.mark_dynamic(md.slots, 0)
    before, tags, pair = dict(vars(md)), list(md.tags), md.tags[1]
    with torch_bcg.bind_metadata(md):
        inside = [md.slots, md.lengths, md.core.table]
        assert len({id(t) for t in (slots, *inside)}) == 4
        assert {t.data_ptr() for t in inside} == {slots.data_ptr()}
        assert md.lengths._dynamo_dynamic_indices == {0}
        assert md.tags[0] is not tags[0]
        assert md.tags[1][0] is not pair[0]
        assert md.tags is before["tags"]
        md.core.table = replaced = torch.ones(1)
        md.tags.pop()
        md.heads += 1
    assert md.lengths is md.slots is slots
    assert md.core.table is replaced
    assert md.tags == tags[:1]
    assert md.heads == before["heads"] + 1


def test_what_is_bound_in_traced_code_is_seen_behind_a_graph_break(device):
    def fn(x):
        md = torch_bcg.current_metadata(Meta)
        y = plus_one(x * 2) * 2
        md.bias, md.core.counts, md.heads = y.sum(1), y.sum(0), md.heads + 1
        md.tags.append(y)
        torch._dynamo.graph_break()
        md.heads += 1
        return plus_one(y) + md.bias[:, None] + md.core.counts * md.heads + md.tags[0]

    torch_bcg.register_metadata_binding(Meta)
    compiled = torch.compile(fn, backend="bcg")
    with torch.no_grad():
        for _ in range(4):
            x, live, md = torch.randn(6, 4, device=device), make(device), make(device)
            with torch_bcg.bind_metadata(live):
                want = fn(x)
            with torch_bcg.bind_metadata(md):
                got = compiled(x)
            assert torch.equal(got, want)
            assert torch.equal(md.bias, live.bias)
            assert (md.heads, len(md.tags)) == (live.heads, 1) == (4, 1)


def test_structure_that_changes_inside(device):
    torch_bcg.register_metadata_binding(Meta)
    for change in (
        lambda md: setattr(md, "core", None),
        lambda md: md.tags.clear(),
        lambda md: setattr(md, "tags", {"a": 1}),
        lambda md: setattr(md, "slots", None),
    ):
        md = make(device, tags=[torch.ones(1), torch.ones(2)])
        scale, lengths = md.scale, md.lengths
        with torch_bcg.bind_metadata(md):
            change(md)
        assert md.scale is scale
        assert md.lengths is lengths


def test_gradients_through_a_field(device):
    torch_bcg.register_metadata_binding(Meta)
    md = make(device)
    md.scale = md.scale.requires_grad_()

    def fn(x):
        return plus_one(x * torch_bcg.current_metadata(Meta).scale[:, None]) * 2

    compiled = torch.compile(fn, backend="bcg", options={"on_eager_call": "count"})
    for f in (fn, compiled, compiled):
        md.scale.grad = None
        x = torch.randn(6, 4, device=device)
        with torch_bcg.bind_metadata(md):
            f(x).sum().backward()
        assert torch.allclose(md.scale.grad, 2 * x.sum(1))


def test_frozen_and_slotted_classes(device):
    @dataclass(frozen=True, slots=True)
    class Frozen:
        scale: Tensor
        again: Tensor

    torch_bcg.register_metadata_binding(Frozen)
    compiled = torch.compile(
        lambda x: x * torch_bcg.current_metadata(Frozen).scale[:, None] * 2, backend="bcg"
    )
    with torch.no_grad():
        for _ in range(3):
            t, x = torch.rand(6, device=device), torch.randn(6, 4, device=device)
            md = Frozen(t, t)
            with torch_bcg.bind_metadata(md):
                assert torch.equal(compiled(x), x * t[:, None] * 2)
            assert md.again is t


def test_a_subclass_is_bound_for_what_it_inherits_from():
    class Special(Meta):
        pass

    torch_bcg.register_metadata_binding(Meta, equal=("heads",))
    base = make("cpu")
    special = Special(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
    with torch_bcg.bind_metadata(special):
        assert torch_bcg.current_metadata(Meta) is special
        assert torch_bcg.current_metadata(Special) is special
    with torch_bcg.bind_metadata(base), pytest.raises(BindingError, match="No Special is bound"):
        torch_bcg.current_metadata(Special)


def test_fields_are_found_whatever_objects_of_the_class_held_before():
    """What is known of a class is looked at again for each object."""
    for tags in ([], [1, 2], [torch.ones(1)], [], [[torch.ones(1)]], {"a": torch.ones(1)}, None):
        md = make("cpu", tags=tags, bias=tags and torch.ones(1))
        found = schema.leaves(md)
        tensors = [p for p, x in found.items() if p.startswith("tags") and isinstance(x, Tensor)]
        assert len(tensors) == ("tensor(" in repr(tags))
        assert isinstance(found["bias"], Tensor) == bool(tags)


# what marked functions read by themselves


def test_reads_are_noted_and_the_class_is_as_it_was():
    torch_bcg.register_metadata_binding(Meta)
    md = make("cpu")
    with torch_bcg.bind_metadata(md), reads_noted() as noted:
        _ = md.slots, md.core.table, md.tags
        assert type(md) is Meta
        assert pickle.loads(pickle.dumps(md.page_size)) == 16
        twin = copy.copy(md)
        assert type(dataclasses.replace(md)) is Meta
    assert "__getattribute__" not in {*vars(Meta), *vars(Core)}
    assert {(Meta, "slots"), (Meta, "core.table")} <= noted
    assert type(twin) is Meta


def test_a_class_with_a_getattribute_of_its_own_keeps_it():
    @dataclass
    class Own:
        scale: int

        def __getattribute__(self, name):
            value = object.__getattribute__(self, name)
            return value + 1 if name == "scale" else value

    torch_bcg.register_metadata_binding(Own)
    own = Own.__getattribute__
    with torch_bcg.bind_metadata(Own(1)), reads_noted() as noted:
        assert torch_bcg.current_metadata(Own).scale == 2
    assert Own.__getattribute__ is own
    assert noted == {(Own, "scale")}


def test_an_exception_in_the_probe_leaves_the_class_as_it_was(device):
    @torch_bcg.eager_on_graph(mutates_args=("out",), name="meta::fails_once")
    def fails_once(q: Tensor, out: Tensor) -> None:
        if failures:
            raise ZeroDivisionError(failures.pop())
        out.copy_(q * torch_bcg.current_metadata(Meta).lengths.sum())

    def fn(x, pool):
        q = x * 2
        out = torch.empty_like(q)
        fails_once(q, out)
        return out + 1

    failures = ["once"]
    torch_bcg.register_metadata_binding(Meta)
    both = Both(device, fn)
    with pytest.raises(ZeroDivisionError):
        both(make(device))
    assert "__getattribute__" not in vars(Meta)
    for _ in range(3):
        both(make(device))
