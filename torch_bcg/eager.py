"""Calls that are not replayed: the graph with plain functions, and never in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from torch_bcg import marking
from torch_bcg.counters import counters
from torch_bcg.errors import BCGWarning, CutError, EagerCallError, MovedError
from torch_bcg.graph import modes
from torch_bcg.graph.inline import forget_arguments
from torch_bcg.graph.ir import Plan
from torch_bcg.option_values import nearest
from torch_bcg.options import Options

_FIXES = {
    "gradients": "Call it under torch.inference_mode(), or torch.no_grad().",
    "tangents": "Call it with tensors that torch.autograd.forward_ad.make_dual() did not make.",
}


class Unrecorded:
    """A graph that is never recorded: the plain functions at marked nodes, autograd and all."""

    def __init__(
        self, gm: fx.GraphModule, reason: str, options: Options, warn: bool = True
    ) -> None:
        self.forward = plain(gm)
        self.reason, self.options, self.warn = reason, options, warn
        self.warned: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        """Runs the graph as it is."""
        counters.eager_call(self.reason)
        if self.warn:
            tell_eager_call(self.reason, self.options, self.warned)
        return self.forward(*args)


def plain(gm: fx.GraphModule) -> Callable[..., Any]:
    """``gm`` with the plain function at each marked operator, leaving no mode behind."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    forget_arguments(graph)
    for node in graph.nodes:
        function = marking.plain_function(node.target)
        if function is not None:
            node.target = function
    forward = fx.GraphModule(gm, graph).forward
    if not modes.has_modes(graph):
        return forward

    def guarded(*args: Any) -> Any:
        with modes.preserved():
            return forward(*args)

    return guarded


def tell_eager_call(reason: str, options: Options, warned: set[str]) -> None:
    """``on_eager_call``: says once a reason that a call was not replayed."""
    other = "torch_bcg.explain() shows the plan; on_eager_call='count' is silent."
    fix = _FIXES.get(reason, other)
    if options.on_eager_call == "error":
        raise EagerCallError(
            "A call was not replayed.", where="call", expected="a replay", found=reason, fix=fix
        )
    if options.on_eager_call == "warn" and reason not in warned:
        warned.add(reason)
        warnings.warn(f"A call was not replayed: {reason}. {fix}", BCGWarning, stacklevel=4)


def tell_moved(names: Sequence[str], options: Options) -> None:
    """``on_moved``: static tensors of a live module lie elsewhere."""
    shown = some_of(names)
    if options.on_moved == "error":
        raise MovedError(
            f"Static tensors moved: {shown}.",
            where="call",
            expected="the addresses they were recorded at",
            found="other addresses",
            fix="Write into them with copy_, or choose on_moved='recapture'.",
        )
    warnings.warn(f"Static tensors moved, recording again: {shown}.", BCGWarning, stacklevel=5)


def tell_execute(plan: Plan, options: Options, warned: set[str]) -> None:
    """``execute="segments:a-b"`` that names no recorded segment of a graph."""
    named = [s.index for s in plan.graph_segments if options.unrecorded(s.index)]
    if options.execute.startswith("segments:") and plan.segments and not named:
        text = (
            f"execute={options.execute!r} names no recorded segment of {plan.name}, whose segments "
            f"are 0 to {len(plan.segments) - 1}."
        )
        if text not in warned:
            warned.add(text)
            warnings.warn(text, BCGWarning, stacklevel=3)


def tell_pad(
    key: str, graphs: Sequence[str], read: Sequence[str], known: Collection[str], options: Options
) -> None:
    """A key of ``pad`` that names nothing: padded rows of what was meant are zero.

    Args:
        key: the name.
        graphs: names of the graphs that do not know it.
        read: what their tensors are called.
        known: what would have been known.
        options: of the compile.
    """
    given, fix = {key: dict(options.pad)[key]}, nearest(key, sorted(known))
    warnings.warn(
        f"pad={given} names no argument and no field of metadata of {some_of(graphs)}; those that "
        f"are read: {some_of(read, 12) or 'none'}; {fix if fix.endswith('?') else f'{fix}.'} "
        "Padded rows of what is not named are 0.",
        BCGWarning,
        stacklevel=4,
    )


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def tell_cuts(plan: Plan, options: Options, warned: set[str]) -> None:
    """``on_cut``: cuts that nobody marked."""
    cuts = [r for r in plan.reasons if r.kind != "mark"]
    if not cuts or options.on_cut == "accept":
        return
    if options.on_cut == "error":
        raise CutError(
            f"{plan.name} is cut where nothing is marked.",
            where=str(cuts[0]),
            expected="cuts at marked operations alone, as on_cut='error' asks",
            found=f"{len(cuts)}: " + "; ".join(map(str, cuts)),
            fix="Mark them with torch_bcg.eager_on_graph, or choose on_cut='accept'.",
        )
    for r in cuts:
        if str(r) not in warned:
            warned.add(str(r))
            warnings.warn(f"{plan.name} is cut: {r}", BCGWarning, stacklevel=3)
