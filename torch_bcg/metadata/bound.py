"""Binding: the object that traced code and marked functions see while a call runs."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torch_bcg.errors import BindingError
from torch_bcg.graph.geometry import has_static_address
from torch_bcg.metadata import schema
from torch_bcg.metadata.registration import (
    BOUND,
    Registration,
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


class bind_as_it_is:  # noqa: N801 - used like a function
    """Binds an object for a call that Dynamo does not see: what `bind_metadata` does besides."""

    def __init__(self, metadata: object) -> None:
        self.metadata = metadata
        self.registrations: list[Registration] = []

    def __enter__(self) -> None:
        found = registrations_of(type(self.metadata))
        if not found:
            raise _nothing_bound(type(self.metadata))
        check_equal(self.metadata)
        with _lock:
            for registration in found:
                if registration.bound is not None:
                    raise _bound_already(registration.cls)
            self.prepare()
            for registration in found:
                bind(registration.cls, self.metadata)
            self.registrations = found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _lock:
            for registration in self.registrations:
                bind(registration.cls, None)
            self.registrations = []
            self.restore()

    def prepare(self) -> None:
        """What is done before the object is bound."""

    def restore(self) -> None:
        """What is done when it is bound no more."""


class bind_metadata(bind_as_it_is):  # noqa: N801 - used like a function
    """``with bind_metadata(md): y = compiled(x)``: an object for one call.

    It is bound for its class and for the registered classes it inherits from, for all threads.
    Inside, its fields hold other tensors over the same memory: Dynamo takes a tensor that it meets
    twice, in two fields or among the arguments of a call, for one, and does not always look whether
    it still is. So what is passed as an argument as well is taken from the object before.

    Args:
        metadata: an object of a registered class, or of one that inherits from such a class.

    Raises:
        BindingError: not registered; one of its classes is bound already, here or in another
            thread; a number that is declared equal differs from that of what was compiled.
    """

    def __init__(self, metadata: object) -> None:
        super().__init__(metadata)
        self.replaced: list[tuple[Any, schema.Step, object, object]] = []

    def prepare(self) -> None:
        """Puts other tensors in the places of those that the object holds."""
        self._replace(self.metadata)

    def restore(self) -> None:
        """Puts the real ones back."""
        for holder, step, real, other in reversed(self.replaced):
            if step.held(holder) is other:  # nobody has replaced it meanwhile
                step.put(holder, real)
        self.replaced = []

    def _replace(self, holder: Any) -> None:
        for step, real in list(schema.items(holder)):
            if isinstance(real, Tensor):
                other: object = _distinct(real)
            elif isinstance(real, tuple):
                other = schema.copied(real, _distinct)
            else:
                self._replace(real)
                continue
            if other is not real:
                step.put(holder, other)
                self.replaced.append((holder, step, real, other))


def _distinct(real: Any) -> Any:
    """Another tensor over the same memory, with what was marked about it; else the thing itself.

    Of one with a static address it is always the same: a program is known by such objects.
    """
    if not isinstance(real, Tensor) or real.requires_grad:  # whose gradient it would not be
        return real
    marks = real.__dict__
    if not marks:
        return real.detach()
    known: Tensor | None = _of_static.get(real)
    if known is not None and _place(known) == _place(real):
        return known
    other = real.detach()
    other.__dict__.update(marks)
    if has_static_address(real):
        _of_static[real] = other
    return other


def _place(t: Tensor) -> tuple[object, ...]:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


_of_static = WeakTensorKeyDictionary()


def _bound_already(cls: type) -> BindingError:
    return BindingError(
        f"A {cls.__name__} is bound already.",
        where=f"bind_metadata({cls.__name__})",
        expected="one object of a class at a time, in all threads",
        found="another call under bind_metadata",
        fix="Leave the other one first.",
    )
