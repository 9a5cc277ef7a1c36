"""Which share of a model's kernels is launched from CUDA graphs, and is it what stats() says?

For each model of a zoo script: compile with bcg, call until calls are replays, then profile one
replayed call at each length. A kernel that belongs to a cudaGraphLaunch was recorded, one launched
by any other call was not; copies and fills that need no kernel are counted beside them. stats()
counts dispatched operations instead, so the two shares differ, and both must be high. A share below
95 % in either refutes that the model is recorded. Needs a CUDA GPU.

The script defines MODELS ({name: (class, configuration class, configuration, kind of input)}),
inputs(kind, length, device), tensors(result) and, for --mark-attention, ATTENTION_CLASS.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import Record, Refused, check_names, parser, progress, replayed, save, table
from watch import Launches, launches

import torch_bcg

ENOUGH = 0.95
MOST_CALLS = 6  # probe, warming, capture: then it replays, or it never will
DEVICE = "cuda"


@dataclass
class Row:
    """One model: kernels by launch, kernels by stats(), or why there are none."""

    model: str
    graph: int = 0
    direct: int = 0
    unknown: int = 0
    graph_copies: int = 0
    direct_copies: int = 0
    launches: int = 0
    kernels: int = 0
    recorded: int = 0
    note: str = ""

    @property
    def profiled(self) -> float:
        """Share of the device's kernels; an unknown launch counts against it."""
        return self.graph / max(1, self.graph + self.direct + self.unknown)

    @property
    def counted(self) -> float:
        """Share by stats()."""
        return self.recorded / max(1, self.kernels)

    @property
    def enough(self) -> bool:
        """Whether both shares are."""
        return not self.note and min(self.profiled, self.counted) >= ENOUGH

    def add(self, found: Launches) -> None:
        """Adds one profiled call."""
        self.graph += found.kernels["graph"]
        self.direct += found.kernels["direct"]
        self.unknown += found.kernels["unknown"]
        self.graph_copies += found.copies["graph"]
        self.direct_copies += found.copies["direct"] + found.copies["unknown"]
        self.launches += found.graphs


def load(path: Path) -> ModuleType:
    """The zoo script as a module."""
    spec = importlib.util.spec_from_file_location("zoo", path)
    if spec is None or spec.loader is None or not path.exists():
        raise Refused(f"--zoo: {path} is no Python script.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return module


def mark_attention(zoo: ModuleType) -> None:
    """Every layer is cut at its attention."""
    torch_bcg.eager_on_graph(torch.nn.functional.scaled_dot_product_attention)
    for name, cls in zoo.ATTENTION_CLASS.items():
        modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        torch_bcg.eager_on_graph(getattr(modeling, cls))


def build(zoo: ModuleType, name: str, device: str = DEVICE) -> Callable[..., Any]:
    """The model, random weights, on the device."""
    import transformers

    cls, config_cls, values, _ = zoo.MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_cls)(**values)
    config.use_cache = False
    return getattr(transformers, cls)(config).eval().to(device)


def look(zoo: ModuleType, name: str, lengths: Sequence[int]) -> Row:
    """One model: calls it at every length until calls are replays, then profiles one at each."""
    row = Row(name)
    torch._dynamo.reset()
    model = build(zoo, name)
    compiled = torch.compile(model, backend="bcg")
    kind = zoo.MODELS[name][3]
    # A second length may make Dynamo compile again, for sizes that vary: all of them come first.
    for length in (*lengths, *lengths):
        for _ in range(MOST_CALLS):
            before = torch_bcg.stats()
            compiled(*zoo.inputs(kind, length, DEVICE))
            if replayed(before, torch_bcg.stats()):
                break
    for length in lengths:
        x = zoo.inputs(kind, length, DEVICE)
        want = model(*x)
        before = torch_bcg.stats()
        results: list[Any] = []
        call = functools.partial(lambda given, kept: kept.append(compiled(*given)), x, results)
        row.add(launches(call))
        after = torch_bcg.stats()
        row.kernels += after.kernels - before.kernels
        row.recorded += after.recorded_kernels - before.recorded_kernels
        torch.testing.assert_close(
            list(zoo.tensors(results[0])), list(zoo.tensors(want)), rtol=1e-4, atol=1e-4
        )
        if not replayed(before, after):
            row.note = f"not replayed at length {length}"
    if row.launches and not row.graph:
        row.note = "the trace holds no kernel of a graph"
    return row


def text(rows: Sequence[Row]) -> str:
    """The table."""
    head = (
        *("model", "graph", "direct", "unknown", "profiler", "recorded", "kernels", "stats()"),
        *("copies in graphs", "direct", "graph launches", "note"),
    )
    body = [
        (
            *(r.model, r.graph, r.direct, r.unknown, f"{r.profiled:.1%}"),
            *(r.recorded, r.kernels, f"{r.counted:.1%}"),
            *(r.graph_copies, r.direct_copies, r.launches, r.note or "-"),
        )
        for r in rows
    ]
    return table(head, body)


def run(args: argparse.Namespace) -> None:
    """All models, one after the other."""
    if not torch.cuda.is_available():
        raise Refused("this counts launches on a GPU, and torch sees none here.")
    zoo = load(args.zoo)
    names = check_names(args.only, zoo.MODELS)
    torch._dynamo.config.recompile_limit = 256
    if args.mark_attention:
        mark_attention(zoo)
    # The tracer misses the kernels of a graph that was recorded before it came, so it has to stay.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    launches(lambda: torch.zeros(8, device="cuda") + 1)
    rows: list[Row] = []
    with progress("profiling", len(names)) as step:
        for name in names:
            try:
                rows.append(look(zoo, name, args.lengths))
            except Exception as error:  # one model's error must not hide the others
                first = str(error).strip().splitlines() or [""]
                rows.append(Row(name, note=f"{type(error).__name__}: {first[0][:80]}"))
            step(name)
    params = {"lengths": args.lengths, "mark_attention": args.mark_attention}
    records = [
        Record.of("profile_zoo", r.model, "share", [share], count=count, **asdict(r), **params)
        for r in rows
        for count, share in (("profiler", r.profiled), ("stats", r.counted))
    ]
    save(args.out, "profile_zoo_marked" if args.mark_attention else "profile_zoo", records)
    print(text(rows))
    enough = sum(r.enough for r in rows)
    print(f"{enough} of {len(rows)} models have at least {ENOUGH:.0%} recorded by both counts")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 counted, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--zoo", type=Path, required=True, help="the script with the models")
    options.add_argument("--lengths", type=int, nargs="+", default=[12, 17, 33])
    options.add_argument("--mark-attention", action="store_true", help="cut every layer there")
    args = options.parse_args(argv)
    try:
        with torch.no_grad():
            run(args)
    except Refused as reason:
        print(f"refused: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
