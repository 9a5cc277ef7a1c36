"""The code of a plan's segments as text, without addresses."""

from __future__ import annotations

import re

from torch import fx

from torch_bcg.graph.ir import Plan
from torch_bcg.graph.lower import Lowering


def graph_code(gm: fx.GraphModule) -> str:
    """A graph with dtypes, shapes, strides, devices and source lines."""
    text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    return re.sub(r"\b0x[0-9a-f]+", "0x...", text).strip("\n") + "\n"


def segments_code(plan: Plan, lowering: Lowering) -> dict[int, str]:
    """Code of each segment, by index: recorded ones as they are recorded, eager ones as run."""
    return {s.index: graph_code(lowering.segment(s)) for s in plan.segments}
