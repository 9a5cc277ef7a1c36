"""What Dynamo knows beside a graph: whose code it is, what stays in place, gradients, settings."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from torch_bcg.graph.geometry import has_memory, has_static_address
from torch_bcg.metadata.instances import instance_of
from torch_bcg.metadata.registration import bound_objects, registrations_of
from torch_bcg.metadata.schema import items
from torch_bcg.sources import local_scope, source_text, transaction


def needs_gradients(gm: fx.GraphModule, example_inputs: Sequence[object]) -> bool:
    """Whether autograd would record the graph."""
    enabled = torch.is_grad_enabled() or any(
        n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes
    )
    return enabled and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def has_tangents(args: Sequence[object]) -> bool:
    """Whether forward-mode differentiation would follow a call, of which Dynamo guards nothing.

    While no level is open no argument is looked at, where this torch says which one is.
    """
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    tensors = (x for x in args if isinstance(x, Tensor) and has_memory(x))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def watched_settings() -> Callable[[], str]:
    """A function that names the global settings of torch that differ from now, "" if none does.

    Those that Dynamo guards every graph with, such as the mode of autograd, precisions, autocast,
    determinism and the default dtype, and modes of torch functions, which make the default device.
    """
    guard = getattr(guards, "GlobalStateGuard", None)
    modes: Any = getattr(torch.overrides, "_get_current_function_mode_stack", None)
    if guard is None or modes is None:
        return lambda: "this torch does not say"
    current = transaction()
    # Dynamo has taken them off while it calls the backend.
    on = getattr(current.output, "torch_function_mode_stack", None) if current else modes()
    if on is None:
        return lambda: "this torch does not say"
    then, modes_then = guard(), _said(on)

    def differing() -> str:
        if not then.check():
            return str(then.reason()).strip()
        return "" if _said(modes()) == modes_then else "modes of torch functions"

    return differing


def _said(modes: Sequence[object]) -> list[tuple[type, object]]:
    """What Dynamo guards modes with: types, and the device of one that makes it the default."""
    return [(type(mode), getattr(mode, "device", None)) for mode in modes]


def watched_tensors(tensors: Mapping[str, Tensor]) -> Callable[[], str]:
    """A function that names a tensor that Dynamo would take for another one by now, "" if none.

    It compares, in C++, what Dynamo guards a tensor with: type, dtype, device, sizes, strides and
    whether it requires a gradient; not where it lies.
    """
    if not tensors:
        return str
    kind = getattr(guards, "TensorGuards", None)
    if kind is None:
        return lambda: "this torch does not say"
    every, names = (*tensors.values(),), [*tensors]
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    # Dispatch keys are compared as well: those that a mode, of inference or of dispatch, adds to
    # every tensor would say what is on now and not what a tensor is.
    alone = functools.partial(torch._C._ForceDispatchKeyGuard, nothing, nothing)
    with alone():
        guard = kind(
            *every,
            dynamic_dims_sizes=[[*x.shape] for x in every],
            dynamic_dims_strides=[[*x.stride()] for x in every],
        )

    def differing() -> str:
        with alone():
            if guard.check(*every):
                return ""
            return str(guard.check_verbose(*every, tensor_check_names=names))

    return differing


Kind = tuple[torch.dtype, torch.device, torch.layout, bool]


def kind_of(x: Tensor) -> Kind:
    """What Dynamo guards a tensor with, besides type, sizes and strides."""
    return x.dtype, x.device, x.layout, x.requires_grad


def kinds_of(gm: fx.GraphModule, example_inputs: Sequence[object]) -> dict[str, tuple[type, Kind]]:
    """Type and kind of every placeholder that is a tensor."""
    nodes = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    return {n.name: (type(x), kind_of(x)) for n, x in nodes if isinstance(x, Tensor)}


def type_of_self() -> type | None:
    """The class of the module whose code Dynamo compiles now, if it compiles a method.

    A module is not in its own nn_module_stack, nor is one whose code is resumed after a break.
    """
    scope = local_scope()
    return type(scope["self"]) if "self" in scope else None


def static_arguments(gm: fx.GraphModule, example_inputs: Sequence[object]) -> frozenset[str]:
    """Placeholders that keep their address: parameters, buffers, module tensors, marked ones."""
    return frozenset(
        node.name
        for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        if isinstance(x, torch.Tensor)
        and (
            isinstance(x, torch.nn.Parameter)
            or has_static_address(x)
            or "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})
        )
    )


def argument_names(gm: fx.GraphModule) -> dict[str, str]:
    """What the user calls each placeholder: ``input_ids``, ``batch['mask']``, ``rest[1]``.

    Where Dynamo compiles a function that hands ``*args`` and ``**kwargs`` on, the names are those
    of the function behind it, if that can be found; else they are ``args[0]`` and the like.

    Args:
        gm: Dynamo's own graph, while Dynamo calls the backend.

    Returns:
        A name for every placeholder whose origin Dynamo says; a size is called after its tensor,
        ``input_ids.size()[1]``. Outside a compilation nothing has a name.
    """
    current = transaction()
    if current is None:
        return {}
    code, _, behind = _frame_of(current)
    names = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        text = source_text(node)
        if text is not None:
            names[node.name] = _readable(text, code, behind)
    return names


def names_in_scope() -> frozenset[str]:
    """What arguments may be called in the code that Dynamo compiles now, read or not.

    Returns:
        Variables of the frame and what lies in containers and dataclasses there, parameters of the
        function behind a wrapper, fields of metadata. Outside a compilation nothing has a name.
    """
    current = transaction()
    if current is None:
        return frozenset()
    code, scope, behind = _frame_of(current)
    there = [at for name, x in scope.items() for at in _inside(f"L[{name!r}]", x)]
    metadata = [x for _, x in there if registrations_of(type(x))] + bound_objects()
    instances = [instance_of(x, ()) for x in metadata]
    return frozenset(
        [_readable(text, code, behind) for text, _ in there]
        + [p.name for p in behind]
        + [name for i in instances for path in i.what for name in i.names(path)]
    )


def _inside(text: str, x: object, depth: int = 3) -> Iterator[tuple[str, object]]:
    """An object and what it holds, objects of metadata as a whole, with Dynamo's text of each."""
    yield text, x
    if depth and not registrations_of(type(x)):
        for step, value in items(x):
            yield from _inside(f"{text}{step}", value, depth - 1)


def _frame_of(
    current: Any,
) -> tuple[types.CodeType, Mapping[str, Any], Sequence[inspect.Parameter]]:
    """Code and variables of the frame whose arguments are the graph's, and `_parameters_behind`."""
    frame = getattr(current.output, "root_tx", None) or current
    code, scope = frame.f_code, current.output.local_scope
    return code, scope, _parameters_behind(code, scope)


def _readable(text: str, code: types.CodeType, behind: Sequence[inspect.Parameter]) -> str:
    """``L['args'][0].size()[1]`` -> ``input_ids.size()[1]``."""
    found = re.fullmatch(r"[LG]\['(\w+)'\](.*)", text)
    if found is None:
        return text
    name, rest = found.groups()
    positional, keywords = _variable(code)
    inner = re.match(r"\[(?:(\d+)|'(\w+)')\]", rest)
    if inner is None or name not in (positional, keywords) or text[0] != "L":
        return f"{name}{rest}"
    after = rest[inner.end() :]
    if name == keywords and inner[2]:
        return f"{inner[2]}{after}"
    place = code.co_argcount + int(inner[1]) if name == positional and inner[1] else len(behind)
    return f"{behind[place].name}{after}" if place < len(behind) else f"{name}{rest}"


def _variable(code: types.CodeType) -> tuple[str, str]:
    """Names of ``*args`` and ``**kwargs`` of a function, "" where it has none."""
    place = code.co_argcount + code.co_kwonlyargcount
    names = []
    for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS):
        names.append(code.co_varnames[place] if code.co_flags & flag else "")
        place += bool(code.co_flags & flag)
    return names[0], names[1]


def _parameters_behind(
    code: types.CodeType, scope: Mapping[str, Any]
) -> tuple[inspect.Parameter, ...]:
    """The positional parameters of the function that a wrapper hands its arguments to."""
    function = _function_behind(code, scope)
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values() if function else ()
    except (TypeError, ValueError):  # a __signature__ somebody made up
        parameters = ()
    return tuple(p for p in parameters if p.kind in named)


def _function_behind(code: types.CodeType, scope: Mapping[str, Any]) -> Any:
    """What a wrapper calls: `functools.wraps` tells it of the forward of a module.

    Else it is the one function or module in the closure of the wrapper, as in Dynamo's own wrapper
    of a module.
    """
    positional, keywords = _variable(code)
    if not positional:
        return None
    first = [scope.get(n) for n in code.co_varnames[: code.co_argcount]]
    first += scope.get(positional, ())
    if first and isinstance(first[0], torch.nn.Module):
        forward = type(first[0]).forward
        if getattr(forward, "__code__", None) is code and hasattr(forward, "__wrapped__"):
            return forward
    held = [scope.get(name) for name in code.co_freevars] if keywords else []
    functions = [f.forward for f in held if isinstance(f, torch.nn.Module)]
    functions += [f for f in held if isinstance(f, (types.FunctionType, types.MethodType))]
    return functions[0] if len(functions) == 1 else None
