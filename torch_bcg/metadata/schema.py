"""Fields of a metadata object, through nested dataclasses and containers, by path.

A path is what is written behind the object in Python: ``seq_lens``, ``core.page_table``,
``tables[0]``, ``plans['c4']``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_bcg.errors import BindingError

T = TypeVar("T")
Getter = Callable[[Any], tuple[Any, ...]]
Numbers = (bool, int, float, str, enum.Enum, torch.dtype, torch.device)


def leaves(instance: object) -> dict[str, Any]:
    """Whatever an object holds that is no dataclass and no container, by path, in order."""
    layout = _layout_of(instance)
    return dict(zip(layout.paths, layout.values(instance), strict=True))


def _leaves(x: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = list(items(x, path))
    if inside:
        for inner, value in inside:
            yield from _leaves(value, inner)
    elif path:
        yield path, x


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the objects of one class hold what, while they are built alike.

    Attributes:
        paths: of the leaves.
        structure: types of all that an object holds, as `structure_of` gives them.
        values, tensors: the leaves of an object, and those that are tensors.
    """

    paths: tuple[str, ...]
    structure: tuple[object, ...]
    structure_of: Getter
    values: Getter
    tensors: Getter


_layouts: dict[type, _Layout] = {}


def _layout_of(instance: object) -> _Layout:
    layout = _layouts.get(type(instance))
    if layout is None or not fits(instance, layout.structure_of, layout.structure):
        found = dict(_leaves(instance, ""))

        def asked(path: str) -> str:
            kind = f"type(x.{path})"
            container = isinstance(found.get(path), (list, tuple, dict))
            return (f"({kind}, holds(x.{path}))" if container else kind) if path in found else ""

        structure_of = structured(instance, asked)
        layout = _layouts[type(instance)] = _Layout(
            tuple(found),
            structure_of(instance),
            structure_of,
            tuple_of(f"x.{path}" for path in found),
            tuple_of(f"x.{path}" for path, value in found.items() if isinstance(value, Tensor)),
        )
    return layout


def fits(instance: object, structure_of: Getter, structure: tuple[object, ...]) -> bool:
    """Whether an object is built as ``structure`` says."""
    try:
        return structure_of(instance) == structure
    except (AttributeError, LookupError, TypeError):
        return False


# Code for one class: to look everything up by path for each object takes longer than all the rest.


def tuple_of(expressions: Iterable[str]) -> Getter:
    """A function from an object ``x`` to these, in order."""
    source = f"lambda x: ({''.join(e + ', ' for e in expressions)})"
    function: Getter = eval(compile(source, "<fields>", "eval"), {"Tensor": Tensor, "holds": holds})
    return function


def structured(instance: object, ending: Callable[[str], str]) -> Getter:
    """What tells whether another object is built like this one: the outer parts first.

    Types of objects and containers, lengths and keys; ``ending`` gives what is asked of a path
    instead, and inside of which nothing is, or "".
    """
    expressions = []
    todo: list[tuple[str, object]] = [("", instance)]
    while todo:
        path, value = todo.pop(0)
        place = f"x.{path}" if path else "x"
        if path and (asked := ending(path)):
            expressions.append(asked)
            continue
        expressions.append(f"type({place})")
        if isinstance(value, (list, tuple)):
            expressions.append(f"len({place})")
        elif isinstance(value, dict):
            expressions.append(f"tuple({place})")
        todo += items(value, path)
    return tuple_of(expressions)


def items(x: object, path: str) -> Iterator[tuple[str, Any]]:
    """What one dataclass, or one container of tensors, holds, by path; nothing of anything else."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        for field in dataclasses.fields(x):
            yield f"{path}.{field.name}".removeprefix("."), getattr(x, field.name, None)
    elif isinstance(x, (list, tuple)) and holds(x):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(x))
    elif isinstance(x, dict) and holds(x):
        yield from ((f"{path}[{key!r}]", value) for key, value in x.items())


def holds(x: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> bool:
    """Whether a container holds what may have a kind of its own; one of numbers is one thing."""
    return any(map(_is_part, x.values() if isinstance(x, dict) else x))


def _is_part(x: object) -> bool:
    return isinstance(x, (Tensor, list, tuple, dict)) or (
        dataclasses.is_dataclass(x) and not isinstance(x, type)
    )


def parts(instance: object) -> dict[str, object]:
    """The object itself under "", and the dataclass objects inside it, by path."""
    found: dict[str, object] = {"": instance}

    def search(x: object, path: str) -> None:
        for inner, value in items(x, path):
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                found[inner] = value
            search(value, inner)

    search(instance, "")
    return found


def copied(instance: T) -> T:
    """The object with new dataclasses and containers in it, and the same tensors."""
    if isinstance(instance, tuple):
        made = [copied(value) for value in instance]
        return type(instance)(*made) if hasattr(instance, "_fields") else type(instance)(made)
    twin = copy.copy(instance)
    for path, value in items(instance, "x"):
        if isinstance(value, (list, tuple, dict)) or dataclasses.is_dataclass(value):
            put(_Holder(twin), path, copied(value))
    return twin


@dataclasses.dataclass
class _Holder:
    """Gives the object itself a path."""

    x: object


def within(path: str, name: str) -> bool:
    """Whether ``path`` is the field ``name``, or lies in it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


@functools.cache
def getter(path: str) -> Callable[[Any], Any]:
    """A function that takes an object to what it holds at a path."""
    source = f"lambda x: x.{path}"
    function: Callable[[Any], Any] = eval(compile(source, "<path of a field>", "eval"))
    return function


def put(instance: object, path: str, value: object) -> None:
    """Binds what an object holds at a path, frozen dataclasses included.

    Raises:
        BindingError: it lies in a tuple.
    """
    holder_path, name = re.fullmatch(r"(?:(.*)\.)?([^.]*)", path, re.DOTALL).groups()  # type: ignore[union-attr]
    holder: Any = getter(holder_path)(instance) if holder_path else instance
    *inner, last = re.split(r"(?=\[)", name)
    if not inner:
        object.__setattr__(holder, last, value)
        return
    for step in inner:
        holder = holder[_index(step)] if step.startswith("[") else getattr(holder, step)
    if isinstance(holder, tuple):
        raise BindingError(
            f"{type(instance).__name__}.{path} lies in a tuple, in which nothing can be replaced.",
            where=f"{type(instance).__name__}.{path}",
            expected="a field, a list or a dict",
            found="a tuple",
            fix="Make it a list, or a field of its own.",
        )
    holder[_index(last)] = value


def in_tuple(instance: object, path: str) -> bool:
    """Whether what is at a path cannot be replaced there."""
    return path.endswith("]") and isinstance(getter(path.rpartition("[")[0])(instance), tuple)


def _index(step: str) -> Any:
    return eval(compile(step[1:-1], "<index of a container>", "eval"), {})


def shared(instance: object) -> list[list[str]]:
    """Paths that hold one and the same tensor object, where there are several."""
    tensors = _layout_of(instance).tensors(instance)
    if len(set(map(id, tensors))) == len(tensors):
        return []
    groups: dict[int, list[str]] = {}
    for path, value in leaves(instance).items():
        if isinstance(value, Tensor):
            groups.setdefault(id(value), []).append(path)
    return [paths for paths in groups.values() if len(paths) > 1]


def check_names(cls: type, names: Iterable[str]) -> None:
    """Refuses a name that is no field.

    Raises:
        BindingError: ``cls`` is no dataclass, or has no such field.
    """
    if not dataclasses.is_dataclass(cls):
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
    fields = {f.name: f for f in dataclasses.fields(cls)}
    plain = first.partition("[")[0]
    if plain not in fields:
        raise unknown_field(root, whole, list(fields), cls)
    if dot:
        for inner in _dataclasses_in(cls, plain):
            _check_name(root, inner, whole, rest)


def unknown_field(root: type, name: str, exist: Iterable[str], cls: type | None = None) -> Any:
    """The error for a name that is no field."""
    where = (cls or root).__name__
    return BindingError(
        f"{root.__name__} has no field '{name}'.",
        where=f"register_metadata_binding({root.__name__}, ...)",
        expected=f"fields of {where}: {', '.join(exist)}",
        found=repr(name),
        fix="Name fields; those in a nested dataclass with a dot, as in 'core.page_table'.",
    )


def _dataclasses_in(cls: type, field: str) -> list[type]:
    """Dataclasses that the annotation of a field names; none where it cannot be resolved."""
    try:
        hint = typing.get_type_hints(cls).get(field)
    except (NameError, TypeError):  # annotations of names that are gone: the object will tell
        return []
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    return [t for t in options if isinstance(t, type) and dataclasses.is_dataclass(t)]


def _is_union(hint: object) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def kind_at(path: str, kinds: Mapping[str, str]) -> str | None:
    """What is said of a path, or of the longest name that it lies in; None: nothing."""
    names = [name for name in kinds if within(path, name)]
    return kinds[max(names, key=len)] if names else None
