"""Plans -> logs (``TORCH_LOGS="+torch_bcg"``) and torch's structured trace, which tlparse shows."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch._guards
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


def compile_id() -> object:
    """What is being compiled now, for a `trace_plan` after that; None outside of a compile."""
    return torch._guards.CompileContext.current_compile_id()


def trace_plan(plan: Plan, probed: bool = False, compiled: object = None) -> None:
    """Sends the texts of a plan to ``TORCH_TRACE``.

    Args:
        plan: an annotated plan.
        probed: whether the plan knows what the probe found.
        compiled: the `compile_id` it belongs to; None: of what is being compiled now.
    """
    _artifact("bcg_plan", plan.render, compiled)
    _artifact("bcg_segments", lambda: text.explanation([plan], probed), compiled)
    _artifact("bcg_reasons", lambda: "\n".join(text.cuts(plan) or ["no cuts"]) + "\n", compiled)


def _artifact(name: str, payload: Callable[[], str], compiled: object) -> None:
    if _trace_structured is not None:
        known = {} if compiled is None else {"compile_id": compiled}
        _trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=payload,
            **known,
        )
