"""What a module has: its tensors, submodules and numbers, and whether that is so still."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torch_bcg.metadata.schema import Numbers

_NOTHING = object()


def dicts_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Where a module keeps its parameters, buffers, submodules and all else."""
    yield from (module._parameters, module._buffers, module._modules, vars(module))


class Attributes:
    """Attributes of modules, with the values that they had when this was made.

    Args:
        found: (the dict that has it, name, value) of each.
    """

    def __init__(self, found: Sequence[tuple[dict[str, Any], str, object]]) -> None:
        self._found = found
        self._dicts = [d for d, _, _ in found]
        self._names = [name for _, name, _ in found]
        self._values = [value for _, _, value in found]

    @staticmethod
    def of(module: nn.Module | None) -> Attributes:
        """Tensors, modules and numbers of a module and its submodules; None: nothing."""
        modules = module.modules() if module is not None else ()
        kinds = (Tensor, nn.Module, *Numbers)
        return Attributes(
            [
                (d, name, x)
                for m in modules
                for d in dicts_of(m)
                for name, x in d.items()
                if isinstance(x, kinds)
            ]
        )

    def about(self, tensors: Sequence[object], numbers: Collection[str]) -> Attributes:
        """Of these some tensors, numbers of these names and all modules.

        Nothing if none of the tensors is here: then they are those of another instance.
        """
        wanted = {id(t) for t in tensors}
        mine = [one for one in self._found if id(one[2]) in wanted]
        others = [
            (d, name, x)
            for d, name, x in self._found
            if isinstance(x, nn.Module) or (name in numbers and isinstance(x, Numbers))
        ]
        return Attributes([*mine, *others] if mine else [])

    def unchanged(self) -> bool:
        """Whether each is the same object still."""
        now = map(dict.get, self._dicts, self._names, itertools.repeat(_NOTHING))
        return all(map(operator.is_, now, self._values))

    def changed(self) -> str:
        """The name of the first that is another object now, "" if none is."""
        return next((name for d, name, x in self._found if d.get(name, _NOTHING) is not x), "")
