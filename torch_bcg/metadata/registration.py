"""Metadata classes: what their authors declare, and what the graphs that live have shown.

A declaration names fields by kind:

  COPY     recorded segments read it at a fixed address; its values are copied there
  WRITTEN  recorded segments write it; what a call brings along is not looked at
  REBIND   no recorded segment touches it: marked functions see each call's own object
  EQUAL    a number that is the same in all calls

A field in no list is derived. Any other number FOLLOWS the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from torch_bcg.errors import BindingError
from torch_bcg.graph.values import Kind
from torch_bcg.metadata.schema import check_names, getter, kind_at

Declared = Literal["COPY", "REBIND", "WRITTEN", "EQUAL"]


@dataclass(eq=False)
class Registration:
    """One metadata class; what `register_metadata_binding` returns.

    Attributes:
        cls: the class.
        declared: kind by name of a field.
    """

    cls: type
    declared: dict[str, Declared]

    @property
    def bound(self) -> object | None:
        """The object that is bound now, or None."""
        return self.cls.__dict__.get(BOUND)

    def bind(self, metadata: object | None) -> None:
        """Binds an object, or nothing."""
        setattr(self.cls, BOUND, metadata)

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
            _changed()


# Where the bound object is: an attribute of its class. In a dict traced code would be guarded by
# all classes that it holds, and compiled again when another one is registered.
BOUND = "__torch_bcg_bound__"
REGISTERED: dict[type, Registration] = {}
_versions = [0, 0]  # of what is registered, of what graphs have shown


@dataclass
class Shown:
    """What a graph that lives has shown of one class.

    Attributes:
        kinds: of its fields, by path.
        equal: values of the numbers that are declared to be equal in all calls.
        constants: values of other numbers that it was made for.
        arguments: paths that are arguments of it.
    """

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    equal: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    arguments: frozenset[str] = frozenset()


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
    old = REGISTERED.get(cls)
    if old is not None and old.bound is not None:
        old.remove()  # says why not
    made = REGISTERED[cls] = Registration(cls, declared)
    made.bind(None)
    _changed()
    return made


def _changed() -> None:
    _versions[0] += 1


def generation() -> int:
    """Grows whenever a class is registered or removed."""
    return _versions[0]


def stamp() -> tuple[int, int]:
    """Changes whenever what is declared or what graphs have shown does."""
    return _versions[0], _versions[1]


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
                if other.equal.get(path, value) != value:
                    raise unequal(cls, path, other.equal[path], value)
    if shown != _shown.get(owner, {}):
        _shown[owner] = shown
        _versions[1] += 1


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
    strength = list(cast("tuple[Kind, ...]", ("EQUAL", "FOLLOWS", "REBIND", "COPY", "WRITTEN")))
    found: dict[str, Kind] = {}
    for shown in every:
        for path, kind in shown.kinds.items():
            found[path] = max(kind, found.get(path, kind), key=strength.index)
    return found


def arguments_of(cls: type) -> frozenset[str] | None:
    """Paths that living graphs take as arguments; None: no graph met the class."""
    found = _arguments.get(cls)
    if found is None or found[0] != stamp():
        every = [shown.arguments for shown in shown_of(cls)]
        found = _arguments[cls] = stamp(), frozenset().union(*every) if every else None
    return found[1]


_arguments: dict[type, tuple[tuple[int, int], frozenset[str] | None]] = {}


def check_equal(instance: object) -> None:
    """Compares numbers that are declared equal with those that living graphs were made for.

    Raises:
        BindingError: one differs.
    """
    for shown in shown_of(type(instance)):
        for path, value in shown.equal.items():
            now = getter(path)(instance)
            if now != value:
                raise unequal(type(instance), path, value, now)


def unequal(cls: type, path: str, expected: object, found: object) -> BindingError:
    """The error for a number that differs though it is declared equal."""
    return BindingError(
        f"{cls.__name__}.{path} is declared equal in all calls, and differs.",
        where=f"{cls.__name__}.{path}",
        expected=f"{expected!r}, as in earlier calls",
        found=repr(found),
        fix="Leave it out of equal= if it may change, or torch_bcg.reset() what was compiled.",
    )


def declared_kind(path: str, declared: Mapping[str, Declared]) -> Declared | None:
    """What is declared of a path, itself or a field that it lies in."""
    return cast("Declared | None", kind_at(path, declared))
