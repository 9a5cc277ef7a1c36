"""Plans -> logs (``TORCH_LOGS="+torch_bcg"``) and torch's structured trace, which tlparse shows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch._logging

from torch_bcg.graph.ir import Plan
from torch_bcg.report import text

log = logging.getLogger(__name__)
# Private in torch, used nowhere else in this package: without it there are logs and no artifacts.
_trace_structured: Callable[..., None] | None = getattr(torch._logging, "trace_structured", None)


def log_plan(plan: Plan) -> None:
    """One line a plan at INFO, one a segment at DEBUG."""
    log.info("%s", plan)
    for segment in plan.segments:
        log.debug("%s: %s", plan.name, segment)


def trace_plan(plan: Plan, probed: bool = False) -> None:
    """Sends the texts of a plan to ``TORCH_TRACE``, under the compile id of the frame if any.

    Args:
        plan: an annotated plan.
        probed: whether the plan knows what the probe found.
    """
    _artifact("bcg_plan", plan.render)
    _artifact("bcg_segments", lambda: text.explanation([plan], probed))
    _artifact("bcg_reasons", lambda: "\n".join(text.cuts(plan) or ["no cuts"]) + "\n")


def _artifact(name: str, payload: Callable[[], str]) -> None:
    if _trace_structured is not None:
        _trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=payload,
        )
