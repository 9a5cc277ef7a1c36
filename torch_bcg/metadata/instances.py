"""What a graph was made for: metadata objects behind its arguments, without their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from torch_bcg.errors import BindingError
from torch_bcg.metadata.schema import Numbers, leaves, parts, shared, within

What = Literal["tensor", "number", "none", "object"]


@dataclass(frozen=True)
class Instance:
    """One object of a registered class, as Dynamo met it.

    Attributes:
        cls: its class.
        what: what each path holds.
        numbers: values of those that are numbers, or otherwise the same for as long as they are.
        parts: classes of the dataclass objects in it, itself included.
        shared: groups of paths that hold one tensor.
        arguments: path -> placeholder of the graph.
        constants: path -> Dynamo's text, of numbers and other objects that the graph was made for.
    """

    cls: type
    what: Mapping[str, What]
    numbers: Mapping[str, object]
    parts: Mapping[str, type]
    shared: tuple[tuple[str, ...], ...]
    arguments: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)

    def read(self, path: str, placeholder: str, text: str) -> None:
        """Notes that traced code read what lies at a path: as an argument, or "" as a constant.

        Raises:
            BindingError: it is no field.
        """
        here = [p for p in self.what if within(path, p)]
        if not here:
            if any(within(p, path) for p in self.what) or not path:
                return  # an object on the way
            raise BindingError(
                f"{self.cls.__name__}.{path} is read, and is no field.",
                where=f"{self.cls.__name__}.{path}",
                expected=f"fields: {', '.join(self.what)}",
                found="an attribute that no refresh sees",
                fix="Declare it as a field of the dataclass.",
            )
        if path in self.what and placeholder:
            self.arguments[path] = placeholder
        elif not placeholder and self.what[here[0]] != "tensor":
            self.constants[here[0]] = text

    def names(self, path: str) -> tuple[str, ...]:
        """What an author may call a field: its path, with the class in front, its last name."""
        return path, f"{self.cls.__name__}.{path}", path.rpartition(".")[2]


def instance_of(metadata: object) -> Instance:
    """An object's classes and fields, with nothing read yet."""
    held = leaves(metadata)
    return Instance(
        type(metadata),
        {path: _what(value) for path, value in held.items()},
        {path: value for path, value in held.items() if isinstance(value, Numbers)},
        {path: type(part) for path, part in parts(metadata).items()},
        tuple(map(tuple, shared(metadata))),
    )


def _what(value: Any) -> What:
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return "tensor"
    return "number" if isinstance(value, Numbers) else "object"


def names_of(instances: Sequence[Instance]) -> dict[str, str]:
    """Names for placeholders that are fields, which `Instance.arguments` takes over.

    Dynamo calls them after the way to where objects are bound.
    """
    names: dict[str, str] = {}
    for instance in instances:
        for path, placeholder in instance.arguments.items():
            name = re.sub(r"\W+", "_", f"{instance.cls.__name__.lower()}_{path}").strip("_")
            while name in names.values():
                name += "_"
            instance.arguments[path] = names.setdefault(placeholder, name)
    return names
