"""A program from outside: what it is, and a way to call it past Dynamo and its guards."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_bcg.compiled import CompiledGraph, current_generation
from torch_bcg.errors import BCGError, StaleError
from torch_bcg.graph.ir import Plan
from torch_bcg.graph.sizes import compiled
from torch_bcg.metadata import refresh
from torch_bcg.metadata.bound import bind_as_it_is
from torch_bcg.metadata.reading import Fields
from torch_bcg.metadata.schema import Numbers, at, copied, layout_of, put
from torch_bcg.runtime import memory
from torch_bcg.runtime.program import Misfit, Program

T = TypeVar("T")


_NOTHING = object()


class Holders:
    """The places of a module where its tensors, modules and numbers are, and what is there.

    Args:
        places: (what holds, under which name, what).
    """

    def __init__(self, places: Sequence[tuple[dict[str, Any], str, object]]) -> None:
        self.places = places
        self.held = [held for held, _, _ in places]
        self.names = [name for _, name, _ in places]
        self.values = [value for _, _, value in places]

    @staticmethod
    def in_module(module: nn.Module | None) -> Holders:
        """Of submodules too; None: no places."""
        found: list[tuple[dict[str, Any], str, object]] = []
        for m in module.modules() if module is not None else ():
            for held in (m._parameters, m._buffers, m._modules, vars(m)):
                kinds = (Tensor, nn.Module, *Numbers)
                found += [(held, n, x) for n, x in held.items() if isinstance(x, kinds)]
        return Holders(found)

    def of(self, tensors: Sequence[object], names: Collection[str]) -> Holders:
        """The places of some tensors, of numbers with these names and of all modules.

        None at all if the module has none of the tensors.
        """
        wanted = {id(t) for t in tensors}
        mine = [place for place in self.places if id(place[2]) in wanted]
        others = [
            (held, name, x)
            for held, name, x in self.places
            if isinstance(x, nn.Module) or (name in names and isinstance(x, Numbers))
        ]
        return Holders([*mine, *others] if mine else [])

    def same(self) -> bool:
        """Whether each has what it had."""
        now = map(dict.get, self.held, self.names, itertools.repeat(_NOTHING))
        return all(map(operator.is_, now, self.values))


class ProgramHandle:
    """One program: its plan, and a way to call it past Dynamo and its guards.

    A handle keeps the static tensors of its program alive. Handles of one program are equal.

    Attributes:
        plan: the plan it was recorded from.
        sizes: value of each symbol of the plan.
    """

    def __init__(self, graph: CompiledGraph, program: Program, held: Holders) -> None:
        self._graph, self._program = graph, program
        self.plan: Plan = program.plan
        self.sizes: Mapping[str, int] = dict(
            zip((s for s, _, _ in program.plan.symbols), program.key, strict=True)
        )
        # Held, not looked up at each call: while there is a handle its program's tensors live.
        self._static = [ref() for ref in program.statics.objects]
        self._held = held

    def __repr__(self) -> str:
        """Name, sizes and figures."""
        sizes = ", ".join(f"{s}={n}" for s, n in self.sizes.items())
        return f"<program of {self.plan.name}({sizes}): {self.replays} replays, {self.bytes} bytes>"

    def __eq__(self, other: object) -> bool:
        """Whether it is of the same program."""
        return isinstance(other, ProgramHandle) and self._program is other._program

    def __hash__(self) -> int:
        """That of the program."""
        return hash(self._program)

    @property
    def replays(self) -> int:
        """Calls so far."""
        return self._program.replays

    @property
    def bytes(self) -> int:
        """Memory of its slots, and what the pool grew by when it was recorded."""
        return self._program.bytes

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """What a call takes: inputs that are no static tensor, no size, no field of what is bound.

        In the order of the graph.
        """
        homes = {v.name: v.home for v in self.plan.values}
        others = {n for fields in self._fields for n in fields.names}
        others |= {self.plan.arguments[target] for target, _, _ in self._derived}
        others |= {argument for _, argument, dim in self.plan.symbols if dim < 0}
        every = [a for a in self.plan.arguments if a not in others]
        return tuple(a for a in every if homes[a] not in ("static", "size"))

    def __call__(self, *args: Any, metadata: object = None) -> tuple[Any, ...]:
        """Replays with these `arguments`, in order; returns the graph's outputs.

        With ``check="address"`` all static tensors have to be in place, and a compiled module has
        to have the tensors, modules and numbers that it had when `programs` was called; else only
        the address of the first tensor is looked at. Hooks and the code of a module are not.

        Args:
            args: tensors and numbers.
            metadata: bound for this call alone; None: what the graph reads of metadata is bound
                already, if it reads any.

        Raises:
            StaleError: the program is gone, a static tensor moved or was replaced, or marks,
                metadata classes or settings of torch have changed.
            BindingError: what is bound is not what the graph was made for.
            BCGError: an argument or field has another shape, stride or dtype than the program was
                recorded for.
        """
        if metadata is not None:
            with bind_as_it_is(metadata):
                return self(*args)
        if len(args) != len(self._given):
            raise _unfit("number of arguments", str(len(self._given)), str(len(args)))
        graph, program = self._graph, self._program
        with graph.pool.lock:  # nobody frees it between the look and the call
            # No copy: of hundreds of weights that takes as long as all the rest. A call of this
            # handle amid this one fills and empties the same places, which `replay` has read.
            full = self._full
            try:
                for place, x in zip(self._given, args, strict=True):
                    full[place] = x
                for fields in self._fields:
                    fields.take(full)
                for target, source, dim in self._derived:
                    full[target] = full[source].shape[dim]
                if graph.generation != current_generation():
                    graph.make_plan()
                changed = graph.settings()
                if changed:
                    raise _stale("settings of torch", "those when it was compiled", changed)
                if program.dead or not graph.fits(program.statics, full):
                    raise _moved()
                self._check(full, graph.key(full))
                outputs: tuple[Any, ...] = graph.replay(program, full, self._same)
            except Misfit:
                raise _moved() from None
            finally:
                for place in self._emptied:
                    full[place] = None
        return outputs

    def captured(self, live: T) -> T:
        """A copy of a metadata object whose tensors are the slots of this program.

        What recorded segments touch lies where they read it and holds ``live``'s values, so a call
        with `bind_metadata` of it copies nothing; `torch_bcg.metadata.refresh` brings the values of
        later steps. It is valid as long as the program.

        Args:
            live: an object of a class that the program's graph reads, at the program's sizes.

        Raises:
            BCGError: the program is gone, or its graph reads no object of that class.
            BindingError: ``live`` does not fit, see `refresh`.
        """
        if self._program.dead:
            raise _unfit("program", "one that is recorded", "it was freed")
        classes = [instance.cls for instance in self._graph.instances]
        if classes.count(type(live)) != 1:
            found = f"{classes.count(type(live))} objects of {type(live).__name__}"
            raise BCGError(
                f"This program has no slots for a {type(live).__name__}.",
                where="ProgramHandle.captured",
                expected=f"a class of which {self.plan.name} reads one object",
                found=found,
                fix="Take the program of the graph that reads it, see plan.bindings of each.",
            )
        fields = self.plan.bindings[classes.index(type(live))].fields
        homes = {v.name: v.home for v in self.plan.values}
        captured: T = copied(live, lambda value: value)
        paths = layout_of(live).paths
        for f in fields:
            real = at(live, paths[f.name]) if f.name in paths else None
            home = homes.get(f.argument)
            if (
                not isinstance(real, Tensor)
                or f.kind not in ("COPY", "WRITTEN")
                or home == "static"
            ):
                continue
            with torch.inference_mode(real.is_inference()):  # Dynamo tells the two apart
                there = home == "slot"
                mine = memory.shared(self._program.slot(f.argument)) if there else real.clone()
            self._check_own(f.name, real)
            put(captured, paths[f.name], mine)
        refresh(captured, live)
        return captured

    def _check_own(self, name: str, real: Tensor) -> None:
        """Refuses a field in the memory of a static tensor: slots would be apart from it."""
        storage = real.untyped_storage().data_ptr()
        for ref in self._program.statics.objects:
            static = ref()
            if static is not None and static.untyped_storage().data_ptr() == storage:
                raise _unfit(name, "memory of its own", "that of a tensor at its own address")

    # what is there for every call

    @functools.cached_property
    def _fields(self) -> list[Fields]:
        instances = [i for i in self._graph.instances if i.bound]
        return [Fields(i, self.plan.arguments) for i in instances]

    @functools.cached_property
    def _full(self) -> list[Any]:
        """All arguments: static tensors, sizes, and None where a call brings its own."""
        full: list[Any] = [None] * len(self.plan.arguments)
        for symbol, argument, dim in self.plan.symbols:
            if dim < 0:
                full[self.plan.arguments.index(argument)] = self.sizes[symbol]
        for place, x in zip(self._program.statics.places, self._static, strict=True):
            full[place] = x
        return full

    @functools.cached_property
    def _given(self) -> list[int]:
        return [*map(self.plan.arguments.index, self.arguments)]

    @functools.cached_property
    def _emptied(self) -> list[int]:
        return [*self._given, *(place for fields in self._fields for place in fields.places)]

    @functools.cached_property
    def _derived(self) -> list[tuple[int, int, int]]:
        """Arguments that are sizes of others, and the tensor and dim that have each.

        The padded size as a number, and sizes of no key; not fields, which say their own.
        """
        plan, names, padding = self.plan, self.plan.arguments, self.plan.padding
        specs = {v.name: v.spec for v in plan.values}
        found = [
            (names.index(argument), names.index(padding.argument), padding.dim)
            for symbol, argument, dim in plan.symbols
            if padding is not None and symbol == padding.symbol and dim < 0
        ]
        found += [
            next(
                (names.index(argument), names.index(n), spec.size.index(symbol))
                for n, spec in specs.items()
                if n in names and spec is not None and symbol in spec.size
            )
            for symbol, argument, dim in plan.call_symbols
            if dim < 0
        ]
        fields = {place for f in self._fields for place in f.places}
        return [derived for derived in found if derived[0] not in fields]

    @functools.cached_property
    def _checked(self) -> list[tuple[int, str, torch.dtype]]:
        """Tensors that a call brings: place, name, dtype."""
        known = {v.name: v.spec for v in self.plan.values if v.spec is not None}
        names = [self.plan.arguments[place] for place in self._emptied]
        return [
            (place, n, getattr(torch, known[n].dtype))
            for place, n in zip(self._emptied, names, strict=True)
            if n in known
        ]

    @functools.cached_property
    def _numbers(self) -> tuple[list[int], Callable[..., tuple[object, ...]]]:
        """Places of fields that are sizes of the key, and what they are by its symbols."""
        symbols = [s for s, _, _ in self.plan.symbols]
        nodes = self._graph.facts.nodes
        found = {
            place: nodes[n].expr
            for f in self._fields
            for place, n in zip(f.places, f.names, strict=True)
            if not nodes[n].tensors and nodes[n].expr and nodes[n].symbols <= {*symbols}
        }
        return [*found], compiled(found.values(), symbols)

    @functools.cached_property
    def _fixed(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """Fields that stay in place: place, name, addresses."""
        statics = self._program.statics
        every = zip(statics.places, statics.names, statics.found_at, strict=True)
        fields = {place for f in self._fields for place in f.places}
        return [(place, name, at) for place, name, at in every if place in fields]

    @functools.cached_property
    def _same(self) -> Callable[[], bool]:
        """Whether the module holds the static tensors where it did."""
        if "address" not in self._graph.options.check:
            return lambda: True
        return self._held.of(self._static, self._graph.guarded).same

    def _check(self, args: Sequence[Any], key: tuple[int, ...]) -> None:
        """Raises if arguments of this key are not what the program was recorded for."""
        program = self._program
        if self._graph.rows.key_for(key) != program.key:
            raise _unfit("sizes", f"those of {dict(self.sizes)}", str(key))
        expected = program.at(key).geometries
        for place, name, dtype in self._checked:
            x = args[place]
            if not isinstance(x, Tensor):
                raise _unfit(name, "a tensor", type(x).__name__)
            if name in expected and (x.shape, x.stride()) != expected[name][:2]:
                raise _unfit(name, str(expected[name][:2]), str((tuple(x.shape), x.stride())))
            if x.dtype != dtype:
                raise _unfit(name, str(dtype), str(x.dtype))
        places, numbers = self._numbers
        for place, number in zip(places, numbers(*key), strict=True):
            if args[place] != number:
                raise _unfit(self.plan.arguments[place], str(number), str(args[place]))
        for place, name, found_at in self._fixed:
            if memory.addresses(args[place]) != found_at:
                raise _stale(name, "the address recorded", "another one")


def _moved() -> StaleError:
    return _stale("static tensors", "alive, in place, at the addresses recorded", "moved or gone")


def _stale(what: str, expected: str, found: str) -> StaleError:
    error = _unfit(what, expected, found, StaleError)
    assert isinstance(error, StaleError)
    return error


def _unfit(what: str, expected: str, found: str, kind: type[BCGError] = BCGError) -> BCGError:
    return kind(
        f"The program was not recorded for this call: {what}.",
        where="ProgramHandle",
        expected=expected,
        found=found,
        fix="Call the compiled function, which finds or records the right program.",
    )
