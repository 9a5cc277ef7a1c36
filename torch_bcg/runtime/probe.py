"""The first real run of a graph, node by node: its result is the call's, its report cuts the graph.

What reads the host, waits for the device or keeps memory that it made cannot be recorded, and
neither schemas nor dispatch modes show it inside a custom operator. Nothing is run twice: an
operation that is found out has already done its work, once.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_bcg.errors import OutputError
from torch_bcg.graph import modes
from torch_bcg.graph.geometry import has_memory, target_name
from torch_bcg.graph.ir import EagerSegment, Plan, Reason
from torch_bcg.graph.sizes import Geometry
from torch_bcg.graph.sorting import where
from torch_bcg.marking import plain_function
from torch_bcg.runtime.device import Pool
from torch_bcg.runtime.kept import Keepers
from torch_bcg.runtime.recorders import host_reads, wrong_output


def probe(
    gm: fx.GraphModule,
    args: Sequence[object],
    plan: Plan,
    geometries: Mapping[str, Geometry],
    pool: Pool,
) -> tuple[Any, tuple[Reason, ...]]:
    """Runs ``gm`` once for real.

    Args:
        gm: the whole graph.
        args: the caller's arguments, read and written as in any call.
        plan: which nodes would be recorded, and what they are expected to return.
        geometries: of the plan's values, for these arguments.
        pool: of the plan's device; its lock is held, since what watches the host is process-wide.

    Returns:
        The result, and a reason for each node that was to be recorded and cannot be.

    Raises:
        OutputError: a marked function returned another shape, dtype or alias than its fake.
    """
    run = _Probe(gm, plan, geometries)
    with modes.preserved(), pool.sync_reports() as run.waits:
        result = run.run(*args)
    run.env.clear()
    return result, tuple(run.reasons())


@contextlib.contextmanager
def waits(found: list[str]) -> Iterator[None]:
    """Notes what waits for the device though PyTorch's own debug mode does not say so.

    That mode hears of copies and of `Tensor.item`, not of these, which autotuners call. They are
    replaced for the time being, inside `host_reads`, whose lock keeps other probes out.
    """
    here = threading.get_ident()
    originals = [(owner, name, getattr(owner, name)) for owner, name in _WAITS]

    def heard(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                found.append(f"{name} waits for the device")
            return original(*args, **kwargs)

        return wait

    for owner, name, original in originals:
        setattr(owner, name, heard(f"{owner.__name__}.{name}", original))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


_WAITS: list[tuple[Any, str]] = [
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.accelerator, "synchronize"),
]


class _Probe(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, plan: Plan, geometries: Mapping[str, Geometry]) -> None:
        super().__init__(gm)
        self.nodes = list(gm.graph.nodes)
        self.extra_traceback = False
        self.recorded = {n for s in plan.graph_segments for n in s.nodes}
        eager = {n for s in plan.segments if isinstance(s, EagerSegment) for n in s.nodes}
        # What a marked function returns must be what its fake said, whoever reads it.
        homes = ("bridge", "fresh")
        self.made = {v.name: v for v in plan.values if v.name in eager and v.home in homes}
        self.geometries = geometries
        self.waits: list[str] = []
        self.found: list[Reason] = []
        self.keepers = Keepers(plan.device)

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self.recorded:
            result = super().run_node(n)
            if n.name in self.made and self.made[n.name].spec is not None:
                self.check(n, result)
            return result
        reads: list[str] = []
        before = len(self.waits)
        operands = [self.env[p] for p in n.all_input_nodes]

        def watched() -> Any:
            with host_reads(reads.append), waits(self.waits):
                return super(_Probe, self).run_node(n)

        result = self.keepers.call(n, operands, watched)
        if reads or len(self.waits) > before:
            why = f"Tensor.{reads[0]}" if reads else self.waits[-1]
            self.found.append(Reason("host read", n.name, where(n), f"{target_name(n)}, {why}"))
        return result

    def reasons(self) -> list[Reason]:
        """A reason for each recorded node that cannot be; all nodes of an operator that keeps."""
        kept = self.keepers.keeping()
        known = {r.node for r in self.found}
        keeping = [
            Reason("keeps memory", n.name, where(n), target_name(n))
            for n in self.nodes
            if n.name in self.recorded and n.name not in known and n.target in kept
        ]
        return self.found + keeping

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(plain_function(target) or target, args, kwargs)

    def check(self, n: fx.Node, result: object) -> None:
        """What later nodes were planned for must be what the facts say."""
        value, place = self.made[n.name], f"{n.name}, {where(n)}"
        source = n.args[0] if n.target is operator.getitem else n
        name = target_name(source if isinstance(source, fx.Node) else n)
        assert value.spec is not None
        size = self.geometries[n.name][0]
        dtype = getattr(torch, value.spec.dtype)
        if not isinstance(result, Tensor) or tuple(result.shape) != size or result.dtype != dtype:
            expected = torch.empty(size, dtype=dtype, device="meta")
            raise wrong_output(name, place, expected, result)
        if value.home == "fresh":  # passed on as it is: sharing memory changes nothing
            return
        storage = result.untyped_storage()._cdata
        for p in n.all_input_nodes:
            given = self.env.get(p)
            if (
                isinstance(given, Tensor)
                and result.numel()
                and has_memory(given)
                and given.untyped_storage()._cdata == storage
            ):
                raise OutputError(
                    f"'{name}' returned memory of its argument '{p.name}', which its fake "
                    "implementation does not say.",
                    where=place,
                    expected="new memory",
                    found=f"a view of '{p.name}'",
                    fix="Return a clone, or let the fake= of the marked function return the same "
                    "view of its argument.",
                )
