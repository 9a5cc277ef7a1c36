"""Storages of one fake pass, numbered in the order in which they appear, and tensors over them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.printers import PythonPrinter

from torch_bcg.graph.geometry import dtype_name, overlaps_itself, storage_id
from torch_bcg.graph.ir import TensorSpec
from torch_bcg.graph.known import TensorFact


class Storages:
    """Which storage a tensor lies in, who made it, and the tensor's geometry in it.

    A wrapper subclass has a number of its own. ``inside`` has the storages of what it wraps, by
    that number, and ``wrapped`` those of them that a plain tensor had before.
    """

    def __init__(self) -> None:
        self.inside: dict[int, set[int]] = {}
        self.wrapped: set[int] = set()
        self.numbers: dict[int, int] = {}
        self.keep: list[torch.Tensor] = []  # a freed storage's id could be used again
        self.origin: dict[int, str] = {}
        self.offsets: dict[int, tuple[Any, int]] = {}
        self.printer = PythonPrinter()

    def tensor(self, node: fx.Node, x: torch.Tensor) -> TensorFact:
        """The facts of a tensor that ``node`` returned."""
        special = ""
        if is_traceable_wrapper_subclass(x):
            special = type(x).__name__
        elif x.layout != torch.strided or x.is_nested:
            special = f"{x.layout}".removeprefix("torch.") + " layout"
        if special:
            spec = TensorSpec(dtype_name(x), str(x.device), tuple(map(str, x.shape)), ())
            number = self.storage(node, x)
            if is_traceable_wrapper_subclass(x) and number not in self.inside:
                self.inside[number] = {storage_id(t) for t in inner_tensors(x)}
                self.wrapped |= self.inside[number] & self.numbers.keys()
            return TensorFact(number, spec, special)
        storage = self.storage(node, x)
        first, itemsize = self.offsets.setdefault(storage, (x.storage_offset(), x.itemsize))
        delta = x.storage_offset() * x.itemsize - first * itemsize
        stride = x.stride()
        spec = TensorSpec(
            dtype_name(x),
            str(x.device),
            tuple(self.expr(s) for s in x.shape),
            tuple(self.expr(s) for s in stride),
            self.expr(delta),
        )
        unbacked = bool(free_unbacked_symbols([*x.shape, *stride]))
        overlapping = not unbacked and overlaps_itself(x)
        return TensorFact(storage, spec, "", unbacked, overlapping, (x.is_conj(), x.is_neg()))

    def backed(self, x: torch.Tensor) -> Iterator[sympy.Symbol]:
        """Symbols of a tensor's geometry that arguments give."""
        if x.layout != torch.strided or is_traceable_wrapper_subclass(x):
            return
        first, itemsize = self.offsets[self.numbers[storage_id(x)]]
        delta = x.storage_offset() * x.itemsize - first * itemsize
        unbacked = free_unbacked_symbols([*x.shape, *x.stride(), delta])
        yield from (s for s in free_symbols([*x.shape, *x.stride(), delta]) if s not in unbacked)

    def shared(self, written: Collection[int]) -> dict[int, str]:
        """Storages of plain tensors that a wrapper shows as well, where that matters.

        It does where one of the two is written, and where the plain tensor came first: a wrapper
        keeps its memory for longer than anybody sees.

        Args:
            written: numbers of storages that are written.

        Returns:
            Number of the storage -> name of the node that made the first such wrapper.
        """
        found: dict[int, str] = {}
        for wrapper, keys in self.inside.items():
            numbers = {self.numbers[k] for k in keys if k in self.numbers}
            touched = wrapper in written or not numbers.isdisjoint(written)
            for key, number in ((k, self.numbers[k]) for k in keys if k in self.numbers):
                if touched or key in self.wrapped:
                    found.setdefault(number, self.origin[wrapper])
        return found

    def storage(self, node: fx.Node, x: torch.Tensor) -> int:
        """The number of a tensor's storage; ``node`` made it if it is new."""
        key = storage_id(x)
        if key not in self.numbers:
            self.keep.append(x)
            number = len(self.numbers)
            self.numbers[key] = number
            self.origin[number] = node.name
        return self.numbers[key]

    def expr(self, x: Any) -> str:
        """A number, or a sequence of numbers, as a Python expression."""
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(self.printer.doprint(x.node.expr))
        if isinstance(x, (tuple, list)):
            return f"({''.join(self.expr(i) + ',' for i in x)})"
        return repr(x)


def inner_tensors(x: Any) -> list[torch.Tensor]:
    """The plain tensors in a wrapper subclass, which names other objects of its own as well."""
    if not is_traceable_wrapper_subclass(x):
        return [x] if isinstance(x, torch.Tensor) else []
    names, _ = x.__tensor_flatten__()
    return [t for name in names for t in inner_tensors(getattr(x, name))]
