"""What a mark can be put on, and what it then means: ``resolve`` makes one ``Marked`` of anything.

Marking the target for good is the business of ``marks``. A target is only resolved if the mark can
mean something: an operator that does not exist is an error now, not a cut that never comes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType
from typing import Any, TypeGuard

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from torch_bcg.errors import MarkError
from torch_bcg.marking.names import AnyOperator, Spelling, find_named, operator_names, spelled
from torch_bcg.marking.operators import operator_name

__all__ = ["Marked", "is_plain", "resolve", "shown"]

_COLLECTIVES = "_c10d_functional"
_WHERE = "eager_on_graph, or options={'mark': ...}"


@dataclass(frozen=True, slots=True)
class Marked:
    """One thing that can be marked, resolved: what ``mark_of`` compares nodes with.

    Attributes:
        name: As in ``Mark``.
        operators: Pairs of ``"namespace::name"`` and overload; no overload stands for all.
        function: The torch function itself, for those whose name says no operator.
        module: The module class.
        dispatched: Whether it also means operators that other calls reach inside.
    """

    name: str
    operators: tuple[Spelling, ...] = ()
    function: Callable[..., Any] | None = None
    module: type[torch.nn.Module] | None = None
    dispatched: bool = False


def resolve(target: object) -> Marked:
    """Find out what a mark means, without making it.

    Args:
        target: Anything ``eager_on_graph`` takes, but a plain function not yet decorated.

    Returns:
        What ``mark_of`` takes as ``extra``.

    Raises:
        MarkError: It cannot be marked.
    """
    made = operator_name(target)
    if made is not None:
        return Marked(made, ((made, None),), dispatched=True)
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return Marked(target.__name__, module=target)
    if isinstance(target, str):
        return _marked_operator(_named(target))
    if isinstance(target, CustomOpDef):
        return _marked_operator(_operator_of(target))
    if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return _marked_operator(target)
    if _is_of_torch(target):
        return _marked_function(target)
    raise _unmarkable(target)


def is_plain(target: object) -> TypeGuard[FunctionType]:
    """Whether this is a Python function that torch does not bring, so one to decorate."""
    return isinstance(target, FunctionType) and not _is_of_torch(target)


def shown(target: object) -> str:
    """How a message names a target."""
    if isinstance(target, (str, int, float)):
        return repr(target)
    name = getattr(target, "__qualname__", None)
    return name if isinstance(name, str) else f"{type(target).__name__} object"


def _marked_operator(operator: AnyOperator) -> Marked:
    spelling = spelled(operator)
    assert spelling is not None
    name = ".".join(part for part in spelling if part is not None)
    return Marked(name, _with_wait(spelling), dispatched=True)


def _with_wait(spelling: Spelling) -> tuple[Spelling, ...]:
    # A recorded wait would wait for the collective of its recording and not for the eager one.
    if spelling[0].startswith(_COLLECTIVES + "::"):
        return spelling, (f"{_COLLECTIVES}::wait_tensor", None)
    return (spelling,)


def _marked_function(fn: Callable[..., Any]) -> Marked:
    name = fn.__name__
    spelling = spelled(fn)
    collective = find_named(f"{_COLLECTIVES}::{name}")
    # Methods of tensors have no module.
    module = str(getattr(fn, "__module__", None))
    if module.startswith("torch.distributed") and collective is not None:
        # Dynamo rewrites it to the functional operator and a wait.
        return Marked(name, _with_wait((f"{_COLLECTIVES}::{name}", None)), fn, dispatched=True)
    # Of a function like flex_attention Dynamo leaves the higher-order operator of that name.
    return Marked(name, (spelling or (f"higher_order::{name}", None),), fn)


def _named(name: str) -> AnyOperator:
    operator = find_named(name)
    if operator is not None:
        return operator
    valid = operator_names()
    wanted = name.replace(".", "::", 1) if "::" not in name else name
    near = difflib.get_close_matches(wanted, valid, n=1) or difflib.get_close_matches(
        f"aten::{name}", valid, n=1
    )
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise MarkError(
        f"There is no operator {name!r}.",
        where=_WHERE,
        expected='"namespace::name", or "namespace::name.overload"',
        found=repr(name),
        fix=hint + "If a module of yours defines it, import that first",
    )


def _operator_of(definition: CustomOpDef) -> AnyOperator:
    # What torch.library.custom_op returns has no public way to its operator.
    name, _ = str(definition._opoverload).rsplit(".", 1)
    return _named(name)


def _is_of_torch(target: object) -> TypeGuard[Callable[..., Any]]:
    if isinstance(target, MethodDescriptorType):
        # Dunder methods are Python syntax: Dynamo leaves another function, or another operator.
        return target.__objclass__ in torch.Tensor.__mro__ and not target.__name__.startswith("__")
    if not isinstance(target, (FunctionType, BuiltinFunctionType)):
        return False
    return str(target.__module__).partition(".")[0] == "torch"


def _unmarkable(target: object) -> MarkError:
    if isinstance(target, torch.nn.Module):
        fix = f"mark its class, {type(target).__name__}"
    elif isinstance(target, MethodType):
        fix = "mark the class of its module, or a function that takes tensors instead of self"
    elif isinstance(target, FunctionType):
        fix = "decorate it with @torch_bcg.eager_on_graph, and pass what that returns"
    elif isinstance(target, type) and issubclass(target, torch.autograd.Function):
        fix = "mark the operators it calls, or annotate the call"
    else:
        fix = 'wrap the call in torch.fx.traceback.annotate({"bcg": "eager"})'
    return MarkError(
        f"{shown(target)} cannot be marked.",
        where=_WHERE,
        expected="a function, a torch function, an operator or its name, or a module class",
        found="a class" if isinstance(target, type) else f"of type {type(target).__name__}",
        fix=fix,
    )
