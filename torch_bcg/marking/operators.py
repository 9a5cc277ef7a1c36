"""A plain function -> an operator of its own, so that Dynamo leaves one node where it is called.

Made with ``torch.library.Library``, not ``custom_op``, whose dispatch costs ten times as much. What
is marked is decided in ``marking``. The invariant: the function returned by ``make_operator`` does
what the plain function does, always, also after another one has taken its operator's name.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from torch_bcg.errors import MarkError
from torch_bcg.marking.names import find_named, spelled
from torch_bcg.marking.signature import checked_fake, place_of, schema_of

__all__ = ["is_operator", "make_operator", "operator_name", "plain_function"]

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*", re.ASCII)
_DEFAULT_NAMESPACE = "torch_bcg"


class _Operator:
    """One plain function and the operator that stands for it now."""

    def __init__(self, plain: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
        # FX names what it calls by module, which a function made by exec() does not have.
        plain.__module__ = plain.__module__ or "__main__"
        self.plain = plain
        self.schema = schema
        self.fake = fake

    def define(self, name: str) -> None:
        """Register under ``name``, which must be free."""
        namespace, short = name.split("::")
        self.name = name
        self.library = torch.library.Library(namespace, "FRAGMENT")
        self.library.define(short + self.schema, tags=(torch.Tag.cudagraph_unsafe,))
        # Other backends reach this through the dispatcher, where Dynamo would trace into it and
        # compile what was marked to be left alone.
        self.library.impl(short, torch.compiler.disable(self.plain), "CompositeExplicitAutograd")
        torch.library.register_fake(name, self.fake, lib=self.library)
        packet = getattr(getattr(torch.ops, namespace), short)
        self.packet: OpOverloadPacket = packet
        # Traced code reads this attribute, so Dynamo guards it and compiles again when it changes.
        self.op: OpOverload = packet.default
        _operators[name] = self

    def withdraw(self) -> None:
        """Take back the registrations, so that the name is free."""
        del _operators[self.name]
        _destroy(self.library)


_operators: dict[str, _Operator] = {}
_callers: weakref.WeakKeyDictionary[Callable[..., Any], _Operator] = weakref.WeakKeyDictionary()
_destroyed: list[torch.library.Library] = []
_lock = threading.RLock()


def make_operator(
    fn: FunctionType,
    *,
    mutates_args: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Define an operator for ``fn`` and return the function that calls either.

    An older function of the same name loses the name, not its life: it goes on under the name with
    a number, for those who still hold it (closures made in a loop share a name).

    Args:
        fn: The plain function: tensors and numbers in, tensors or None out, all annotated.
        mutates_args: Names of the parameters it writes.
        fake: Takes the same arguments, returns new empty tensors like the results. Needed if
            ``fn`` returns anything.
        name: ``"namespace::name"``; made of module and name of ``fn`` when left out.

    Returns:
        A function with the name and signature of ``fn``: the operator in traced code, ``fn`` itself
        everywhere else.

    Raises:
        MarkError: Something about ``fn``, ``fake`` or ``name`` makes that impossible.
    """
    schema = schema_of(fn, mutates_args)
    operator = _Operator(fn, schema, checked_fake(fn, fake, schema))
    with _lock:
        _define_as(operator, _checked_name(fn, name))

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator.op(*args, **kwargs)
        return fn(*args, **kwargs)

    _callers[marked] = operator
    return marked


def plain_function(target: object) -> Callable[..., Any] | None:
    """The Python function behind an operator made by ``make_operator``, for calling it directly.

    Args:
        target: Anything; usually the target of a node.

    Returns:
        The function, or None for everything else, operators that have been replaced included.
    """
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        return None
    name, _ = spelled(target) or ("", None)
    operator = _operators.get(name)
    if operator is None or (operator.op is not target and operator.packet is not target):
        return None
    return operator.plain


def operator_name(fn: object) -> str | None:
    """The present name of the operator that a function returned by ``make_operator`` calls."""
    operator = _callers.get(fn) if isinstance(fn, FunctionType) else None
    return operator.name if operator is not None else None


def is_operator(name: str) -> bool:
    """Whether ``make_operator`` made the operator of this name."""
    return name in _operators


def _define_as(operator: _Operator, name: str) -> None:
    older = _operators.get(name)
    if older is not None:
        older.withdraw()
    operator.define(name)
    if older is not None:
        number = 1
        while find_named(f"{name}_{number}") is not None:
            number += 1
        older.define(f"{name}_{number}")


def _destroy(library: torch.library.Library) -> None:
    # torch has no public way that does not wait for the garbage collector, and a name can only be
    # defined again when it is free. The finalizer would clear what torch.ops knows under the name,
    # which is another operator's by then, so the object stays.
    library._destroy()
    _destroyed.append(library)


def _checked_name(fn: FunctionType, name: str | None) -> str:
    if name is None:
        spelled = re.sub(r"\W+", "_", f"{fn.__module__}_{fn.__qualname__}", flags=re.ASCII)
        return f"{_DEFAULT_NAMESPACE}::{spelled.strip('_')}"
    if not _NAME.fullmatch(name):
        raise MarkError(
            f"{name!r} cannot be the name of an operator.",
            where=place_of(fn),
            expected='"namespace::name", both of letters, digits and underscores',
            found=repr(name),
            fix=f'name="my::{fn.__name__}"',
        )
    if name not in _operators and find_named(name) is not None:
        raise MarkError(
            f"The operator {name} exists and was not made by eager_on_graph.",
            where=place_of(fn),
            expected="a name of its own",
            found=name,
            fix=f'mark the operator itself, eager_on_graph("{name}"), or choose another name',
        )
    return name
