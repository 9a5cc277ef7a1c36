"""Mutants of padded sizes, of shared memory and of checks; see `mutants.breaks`."""

from torch import Tensor

import torch_bcg.rows
from mutants.breaks import always, nothing, replaced
from torch_bcg.graph import lifetimes, padding
from torch_bcg.graph.buckets import SizeGuards
from torch_bcg.runtime import calls, checks, steps, trial
from torch_bcg.runtime.calls import _Binder
from torch_bcg.runtime.trial import Trial
from torch_bcg.runtime.workspace import Workspace


def not_back(original):
    """What eager segments write to copies stays there."""
    return lambda binder, segment, back: None if back else original(binder, segment, back)


def once_ever(original):
    """A copy is up to date from its first reader on."""
    return always(None)(original)


def whole(original):
    return lambda binder, whole, name, dims: whole


def whole_operand(original):
    return lambda binder, name, segment, cuts: binder.space.resolve(name)


def front_of_the_padded(original):
    """Fronts have the strides of the padded value."""

    def operand(binder, name, segment, cuts):
        made = original(binder, name, segment, cuts)
        if name not in cuts:
            return made
        return binder.narrowed(binder.space.resolve(name), name, cuts[name].row_dims)

    return operand


def not_copied(original):
    """Nothing is copied to where the front is a view."""
    return lambda binder, segment, back: None


def strides_of_the_padded(monkeypatch):
    replaced(_Binder, "operand", front_of_the_padded)(monkeypatch)
    replaced(_Binder, "copy_fronts", not_copied)(monkeypatch)


def whole_outputs(original):
    return lambda b, o: (b.space.resolve(o.name), b.space.geometries[o.name])


def of_the_bucket(original):
    return lambda space, key: original(space, space.key)


def no_reason(original):
    return lambda one, args: (original(one, args)[0], None)


def zeros_only(original):
    def init(one, *args):
        original(one, *args)
        one.fillings, one.changes = one.fillings[:1], ()

    return init


def as_they_are(original):
    """Rows of the call alone are tried."""

    def init(one, *args):
        original(one, *args)
        one.changes = ()

    return init


def no_clones(original):
    """Arguments of one size for all calls are the caller's own."""

    def argument(one, i, name, x, filling):
        if isinstance(x, Tensor) and not one.facts.nodes[name].tensors[0].row_dims:
            return x
        return original(one, i, name, x, filling)

    return argument


def first_only(original):
    """Each size fills its tails once, and not again after other sizes."""

    def fill_tails(slots, fills):
        left = list(fills)

        def step():
            while left:
                left.pop()()

        return step

    return fill_tails


def no_fills(original):
    def init(binder, scene, key):
        original(binder, scene, key)
        binder.fills = {}

    return init


def end_early(original):
    """A value ends one segment before its last reader."""

    def shared(values, lives, written, end):
        return original(values, {s: (a, b - 1) for s, (a, b) in lives.items()}, written, end)

    return shared


PADDING_MUTANTS = {
    "tails not filled": replaced(_Binder, "fill_tails", always(None)),
    "tails filled once": replaced(steps, "fill_tails", first_only),
    "tails filled with zero": replaced(_Binder, "__init__", no_fills),
    "declared rows unknown": replaced(torch_bcg.rows, "fills_of", always(())),
    "copies never made again": replaced(_Binder, "written", always(None)),
    "copies not copied back": replaced(_Binder, "copy_fronts", not_back),
    "no front is copied": replaced(padding._Padder, "is_copied", always(False)),
    "strides of padded values": strides_of_the_padded,
    "outputs not cut": replaced(_Binder, "front_out", whole_outputs),
    "nothing is cut": replaced(_Binder, "narrowed", whole),
    "eager segments see all rows": replaced(_Binder, "operand", whole_operand),
    "numbers of the bucket": replaced(Workspace, "numbers_at", of_the_bucket),
    "smallest bucket": replaced(
        torch_bcg.rows, "find", lambda original: lambda live, sizes, *_: sizes[0]
    ),
    "guards ignored": replaced(SizeGuards, "allows", always(True)),
    "facts not asked": replaced(padding._Padder, "refused", always(None)),
    "trials agree": replaced(Trial, "run", no_reason),
    "trials fill with zero": replaced(Trial, "__init__", zeros_only),
    "trials change no rows": replaced(Trial, "__init__", as_they_are),
    "trials write the caller's memory": replaced(Trial, "argument", no_clones),
    "memory shared too early": replaced(lifetimes, "_shared", end_early),
    "memory released too early": replaced(
        Workspace, "release", lambda original: lambda space, i: original(space, i + 1)
    ),
    "checks compare nothing": replaced(checks, "difference", always("")),
    "one size is tried": replaced(torch_bcg.rows, "gcd", always(1)),
    "trials compare nothing": replaced(trial, "difference", always("")),
    "verify does nothing": replaced(
        calls, "verified", lambda original: lambda again, step, tolerance: step
    ),
    "poison runs nothing again": replaced(
        calls, "without_padding", lambda original: lambda again, step, *_: step
    ),
    "poison fills rows with zero": replaced(_Binder, "poison", always(0.0)),
    "poison leaves dead memory": replaced(calls, "spoil", lambda original: lambda _: nothing),
}
