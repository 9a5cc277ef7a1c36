"""Which nodes of a graph are marked, and by what: ``mark_of`` answers for one node at a time.

What a mark does to a graph is the partition's business. Where a name does not decide which operator
a call will reach, a mark holds: an eager operation too many is slow, one too few is recorded
against its author's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from torch_bcg.errors import MarkError
from torch_bcg.marking.marks import current_marks
from torch_bcg.marking.names import Spelling, spelled
from torch_bcg.marking.operators import is_operator
from torch_bcg.marking.targets import Marked

__all__ = ["Mark", "mark_of"]


@dataclass(frozen=True, slots=True)
class Mark:
    """What ``mark_of`` answers: this node runs eagerly because of a mark.

    Attributes:
        name: What was marked, as its author would write it: ``"my::attention"``,
            ``"scaled_dot_product_attention"``, ``"GPTJAttention"``, ``"annotate"``.
        unit: Which occurrence. All nodes of one unit belong to one marked thing: a node, one call
            of a module, one annotated stretch. The same on every run.
    """

    name: str
    unit: str


def mark_of(
    node: torch.fx.Node,
    extra: Sequence[Marked] = (),
    *,
    dispatched: Iterable[OpOverload[..., Any]] = (),
    owner: type | None = None,
) -> Mark | None:
    """The mark a node runs eagerly by, if any; the widest first.

    Args:
        node: A node of a graph as Dynamo makes it.
        extra: Marks for this compile only.
        dispatched: Operators that the node reaches, where known; a mark on an operator then holds
            for calls that reach it under another name.
        owner: Class of the module whose method is compiled. Dynamo says of every node which
            submodules it came from, but never names this one.

    Returns:
        The mark, or None. Placeholders, attributes and outputs compute nothing and have none.

    Raises:
        MarkError: An annotation has a value for ``"bcg"`` that means nothing.
    """
    if not node.op.startswith("call_"):
        return None
    marks = [*current_marks(), *extra]
    return (
        _by_module(node, marks, owner) or _by_annotation(node) or _by_call(node, marks, dispatched)
    )


def _by_module(node: torch.fx.Node, marks: Sequence[Marked], owner: type | None) -> Mark | None:
    classes = [marked.module for marked in marks if marked.module is not None]
    if not classes:
        return None
    for cls in classes:
        if owner is not None and issubclass(owner, cls):
            return Mark(cls.__name__, "self")
    for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
        for cls in classes:
            if _is_kind(kind, cls):
                # The key is an address, with @1, @2 ... for further calls of the same module.
                _, at, call = key.partition("@")
                return Mark(cls.__name__, path + at + call)
    return None


def _is_kind(kind: type | str, cls: type) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, cls)
    # Exported graphs hold names.
    return any(kind == f"{c.__module__}.{c.__qualname__}" for c in _family(cls))


def _family(cls: type) -> Iterator[type]:
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from _family(child)


def _by_annotation(node: torch.fx.Node) -> Mark | None:
    if not _is_annotated(node):
        return None
    first = node
    while first.prev.op.startswith("call_") and _is_annotated(first.prev):
        first = first.prev
    return Mark("annotate", first.name)


def _is_annotated(node: torch.fx.Node) -> bool:
    custom = node.meta.get("custom") or {}
    if "bcg" not in custom:
        return False
    if custom["bcg"] != "eager":
        raise MarkError(
            "An annotation for bcg has a value that means nothing.",
            where=f"node {node.name}",
            expected='torch.fx.traceback.annotate({"bcg": "eager"})',
            found=repr(custom["bcg"]),
            fix='write "eager"',
        )
    return True


def _by_call(
    node: torch.fx.Node, marks: Sequence[Marked], dispatched: Iterable[OpOverload[..., Any]]
) -> Mark | None:
    if isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None  # Sizes are computed by functions of the same names, without any operator.
    called = spelled(node.target)
    reached = [spelling for op in dispatched if (spelling := spelled(op)) is not None]
    for spelling in [called, *reached]:
        if spelling is not None and is_operator(spelling[0]):
            return Mark(spelling[0], node.name)
    for marked in marks:
        if (
            (marked.function is not None and marked.function is node.target)
            or (called is not None and _holds(marked, called))
            or (marked.dispatched and any(_holds(marked, spelling) for spelling in reached))
        ):
            return Mark(marked.name, node.name)
    return None


def _holds(marked: Marked, call: Spelling) -> bool:
    name, which = call
    return any(
        name == other and (which is None or wanted is None or which == wanted)
        for other, wanted in marked.operators
    )
