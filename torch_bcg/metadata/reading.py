"""What a program that is called past Dynamo takes of a bound object, and compares of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bcg.errors import BindingError
from torch_bcg.metadata.bound import current_metadata
from torch_bcg.metadata.instances import Instance
from torch_bcg.metadata.schema import reader_of, shape_of


class Fields:
    """The arguments of a graph that are fields of what is bound of one class.

    Dynamo compares what else a graph was made for: numbers, lengths, what is None, what is one
    tensor. So does this.

    Args:
        instance: the object that the graph was made for.
        arguments: names of the graph's arguments, in order.

    Attributes:
        names: of the arguments that are fields.
        places: of these among all arguments.
    """

    def __init__(self, instance: Instance, arguments: Sequence[str]) -> None:
        self.instance, self.cls = instance, instance.cls
        self.names = tuple(instance.arguments.values())
        self.places = tuple(map(arguments.index, self.names))
        self.guarded = list(instance.guarded.values())
        shared = [path for group in instance.sharing for path in group]
        self.read = reader_of([*instance.arguments, *instance.guarded, *shared])

    def take(self, args: list[Any]) -> None:
        """Puts the fields of the bound object in their places.

        Raises:
            BindingError: nothing of the class is bound, or an object that the graph was not made
                for.
        """
        md: object = current_metadata(self.cls)
        if type(md) is not self.cls:
            raise self.unlike("its class", self.cls.__name__, type(md).__name__)
        for path in self.instance.opaque:
            raise self.unlike(path, "a tensor, a number or None: no more is compared", "an object")
        try:
            values = self.read(md)
        except (AttributeError, LookupError, TypeError) as error:  # it is built otherwise
            raise self.unlike("its parts", "those it was recorded for", str(error)) from error
        n, m = len(self.places), len(self.guarded)
        for place, value in zip(self.places, values[:n], strict=True):
            args[place] = value
        shapes = list(map(shape_of, values[n : n + m]))
        if shapes != self.guarded:
            pairs = zip(self.instance.guarded.items(), shapes, strict=True)
            path, old, new = next((p, old, new) for (p, old), new in pairs if old != new)
            raise self.unlike(path, str(old), str(new))
        shared = iter(values[n + m :])
        for group in self.instance.sharing:
            first, *others = [next(shared) for _ in group]
            if any(other is not first for other in others):
                raise self.unlike(group[0], f"one tensor with {', '.join(group[1:])}", "several")

    def unlike(self, path: str, expected: str, found: str) -> BindingError:
        """The error for an object that the graph was not made for."""
        return BindingError(
            f"The program was not recorded for the {self.cls.__name__} that is bound: {path}.",
            where=f"{self.cls.__name__}, {path}",
            expected=expected,
            found=found,
            fix="Call the compiled function, which finds or records the right program.",
        )
