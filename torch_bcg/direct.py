"""The arguments of a program that is called directly: who brings each, and what it has to be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torch_bcg.errors import MisfitError
from torch_bcg.frame import Kind, kind_of
from torch_bcg.graph import sizes
from torch_bcg.graph.ir import Plan
from torch_bcg.graph.sizes import Geometry
from torch_bcg.metadata.instances import Instance
from torch_bcg.metadata.reading import Fields
from torch_bcg.runtime import memory
from torch_bcg.runtime.statics import Statics

_SYMBOL = re.compile(r"\b[su]\d+\b")


class Arguments:
    """All arguments of one program, of which a call brings some.

    Static tensors and sizes of the program are here already, fields come from what is bound, sizes
    from the tensors that have them, and the rest is given.

    Args:
        plan: of the program.
        key: values of its symbols.
        statics: its static tensors.
        static: those, alive.
        instances: objects that are bound when the graph is called.
        numbers: expressions of the arguments that are numbers.
        kinds: types and kinds of the arguments that are tensors.
    """

    def __init__(
        self,
        plan: Plan,
        key: Sequence[int],
        statics: Statics,
        static: Sequence[object],
        instances: Sequence[Instance],
        numbers: Mapping[str, str],
        kinds: Mapping[str, tuple[type, Kind]],
    ) -> None:
        names = plan.arguments
        self._names = names
        self._fields = [Fields(i, names) for i in instances]
        of_fields = {place: names[place] for f in self._fields for place in f.places}
        self._derived = [d for d in derived_sizes(plan) if d[0] not in of_fields]
        self._full: list[Any] = [None] * len(names)
        symbols = zip(plan.symbols, key, strict=True)
        known: dict[int, object] = {names.index(a): n for (_, a, dim), n in symbols if dim < 0}
        known |= dict(zip(statics.places, static, strict=True))
        for place, value in known.items():
            self._full[place] = value
        homes = {v.name: v.home for v in plan.values}
        elsewhere = {*of_fields, *known, *(target for target, _, _ in self._derived)}
        self._given = [
            place
            for place, name in enumerate(names)
            if place not in elsewhere and homes[name] not in ("static", "size")
        ]
        self._brought = [*self._given, *of_fields]
        specs = {v.name: v.spec for v in plan.values if v.spec is not None}
        self._tensors = [
            (place, n, *kinds[n]) for place in self._brought if (n := names[place]) in kinds
        ]
        self._places = [place for place, *_ in self._tensors]
        at = zip(statics.places, statics.found_at, strict=True)
        self._fixed = [(place, found_at) for place, found_at in at if place in of_fields]
        symbols_of_key = [s for s, _, _ in plan.symbols]
        of_key = {n: e for n, e in numbers.items() if {*_SYMBOL.findall(e)} <= {*symbols_of_key}}
        sized = {place: of_key[name] for place, name in of_fields.items() if name in of_key}
        self._sized, self._sizes = [*sized], sizes.compiled(sized.values(), symbols_of_key)
        alone = {names.index(n): e for n, e in numbers.items() if _SYMBOL.fullmatch(e)}
        self._integers = [(place, names[place]) for place in self._brought if place in alone]
        self._symbols = {e: (place, -1) for place, e in alone.items()}
        self._symbols |= {
            s: (names.index(a), dim) for s, a, dim in (*plan.call_symbols, *plan.symbols)
        }
        # Sizes are read of these before anything else of a tensor is compared.
        sources = {*self._symbols.values(), *((source, dim) for _, source, dim in self._derived)}
        self._ranks = [
            (place, names[place], len(specs[names[place]].size))
            for place in {place for place, dim in sources if dim >= 0}.intersection(self._brought)
        ]
        varying = {
            place: specs[n]
            for place, n, _, _ in self._tensors
            if n in specs and not sizes.symbols_of(specs[n]) <= {*symbols_of_key}
        }
        self._varying = sizes.geometries_of(varying, [*self._symbols]) if varying else None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are given, in the order of the graph."""
        return tuple(self._names[place] for place in self._given)

    @contextmanager
    def of_call(self, given: Sequence[Any]) -> Iterator[list[Any]]:
        """All arguments of one call, until it ends.

        Raises:
            MisfitError: another number of arguments, or an object is bound that does not fit.
        """
        if len(given) != len(self._given):
            raise misfit("number of arguments", str(len(self._given)), str(len(given)))
        # No copy: of hundreds of weights that takes as long as all the rest. A call of this program
        # amid this one fills and empties the same places, which the replay has read.
        full = self._full
        try:
            for place, x in zip(self._given, given, strict=True):
                full[place] = x
            for fields in self._fields:
                fields.take(full)
            for place, name, cls, _ in self._tensors:
                if type(full[place]) is not cls:
                    raise misfit(name, f"a {cls.__name__}", type(full[place]).__name__)
            for place, name in self._integers:
                if type(full[place]) is not int:
                    raise misfit(name, "an int", type(full[place]).__name__)
            for place, name, rank in self._ranks:
                if full[place].dim() != rank:
                    raise misfit(name, f"{rank} dims", str(full[place].dim()))
            for target, source, dim in self._derived:
                full[target] = full[source].shape[dim]
            yield full
        finally:
            for place in self._brought:
                full[place] = None

    def values(self) -> dict[str, int]:
        """Of the symbols, in a call."""
        full = self._full
        return {
            symbol: full[place] if dim < 0 else full[place].shape[dim]
            for symbol, (place, dim) in self._symbols.items()
        }

    def brought(self) -> list[Any]:
        """Those that a call brings itself, what is given and fields of what is bound."""
        return [self._full[place] for place in self._brought]

    def check(
        self,
        key: Sequence[int],
        geometries: Mapping[str, Geometry],
        values: Mapping[str, int],
    ) -> None:
        """Compares what a call of this key brings with what the program was recorded for.

        Args:
            key: of the call.
            geometries: of what follows from the key.
            values: of all symbols, from which the rest follows.

        Raises:
            MisfitError: something differs.
        """
        full = self._full
        for place, name, _, kind in self._tensors:
            x = full[place]
            if kind_of(x) != kind:
                words = ("dtype", "device", "layout", "requires_grad")
                parts = zip(words, kind, kind_of(x), strict=True)
                what, old, new = next(part for part in parts if part[1] != part[2])
                raise misfit(f"{what} of {name}", str(old), str(new))
            if name in geometries and (x.shape, x.stride()) != geometries[name][:2]:
                raise _other_geometry(name, x, geometries[name])
        # Dynamo gives one placeholder to one tensor: of two it was told that they are apart.
        if len({id(full[place]) for place in self._places}) < len(self._places):
            raise misfit("tensors", "several", "one of them in two places")
        if self._varying is not None:
            for place, geometry in self._varying(*values.values()).items():
                x = full[place]
                if (x.shape, x.stride()) != geometry[:2]:
                    raise _other_geometry(self._names[place], x, geometry)
        for place, number in zip(self._sized, self._sizes(*key), strict=True):
            if full[place] != number:
                raise misfit(self._names[place], str(number), str(full[place]))
        for place, found_at in self._fixed:
            if memory.addresses(full[place]) != found_at:
                raise misfit(self._names[place], "the address recorded", "another one")


def _other_geometry(name: str, x: Tensor, geometry: Geometry) -> MisfitError:
    return misfit(name, str(geometry[:2]), str((tuple(x.shape), x.stride())))


def derived_sizes(plan: Plan) -> list[tuple[int, int, int]]:
    """Arguments that are sizes of others, and the tensor and dim that have each.

    The padded size as a number, and sizes of no key.
    """
    names, padding = plan.arguments, plan.padding
    found = [
        (names.index(argument), names.index(padding.argument), padding.dim)
        for symbol, argument, dim in plan.symbols
        if padding is not None and symbol == padding.symbol and dim < 0
    ]
    for symbol, argument, dim in plan.call_symbols:
        if dim < 0:
            found += [
                (names.index(argument), names.index(v.name), v.spec.size.index(symbol))
                for v in plan.values
                if v.name in names and v.spec is not None and symbol in v.spec.size
            ][:1]
    return found


def misfit(what: str, expected: str, found: str) -> MisfitError:
    """The error for a call that a program was not recorded for."""
    return MisfitError(
        f"The program was not recorded for this call: {what}.",
        where="ProgramHandle",
        expected=expected,
        found=found,
        fix="Call the compiled function, which finds or records the right program.",
    )
