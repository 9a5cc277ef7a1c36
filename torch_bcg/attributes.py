"""What a module had where a graph was made for it, and whether that is so still."""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_bcg.frame import watched_tensors
from torch_bcg.metadata.schema import container_of, contents_of
from torch_bcg.sources import Link, Premises, along, text_of, value_in, whole

Kind = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_NOTHING = object()


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
        inside: dict[int, Any] = {}
        root = module() if module is not None else None
        for way in (*premises.tensors.values(), *premises.outlines) if root is not None else ():
            *holders, value = along(root, way)
            for holder, link in zip(holders, way):  # noqa: B905 - a way may end early
                if link.kind != "attribute" and (
                    link.kind != "item" or not isinstance(holder, dict)
                ):
                    inside[id(holder)] = holder
                for d, key in _held_at(holder, link):
                    places[id(d), key] = d, key
            if premises.outlines.get(way, (type, None))[0] in (contents_of, whole):
                inside[id(value)] = value
        self._dicts = [d for d, _ in places.values()]
        # As names are interned that dicts have: the same object is found at once.
        self._keys = [sys.intern(k) if type(k) is str else k for _, k in places.values()]
        self._values = [dict.get(d, key, _NOTHING) for d, key in places.values()]
        groups: dict[Any, list[Any]] = {}
        for one in inside.values():
            groups.setdefault(container_of(one), []).append(one)
        self._inside = [
            (base, ones, [*map(base.__len__, ones)], [*_all_in(base, ones)])
            for base, ones in groups.items()
            if base in (list, dict, OrderedDict, set, deque)  # in others nothing can be replaced
        ]
        self._other_tensor = watched_tensors(tensors)
        self._other = _changed_already(tensors, kinds)
        if module is not None and not self._other:
            self._other = _differing(root, tensors, premises)

    def unchanged(self) -> bool:
        """Whether they are, and were when the graph was made."""
        now = map(dict.get, self._dicts, self._keys, itertools.repeat(_NOTHING))
        return (
            not self._other
            and not self._other_tensor()
            and all(map(operator.is_, now, self._values))
            and all(
                [*map(base.__len__, ones)] == sizes
                and all(map(operator.is_, _all_in(base, ones), held))
                for base, ones, sizes, held in self._inside
            )
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
    for way, (told_by, told) in premises.outlines.items():
        if told_by(value_in(root, way)) != told:
            return text_of(way)
    for way, other in premises.shared.items():
        if value_in(root, way) is not value_in(root, other):
            return text_of(way)
    return ""


def _all_in(base: Any, ones: Iterable[Any]) -> Iterator[object]:
    """Items of containers of one class, one after another; of dicts the keys."""
    return itertools.chain.from_iterable(map(base.__iter__, ones))


def _held_at(holder: object, link: Link) -> Iterator[tuple[dict[Any, Any], object]]:
    """The dict and the key where a link finds what it leads to."""
    if isinstance(holder, dict) and link.kind == "item":
        yield holder, link.key
    elif isinstance(holder, dict) and link.kind == "value":
        yield holder, [*_all_in(container_of(holder), [holder])][link.key]
    elif link.kind == "attribute" and isinstance(getattr(holder, "__dict__", None), dict):
        inside = dicts_of(holder) if isinstance(holder, nn.Module) else ()
        if all(vars(holder).get(link.key) is not d for d in inside):  # else it is one of these
            yield next((d for d in inside if link.key in d), vars(holder)), link.key
