"""What Dynamo knows beyond the graph: whose code it is, what stays in place, gradients."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

from torch_bcg.errors import BindingError
from torch_bcg.metadata.instances import Instance, instance_of
from torch_bcg.metadata.registration import (
    BOUND,
    REGISTERED,
    declared_kind,
    declared_of,
    registrations_of,
    shown_of,
)
from torch_bcg.metadata.schema import leaves


def needs_gradients(gm: fx.GraphModule, example_inputs: Sequence[object]) -> bool:
    """Whether autograd would record the graph."""
    enabled = torch.is_grad_enabled() or any(
        n.target is torch._C._set_grad_enabled and n.args[0] for n in gm.graph.nodes
    )
    return enabled and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def type_of_self() -> type | None:
    """The class of the module whose code Dynamo compiles now, if it compiles a method.

    A module is not in its own nn_module_stack, nor is one whose code is resumed after a break.
    """
    transaction = InstructionTranslator.current_tx() if TracingContext.try_get() else None
    scope = transaction.output.local_scope if transaction is not None else {}
    return type(scope["self"]) if "self" in scope else None


def static_arguments(gm: fx.GraphModule, example_inputs: Sequence[object]) -> frozenset[str]:
    """Placeholders that keep their address: parameters, buffers, module tensors, marked ones."""
    return frozenset(
        node.name
        for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        if isinstance(x, torch.Tensor)
        and (
            isinstance(x, torch.nn.Parameter)
            or hasattr(x, "_dynamo_static_input_type")
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
    transaction = InstructionTranslator.current_tx() if TracingContext.try_get() else None
    if transaction is None:
        return {}
    frame = getattr(transaction.output, "root_tx", None) or transaction
    code, scope = frame.f_code, transaction.output.local_scope
    behind = _parameters_behind(code, scope)
    names = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is not None:
            names[node.name] = _readable(_text_of(source), code, behind)
    return names


def metadata_behind(gm: fx.GraphModule) -> tuple[Instance, ...]:
    """The objects of registered classes that the graph reads, and which of their fields.

    Args:
        gm: Dynamo's own graph, while Dynamo calls the backend.

    Raises:
        BindingError: an attribute is read that is no field, or torch says no more where an argument
            comes from.
    """
    transaction = InstructionTranslator.current_tx() if TracingContext.try_get() else None
    if transaction is None or not REGISTERED:
        return ()
    scope = {"L": transaction.output.local_scope, "G": transaction.output.global_scope}
    found: dict[int, tuple[object, Instance]] = {}
    outside: list[tuple[str, object]] = list(transaction.output.local_scope.items())
    objects: dict[str, object] = {}

    def read(source: Any, placeholder: str) -> None:
        whole, inside = _text_of(source), False
        while (source := getattr(source, "base", None)) is not None:
            text = _text_of(source)
            if text not in objects:
                objects[text] = _object_at(text, scope)
            held = objects[text]
            if registrations_of(type(held)):
                path = whole.removeprefix(text).removeprefix(".")
                _, instance = found.setdefault(id(held), (held, instance_of(held)))
                instance.read(path, placeholder, whole)
                inside = True
        if placeholder and not inside:
            outside.append((whole, _object_at(whole, scope)))

    for node in gm.graph.find_nodes(op="placeholder"):
        if getattr(node, "_dynamo_source", None) is not None:
            read(node._dynamo_source, node.name)
    for guard in TracingContext.get().guards_context.dynamo_guards:
        if guard.create_fn_name() in _COMPARED:
            read(guard.originating_source, "")
    for metadata, instance in found.values():
        if vars(instance.cls).get(BOUND) is metadata:
            _check_apart(metadata, outside)
        _let_follow(instance)
    return tuple(instance for _, instance in found.values())


def _check_apart(metadata: object, outside: Sequence[tuple[str, object]]) -> None:
    """Refuses what Dynamo takes for one tensor and would not look at again."""
    fields = {id(x): path for path, x in leaves(metadata).items() if isinstance(x, torch.Tensor)}
    for text, held in outside:
        if id(held) in fields:
            name = f"{type(metadata).__name__}.{fields[id(held)]}"
            raise BindingError(
                f"{name} is also an argument or a tensor of the model.",
                where=f"{name}, {text}",
                expected="a tensor that this graph meets once",
                found="the same object in both places",
                fix="Pass it in one way, or give the metadata a view of it: tensor.view_as(tensor)",
            )


def _let_follow(instance: Instance) -> None:
    """Tells Dynamo of integers that differ between graphs: from the next one on they vary.

    It takes what is reached through a global name for a constant, and would make a graph for each
    value until it gives up.
    """
    config = torch.compiler.config
    for path, text in instance.constants.items():
        value = instance.numbers.get(path)
        if type(value) is not int or declared_kind(path, declared_of(instance.parts)) == "EQUAL":
            continue
        seen = [shown.constants.get(path, value) for shown in shown_of(instance.cls)]
        told = [t for t in config.dynamic_sources.split(",") if t]
        if any(other != value for other in seen) and re.escape(text) not in told:
            config.dynamic_sources = ",".join([*told, re.escape(text)])


# Guards that compare what an object holds with what it held.
_COMPARED = ("EQUALS_MATCH", "CONSTANT_MATCH", "ID_MATCH", "BOOL_MATCH", "NONE_MATCH")


def _text_of(source: Any) -> str:
    """What Dynamo writes for where something comes from: ``L['md'].core.slots``."""
    name = getattr(source, "name", None)
    text = name() if callable(name) else name  # by version of torch
    if not isinstance(text, str):
        raise BindingError(
            "This torch does not say where the arguments of a graph come from.",
            where=f"a source of Dynamo's, {type(source).__name__}",
            expected="its name, as in L['md'].slots",
            found=repr(text),
            fix="Report the version of torch; without register_metadata_binding all works on.",
        )
    return text


def _object_at(text: str, scope: dict[str, Any]) -> object:
    """The object behind Dynamo's text; None where that needs more than Python itself."""
    try:
        return eval(text, dict(scope))
    except (NameError, AttributeError, LookupError, TypeError, SyntaxError):
        return None


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
