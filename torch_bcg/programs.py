"""What was compiled for a function, from outside: its graphs and programs, and how to free them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.eval_frame import (  # the one place that looks into Dynamo's caches
    OptimizedModule,
    _debug_get_cache_entry_list,
    innermost_fn,
)

from torch_bcg.compiled import CompiledGraph
from torch_bcg.dynamo import bcg
from torch_bcg.errors import BCGError
from torch_bcg.graph.ir import Plan
from torch_bcg.metadata import refresh
from torch_bcg.metadata.schema import at, copied, layout_of, put
from torch_bcg.runtime.memory import shared
from torch_bcg.runtime.program import Misfit, Program

T = TypeVar("T")


class ProgramHandle:
    """One program: its plan, and a way to call it past Dynamo and its guards.

    A handle keeps the static tensors of its program alive.

    Attributes:
        plan: the plan it was recorded from.
        sizes: value of each symbol of the plan.
        replays: calls so far.
        bytes: memory of its slots, and what the pool grew by when it was recorded.
        arguments: what a call takes: the graph's inputs that are no static tensor and no size.
    """

    def __init__(self, graph: CompiledGraph, program: Program) -> None:
        self._graph, self._program = graph, program
        self.plan: Plan = program.plan
        self.sizes: Mapping[str, int] = dict(
            zip((s for s, _, _ in program.plan.symbols), program.key, strict=True)
        )
        homes = {v.name: v.home for v in self.plan.values}
        self._specs = {v.name: v.spec for v in self.plan.values}
        self._sizes = self._size_places()
        sizes = {self.plan.arguments[target] for target, _, _ in self._sizes}
        self.arguments = tuple(
            a for a in self.plan.arguments if homes[a] not in ("static", "size") and a not in sizes
        )
        self._full: list[Any] = [None] * len(self.plan.arguments)
        self._given = [self.plan.arguments.index(a) for a in self.arguments]
        for symbol, argument, dim in self.plan.symbols:
            if dim < 0:
                self._full[self.plan.arguments.index(argument)] = self.sizes[symbol]
        # Held, not looked up at each call: while there is a handle its program's tensors live.
        for place, ref in zip(program.statics.places, program.statics.objects, strict=True):
            self._full[place] = ref()
        self._rows = self._row_places()

    def __repr__(self) -> str:
        """Name, sizes and figures."""
        sizes = ", ".join(f"{s}={n}" for s, n in self.sizes.items())
        return f"<program of {self.plan.name}({sizes}): {self.replays} replays, {self.bytes} bytes>"

    @property
    def replays(self) -> int:
        """Calls so far."""
        return self._program.replays

    @property
    def bytes(self) -> int:
        """Memory of its slots, and what the pool grew by when it was recorded."""
        return self._program.bytes

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Replays with these `arguments`, in order; returns the graph's outputs.

        Raises:
            BCGError: the program is gone, a static tensor moved (without ``check="address"`` only
                the first one is looked at), or an argument has another shape, stride or dtype than
                the program was recorded for.
        """
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
                for target, source, dim in (*self._rows, *self._sizes):
                    full[target] = full[source].shape[dim]
                if program.dead or not graph.fits(program.statics, full):
                    raise _moved()
                self._check(args, graph.key(full))
                outputs: tuple[Any, ...] = graph.replay(program, full)
            except Misfit:
                raise _moved() from None
            finally:
                for place in self._given:
                    full[place] = None
        return outputs

    def _check(self, args: Sequence[Any], key: tuple[int, ...]) -> None:
        """Raises if arguments of this key are not what the program was recorded for."""
        program = self._program
        if self._graph.rows.key_for(key) != program.key:
            raise _unfit("sizes", f"those of {dict(self.sizes)}", str(key))
        expected = program.at(key).geometries
        for name, x in zip(self.arguments, args, strict=True):
            if name in expected and (tuple(x.shape), x.stride()) != expected[name][:2]:
                raise _unfit(name, str(expected[name][:2]), str((tuple(x.shape), x.stride())))
            spec = self._specs[name]
            if spec is not None and x.dtype != getattr(torch, spec.dtype):
                raise _unfit(name, spec.dtype, str(x.dtype))

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
                not isinstance(real, torch.Tensor)
                or f.kind not in ("COPY", "WRITTEN")
                or home == "static"
            ):
                continue
            with torch.inference_mode(real.is_inference()):  # Dynamo tells the two apart
                there = home == "slot"
                mine = shared(self._program.slot(f.argument)) if there else real.clone()
            self._check_own(f.name, real)
            put(captured, paths[f.name], mine)
        refresh(captured, live)
        return captured

    def _check_own(self, name: str, real: torch.Tensor) -> None:
        """Refuses a field in the memory of a static tensor: slots would be apart from it."""
        storage = real.untyped_storage().data_ptr()
        for ref in self._program.statics.objects:
            static = ref()
            if static is not None and static.untyped_storage().data_ptr() == storage:
                raise _unfit(name, "memory of its own", "that of a tensor at its own address")

    def _row_places(self) -> list[tuple[int, int, int]]:
        """The argument that is the padded size as a number, and the tensor and dim that have it."""
        padding, names = self.plan.padding, self.plan.arguments
        return [
            (names.index(argument), names.index(padding.argument), padding.dim)
            for symbol, argument, dim in self.plan.symbols
            if padding is not None and symbol == padding.symbol and dim < 0
        ]

    def _size_places(self) -> list[tuple[int, int, int]]:
        """Arguments that are sizes of no key, and the tensor and dim that have each."""
        names, specs = self.plan.arguments, self._specs
        return [
            next(
                (names.index(argument), names.index(n), spec.size.index(symbol))
                for n, spec in specs.items()
                if n in names and spec is not None and symbol in spec.size
            )
            for symbol, argument, dim in self.plan.call_symbols
            if dim < 0
        ]


def _moved() -> BCGError:
    return _unfit("static tensors", "alive, at the addresses recorded", "moved or gone")


def _unfit(what: str, expected: str, found: str) -> BCGError:
    return BCGError(
        f"The program was not recorded for this call: {what}.",
        where="ProgramHandle",
        expected=expected,
        found=found,
        fix="Call the compiled function, which finds or records the right program.",
    )


def wrapper_of(compiled: Any) -> Any:
    """What `torch.compile` made: a module may have it as its forward, or beside it."""
    if isinstance(compiled, torch.nn.Module) and not isinstance(compiled, OptimizedModule):
        compiled = compiled._compiled_call_impl or compiled.forward
    return getattr(compiled, "__func__", compiled)


def is_compiled(compiled: Any) -> bool:
    """Whether `torch.compile`, or ``module.compile()``, was called for it."""
    wrapper = wrapper_of(compiled)
    return isinstance(wrapper, OptimizedModule) or innermost_fn(wrapper) is not wrapper


def programs(compiled: Callable[..., Any]) -> list[ProgramHandle]:
    """The programs of a compiled function or module, the last used of each graph first."""
    return [ProgramHandle(g, p) for g in graphs_of(compiled) for p in g.programs]


def reset(compiled: Callable[..., Any] | None = None) -> None:
    """Frees programs, slots and recordings; the next calls record again.

    Args:
        compiled: what `torch.compile` returned; None: everything.
    """
    if compiled is None:
        bcg.reset()
        return
    for graph in graphs_of(compiled):
        graph.reset()


def graphs_of(compiled: Callable[..., Any]) -> list[CompiledGraph]:
    """The graphs of a compiled function or module, those after graph breaks included.

    The backend never sees what `torch.compile` returns, so they are found by code object: Dynamo's
    cache entries of the code name their graphs among the globals, and so does resumed code.
    """
    found: list[CompiledGraph] = []
    seen: set[types.CodeType] = set()
    todo = _functions(compiled)
    while todo:
        function = todo.pop(0)
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        scope = function.__globals__
        for entry in _debug_get_cache_entry_list(function.__code__):
            values = [(n, scope[n]) for n in entry.code.co_names if n in scope]
            todo += [v for n, v in values if n.startswith("__resume_at")]
            graphs = [innermost_fn(v) for n, v in values if n.startswith("__compiled_fn")]
            found += [g for g in graphs if isinstance(g, CompiledGraph) and g not in found]
    return found


def forget_graphs(code: types.CodeType) -> None:
    """Makes Dynamo let go of all graphs of a code object, and so of what they keep alive."""
    reset_code(code)


def _functions(compiled: Callable[..., Any]) -> list[types.FunctionType]:
    """The Python functions whose code Dynamo may have compiled for ``compiled``."""
    starts: list[Any] = [compiled]
    if isinstance(compiled, OptimizedModule):
        # Dynamo wraps the forward of torch's own modules: then the code is the wrapper's.
        starts = [compiled.forward, compiled._orig_mod.forward]
    elif isinstance(compiled, torch.nn.Module):
        starts = [compiled.forward]
    functions: list[types.FunctionType] = []
    for start in starts:
        functions += _unwrapped(innermost_fn(start))
    return functions


def _unwrapped(current: Any) -> list[types.FunctionType]:
    """A function and those it wraps."""
    functions: list[types.FunctionType] = []
    while current is not None:
        current = getattr(current, "__func__", current)
        if isinstance(current, types.FunctionType):
            functions.append(current)
        current = getattr(current, "__wrapped__", None)
    return functions
