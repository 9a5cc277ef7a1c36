"""Binding: the object that traced code and marked functions see while a call runs."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_bcg.errors import BindingError
from torch_bcg.graph.geometry import has_static_address
from torch_bcg.metadata import schema
from torch_bcg.metadata.registration import (
    BOUND,
    TRACED,
    Registration,
    arguments_of,
    bind,
    check_equal,
    registrations_of,
)

T = TypeVar("T")
_lock = threading.Lock()


def current_metadata(cls: type[T]) -> T:
    """The object of a registered class that is bound for this call.

    Traced code reads its fields as graph inputs; marked functions read them as they are.

    Raises:
        BindingError: the class is not registered, or nothing of it is bound.
    """
    bound = getattr(cls, TRACED if torch.compiler.is_compiling() else BOUND, None)
    if not isinstance(bound, cls):
        raise _nothing_bound(cls)
    return bound


def _nothing_bound(cls: type) -> BindingError:
    name = getattr(cls, "__name__", repr(cls))
    registered = bool(registrations_of(cls))
    return BindingError(
        f"No {name} is bound." if registered else f"{name} is not registered.",
        where=f"current_metadata({name})",
        expected=f"with torch_bcg.bind_metadata(...) around the call, an object of {name}",
        found="no object" if registered else "a class that nobody registered",
        fix="Bind one." if registered else f"torch_bcg.register_metadata_binding({name})",
    )


class bind_metadata:  # noqa: N801 - used like a function
    """``with bind_metadata(md): y = compiled(x)``: an object for one call.

    It is bound for its class and for the registered classes it inherits from, for all threads.
    Marked functions see the object itself. Traced code sees a twin, whose tensors are others over
    the same memory: Dynamo takes a tensor that it meets twice, in two fields or among the arguments
    of a call, for one, and does not always look whether it still is. What traced code binds in the
    twin is bound in the object when the call is over.

    Args:
        metadata: an object of a registered class, or of one that inherits from such a class.

    Raises:
        BindingError: not registered; one of its classes is bound already, here or in another
            thread; a number that is declared equal differs from that of what was compiled; at the
            end, a field that graphs take as an argument was replaced meanwhile, which they did not
            see.
    """

    def __init__(self, metadata: object) -> None:
        self.metadata = metadata
        self.twin: object = None
        self.registrations: list[Registration] = []
        self.before: tuple[tuple[Any, ...], tuple[Any, ...]] = (), ()

    def __enter__(self) -> None:
        found = registrations_of(type(self.metadata))
        if not found:
            raise _nothing_bound(type(self.metadata))
        check_equal(self.metadata)
        self.layout = schema.layout_of(self.metadata)
        self.twin = schema.twin_of(self.metadata, _distinct)
        self.before = self.layout.values(self.metadata), self.layout.values(self.twin)
        with _lock:
            for registration in found:
                if registration.bound is not None:
                    raise _bound_already(registration.cls)
            for registration in found:
                bind(registration.cls, self.metadata, self.twin)
            self.registrations = found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            for registration in self.registrations:
                bind(registration.cls, None, None)
            self.registrations = []
        if error is None:
            self._compare()

    def _compare(self) -> None:
        """Brings over what traced code bound, and refuses what it should have seen and did not."""
        now = self._values(self.metadata), self._values(self.twin)
        if all(all(map(operator.is_, *both)) for both in zip(self.before, now, strict=True)):
            return
        places = zip(self.layout.paths.items(), *self.before, *now, strict=True)
        for (path, steps), ours, theirs, ours_now, theirs_now in places:
            if theirs_now is not theirs:
                schema.put(self.metadata, steps, theirs_now)
            elif ours_now is not ours and path in (arguments_of(type(self.metadata)) or ()):
                raise _replaced(type(self.metadata), path)

    def _values(self, x: object) -> Sequence[Any]:
        if self.layout.built.like(x):
            return self.layout.values(x)
        found = schema.leaves(x)
        return [found.get(path) for path in self.layout.paths]


def _distinct(real: Tensor) -> Tensor:
    """Another tensor over the same memory, with what was marked about it.

    Of one with a static address it is always the same: a program is known by such objects.
    """
    marks = real.__dict__
    if not marks:
        return real.detach()
    known: Tensor | None = _of_static.get(real) if has_static_address(real) else None
    if known is not None and known.data_ptr() == real.data_ptr():
        return known
    distinct = real.detach()
    distinct.__dict__.update(marks)
    if has_static_address(real):
        _of_static[real] = distinct
    return distinct


_of_static = WeakTensorKeyDictionary()


def _bound_already(cls: type) -> BindingError:
    return BindingError(
        f"A {cls.__name__} is bound already.",
        where=f"bind_metadata({cls.__name__})",
        expected="one object of a class at a time, in all threads",
        found="another call under bind_metadata",
        fix="Leave the other one first.",
    )


def _replaced(cls: type, path: str) -> BindingError:
    return BindingError(
        f"{cls.__name__}.{path} was replaced while it was bound.",
        where=f"bind_metadata({cls.__name__})",
        expected="the object with which the call began: traced code read that",
        found="another one, bound by a marked function or beside the call",
        fix="Write into the tensor, or bind the object again after it was replaced.",
    )
