"""What a program is built from: memory by name, and the cells through which a call's values go."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from torch_bcg.graph.ir import Plan, Value
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.sizes import Geometry, compiled
from torch_bcg.runtime import memory, steps
from torch_bcg.runtime.device import Pool


class Workspace:
    """Binds names to memory, and makes what is remade at every call."""

    def __init__(
        self,
        plan: Plan,
        lowering: Lowering,
        geometries: Mapping[str, Geometry],
        key: tuple[int, ...],
        args: Sequence[Any],
        pool: Pool,
        unrecorded: Callable[[int], bool],
        aliases: memory.Aliases | None,
    ) -> None:
        self.aliases = aliases
        self.plan, self.lowering, self.geometries = plan, lowering, geometries
        self.key, self.pool, self.unrecorded = key, pool, unrecorded
        self.given = args
        self.args = dict(zip(plan.arguments, args, strict=True))
        self.place = {name: i for i, name in enumerate(plan.arguments)}
        self.values = {v.name: v for v in plan.values}
        self.bound: dict[str, Any] = {}
        self.cell: dict[str, int] = {}
        self.cells: list[Any] = []  # the object the steps hold; as long as the template in the end
        self.template: list[Any] = []
        self.loads: dict[str, int] = {}
        self.steps: list[steps.Step] = []
        self.owners: list[object] = []
        self.copied = 0
        self.recorded_kernels = 0
        self.bytes = 0

    def bind_arguments(self) -> None:
        """Numbers of the key, and static tensors at their own addresses."""
        symbols = [s for s, _, _ in self.plan.symbols]
        sizes = [v for v in self.plan.values if v.home == "size"]
        numbers = compiled((v.expr for v in sizes), symbols)(*self.key)
        self.bound.update(zip((v.name for v in sizes), numbers, strict=True))
        for v in self.plan.values:
            if v.home == "static":
                given = self.args.get(v.name)
                if given is None:
                    given = operator.attrgetter(str(self.lowering.nodes[v.name].target))(
                        self.lowering.gm
                    )
                self.bound[v.name] = memory.shared(given)

    def bind_memory(self) -> None:
        """Slots, bridges and scratch memory, and what is made from numbers alone."""
        for v in self.plan.values:
            if v.home in ("slot", "scratch", "bridge"):
                self.bound[v.name] = self.allocate(v)
            elif v.home == "constant":
                node = self.lowering.nodes[v.name]
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), lambda p: self.resolve(p.name)
                )
                self.bound[v.name] = _call(node, args, kwargs)

    def allocate(self, v: Value) -> Tensor:
        """Memory for a value, counted."""
        assert v.spec is not None
        t = memory.allocate(v.spec, self.geometries[v.name])
        self.bytes += t.untyped_storage().nbytes()
        return t

    def resolve(self, name: str) -> Any:
        """The fixed value of a node: bound, or made now from what is bound."""
        name = self.lowering.canonical.get(name, name)
        if name not in self.bound:
            v = self.values.get(name)
            if v is not None and v.home == "alias":
                assert v.spec is not None
                base = self.resolve(v.base)
                size, stride, offset = self.geometries[name]
                shift = self.geometries[v.base][2]
                self.bound[name] = memory.moved_view(
                    base, v.spec.dtype, (size, stride, offset - shift)
                )
            else:
                node = self.lowering.nodes[name]
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), lambda p: self.resolve(p.name)
                )
                self.bound[name] = _call(node, args, kwargs)
        return self.bound[name]

    def cell_of(self, name: str) -> int:
        """The cell a value of a call goes through; an argument's is loaded at each call."""
        if name not in self.cell:
            self.cell[name] = len(self.template)
            self.template.append(None)
            if name in self.place:
                self.loads[name] = self.place[name]
        return self.cell[name]

    def remake(self, name: str, wanted: Sequence[str]) -> tuple[Callable[..., Any], list[int]]:
        """Code that remakes per-call values, and the cells it takes."""
        floats = [n for n in wanted if n in self.lowering.floats]
        needs = self.lowering.needs(floats, set(floats), self.is_size)
        outside = list(dict.fromkeys([*needs.outside, *(n for n in wanted if n not in floats)]))
        inside = needs.inside | set(floats)
        code = self.lowering.lower(name, (), inside, outside, wanted)
        cells = [self.cell_of(n) for n in outside]
        for n, cell in zip(outside, cells, strict=True):
            if n in self.bound and n not in self.place:
                self.template[cell] = self.bound[n]
        return code.forward, cells

    def is_size(self, name: str) -> bool:
        """Whether a name is a number of the key."""
        return name in self.values and self.values[name].home == "size"


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)
