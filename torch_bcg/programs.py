"""What was compiled for a function, from outside: its graphs and programs, and how to free them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.eval_frame import (  # the one place that looks into Dynamo's caches
    OptimizedModule,
    _debug_get_cache_entry_list,
    innermost_fn,
)

from torch_bcg.compiled import CompiledGraph
from torch_bcg.dynamo import bcg
from torch_bcg.handle import ProgramHandle


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
    module = module_of(compiled)
    return [ProgramHandle(g, p, module) for g in graphs_of(compiled) for p in g.programs]


def module_of(compiled: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that was compiled, as one or by its forward; None: a function was."""
    module: Any = compiled
    if isinstance(compiled, OptimizedModule):
        module = compiled._orig_mod
    elif not isinstance(compiled, torch.nn.Module):
        module = getattr(innermost_fn(compiled), "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


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
