"""What one call does, watched from outside.

The kernels that it makes a GPU run and how each was launched, the operators that it dispatches, and
the calls of one Python function in it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Launches:
    """What a device ran, by how it was launched: from a CUDA graph, directly, or unknown."""

    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)  # copies and fills without a kernel
    graphs: int = 0  # calls of cudaGraphLaunch

    @property
    def recorded(self) -> float:
        """Share of the kernels that came from graphs; an unknown launch counts as direct."""
        total = sum(self.kernels.values())
        return self.kernels["graph"] / total if total else 0.0


def launches(call: Callable[[], object]) -> Launches:
    """Runs ``call`` once under the profiler and counts what the device ran. CUDA only."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    return count_launches(trace["traceEvents"])


def count_launches(events: Iterable[Mapping[str, Any]]) -> Launches:
    """Counts a trace: each device event carries the correlation of the host call it came from.

    All kernels of one replay share the correlation of its ``cudaGraphLaunch``. Where that host call
    is missing from the trace, the number of the graph's node tells the same, if it is there.
    """
    events = [e for e in events if e.get("ph") == "X"]
    host = {
        e["args"]["correlation"]: str(e["name"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = Launches(graphs=sum("GraphLaunch" in name for name in host.values()))
    kinds = {"kernel": found.kernels, "gpu_memcpy": found.copies, "gpu_memset": found.copies}
    for e in events:
        if e.get("cat") in kinds:
            args = e.get("args", {})
            name = host.get(args.get("correlation"))
            if name is None:
                node = args.get("graph node id") or args.get("graph id")
                how = "graph" if node else "unknown"
            else:
                how = "graph" if "GraphLaunch" in name else "direct"
            kinds[e["cat"]][how] += 1
    return found


class Dispatched(TorchDispatchMode):
    """Notes the name and the arguments of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def calls_of(code: CodeType) -> Iterator[list[dict[str, Any]]]:
    """The arguments of every call of one Python function, whoever makes it."""
    found: list[dict[str, Any]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is code:
            found.append(dict(frame.f_locals))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
