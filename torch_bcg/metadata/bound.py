"""Binding: the object that traced code and marked functions see while a call runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_bcg.errors import BindingError
from torch_bcg.metadata import schema
from torch_bcg.metadata.registration import (
    BOUND,
    Registration,
    arguments_of,
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
    bound = getattr(cls, BOUND, None)
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
    Inside, fields that graphs take as arguments, and fields that hold one tensor, hold tensors of
    their own over the same memory: Dynamo takes a tensor that it meets twice, here and among the
    arguments of a call, for one, and not everywhere looks whether it still is.

    Args:
        metadata: an object of a registered class, or of one that inherits from such a class.

    Raises:
        BindingError: not registered; one of its classes is bound already, here or in another
            thread; a number that is declared equal differs from that of what was compiled.
    """

    def __init__(self, metadata: object) -> None:
        self.metadata = metadata
        self.registrations: list[Registration] = []
        self.shown: list[tuple[str, Tensor, Tensor]] = []

    def __enter__(self) -> None:
        found = registrations_of(type(self.metadata))
        if not found:
            raise _nothing_bound(type(self.metadata))
        check_equal(self.metadata)
        with _lock:
            for registration in found:
                if registration.bound is not None:
                    raise _bound_already(registration.cls)
            try:
                self._tell_apart()
            except BindingError:
                self._as_it_was()
                raise
            for registration in found:
                registration.bind(self.metadata)
            self.registrations = found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            for registration in self.registrations:
                registration.bind(None)
            self.registrations = []
            self._as_it_was()

    def _as_it_was(self) -> None:
        for path, real, distinct in self.shown:
            if schema.getter(path)(self.metadata) is distinct:  # nobody has replaced it since
                schema.put(self.metadata, path, real)
        self.shown = []

    def _tell_apart(self) -> None:
        known = arguments_of(type(self.metadata))
        paths = schema.leaves(self.metadata) if known is None else known
        twice = [path for group in schema.shared(self.metadata) for path in group[1:]]
        for path in dict.fromkeys([*paths, *twice]):
            real = schema.getter(path)(self.metadata)
            if path not in twice and schema.in_tuple(self.metadata, path):
                continue
            if isinstance(real, Tensor):
                distinct = _distinct(real)
                schema.put(self.metadata, path, distinct)
                self.shown.append((path, real, distinct))


def _distinct(real: Tensor) -> Tensor:
    """Another tensor over the same memory, with what was marked about it.

    Of one with a static address it is always the same: a program is known by such objects.
    """
    static = hasattr(real, "_dynamo_static_input_type")
    known: Tensor | None = _of_static.get(real) if static else None
    if known is not None and known.data_ptr() == real.data_ptr():
        return known
    distinct = real.detach()
    distinct.__dict__.update(real.__dict__)
    if static:
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
