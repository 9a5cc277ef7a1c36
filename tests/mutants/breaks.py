"""Mutants: each breaks one rule of the runtime through module attributes, and nothing else.

A mutant takes pytest's ``monkeypatch``. One that no longer fits the code it patches raises
something else than what a scenario raises, so it does not pass for killed.
"""

import contextlib
import functools

import torch

import torch_bcg.attributes
import torch_bcg.compiled
import torch_bcg.dynamo
import torch_bcg.marking
from mutants.recorders import (
    executed,
    fresh_operands,
    fresh_outputs,
    one_replay,
    one_seed,
    recorders,
)
from torch_bcg.attributes import Watched
from torch_bcg.graph import modes, plan
from torch_bcg.graph.plan import _Planner
from torch_bcg.metadata import reading
from torch_bcg.runtime import calls, memory, probe, statics, steps
from torch_bcg.runtime.collection import Programs
from torch_bcg.runtime.device import Pool
from torch_bcg.runtime.program import Program
from torch_bcg.runtime.recorders import HostRecorder
from torch_bcg.runtime.slots import Arena
from torch_bcg.runtime.statics import Overlaps, Statics


def replaced(owner, name, make):
    """The mutant that puts ``make(original)`` in the place of ``owner.name``."""

    def mutate(monkeypatch):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, make(original))

    return mutate


def nothing(*args, **kwargs):
    return None


def always(value):
    return lambda original: lambda *args, **kwargs: value


def no_step(original):
    """Makes a step that does nothing."""
    return always(nothing)(original)


def first_time_only(original):
    """Makes a step that works once a program."""

    def make(*args):
        step, done = original(*args), []

        def once():
            if not done:
                done.append(step())

        return once

    return make


def without_stores(original):
    def eager(cells, forward, bound, loads, stores, bridges):
        return original(cells, forward, bound, loads, (), bridges)

    return eager


def bridges_once(original):
    def eager(cells, forward, bound, loads, stores, bridges):
        todo = [original(cells, forward, bound, loads, stores, b) for b in ((), bridges)]
        return lambda: todo.pop()() if len(todo) == 2 else todo[0]()

    return eager


def itself(t):
    return t


def program_memory(original):
    """Outputs are the program's own memory."""
    return lambda tensors, take: [(lambda t=t: t, ((i, itself),)) for i, t in tensors.items()]


def a_clone_each(original):
    """Outputs that share memory are copied apart."""
    return lambda tensors, take: [(t.clone, ((i, itself),)) for i, t in tensors.items()]


def views_of_slots(original):
    """A returned view of an input is one of the slot the input was copied into."""

    def view_out(builder, cell, output):
        cells, view = builder.cells, builder.space.resolve(output.name)
        return functools.partial(cells.__setitem__, cell, view)

    return view_out


def copies_back_at_the_end(monkeypatch):
    copy_back, outputs = calls._Binder.copy_back, calls._Binder.outputs

    def later(builder, segment):
        builder.__dict__.setdefault("late", []).append(segment)

    def and_then_outputs(builder):
        for segment in builder.late:
            copy_back(builder, segment)
        return outputs(builder)

    monkeypatch.setattr(calls._Binder, "copy_back", later)
    monkeypatch.setattr(calls._Binder, "outputs", and_then_outputs)


def values_stay(original):
    """The arguments of a call are kept until the next."""

    def replay(program, args, bound, late):
        try:
            return original(program, args, bound, late)
        finally:
            for cell, place in bound.loads:
                bound.cells[cell] = args[place]

    return replay


def first_key(original):
    """The sizes of the first call are taken for those of every call."""

    def key_reader(plan):
        read, first = original(plan), []

        def key(args):
            first[:] = first or [read(args)]
            return first[0]

        return key

    return key_reader


def twice(original):
    def probed(*args):
        original(*args)
        return original(*args)

    return probed


@contextlib.contextmanager
def no_context(*args):
    yield []


def never_left(original):
    """An exception leaves the pool in use."""

    @contextlib.contextmanager
    def in_use(pool):
        pool.busy = True
        yield
        pool.busy = False

    return in_use


def inference_slots(original):
    def over(*args):
        with torch.inference_mode():
            return original(*args)

    return over


def forgiving(original):
    """Whatever a bound object holds is what it held."""

    class Anything:
        def __eq__(self, other):
            return True

        __hash__ = None

    return lambda value: Anything()


MUTANTS = {
    "never replays": replaced(Programs, "find", always(None)),
    "address not in the key": replaced(statics, "same_addresses", always(True)),
    "late addresses not compared": replaced(Statics, "match_late", always(True)),
    "every first segment runs twice": replaced(plan, "is_repeatable", always(True)),
    "moved tensors unseen": replaced(Statics, "moved", always([])),
    "dead programs kept": replaced(Programs, "drop", always(None)),
    "programs not freed": replaced(Program, "free", always(None)),
    "inputs not copied in": replaced(steps, "copy_in", no_step),
    "inputs copied in once": replaced(steps, "copy_in", first_time_only),
    "writes not copied back": replaced(steps, "copy_back", no_step),
    "writes copied back once": replaced(steps, "copy_back", first_time_only),
    "writes copied back at the end": copies_back_at_the_end,
    "overlap unseen": replaced(Overlaps, "found", always(None)),
    "eager calls silent": replaced(torch_bcg.compiled, "tell_eager_call", always(None)),
    "outputs in program memory": replaced(memory, "out_of", program_memory),
    "outputs cloned apart": replaced(memory, "out_of", a_clone_each),
    "outputs cloned once": replaced(steps, "hand_out", first_time_only),
    "views of slots returned": replaced(calls._Binder, "view_out", views_of_slots),
    "arguments remade once": replaced(steps, "remake_out", first_time_only),
    "eager values lost": replaced(steps, "eager", without_stores),
    "eager segments run once": replaced(steps, "eager", first_time_only),
    "bridges keep the first value": replaced(steps, "eager", bridges_once),
    "views taken for reads": replaced(
        _Planner, "touched_storages", lambda original: lambda self: frozenset(self.facts.origin)
    ),
    "cells not cleared": replaced(Program, "replay", values_stay),
    "numbers filled once": replaced(steps, "fill_numbers", first_time_only),
    "sizes not in the key": replaced(torch_bcg.compiled, "key_reader", first_key),
    "modes left behind": replaced(modes, "preserved", lambda original: no_context),
    "modes not put in force": replaced(modes.ModeWriter, "change", always(None)),
    "slots made in inference mode": replaced(memory, "over", inference_slots),
    "one seed": recorders(one_seed),
    "recorded segments replayed once": recorders(one_replay),
    "recording executes": recorders(executed),
    "probed twice": replaced(torch_bcg.compiled, "probe", twice),
    "re-entry unseen": replaced(Pool, "in_use", lambda original: no_context),
    "in use after an exception": replaced(Pool, "in_use", never_left),
    "later marks unseen": replaced(torch_bcg.marking, "generation", always(0)),
    "a handle's module unseen": replaced(Watched, "unchanged", always(True)),
    "a handle's strides unseen": replaced(torch_bcg.attributes, "watched_tensors", always(str)),
    "a handle's settings unseen": replaced(torch_bcg.compiled, "watched_settings", always(str)),
    "a handle's metadata not compared": replaced(reading, "outline_of", forgiving),
    "gradients ignored": replaced(torch_bcg.dynamo, "needs_gradients", always(False)),
}


# Of the host recorder, and of how host reads are found without a device that reports them.
def in_use(original):
    """A block is given out again while the tensor it was given out as lives."""

    def take(arena, spec, geometry):
        given = arena.__dict__.setdefault("given", [])
        for t in given:
            if memory.extent(t) >= memory.reach(*geometry[:2]) * t.itemsize:
                return memory.over(t.untyped_storage(), t.dtype, 0, geometry)
        given.append(original(arena, spec, geometry))
        return given[-1]

    return take


HOST_MUTANTS = {
    "runs on copies of its operands": replaced(HostRecorder, "record", fresh_operands),
    "leaves results elsewhere": replaced(HostRecorder, "record", fresh_outputs),
    "host reads unseen": replaced(probe, "host_reads", lambda original: no_context),
    "memory given out twice": replaced(Arena, "take", in_use),
}
