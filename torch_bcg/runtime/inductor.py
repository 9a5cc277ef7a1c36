"""What is taken of PyTorch's compilers: Inductor itself, and sizes that are symbols."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torch_bcg.graph.buckets import SizeGuards
from torch_bcg.graph.sizes import compiled
from torch_bcg.option_values import INDUCTOR
from torch_bcg.runtime.operands import Operand, alike

Function = Callable[..., Sequence[Any]]
Compiler = Callable[[fx.GraphModule, list[Any]], Function]

_COMPILING = threading.RLock()  # two devices have two pools, and compilers one process


def inductor(settings: Iterable[tuple[str, object]] = ()) -> Compiler:
    """Inductor without CUDA graphs of its own, drawing the random numbers that eager draws.

    Args:
        settings: names and values, as `option_values.compiler` checked them.
    """
    own: dict[str, Any] = {**dict(settings), **INDUCTOR}

    def compile_segment(code: fx.GraphModule, examples: list[Any]) -> Function:
        compiler = torch._dynamo.lookup_backend("inductor")
        with torch._inductor.config.patch(own):
            function: Function = compiler(code, examples)
        return function

    return compile_segment


class Symbols:
    """Sizes as symbols that have some values now, in a shape environment of their own.

    Attributes:
        fixed: sizes of 0 and 1, which are no symbols.
        values: by the plan's name of a size, the symbol or the number.
        names: by the plan's name, that of the guards.
        guards: what was taken for granted about the symbols.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.fixed = {s: n for s, n in sizes.items() if n < 2}
        self.values = {s: n if s in self.fixed else self.symbol(s, n) for s, n in sizes.items()}
        self.names = {s: str(x) for s, x in self.values.items() if s not in self.fixed}
        self.guards = SizeGuards(self.mode.shape_env)

    def symbol(self, name: str, hint: int) -> Any:
        """A size that is known to be 2 or more, and to be ``hint`` now."""
        shapes, source = self.mode.shape_env, ConstantSource(name)
        assert shapes is not None
        symbol = shapes.create_symbol(hint, source, DimDynamic.DYNAMIC, constraint_dim=None)
        return shapes.create_symintnode(symbol, hint=hint, source=source)

    def examples(self, given: Sequence[Operand]) -> list[Any]:
        """The symbols, then fake operands."""
        wanted = [
            f"({_row(g.size)}, {_row(g.stride)})" if isinstance(g.value, Tensor) else g.expr
            for g in given
        ]
        known = compiled(wanted, list(self.values))(*self.values.values())
        with self.mode:
            return [self.values[s] for s in self.names] + alike(given, known, torch.empty_strided)

    def compile(self, compiler: Compiler, code: fx.GraphModule, examples: list[Any]) -> Function:
        """What the compiler makes of code for these sizes."""
        with _COMPILING, tracing(TracingContext(self.mode)):
            return compiler(code, examples)


def _row(expressions: Sequence[str]) -> str:
    return "(" + "".join(e + "," for e in expressions) + ")"
