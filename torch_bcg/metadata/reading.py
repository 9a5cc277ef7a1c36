"""What a program that is called past Dynamo takes of a bound object, and compares of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_bcg.errors import MisfitError
from torch_bcg.metadata.bound import current_metadata
from torch_bcg.metadata.instances import Instance
from torch_bcg.metadata.schema import outline_of, reader_of


class Fields:
    """The arguments of a graph that are fields of what is bound of one class.

    Dynamo compares what else a graph was made for: numbers, lengths, what is None, what is one
    tensor. So does this.

    Args:
        instance: the object that the graph was made for.
        arguments: names of the graph's arguments, in order.

    Attributes:
        instance: as given.
        names: of the arguments that are fields.
        places: of these among all arguments.
    """

    def __init__(self, instance: Instance, arguments: Sequence[str]) -> None:
        self.instance = instance
        self.names = tuple(instance.arguments.values())
        self.places = tuple(map(arguments.index, self.names))
        self._outlines = list(instance.outlines.values())
        shared = [path for group in instance.sharing for path in group]
        self._read = reader_of([*instance.arguments, *instance.outlines, *shared])

    def take(self, args: list[Any]) -> None:
        """Puts the fields of the bound object in their places.

        Raises:
            BindingError: nothing of the class is bound.
            MisfitError: an object that the graph was not made for, or one that nobody can compare.
        """
        instance = self.instance
        md: object = current_metadata(instance.cls)
        if type(md) is not instance.cls:
            raise self._unlike("its class", instance.cls.__name__, type(md).__name__)
        if instance.opaque:
            wanted = (
                "tensors, numbers and None: of other objects no more than the class is compared"
            )
            raise self._unlike(instance.opaque[0], wanted, "an object that the graph looks into")
        try:
            values = self._read(md)
        except (AttributeError, LookupError, TypeError) as error:  # it is built otherwise
            raise self._unlike("its parts", "those it was recorded for", str(error)) from error
        n, m = len(self.places), len(self._outlines)
        for place, value in zip(self.places, values[:n], strict=True):
            args[place] = value
        outlines = list(map(outline_of, values[n : n + m]))
        if outlines != self._outlines:
            pairs = zip(instance.outlines.items(), outlines, strict=True)
            path, old, new = next((p, old, new) for (p, old), new in pairs if old != new)
            raise self._unlike(path, str(old), str(new))
        shared = iter(values[n + m :])
        for group in instance.sharing:
            first, *others = [next(shared) for _ in group]
            if any(other is not first for other in others):
                raise self._unlike(group[0], f"one tensor with {', '.join(group[1:])}", "several")

    def _unlike(self, path: str, expected: str, found: str) -> MisfitError:
        name = self.instance.cls.__name__
        return MisfitError(
            f"The program was not recorded for the {name} that is bound: {path}.",
            where=f"{name}, {path}",
            expected=expected,
            found=found,
            fix="Call the compiled function, which finds or records the right program.",
        )
