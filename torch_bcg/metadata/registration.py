"""Metadata classes: what their authors declare, and what the graphs that live have shown.

A declaration names fields by kind:

  COPY     recorded segments read it at a fixed address; its values are copied there
  WRITTEN  recorded segments write it; what a call brings along is not looked at
  REBIND   no recorded segment touches it: marked functions see each call's own object
  EQUAL    a number that is the same in all calls

A field in no list is derived. Any other number FOLLOWS the call.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind, stronger
from torch_bcg.metadata.schema import at, check_names, layout_of, leaves

Declared = Literal["COPY", "REBIND", "WRITTEN", "EQUAL"]


@dataclass(eq=False)
class Registration:
    """One metadata class; what `register_metadata_binding` returns.

    Attributes:
        cls: the class.
        declared: kind by name of a field.
        varying: what Dynamo was told of it, see `let_vary`.
    """

    cls: type
    declared: Mapping[str, Declared]
    varying: list[str] = field(default_factory=list)

    @property
    def bound(self) -> object | None:
        """The object that is bound now, or None."""
        return self.cls.__dict__.get(BOUND)

    def remove(self) -> None:
        """Forgets the class; live programs that read it plan again at their next call.

        Raises:
            BindingError: an object of the class is bound.
        """
        if self.bound is not None:
            raise BindingError(
                f"{self.cls.__name__} is bound.",
                where=f"remove() of {self.cls.__name__}",
                expected="nothing of the class bound",
                found="a call under bind_metadata",
                fix="Remove it after the call.",
            )
        if REGISTERED.get(self.cls) is self:
            del REGISTERED[self.cls]
            delattr(self.cls, BOUND)
            _tell([t for t in _told() if t not in self.varying])
            _versions["declared"] += 1


# Where the bound object is: an attribute of its class. In a dict traced code would be guarded by
# all classes that it holds, and compiled again when another one is registered.
BOUND = "__torch_bcg_bound__"
REGISTERED: dict[type, Registration] = {}
_versions = {"declared": 0, "shown": 0}


def bind(cls: type, metadata: object | None) -> None:
    """Binds an object, or nothing."""
    setattr(cls, BOUND, metadata)


def let_vary(registration: Registration, text: str) -> None:
    """Tells Dynamo that what it calls ``text`` is no constant, until the class is removed.

    It takes an integer behind a global name for one, makes a graph for each value, and gives up
    after eight.
    """
    # Dynamo drops spaces, and commas end a pattern.
    pattern = re.sub(r"\\? |,", ".", re.escape(text))
    if pattern not in _told():
        registration.varying.append(pattern)
        _tell([*_told(), pattern])


def _told() -> list[str]:
    return [t for t in torch.compiler.config.dynamic_sources.split(",") if t]


def _tell(patterns: Iterable[str]) -> None:
    torch.compiler.config.dynamic_sources = ",".join(patterns)


@dataclass
class Shown:
    """What a graph that lives has shown of one class.

    Attributes:
        kinds: of its fields, by path.
        equal: values of the numbers that are declared to be equal in all calls.
        constants: values of other numbers that it was made for.
    """

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    equal: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)


_shown: weakref.WeakKeyDictionary[object, Mapping[type, Shown]] = weakref.WeakKeyDictionary()


def register_metadata_binding(
    cls: type,
    *,
    equal: Iterable[str] = (),
    copy: Iterable[str] = (),
    rebind: Iterable[str] = (),
    written: Iterable[str] = (),
) -> Registration:
    """Registers a dataclass whose objects `bind_metadata` binds for a call.

    What is declared is checked against what each graph does, when it is compiled. Subclasses are
    registered with it; they can be registered with lists of their own, which come first.

    Args:
        cls: a dataclass; its fields may be dataclasses, lists, tuples and dicts.
        equal: numbers that are the same in all calls.
        copy: tensors to copy to a fixed address, though nothing recorded may read them.
        rebind: tensors and other objects that only marked functions read.
        written: tensors that recorded segments write before anybody reads them.

    Returns:
        The registration; its ``remove()`` undoes it. Registering a class again replaces it.

    Raises:
        BindingError: no dataclass, a name that is no field, a field in two lists, or an object of
            the class is bound.
    """
    for given in (equal, copy, rebind, written):
        if isinstance(given, str):
            raise BindingError(
                f"{given!r} is no list of fields.",
                where=f"register_metadata_binding({getattr(cls, '__name__', cls)}, ...)",
                expected="names in a tuple or list",
                found="a text",
                fix=f"Write ({given!r},).",
            )
    lists: dict[Declared, tuple[str, ...]] = {
        "EQUAL": tuple(equal), "COPY": tuple(copy), "REBIND": tuple(rebind),
        "WRITTEN": tuple(written),
    }  # fmt: skip
    check_names(cls, (name for names in lists.values() for name in names))
    declared: dict[str, Declared] = {}
    for kind, names in lists.items():
        for name in names:
            if declared.setdefault(name, kind) != kind:
                raise BindingError(
                    f"{cls.__name__}.{name} is declared twice.",
                    where=f"register_metadata_binding({cls.__name__}, ...)",
                    expected="each field in one list at most",
                    found=f"{declared[name].lower()}= and {kind.lower()}=",
                    fix="Take it out of one of them.",
                )
    if cls in REGISTERED:
        REGISTERED[cls].remove()
    made = REGISTERED[cls] = Registration(cls, declared)
    bind(cls, None)
    _versions["declared"] += 1
    return made


def generation() -> int:
    """Grows whenever a class is registered or removed."""
    return _versions["declared"]


def stamp() -> tuple[int, int]:
    """Changes whenever what is declared or what graphs have shown does."""
    return _versions["declared"], _versions["shown"]


def registrations_of(cls: type) -> list[Registration]:
    """Those of a class and the classes it inherits from, the nearest first."""
    return [REGISTERED[c] for c in cls.__mro__ if c in REGISTERED]


def declared_of(classes: Mapping[str, type]) -> dict[str, Declared]:
    """What is declared of an object's fields: for its own class, then for the classes inside."""
    found: dict[str, Declared] = {}
    for path, part in classes.items():
        for registration in registrations_of(part):
            for name, kind in registration.declared.items():
                found.setdefault(f"{path}.{name}".removeprefix("."), kind)
    return found


def remember(owner: object, shown: Mapping[type, Shown]) -> None:
    """Notes what a graph has shown, for as long as it lives.

    Raises:
        BindingError: a number that is declared equal differs from that of another graph.
    """
    for cls, mine in shown.items():
        for other in shown_of(cls, owner):
            for path, value in mine.equal.items():
                if not same(other.equal.get(path, value), value):
                    raise unequal(cls, path, other.equal[path], value)
    if shown != _shown.get(owner, {}):
        _shown[owner] = shown
        _versions["shown"] += 1


def as_bound(shown: Mapping[type, Shown]) -> Mapping[type, Shown]:
    """With the equal numbers that the objects have that are bound now, for this very call."""
    bound = {type(x): x for x in bound_objects()}
    now = {cls: leaves(bound[cls]) for cls in shown if cls in bound}
    return {
        cls: replace(one, equal={p: now[cls].get(p, v) for p, v in one.equal.items()})
        if cls in now
        else one
        for cls, one in shown.items()
    }


def forget(owner: object) -> None:
    """What a graph has shown is no longer so."""
    remember(owner, {})


def bound_objects() -> list[object]:
    """All that is bound now."""
    bound = {id(r.bound): r.bound for r in REGISTERED.values() if r.bound is not None}
    return list(bound.values())


def shown_of(cls: type, but: object = None) -> Iterator[Shown]:
    """What living graphs have shown of a class, of all graphs or all but one."""
    for owner, shown in list(_shown.items()):
        if cls in shown and owner is not but:
            yield shown[cls]


def kinds_of(cls: type) -> dict[str, Kind] | None:
    """The kinds of all fields that living graphs have shown together; None: no graph met it."""
    every = list(shown_of(cls))
    if not every:
        return None
    found: dict[str, Kind] = {}
    for shown in every:
        for path, kind in shown.kinds.items():
            found[path] = stronger(kind, found.get(path, kind))
    return found


def check_equal(instance: object) -> None:
    """Compares numbers that are declared equal with those that living graphs were made for.

    Raises:
        BindingError: one differs.
    """
    for shown in shown_of(type(instance)):
        for path, value in shown.equal.items():
            steps = layout_of(instance).paths.get(path)
            now = None if steps is None else at(instance, steps)
            if not same(now, value):
                raise unequal(type(instance), path, value, now)


def same(a: object, b: object) -> bool:
    """Whether two numbers are one: of one type as well, and not a number is itself."""
    return type(a) is type(b) and (a == b or (a != a and b != b))


def unequal(cls: type, path: str, expected: object, found: object) -> BindingError:
    """The error for a number that differs though it is declared equal."""
    return BindingError(
        f"{cls.__name__}.{path} is declared equal in all calls, and differs.",
        where=f"{cls.__name__}.{path}",
        expected=f"{expected!r}, as in earlier calls",
        found=repr(found),
        fix="Leave it out of equal= if it may change, or torch_bcg.reset() what was compiled.",
    )
