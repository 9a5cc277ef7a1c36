"""Which fields marked functions read by themselves, past the graph, while a call runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch_bcg.metadata.registration import bound_objects
from torch_bcg.metadata.schema import leaves, parts, within

_lock = threading.RLock()


@contextlib.contextmanager
def reads_noted() -> Iterator[set[tuple[type, str]]]:
    """Notes (class, path) of what is read of the objects that are bound, until it ends.

    The classes are given another ``__getattribute__`` meanwhile: their objects stay what they are,
    also for whoever copies, pickles or compares the type of one.
    """
    noted: set[tuple[type, str]] = set()
    with _lock, contextlib.ExitStack() as stack:
        bound = bound_objects()
        places: dict[int, list[tuple[type, str]]] = {}
        classes: dict[type, None] = {}
        for instance in bound:
            for path, part in parts(instance).items():
                places.setdefault(id(part), []).append((type(instance), path))
                classes[type(part)] = None
        seen: set[tuple[int, str]] = set()
        for cls in classes:
            stack.enter_context(_noting(cls, seen))
        yield noted
    for instance in bound:
        held, inside = leaves(instance), parts(instance)
        for identity, name in seen:
            for cls, path in places.get(identity, ()):
                field = f"{path}.{name}".removeprefix(".")
                if cls is type(instance) and field not in inside:  # which notes what it is asked
                    noted |= {(cls, p) for p in held if within(p, field)}


@contextlib.contextmanager
def _noting(cls: type, seen: set[tuple[int, str]]) -> Iterator[None]:
    original: Any = cls.__getattribute__
    own = "__getattribute__" in cls.__dict__

    def noting(self: object, name: str) -> object:
        seen.add((id(self), name))
        held: object = original(self, name)
        return held

    cls.__getattribute__ = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if own:
            cls.__getattribute__ = original  # type: ignore[method-assign]
        else:
            del cls.__getattribute__
