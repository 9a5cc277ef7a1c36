"""Storages of one fake pass, numbered in the order in which they appear, and tensors over them."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Which storage a tensor lies in, who made it, and the tensor's geometry in it."""

    def __init__(self) -> None:
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
            return TensorFact(self.storage(node, x), spec, special)
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
