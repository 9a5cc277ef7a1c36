"""Fields of a metadata object, through nested dataclasses and containers, by path.

A path is what is written behind the object in Python, ``seq_lens``, ``core.page_table``,
``tables[0]``, ``plans['c4']``. The steps that lead there go with it; `reader_of` alone takes it for
the Python that it is.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import operator
import types
import typing
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_bcg.errors import BindingError

T = TypeVar("T")
Getter = Callable[[Any], tuple[Any, ...]]
Setter = Callable[[Any, Any, Any], None]
# What is a value rather than an object: it can be compared, and shown.
Numbers = (bool, int, float, str, enum.Enum, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Step:
    """One attribute, or one item of a container."""

    key: Any
    attribute: bool

    def __str__(self) -> str:
        return f".{self.key}" if self.attribute else f"[{self.key!r}]"

    def get(self, x: Any) -> Any:
        """What ``x`` holds there."""
        return getattr(x, self.key) if self.attribute else x[self.key]

    def put(self, x: Any, value: object) -> None:
        """Binds what ``x`` holds there, which is no tuple."""
        self.setter(x, self.key, value)

    @property
    def setter(self) -> Setter:
        """What binds it, given ``x``, the key and a value."""
        return object.__setattr__ if self.attribute else operator.setitem

    def held(self, x: Any) -> Any:
        """The same, or None where there is nothing any more."""
        try:
            return self.get(x)
        except (AttributeError, LookupError, TypeError):
            return None


Steps = tuple[Step, ...]


def text_of(steps: Steps) -> str:
    """The path as it is written."""
    return "".join(map(str, steps)).removeprefix(".")


def at(x: Any, steps: Steps) -> Any:
    """What an object holds at a path; what there is no more raises as in Python."""
    return functools.reduce(lambda held, step: step.get(held), steps, x)


def put(x: Any, steps: Steps, value: object) -> None:
    """Binds what an object holds at a path, frozen dataclasses included.

    Raises:
        BindingError: it lies in a tuple.
    """
    holder, last = at(x, steps[:-1]), steps[-1]
    if isinstance(holder, tuple):
        name = f"{type(x).__name__}.{text_of(steps)}"
        raise BindingError(
            f"{name} lies in a tuple, in which nothing can be replaced.",
            where=name,
            expected="a field, a list or a dict",
            found="a tuple",
            fix="Make it a list, or a field of its own.",
        )
    last.put(holder, value)


def getter_of(paths: Sequence[Steps]) -> Getter:
    """A function from an object to what it holds at some paths, in order."""
    if len(paths) > 1 and all(step.attribute for steps in paths for step in steps):
        found: Getter = operator.attrgetter(*map(text_of, paths))
        return found
    return lambda x: tuple([at(x, steps) for steps in paths])


def reader_of(paths: Iterable[str]) -> Getter:
    """A function from an object to what it holds at paths as they are written, "" is itself.

    They may lead into what has no steps.

    Raises:
        SyntaxError: one is no Python.
    """
    read = "".join(f"x.{path}, " if path else "x, " for path in paths)
    found: Getter = eval(f"lambda x: ({read})")
    return found


def outline_of(value: object) -> object:
    """What tells two values apart without their tensors: type, number, length or keys.

    Nothing of it belongs to anybody else, and nobody's code runs for it.
    """
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # as a text NaN equals itself
    if kind in _VALUES:
        return kind, value
    if isinstance(value, enum.Enum):
        return kind, value.name
    base = container_of(value)
    if base is None:
        return kind
    if base in _PLAIN:
        return kind, base.__len__(value)
    keys = [k if type(k) in (int, str) else id(k) for k in base.__iter__(value)]
    return kind, (frozenset if base in (set, frozenset) else tuple)(keys)


_VALUES = (
    bool, int, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# The order of an OrderedDict is its own, that of other dicts the one of dict.
_CONTAINERS = (list, tuple, OrderedDict, dict, set, frozenset, deque)
_PLAIN = (list, tuple, deque)
_MOST = 1000  # values of a container that are compared one by one


def container_of(value: object) -> Any:
    """The class of Python that makes a value the container it is, whatever was derived from it.

    None: it is no container.
    """
    return next((base for base in _CONTAINERS if isinstance(value, base)), None)


def contents_of(value: object, whole: bool = False, depth: int = 3) -> object:
    """`outline_of` a value, and of what is in a container: unless it is large or deep, or whole."""
    base = container_of(value)
    inside: Iterable[object] = ()
    if isinstance(value, (*_PLAIN, dict)) and (whole or (depth and base.__len__(value) <= _MOST)):
        inside = dict.values(value) if isinstance(value, dict) else base.__iter__(value)
    return outline_of(value), *(contents_of(x, whole, depth - 1) for x in inside)


def items(x: object) -> Iterator[tuple[Step, Any]]:
    """What one dataclass, or one container of tensors, holds; nothing of anything else."""
    if _is_object(x):
        yield from ((step, getattr(x, step.key, None)) for step in _fields_of(type(x)))  # type: ignore[arg-type]
    elif isinstance(x, tuple) and hasattr(x, "_fields") and holds(x):
        yield from ((Step(name, True), value) for name, value in zip(x._fields, x, strict=True))
    elif isinstance(x, (list, tuple)) and holds(x):
        yield from ((Step(i, False), value) for i, value in enumerate(x))
    elif isinstance(x, dict) and holds(x):
        yield from ((Step(key, False), value) for key, value in x.items())


@functools.cache
def _fields_of(cls: Any) -> tuple[Step, ...]:
    return tuple(Step(f.name, True) for f in dataclasses.fields(cls))


def _is_object(x: object) -> bool:
    return hasattr(type(x), "__dataclass_fields__")


def holds(x: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> bool:
    """Whether a container holds what may have a kind of its own; one of numbers is one thing."""
    inside = x.values() if isinstance(x, dict) else x
    return any(isinstance(v, (Tensor, list, tuple, dict)) or _is_object(v) for v in inside)


def walked(x: object, steps: Steps = ()) -> Iterator[tuple[Steps, Any, bool]]:
    """(steps, value, whether something is inside) of an object and all in it, outer ones first."""
    todo = [(steps, x)]
    while todo:
        steps, x = todo.pop(0)
        inside = [((*steps, step), value) for step, value in items(x)]
        yield steps, x, bool(inside)
        todo = [*inside, *todo]


class Built:
    """Tells whether other objects are built like one: the same types at all places.

    Args:
        x: an object.
        places: in it; more is asked of what a container holds.
        free: at how many of the first places there may be anything.
    """

    def __init__(self, x: object, places: Sequence[Steps], free: int = 0) -> None:
        self.at = getter_of(places)
        held = self.at(x)
        self.type, self.free = type(x), free
        self.types = [*map(type, held[free:])]
        self.contents = [
            (i, _contents(v))
            for i, v in enumerate(held)
            if i >= free and isinstance(v, (list, tuple, dict))
        ]

    def of(self, x: object) -> tuple[Any, ...] | None:
        """What another object holds at the places; None if it is not built alike."""
        try:
            held = self.at(x)
        except (AttributeError, LookupError, TypeError):  # it has no such place
            return None
        if type(x) is not self.type or [*map(type, held[self.free :])] != self.types:
            return None
        for i, contents in self.contents:
            if _contents(held[i]) != contents:
                return None
        return held


def _contents(x: Any) -> object:
    """Length or keys of a container of tensors; of one of numbers only that it is one."""
    return holds(x) and (tuple(x) if isinstance(x, dict) else len(x))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the objects of one class are built, for as long as they are built alike.

    Attributes:
        paths: of what is no dataclass and no container of tensors, with the steps.
        values: what an object holds there.
        built: tells whether another object is built alike.
    """

    paths: Mapping[str, Steps]
    values: Getter
    built: Built


_layouts: dict[type, Layout] = {}


def layout_of(x: object) -> Layout:
    """How an object is built; of each class the last layout is kept."""
    layout = _layouts.get(type(x))
    if layout is None or layout.built.of(x) is None:
        every = list(walked(x))
        ends = [steps for steps, _, inside in every if steps and not inside]
        layout = _layouts[type(x)] = Layout(
            {text_of(steps): steps for steps in ends},
            getter_of(ends),
            Built(x, [steps for steps, _, _ in every if steps]),
        )
    return layout


def leaves(x: object) -> dict[str, Any]:
    """Whatever an object holds that is no dataclass and no container, by path, in order."""
    layout = layout_of(x)
    return dict(zip(layout.paths, layout.values(x), strict=True))


def parts(x: object) -> dict[str, object]:
    """The object itself under "", and the dataclass objects inside it, by path."""
    return {text_of(steps): value for steps, value, _ in walked(x) if _is_object(value)}


def copied(x: Any, of: Callable[[Any], Any]) -> Any:
    """An object with new dataclasses and containers in it, and what ``of`` gives of all else."""
    if _is_object(x):
        twin = copy.copy(x)
        for field in dataclasses.fields(x):
            value = getattr(x, field.name, None)
            other = copied(value, of)
            if other is not value:
                object.__setattr__(twin, field.name, other)
        return twin
    if isinstance(x, dict) and holds(x):
        return {key: copied(value, of) for key, value in x.items()}
    if isinstance(x, (list, tuple)) and holds(x):
        values = [copied(value, of) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else type(x)(values)
    return of(x)


def within(path: str, name: str) -> bool:
    """Whether ``path`` is the field ``name``, or lies in it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def kind_at(path: str, kinds: Mapping[str, T]) -> T | None:
    """What is said of a path, or of the longest name that it lies in; None: nothing."""
    names = [name for name in kinds if within(path, name)]
    return kinds[max(names, key=len)] if names else None


def sharing(x: object) -> list[list[str]]:
    """Paths that hold one and the same tensor object, where there are several."""
    groups: dict[int, list[str]] = {}
    for path, value in leaves(x).items():
        if isinstance(value, Tensor):
            groups.setdefault(id(value), []).append(path)
    return [paths for paths in groups.values() if len(paths) > 1]


def check_names(cls: type, names: Iterable[str]) -> None:
    """Refuses a name that is no field.

    Raises:
        BindingError: ``cls`` is no dataclass, or has no such field.
    """
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise BindingError(
            f"{getattr(cls, '__name__', cls)!s} is no metadata class.",
            where="register_metadata_binding",
            expected="a dataclass",
            found=repr(cls),
            fix="Decorate the class with @dataclasses.dataclass.",
        )
    for name in names:
        _check_name(cls, cls, name, name)


def _check_name(root: type, cls: type, whole: str, name: str) -> None:
    first, dot, rest = name.partition(".")
    fields = [f.name for f in dataclasses.fields(cls)]
    plain = first.partition("[")[0]
    if plain not in fields:
        raise unknown_field(root, whole, fields)
    if dot and plain == first:  # what is in a container only an object can tell
        for inner in _dataclasses_in(cls, plain):
            _check_name(root, inner, whole, rest)


def unknown_field(cls: type, name: str, exist: Iterable[str]) -> BindingError:
    """The error for a name that is no field."""
    return BindingError(
        f"{cls.__name__} has no field '{name}'.",
        where=f"register_metadata_binding({cls.__name__}, ...)",
        expected=f"fields: {', '.join(exist)}",
        found=repr(name),
        fix="Name fields; those in a nested dataclass with a dot, as in 'core.page_table'.",
    )


def _dataclasses_in(cls: type, field: str) -> list[type]:
    """Dataclasses that the annotation of a field names; none where it cannot be resolved."""
    try:
        hint = typing.get_type_hints(cls).get(field)
    except (NameError, TypeError):  # annotations of names that are gone: the object will tell
        return []
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    options = typing.get_args(hint) if union else (hint,)
    return [t for t in options if isinstance(t, type) and dataclasses.is_dataclass(t)]
