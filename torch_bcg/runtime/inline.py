"""A call without recordings, through the very code that a program of its size was recorded from.

It is for calls that cannot be replayed: while somebody else records a CUDA graph, which takes the
kernels of fused segments and of the eager operations between them, or amid another replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_bcg.graph import modes
from torch_bcg.graph.ir import Segment
from torch_bcg.graph.lower import name_of
from torch_bcg.runtime import memory
from torch_bcg.runtime.recorders import put
from torch_bcg.runtime.steps import as_taken
from torch_bcg.runtime.workspace import Workspace


def inline(space: Workspace, args: Sequence[Any]) -> Any:
    """Runs the segments of a program on the memory of a call of its own size.

    Args:
        space: where the program was recorded.
        args: of the call, read and written where they are.

    Returns:
        What the graph returns.

    Raises:
        OutputError: an eager result is not what its fake says.
    """
    with modes.preserved():
        return _Inline(space, args).run()


class _Inline:
    """Values of one call by name.

    Attributes:
        values: arguments, sizes, what has a home in the plan, and what segments made.
        views: what was made of those without a kernel, for one segment.
    """

    def __init__(self, space: Workspace, args: Sequence[Any]) -> None:
        self.space = space
        self.values: dict[str, Any] = dict(zip(space.plan.arguments, args, strict=True))
        self.values |= space.numbers_at(space.key)
        self.views: dict[str, Any] = {}
        homes = [v for v in space.plan.values if v.storage >= 0 and v.name not in self.values]
        self.last = {v.name: v.last for v in homes}

    def run(self) -> Any:
        for segment in self.space.plan.segments:
            code = self.space.code(segment)
            results = code.forward(*self.operands(segment))
            for name, result in zip(segment.outputs, results, strict=True):
                self.values[name] = self.as_planned(name, result, name_of(code))
            self.views.clear()
            # As when it is recorded, memory goes after its last reader.
            done = [n for n in self.values if n in self.last and self.last[n] <= segment.index]
            for name in done:
                del self.values[name]
        (node,) = self.space.lowering.gm.graph.find_nodes(op="output")
        return fx.node.map_arg(node.args[0], lambda n: self.value(n.name))

    def as_planned(self, name: str, result: Any, segment: str) -> Any:
        """A result as others read it: of an eager segment a copy, as a replay makes one.

        Raises:
            OutputError: it has another shape or dtype.
        """
        v = self.space.values.get(name)
        if v is None or v.home != "bridge":
            return result
        assert v.spec is not None
        planned = memory.allocate(v.spec, self.space.geometries[name])
        put(result, planned, memory.once(planned), name, segment)
        return planned

    def operands(self, segment: Segment) -> list[Any]:
        taken = [self.value(n) for n in (*segment.inputs, *segment.carried)]
        sources = {s.name: s for s in self.space.plan.number_slots}
        for name in dict.fromkeys(s for _, _, s in segment.number_slots):
            dtype = getattr(torch, sources[name].dtype)
            number = as_taken(self.value(sources[name].source), dtype)
            slot = torch.empty((), dtype=dtype, device=self.space.plan.device)
            taken.append(slot.fill_(number))
        return taken

    def value(self, name: str) -> Any:
        name = self.space.lowering.canonical.get(name, name)
        for known in (self.values, self.views):
            if name in known:
                return known[name]
        v = self.space.values.get(name)
        if v is not None and v.home == "scratch":
            # As the program has it: the value that ``empty_like`` names may be gone.
            made = memory.empty_like(self.space.bound[name])
        elif self.space.lowering.nodes[name].op == "get_attr":
            made = self.space.attribute(name)
        else:
            made = self.space.lowering.call(name, self.value)
        (self.values if name in self.last else self.views)[name] = made
        return made
