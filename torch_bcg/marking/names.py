"""Which operator a call means, as far as its name says; nothing here runs or is marked.

Dynamo leaves ``torch.nonzero(x)``, ``x.nonzero()`` and ``torch.ops.aten.nonzero(x)`` as a function,
a text and an operator. All three are spelled ``("aten::nonzero", None)`` here: name and overload,
None where the overload is only chosen when the call is made.
"""

from __future__ import annotations

from types import MethodDescriptorType
from typing import Any, TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["AnyOperator", "Spelling", "find_named", "operator_names", "spelled"]

Spelling: TypeAlias = tuple[str, str | None]
AnyOperator: TypeAlias = "OpOverload[..., Any] | OpOverloadPacket[..., Any] | HigherOrderOperator"

# Modules whose functions carry the name of the operator they call.
_NAMESAKES = ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
# Python's operators whose function is not named like torch's.
_PYTHON_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}


def spelled(target: object) -> Spelling | None:
    """The operator that calling ``target`` means, or None if its name says none.

    Args:
        target: An operator, a function, a method of tensors, or the name of such a method.
    """
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}", None
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        namespace, short, *which = str(target).split(".")
        return f"{namespace}::{short}", which[0] if which else None
    if isinstance(target, str):
        return f"aten::{target}", None
    name = getattr(target, "__name__", None)
    module = getattr(target, "__module__", None)
    if not isinstance(name, str):
        return None
    if isinstance(target, MethodDescriptorType):
        return f"aten::{name}", None
    if module == "_operator":
        return f"aten::{_PYTHON_OPERATORS.get(name, name)}", None
    if module in _NAMESAKES or (isinstance(module, str) and module.startswith("torch._C")):
        return f"aten::{name}", None
    return None


def find_named(name: str) -> AnyOperator | None:
    """The operator called ``"namespace::name"`` or ``"namespace.name"``, with overload or without.

    Args:
        name: The qualified name; ``"higher_order::name"`` finds higher-order operators.

    Returns:
        The packet or overload, or None if there is none of this name.
    """
    parts = name.replace("::", ".").split(".")
    if not 2 <= len(parts) <= 3 or not all(parts):
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    is_operator = isinstance(found, (OpOverload, OpOverloadPacket, HigherOrderOperator))
    return found if is_operator else None


def operator_names() -> list[str]:
    """Names of all operators there are now; empty if torch does not tell."""
    names = getattr(torch._C, "_dispatch_get_all_op_names", list)
    return sorted({name.partition(".")[0] for name in names()})
