"""What a graph was made for: metadata objects behind its arguments, without their tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.metadata.schema import (
    Numbers,
    leaves,
    outline_of,
    parts,
    reader_of,
    sharing,
    within,
)

What = Literal["tensor", "number", "none", "object"]
Guard = Literal["", "value", "type", "other"]


@dataclass(frozen=True)
class Read:
    """Something that traced code read of an object.

    Attributes:
        path: where it is in the object.
        argument: the placeholder that it is, or "": a constant of the graph.
        text: what Dynamo writes for where it comes from.
        guard: what a guard compares of it, "" for an argument.
    """

    path: str
    argument: str
    text: str
    guard: Guard = ""


@dataclass(frozen=True)
class Instance:
    """One object of a registered class, as Dynamo met it.

    Attributes:
        cls: its class.
        what: what each path holds.
        numbers: values of those that are numbers, or otherwise the same for as long as they are.
        parts: classes of the dataclass objects in it, itself included.
        sharing: groups of paths that hold one tensor.
        arguments: path -> placeholder of the graph.
        constants: path -> Dynamo's text, of numbers and other objects that the graph was made for.
        outlines: path -> `outline_of` what guards look at there, arguments left out.
        opaque: paths of which it was made for more than that tells.
        bound: it is what `bind_metadata` bound, not an argument or something in another object.
    """

    cls: type
    what: Mapping[str, What]
    numbers: Mapping[str, object]
    parts: Mapping[str, type]
    sharing: tuple[tuple[str, ...], ...]
    arguments: Mapping[str, str]
    constants: Mapping[str, str]
    outlines: Mapping[str, object]
    opaque: tuple[str, ...]
    bound: bool

    def names(self, path: str) -> tuple[str, ...]:
        """What an author may call a field: its path, with the class in front, its last name."""
        return path, f"{self.cls.__name__}.{path}", path.rpartition(".")[2]


def instance_of(metadata: object, reads: Iterable[Read], bound: bool = False) -> Instance:
    """An object's classes and fields, and what is read of them.

    Raises:
        BindingError: something is read that is no field.
    """
    held = leaves(metadata)
    what = {path: _what(value) for path, value in held.items()}
    arguments: dict[str, str] = {}
    constants: dict[str, str] = {}
    guards: dict[str, set[Guard]] = {}
    for read in reads:
        if read.guard:
            guards.setdefault(read.path, set()).add(read.guard)
            if read.guard != "value":
                continue
        field = next((p for p in what if within(read.path, p)), None)
        if field is None:
            _check_on_the_way(type(metadata), read.path, what)
        elif read.argument and field == read.path:  # else a size of it
            arguments[field] = read.argument
        elif not read.argument and what[field] != "tensor":
            constants[field] = read.text
    for path in arguments:
        guards.pop(path, None)
    outlines, opaque = _outlined(metadata, guards)
    return Instance(
        type(metadata),
        what,
        {path: value for path, value in held.items() if isinstance(value, Numbers)},
        {path: type(part) for path, part in parts(metadata).items()},
        tuple(map(tuple, sharing(metadata))),
        arguments,
        constants,
        outlines,
        opaque,
        bound,
    )


def _outlined(
    metadata: object, guards: Mapping[str, Collection[Guard]]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Outlines of what guards look at, and the paths of which they compare more than that."""
    outlines: dict[str, object] = {}
    opaque = []
    for path, kinds in guards.items():
        try:
            (value,) = reader_of([path])(metadata)
        except (NameError, AttributeError, LookupError, TypeError, SyntaxError):
            opaque.append(path)  # a name of Dynamo's own
            continue
        outlines[path] = outline_of(value)
        plain = value is None or isinstance(value, (*Numbers, list, tuple, dict))
        if not plain and {*kinds} != {"type"}:
            opaque.append(path)
    return outlines, tuple(opaque)


def _check_on_the_way(cls: type, path: str, fields: Iterable[str]) -> None:
    """Refuses an attribute that is neither a field nor an object that holds some."""
    if path and not any(within(field, path) for field in fields):
        raise BindingError(
            f"{cls.__name__}.{path} is read, and is no field.",
            where=f"{cls.__name__}.{path}",
            expected=f"fields: {', '.join(fields)}",
            found="an attribute that no refresh sees",
            fix="Declare it as a field of the dataclass.",
        )


def _what(value: Any) -> What:
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return "tensor"
    return "number" if isinstance(value, Numbers) else "object"


def names_of(instances: Sequence[Instance]) -> dict[str, str]:
    """Placeholders that are fields, and what they are better called.

    Dynamo calls them after the way to where objects are bound.
    """
    names: dict[str, str] = {}
    for instance in instances:
        for path, placeholder in instance.arguments.items():
            name = re.sub(r"\W+", "_", f"{instance.cls.__name__.lower()}_{path}").strip("_")
            while name in names.values():
                name += "_"
            names.setdefault(placeholder, name)
    return names


def renamed(instances: Sequence[Instance], names: Mapping[str, str]) -> tuple[Instance, ...]:
    """The instances with other names for placeholders."""
    return tuple(
        dataclasses.replace(i, arguments={path: names[a] for path, a in i.arguments.items()})
        for i in instances
    )
