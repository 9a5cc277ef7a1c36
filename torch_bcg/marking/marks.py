"""``eager_on_graph``: marks for the process are made and taken back here.

Marks for one compile come with its options instead and pass through ``resolve`` alone. Which nodes
of a graph a mark meets is decided in ``match``; nothing here looks at a graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch._library.custom_ops import CustomOpDef

from torch_bcg.errors import MarkError
from torch_bcg.marking.operators import make_operator, operator_name
from torch_bcg.marking.targets import Marked, is_plain, resolve, shown

__all__ = ["Handle", "current_marks", "eager_on_graph", "generation"]


class Handle:
    """What marking an operator or a torch function returns; ``remove()`` takes the mark back."""

    def __init__(self, number: int) -> None:
        self._number = number

    def remove(self) -> None:
        """Take the mark back. Other marks on the same thing stay; a second call does nothing."""
        with _lock:
            if _marks.pop(self._number, None) is not None:
                _bump()


_marks: dict[int, Marked] = {}
_numbers = itertools.count(1)
_generation = 0
_lock = threading.RLock()


def generation() -> int:
    """A number that grows with every mark made, removed or defined again."""
    return _generation


def current_marks() -> tuple[Marked, ...]:
    """The marks of the process; decorated functions are known by their operator instead."""
    with _lock:
        return tuple(_marks.values())


def eager_on_graph(
    target: Any = None,
    /,
    *,
    mutates_args: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    name: str | None = None,
    enable: bool = True,
) -> Any:
    """Mark what must run eagerly, between recorded segments, in every compiled program.

    A plain function is decorated, with or without parentheses, and becomes an operator; outside
    compiled programs it stays the plain function. A module class marks every call of it and of its
    subclasses. An operator (object or qualified name) or a function of torch is marked as it is,
    under all its spellings: ``aten::nonzero`` also means ``torch.nonzero(x)`` and ``x.nonzero()``.

    Args:
        target: What to mark, or a bool, which is ``enable`` given by position.
        mutates_args: For a plain function: names of the arguments it writes.
        fake: For a plain function that returns tensors: takes the same arguments and returns empty
            tensors of the shapes, dtypes and devices of the results.
        name: For a plain function: the operator's ``"namespace::name"``. Defining a name again
            replaces it; who still holds the older function keeps that.
        enable: False marks nothing and gives a function or class back as it is.

    Returns:
        The decorated function, the class itself, a ``Handle`` for operators and functions of torch,
        or a decorator if there is no target yet.

    Raises:
        MarkError: The target cannot be marked; the message says why and what to do instead.
    """
    if target is None or isinstance(target, bool):
        wanted = enable if target is None else target

        def decorate(fn: Any) -> Any:
            return eager_on_graph(
                fn, mutates_args=mutates_args, fake=fake, name=name, enable=wanted
            )

        return decorate
    if is_plain(target):
        if not enable or operator_name(target) is not None:
            return target
        operator = make_operator(target, mutates_args=mutates_args, fake=fake, name=name)
        with _lock:
            _bump()
        return operator
    if fake is not None or name is not None or tuple(mutates_args):
        raise MarkError(
            f"{shown(target)} has its schema already.",
            where="eager_on_graph",
            expected="mutates_args, fake and name with a plain function only",
            found=shown(target),
            fix="leave them out",
        )
    marked = resolve(target)
    number = next(_numbers)
    if enable:
        with _lock:
            _marks[number] = marked
            _bump()
    returns_itself = isinstance(target, (type, CustomOpDef))
    return target if returns_itself else Handle(number)


def _bump() -> None:
    global _generation
    _generation += 1
