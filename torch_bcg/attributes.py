"""What a module had where a graph was made for it, and whether that is so still."""

from __future__ import annotations

import itertools
import operator
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_bcg.frame import watched_tensors
from torch_bcg.metadata.schema import contents_of, outline_of
from torch_bcg.sources import Premises, value_in

Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_NOTHING = object()
_LAST_LINK = re.compile(r"(.*)(?:\.(\w+)|\[(?:'([^']*)'|(\d+))\])")


def dicts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps its parameters, buffers and submodules."""
    return module._parameters, module._buffers, module._modules


class Watched:
    """Objects on the ways to what a graph was made for, which have to stay the objects they are.

    Args:
        module: whose method was compiled; None: a function was, of which nothing is known.
        tensors: the static ones of a program, by name; their sizes and strides have to stay too.
        premises: of its graph.
        kinds: of those tensors, sizes, strides and dtype in the program.
    """

    def __init__(
        self,
        module: weakref.ref[nn.Module] | None,
        tensors: Mapping[str, Tensor],
        premises: Premises,
        kinds: Mapping[str, Kind],
    ) -> None:
        places: dict[tuple[int, object], tuple[dict[Any, Any], object]] = {}
        lists: dict[int, list[Any]] = {}
        dicts: dict[int, dict[Any, Any]] = {}
        root = module() if module is not None else None
        for way in _ways(premises) if root is not None else ():
            for d, key in _held_at(root, way, lists):
                places[id(d), key] = d, key
        sets: dict[int, set[Any]] = {}
        for way, was in premises.outlines.items() if root is not None else ():
            value = value_in(root, way)
            if isinstance(value, dict) and not isinstance(was, type):
                dicts[id(value)] = value
            elif isinstance(value, set) and not isinstance(was, type):
                sets[id(value)] = value
        self._dicts = [d for d, _ in places.values()]
        self._keys = [key for _, key in places.values()]
        self._values = [dict.get(d, key, _NOTHING) for d, key in places.values()]
        self._growing = [*dicts.values()]
        self._sizes = [*map(len, self._growing)]
        self._sets = [(one, outline_of(one)) for one in sets.values()]
        self._lists, self._contents = [*lists.values()], [*map(tuple, lists.values())]
        self._other_tensor = watched_tensors(tensors)
        self._other = _changed_already(tensors, kinds)
        if module is not None and not self._other:
            self._other = _differing(root, tensors, premises)

    def unchanged(self) -> bool:
        """Whether they are, and were when the graph was made."""
        now = map(dict.get, self._dicts, self._keys, itertools.repeat(_NOTHING))
        pairs = zip(self._lists, self._contents, strict=True)
        return (
            not self._other
            and not self._other_tensor()
            and all(map(operator.is_, now, self._values))
            and [*map(len, self._growing)] == self._sizes
            and all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)
            and all(outline_of(one) == outline for one, outline in self._sets)
        )

    def changed(self) -> str:
        """What is not, "" if all are."""
        places = zip(self._dicts, self._keys, self._values, strict=True)
        others = (str(key) for d, key, x in places if d.get(key, _NOTHING) is not x)
        found = self._other or self._other_tensor() or next(others, "")
        return found or ("" if self.unchanged() else "a container")


def _changed_already(tensors: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> str:
    """A tensor that is not as a program has it, wherever it lies; "" if all are."""
    for name, x in tensors.items():
        if name in kinds and (x.shape, x.stride(), x.dtype) != kinds[name]:
            return name
        if x.requires_grad and torch.is_grad_enabled():
            return f"requires_grad of {name}"
    return ""


def _differing(root: object, tensors: Mapping[str, Tensor], premises: Premises) -> str:
    """What is not as it was when the graph was made, "" if all is."""
    if root is None:
        return "the module"
    for name, way in premises.tensors.items():
        if name in tensors and value_in(root, way) is not tensors[name]:
            return name
    for way, was in premises.outlines.items():
        value = value_in(root, way)
        if was is not type(value) and was != contents_of(value):
            return way.removeprefix(".")
    return ""


def _ways(premises: Premises) -> Iterator[str]:
    """All ways, and what they lead through, each once."""
    seen: set[str] = set()
    for way in (*premises.tensors.values(), *premises.outlines):
        while way and way not in seen:
            seen.add(way)
            yield way
            link = _LAST_LINK.fullmatch(way)
            way = link[1] if link else ""


def _held_at(
    root: object, way: str, lists: dict[int, list[Any]]
) -> Iterator[tuple[dict[Any, Any], object]]:
    """The dict and the key of the last link of a way; a list is added to the lists."""
    link = _LAST_LINK.fullmatch(way)
    holder = value_in(root, link[1]) if link else None
    if link is None or holder is None:
        return
    _, name, key, index = link.groups()
    if isinstance(holder, list):
        lists[id(holder)] = holder
    elif isinstance(holder, dict) and name is None:
        yield holder, int(index) if key is None else key
    elif name is not None and isinstance(getattr(holder, "__dict__", None), dict):
        inside = dicts_of(holder) if isinstance(holder, nn.Module) else ()
        if all(vars(holder).get(name) is not d for d in inside):  # else it is one of these
            yield next((d for d in inside if name in d), vars(holder)), name
