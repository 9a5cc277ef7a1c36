"""What a module has: its tensors, submodules and all else, and whether that is so still."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from torch_bcg.metadata.schema import contents_of
from torch_bcg.sources import Premises, value_in

Place = tuple[dict[Any, Any], Any, object]  # a dict, a key, and the value that is there
_NOTHING = object()
_GROWING = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def dicts_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Where a module keeps its parameters, buffers and submodules."""
    yield from (module._parameters, module._buffers, module._modules)


class Attributes:
    """Everything that a module and its submodules have.

    Args:
        module: the root; None: nothing.
    """

    def __init__(self, module: nn.Module | None) -> None:
        modules = [] if module is None else [*module.modules()]
        self.module = None if module is None else weakref.ref(module)
        self.held = [(d, k, x) for m in modules for d in dicts_of(m) for k, x in d.items()]
        self.others = [
            (vars(m), k, x)
            for m in modules
            for k, x in vars(m).items()
            if all(x is not d for d in dicts_of(m))
        ]
        self.types = [(vars(m), type(m)) for m in modules]
        self.growing = [d for m in modules if isinstance(m, _GROWING) for d in dicts_of(m)]

    def about(self, tensors: Mapping[str, object], premises: Premises) -> Watched:
        """What of it a program depends on.

        Args:
            tensors: the static ones of the program, by name.
            premises: of its graph.
        """
        own, names = premises.tensors, premises.names
        wanted = {id(t) for t in tensors.values()}
        places = [
            place
            for place in self.held
            if place[2] is None or isinstance(place[2], nn.Module) or id(place[2]) in wanted
        ]
        others = [place for place in self.others if id(place[2]) in wanted or place[1] in names]
        others += [
            (d, name, _NOTHING)  # of the class, until an instance has its own
            for d, cls in self.types
            for name in names
            if name not in d and hasattr(cls, name) and not callable(getattr(cls, name))
        ]
        dicts = [x for _, _, x in others if isinstance(x, dict)]
        lists = [x for _, _, x in others if isinstance(x, list)]
        places += others + [(d, k, x) for d in dicts for k, x in d.items()]
        if self.module is None:
            return Watched(places, dicts, lists)
        module = self.module()
        missing = [n for n, x in tensors.items() if n in own and value_in(module, own[n]) is not x]
        for text, was in premises.outlines.items():
            value = value_in(module, text)
            if was not in (type(value), contents_of(value)):
                missing.append(text)
            holder, _, name = text.rpartition(".")
            d = getattr(value_in(module, holder), "__dict__", None)
            if value is None and d is not None and name.isidentifier() and name != "__dict__":
                places.append((d, name, d.get(name, _NOTHING)))  # what was asked for is not there
        return Watched(places, [*self.growing, *dicts], lists, missing[:1])


class Watched:
    """Values that have to stay the objects that they were when this was made.

    Args:
        places: values in dicts.
        growing: dicts that may get more keys.
        lists: of any objects.
        missing: what was not the same even then.
    """

    def __init__(
        self,
        places: Sequence[Place] = (),
        growing: Sequence[dict[Any, Any]] = (),
        lists: Sequence[list[Any]] = (),
        missing: Sequence[str] = (),
    ) -> None:
        self._dicts = [d for d, _, _ in places]
        self._keys = [k for _, k, _ in places]
        self._values = [x for _, _, x in places]
        self._growing, self._sizes = growing, [*map(len, growing)]
        self._lists, self._contents = lists, [*map(tuple, lists)]
        self._missing = missing

    def unchanged(self) -> bool:
        """Whether they are."""
        now = map(dict.get, self._dicts, self._keys, itertools.repeat(_NOTHING))
        pairs = zip(self._lists, self._contents, strict=True)
        return (
            not self._missing
            and all(map(operator.is_, now, self._values))
            and [*map(len, self._growing)] == self._sizes
            and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)
        )

    def changed(self) -> str:
        """What is not, "" if all are."""
        places = zip(self._dicts, self._keys, self._values, strict=True)
        others = (str(k) for d, k, x in places if d.get(k, _NOTHING) is not x)
        rest = "" if self.unchanged() else "a container"
        return next(iter(self._missing), "") or next(others, rest)
