"""``doctor``: versions, devices, which features of torch were found, and a try of a small function.

A feature that is missing is no fault if the package does without it; the text says what is lost.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch._dynamo.eval_frame
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

import torch_bcg
from torch_bcg.commands.results import recorder
from torch_bcg.counters import counters

_PACKAGES = ("torch", "triton", "transformers", "torch_bcg")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked for.

    Attributes:
        name: what it is called.
        found: whether it is there.
        needed: whether ``bcg`` cannot work without it.
        note: what it is for, or what is lost without it.
    """

    name: str
    found: bool
    needed: bool
    note: str


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was found; ``str()`` is the text."""

    versions: dict[str, str | None]
    gpus: tuple[str, ...]
    recorder: str
    checks: tuple[Check, ...]
    trial_s: float

    @property
    def healthy(self) -> bool:
        """Whether everything needed is there, and the trial was right."""
        return all(c.found for c in self.checks if c.needed)

    def json(self) -> str:
        """One JSON object."""
        return json.dumps({"healthy": self.healthy, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        lines = [
            f"{name:<13} {version or 'not installed'}" for name, version in self.versions.items()
        ]
        lines.append(f"{'GPU':<13} {', '.join(self.gpus) or 'none'}")
        lines.append(f"{'recorder':<13} {self.recorder}")
        if not self.gpus:
            lines.append("              its times say nothing about CUDA graphs")
        lines.append("")
        width = max(len(c.name) for c in self.checks)
        for c in self.checks:
            word = "found" if c.found else "MISSING" if c.needed else "absent"
            lines.append(f"{word:<7}  {c.name:<{width}}  {c.note}")
        verdict = "all right" if self.healthy else "not all right: see MISSING above"
        return "\n".join([*lines, "", f"{verdict} (trial: {self.trial_s:.1f} s)"])


def examine() -> Findings:
    """Looks at this machine and tries a small function on it."""
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    device = "cuda" if gpus else "cpu"
    started = time.perf_counter()
    right = _try(device)
    trial_s = time.perf_counter() - started
    note = "a marked operation between recorded ones, replayed three times"
    checks = (*_registration(), *_features(), Check("trial", right, True, note))
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        installed = importlib.util.find_spec(package) is not None
        versions[package] = _version(package) if installed else None
    return Findings(versions, gpus, recorder(device), checks, trial_s)


def _version(package: str) -> str:
    if package == "torch_bcg":
        return torch_bcg.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _registration() -> tuple[Check, Check]:
    """The entry point, once, and what Dynamo finds by name."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="bcg")
    # An editable install is found twice by some versions of importlib: by value it is one.
    values = {p.value for p in points}
    once = values == {"torch_bcg.dynamo:bcg"}
    found: object = lookup_backend("bcg") if once else None
    same = found is torch_bcg.bcg
    return (
        Check("entry point 'bcg'", once, True, 'how backend="bcg" is found by name, exactly once'),
        Check("lookup_backend('bcg')", same, True, "is torch_bcg.bcg itself"),
    )


def _features() -> list[Check]:
    """Private features of torch that the package uses, by the module that has them."""
    c, eval_frame = torch._C, torch._dynamo.eval_frame
    cuda = torch.version.cuda is not None
    rows: list[tuple[object, str, bool, str]] = [
        (eval_frame, "_debug_get_cache_entry_list", True, "programs(), explain(), reset() of one"),
        (eval_frame, "innermost_fn", True, "the same"),
        (InstructionTranslator, "current_tx", True, "marks on the class that is compiled itself"),
        (TracingContext, "try_get", True, "symbolic sizes as Dynamo chose them"),
        (torch.Tag, "cudagraph_unsafe", True, "operators that say that they cannot be recorded"),
        (c, "_tensors_data_ptrs_at_indices_equal", False, "addresses compared in C++, else Python"),
        (c, "_set_storage_data_ptr_access_error_msg", False, "a stale alias raises on a GPU"),
        (c, "_construct_storage_from_data_pointer", False, "outputs='alias'"),
        (c, "_cuda_endAllocateToPool", False, "a pool is usable after a capture that failed"),
        (c, "_dispatch_get_all_op_names", False, "the nearest name, for a mark misspelled"),
        (torch._logging, "trace_structured", False, "artifacts for tlparse"),
        (torch.fx.traceback, "annotate", False, "marks on a stretch of code"),
    ]
    checks = []
    for owner, name, needed, note in rows:
        found = hasattr(owner, name)
        if not found and not cuda and name.startswith(("_tensors", "_set_storage", "_cuda")):
            note += " (only in CUDA builds of torch)"
        checks.append(Check(name, found, needed, note))
    return checks


@torch_bcg.eager_on_graph(mutates_args=("out",), name="torch_bcg_doctor::reversed_into")
def _reversed_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(0))


def _small(x: Tensor) -> Tensor:
    y = torch.relu(x * 2)
    out = torch.empty_like(y)
    _reversed_into(y, out)
    return out + y.sum()


def _try(device: str) -> bool:
    """Whether one call and three replays agree with eager, and were replays."""
    compiled: Callable[[Tensor], Tensor] = torch.compile(_small, backend="bcg")
    before = counters.replays
    with torch.inference_mode():
        inputs = [torch.randn(8, 4, device=device) for _ in range(4)]
        same = [torch.equal(compiled(x), _small(x)) for x in inputs]
    return all(same) and counters.replays == before + 3
