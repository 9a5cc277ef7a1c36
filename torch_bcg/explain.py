"""``explain``: what becomes of a function, as text and as plans, with nothing recorded for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torch_bcg.compiled import CompiledGraph
from torch_bcg.frame import needs_gradients
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import Plan
from torch_bcg.marking import resolve
from torch_bcg.options import Options
from torch_bcg.programs import graphs_of, is_compiled
from torch_bcg.report.text import explanation

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What becomes of a function; ``str()`` is the text.

    Attributes:
        plans: one a graph, in the order in which Dynamo made them.
        probed: whether every graph ran once under the probe, whose cuts are then in the plans.
        gradients: names of plans whose call needed gradients, so that ``bcg`` would not record it.
        unmet: marks given as options that met nothing in any plan.
        fusings: by the name of a plan, what is fused of each program; None: nothing is to be.
    """

    plans: tuple[Plan, ...]
    probed: bool
    gradients: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    fusings: Mapping[str, Sequence[Fusing] | None] = field(default_factory=dict)

    def __str__(self) -> str:
        text = explanation(self.plans, self.probed, self.fusings)
        if self.unmet:
            text += (
                f"\nMarks that met nothing here: {', '.join(self.unmet)}. What Dynamo did not take "
                "into a graph,\nor spells as another operation, a mark does not meet.\n"
            )
        if self.gradients:
            text += (
                f"\nCalled as here nothing of {', '.join(self.gradients)} is recorded: gradients "
                "are needed.\nCall under torch.inference_mode() or torch.no_grad().\n"
            )
        return text


def explain(
    fn: Callable[..., Any], options: Mapping[str, object] | None = None
) -> Callable[..., Explanation] | Explanation:
    """Explains a function or module, or what ``torch.compile`` made of one.

    ``print(explain(model)(*args))`` compiles ``model`` for these arguments, runs it once,
    unrecorded, with all its side effects, and prints the plans. ``print(explain(compiled))`` prints
    the plans of all that was compiled so far, with what the first calls found.

    Args:
        fn: a function or module, or the result of ``torch.compile(..., backend="bcg")``.
        options: as for ``torch.compile``; for a function or module only.

    Returns:
        A callable that takes example arguments and returns the `Explanation`; for something
        compiled, the `Explanation` itself.
    """
    if is_compiled(fn):
        graphs = sorted(graphs_of(fn), key=lambda g: g.number)
        plans = tuple(g.plan for g in graphs)
        unmet = unmet_marks(plans, graphs[0].options) if graphs else ()
        fusings = {g.plan.name: g.fusings for g in graphs}
        return Explanation(plans, all(g.probed for g in graphs), unmet=unmet, fusings=fusings)
    chosen = Options.make(options)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        planner = _Planner(chosen)
        torch.compile(fn, backend=planner)(*args, **kwargs)
        plans = tuple(planner.plans)
        unmet = unmet_marks(plans, chosen)
        fusings = {p.name: None if chosen.inner == "eager" else () for p in plans}
        return Explanation(plans, False, tuple(planner.gradients), unmet, fusings)

    return explained


def unmet_marks(plans: Sequence[Plan], options: Options) -> tuple[str, ...]:
    """Names of the marks in ``options`` that no node of ``plans`` met."""
    met = {r.detail for plan in plans for r in plan.reasons if r.kind == "mark"}
    return tuple(m.name for m in map(resolve, options.mark) if m.name not in met)


class _Planner:
    """A backend that plans each graph and runs it as it came."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.plans: list[Plan] = []
        self.gradients: list[str] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
        graph = CompiledGraph(gm, example_inputs, self.options)
        plan = dataclasses.replace(graph.plan, name=f"graph_{len(self.plans)}")
        self.plans.append(plan)
        if needs_gradients(gm, example_inputs):
            self.gradients.append(plan.name)
        return graph.eager
