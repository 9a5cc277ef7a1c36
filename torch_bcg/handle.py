"""A program from outside: what it is, and a way to call it past Dynamo and its guards."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_bcg.attributes import Watched
from torch_bcg.compiled import CompiledGraph
from torch_bcg.direct import Arguments, misfit
from torch_bcg.errors import BCGError, MisfitError
from torch_bcg.frame import has_tangents
from torch_bcg.graph.ir import Plan
from torch_bcg.graph.sizes import symbols_of
from torch_bcg.metadata import refresh
from torch_bcg.metadata.bound import bind_as_it_is
from torch_bcg.metadata.schema import at, copied, layout_of, put
from torch_bcg.runtime import memory
from torch_bcg.runtime.program import Misfit, Program

T = TypeVar("T")


class ProgramHandle:
    """One program: its plan, and a way to call it past Dynamo and its guards.

    A handle keeps the static tensors of its program alive. Handles of one program are equal.

    Attributes:
        plan: the plan it was recorded from.
        sizes: value of each symbol of the plan.
    """

    def __init__(
        self, graph: CompiledGraph, program: Program, module: torch.nn.Module | None = None
    ) -> None:
        self._graph, self._program = graph, program
        self._module = None if module is None else weakref.ref(module)
        self.plan: Plan = program.plan
        self.sizes: Mapping[str, int] = dict(
            zip((s for s, _, _ in program.plan.symbols), program.key, strict=True)
        )
        # Held, not looked up at each call: while there is a handle its program's tensors live.
        self._static = [ref() for ref in program.statics.objects]

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

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a call takes: inputs that are no static tensor, no size, no field of what is bound.

        In the order of the graph.
        """
        return self._arguments.names

    def __call__(self, *args: Any, metadata: object = None) -> tuple[Any, ...]:
        """Replays with these `arguments`, in order; returns the graph's outputs.

        With ``check="address"`` all static tensors have to be in place and strided as they were,
        and the compiled module has to have them, and whatever else its graph was made for, where it
        had them; else only the address of the first tensor is looked at. With gradients enabled,
        none may be required, and no argument may carry a tangent. Not compared are hooks, code,
        attributes of a class, globals, ``.grad`` and Python attributes of tensors, and what a
        function reads that is no method of a module; nor, once it was called, attributes of an
        object with slots, and defaults and closures of functions. What the compiled function does
        to Python objects after its graph is not done.

        Args:
            args: tensors and numbers.
            metadata: bound for this call alone; None: what the graph reads of metadata is bound
                already, if it reads any.

        Raises:
            MisfitError: the program is not for this call.
            BindingError: nothing is bound of a class that the graph reads.
        """
        if metadata is not None:
            with bind_as_it_is(metadata):
                return self(*args)
        graph, program = self._graph, self._program
        try:
            # Under the lock nobody frees it between the look and the call.
            with graph.pool.lock, self._arguments.of_call(args) as full:
                self._refuse_others(full)
                outputs: tuple[Any, ...] = graph.replay(program, full, self._late)
                return outputs
        except Misfit:
            raise self._moved() from None
        except MisfitError as error:
            error.program = error.program or self
            raise

    def _refuse_others(self, full: list[Any]) -> None:
        """Raises MisfitError if the program, as far as is known by now, is not for a call."""
        graph, program = self._graph, self._program
        if graph.premises.unknown and self._module is not None:
            raise misfit(graph.premises.unknown, "something that can be compared", "nothing")
        changed = graph.changed_settings()
        if changed:
            raise misfit("settings of torch", "those when it was compiled", changed)
        # Of weights it is found out later, with all else of them, or here, if nothing else is.
        asked = self._arguments.brought() if self._compares else full
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in asked):
            raise misfit("gradients", "none that are needed", "an argument that requires them")
        if has_tangents(full):
            raise misfit("tangents", "none", "an argument that carries one")
        if not graph.is_current(program) or not graph.fits(program.statics, full):
            raise self._moved()
        key = graph.key(full)
        if graph.rows.key_for(key) != program.key or graph.rows.due(key, program.key):
            raise misfit("sizes", f"those of {dict(self.sizes)}", str(key))
        values = self._arguments.values()
        self._arguments.check(key, program.at(key).geometries, values)
        if not graph.allows(values):
            raise misfit("sizes", "those Dynamo made the graph for", str(values))

    def captured(self, live: T) -> T:
        """A copy of a metadata object whose tensors are the slots of this program.

        What recorded segments touch lies where they read it and holds ``live``'s values, so a call
        with `bind_metadata` of it copies nothing; `torch_bcg.metadata.refresh` brings the values of
        later steps. It is valid as long as the program.

        Args:
            live: an object of a class that the program's graph reads, at the program's sizes.

        Raises:
            MisfitError: the program is gone, or a field lies in memory of a static tensor.
            BCGError: its graph reads no object of that class.
            BindingError: ``live`` does not fit, see `refresh`.
        """
        if self._program.dead:
            raise self._misfit("program", "one that is recorded", "it was freed")
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
                raise self._misfit(name, "memory of its own", "that of a tensor at its own address")

    @functools.cached_property
    def _arguments(self) -> Arguments:
        graph, program = self._graph, self._program
        bound = [i for i in graph.instances if i.bound]
        numbers = graph.number_expressions()
        return Arguments(
            self.plan, program.key, program.statics, self._static, bound, numbers, graph.kinds
        )

    @property
    def _compares(self) -> bool:
        """Whether static tensors and the module are compared at each call."""
        return "address" in self._graph.options.check

    @functools.cached_property
    def _watched(self) -> Watched:
        """What of the module the program depends on."""
        graph, program = self._graph, self._program
        if not self._compares:
            return Watched(None, {}, graph.premises, {})
        named = zip(program.statics.names, self._static, strict=True)
        static = {name: x for name, x in named if x is not None}
        geometries = program.at(program.key).geometries
        kinds = {
            v.name: (*geometries[v.name][:2], getattr(torch, v.spec.dtype))
            for v in self.plan.values
            if v.name in static and v.spec is not None and not symbols_of(v.spec)
        }
        return Watched(self._module, static, graph.premises, kinds)

    def _late(self, args: Sequence[Any]) -> bool:
        """Whether the call is the program's; asked once the opening runs."""
        return self._program.statics.match_late(args) and self._watched.unchanged()

    def _moved(self) -> MisfitError:
        if self._program.dead:
            return self._misfit("program", "one that is recorded", "it was freed")
        name = self._watched.changed()
        if name:
            return self._misfit(name, "what the module had", "something else")
        return self._misfit("static tensors", "alive, at the addresses recorded", "moved or gone")

    def _misfit(self, what: str, expected: str, found: str) -> MisfitError:
        error = misfit(what, expected, found)
        error.program = self
        return error
