"""Bytes as expressions over the symbols: ``f32[s0, 64]`` is ``256*s0`` bytes.

Sums of products are kept as coefficients of their products, so like terms are one term and a text
does not depend on the order in which values were added.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable

import torch

from torch_bcg.graph.values import TensorSpec, Value


class Amount(Counter[tuple[str, ...]]):
    """A sum: product of texts -> coefficient; the product of nothing is the plain number."""

    def __str__(self) -> str:
        terms = [
            "*".join([f"{c:,}", *names]) if names else f"{c:,}"
            for names, c in sorted(self.items(), reverse=True)
            if c
        ]
        total = " + ".join(terms) or "0"
        return f"{total} byte{'' if total == '1' else 's'}"


def bytes_of(values: Iterable[Value]) -> Amount:
    """Bytes of all elements of tensors; numbers and objects have none."""
    amount = Amount()
    for value in values:
        if value.spec is not None:
            amount.update(_product(value.spec))
    return amount


def _product(spec: TensorSpec) -> Amount:
    numbers, names = [getattr(torch, spec.dtype).itemsize], []
    for size, stride in zip(spec.size, spec.stride or ("1",) * len(spec.size), strict=True):
        if stride == "0":
            continue  # an expanded dim holds no memory of its own
        for factor in _factors(ast.parse(size, mode="eval").body):
            if isinstance(factor, ast.Constant) and isinstance(factor.value, int):
                numbers.append(factor.value)
            else:
                text = ast.unparse(factor)
                simple = isinstance(factor, (ast.Name, ast.Call, ast.Constant))
                names.append(text if simple else f"({text})")
    return Amount({tuple(sorted(names)): math.prod(numbers)})


def _factors(node: ast.expr) -> Iterable[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield node
