"""The comparison with eager can fail: each mutant mistakes one field of the metadata.

A mutant takes pytest's ``monkeypatch`` and changes how torch_bcg brings a field to recorded
segments, or how the test makes it. What is served must then differ from eager, or be refused with
the name of the field.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import torch_bcg
from mutants.breaks import first_time_only, replaced
from paged.paged_model import Llama, Paged, Sizes, lengthened
from paged.paged_requests import Scheduler
from paged.paged_serving import Served, by_calls, by_engine, registered
from torch_bcg.errors import BindingError
from torch_bcg.metadata import bound, refreshing
from torch_bcg.runtime import steps
from torch_bcg.runtime.calls import _Binder

STEPS = 30


# a field that the first version of the model does not have


@dataclass
class Boosted(Paged):
    """A step in which some tokens count more.

    Attributes:
        boost: float32 [T], read by recorded code.
    """

    boost: Tensor

    def padded(self, tokens: int, requests: int) -> Paged:
        """Rows of nobody here as well."""
        step = super().padded(tokens, requests)
        return replace(step, boost=lengthened(self.boost, tokens))


class BoostedLlama(Llama):
    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, vocabulary]"""
        return super().forward(input_ids) * torch_bcg.current_metadata(Paged).boost[:, None]


class BoostedScheduler(Scheduler):
    def paged(self, works, decodes):
        step = super().paged(works, decodes)
        boost = 1 + torch.arange(len(step.core.slots), device=self.device) % 3
        return Boosted(**vars(step), boost=boost.float())


def with_boost(serve):
    """The same way to serve, with the new field."""
    return lambda device, steps: serve(device, steps, BoostedLlama, BoostedScheduler)


# mutants


def taken_for(kind, *fields):
    """`refresh` takes fields for what they are not."""

    def change(original):
        def kinds(captured):
            found, ways = original(captured)
            return {**found, **dict.fromkeys(fields, kind)}, ways

        return kinds

    return replaced(refreshing, "_kinds", change)


def kept_from_the_first_call(*fields):
    """Recorded segments go on reading what the first call of their program brought."""

    def change(original):
        def copy_in(binder):
            plan, before = binder.plan, len(binder.steps)
            mine = {f.argument for b in plan.bindings for f in b.fields if f.name in fields}
            binder.plan = replace(plan, values=tuple(v for v in plan.values if v.name in mine))
            original(binder)
            binder.steps[before:] = map(once, binder.steps[before:])
            binder.plan = replace(plan, values=tuple(v for v in plan.values if v.name not in mine))
            original(binder)
            binder.plan = plan

        return copy_in

    return replaced(_Binder, "copy_in", change)


def once(step):
    """A step that works at the first call only."""
    return first_time_only(lambda: step)()


def rebound(*fields):
    """Fields that recorded segments read are bound anew, where those do not look."""

    def mutate(monkeypatch):
        taken_for("REBIND", *fields)(monkeypatch)
        kept_from_the_first_call(*fields)(monkeypatch)

    return mutate


def narrowed(original):
    """The page table is as wide as the longest request of the batch."""

    def table(scheduler, works):
        width = max([1, *(len(w.request.pages) for w in works)])
        return original(scheduler, works)[:, :width].contiguous()

    return table


DIFFERS = AssertionError, "Tensor-likes are not close"
MUTANTS = {
    "a COPY field rebound": (by_engine, rebound("core.slots"), DIFFERS),
    "a COPY field moved": (
        by_engine,
        taken_for("REBIND", "core.slots"),
        (AssertionError, "moved"),
    ),
    "a COPY field kept": (by_calls, kept_from_the_first_call("core.slots"), DIFFERS),
    "a page table narrowed to the batch": (
        by_engine,
        replaced(Scheduler, "table", narrowed),
        (BindingError, "Paged.page_table cannot be refreshed"),
    ),
    "a number frozen by refresh": (by_engine, taken_for("WRITTEN", "sharpness"), DIFFERS),
    "a number frozen in its slot": (
        by_calls,
        replaced(steps, "fill_numbers", first_time_only),
        DIFFERS,
    ),
    "a new field left out of refresh": (
        with_boost(by_engine),
        taken_for("WRITTEN", "boost"),
        DIFFERS,
    ),
    "a new field left out of calls": (
        with_boost(by_calls),
        kept_from_the_first_call("boost"),
        DIFFERS,
    ),
    "an aliased field rebound": (
        by_engine,
        rebound("core.positions", "query_positions"),
        DIFFERS,
    ),
    "an aliased field left alone": (by_engine, taken_for("WRITTEN", "query_positions"), DIFFERS),
    "aliased fields shown as one": (
        by_engine,
        replaced(bound, "_distinct", lambda original: lambda tensor: tensor),
        (AssertionError, "recorded again"),
    ),
}


@pytest.mark.parametrize("serve", [by_calls, by_engine])
def test_a_new_field_is_derived(device, serve):
    """Nothing was declared when it came."""
    compiled = with_boost(serve)(device, STEPS).compiled
    (binding,) = torch_bcg.explain(compiled).plans[0].bindings
    assert {f.name: f.kind for f in binding.fields}["boost"] == "COPY"


def test_a_copied_field_cannot_be_declared_rebind(device):
    """The mutants need internals: a declaration that is wrong does not get as far."""
    served, source = Served(Llama(Sizes()).to(device)), Scheduler(0, Sizes(), device)
    refused = pytest.raises(BackendCompilerFailed, match=r"core\.slots is declared REBIND")
    with registered(rebind=("core.slots",)), torch.no_grad(), refused:
        served.call(source.step())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(device, monkeypatch, name):
    serve, mutate, (error, says) = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises(error, match=says):
        serve(device, STEPS)
