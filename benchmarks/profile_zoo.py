"""Which share of a model's kernels is launched from CUDA graphs, and is it what stats() says?

For each model of a zoo script: compile with bcg, call until calls are replays, then profile one
replayed call at each length. Three shares come of it:

- by launches: a kernel that belongs to a cudaGraphLaunch was recorded, one launched by any other
  call was not. Copies and fills that need no kernel are counted beside them, not among them.
- by operations, in the unit of stats() but from the profiler: an operation is one dispatched
  operator that launches kernels, however many. A trace does not say which operator a kernel of a
  graph came from. So all operations are counted in a second profiled run, of the same graphs of
  Dynamo's with execute="off", where nothing is recorded; those left outside graphs are counted in
  the replay; what is recorded is the difference.
- by stats(): the dispatched operations that the plan has, recorded or not, whatever they launch.

They differ: one operator that stays eager may launch many kernels, and a copy may need none. Where
in doubt the second share is too low: a kernel of the replay that has no operator, or that copies
for the library alone, counts as left outside, and no such kernel is among all operations. The last
line says how many models have 95 % by each share. Needs a CUDA GPU.

The script defines MODELS ({name: (class, configuration class, configuration, kind of input)}),
inputs(kind, length, device), tensors(result) and, for --mark-attention, ATTENTION_CLASS.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from harness import Record, Refused, check_names, parser, progress, replayed, save, status, table
from watch import Launches, count_launches

import torch_bcg

ENOUGH = 0.95
MOST_CALLS = 6  # probe, warming, capture: then it replays, or it never will
DEVICE = "cuda"
NO_OPERATOR = "no operator"  # stands for one in a count
Event = Mapping[str, Any]


@dataclass
class Row:
    """One model: kernels by launch, operations, kernels by stats(), or why there are none."""

    model: str
    graph: int = 0
    direct: int = 0
    unknown: int = 0
    graph_copies: int = 0
    direct_copies: int = 0
    launches: int = 0
    operations: int = 0  # of the run without graphs
    direct_operators: dict[str, int] = field(default_factory=dict)  # of the replay, calls of each
    kernels: int = 0
    recorded: int = 0
    note: str = ""

    @property
    def profiled(self) -> float:
        """Share of the device's kernels; an unknown launch counts against it."""
        return self.graph / max(1, self.graph + self.direct + self.unknown)

    @property
    def direct_operations(self) -> int:
        """Operations of the replay outside graphs, and kernels there that have no operator."""
        return sum(self.direct_operators.values())

    @property
    def operated(self) -> float:
        """Share of the operations."""
        return max(0, self.operations - self.direct_operations) / max(1, self.operations)

    @property
    def counted(self) -> float:
        """Share by stats()."""
        return self.recorded / max(1, self.kernels)

    @property
    def shares(self) -> dict[str, float]:
        """All three, by what is counted."""
        return {"profiler": self.profiled, "operations": self.operated, "stats": self.counted}

    def enough(self, count: str) -> bool:
        """Whether the share by this count is."""
        return not self.note and self.shares[count] >= ENOUGH

    def add(self, found: Launches, direct: Mapping[str, int]) -> None:
        """Adds one profiled call: its launches, and its operations outside graphs."""
        self.direct_operators = dict(Counter(self.direct_operators) + Counter(direct))
        self.graph += found.kernels["graph"]
        self.direct += found.kernels["direct"]
        self.unknown += found.kernels["unknown"]
        self.graph_copies += found.copies["graph"]
        self.direct_copies += found.copies["direct"] + found.copies["unknown"]
        self.launches += found.graphs


def traced(call: Callable[[], object]) -> list[Event]:
    """Runs ``call`` once under the profiler: the events of its trace. CUDA only."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@functools.cache
def composite(name: str) -> bool:
    """Whether an operator is nothing but calls of others, which are dispatched in its place."""
    space, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, space), op, None)
    overloads = packet.overloads() if packet is not None else []
    names = [name if o == "default" else f"{name}.{o}" for o in overloads]
    made = [
        torch._C._dispatch_has_kernel_for_dispatch_key(n, "CompositeImplicitAutograd")
        for n in names
        if torch._C._dispatch_has_kernel(n)
    ]
    return bool(made) and all(made)


def operations(
    events: Iterable[Event], composite: Callable[[str], bool] = composite
) -> Counter[str]:
    """Operations of a trace that launched kernels outside graphs: calls of each operator.

    A kernel names the host call that launched it, and that one the innermost operator around it.
    The operation is the outermost operator around that one which is not `composite`: what stats()
    counts as one. A launch without operator and a kernel without launch count as `NO_OPERATOR`.
    """
    events = [e for e in events if e.get("ph") == "X"]
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    ops.sort(key=lambda e: (_thread(e), e["ts"], -e["dur"]))
    outer = _operations_around(ops, composite)
    by_id = {e.get("args", {}).get("External id"): i for i, e in enumerate(ops)}
    by_id.pop(None, None)
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found: dict[object, str] = {}
    for n, e in enumerate(events):
        if e.get("cat") != "kernel":
            continue
        args = e.get("args", {})
        launch = launches.get(args.get("correlation"))
        if launch is None:
            if not (args.get("graph node id") or args.get("graph id")):
                found["kernel", n] = NO_OPERATOR
            continue
        if "GraphLaunch" in launch["name"]:
            continue
        inner = by_id.get(launch["args"].get("External id"))
        if inner is None:
            inner = _innermost(ops, launch)
        operation = None if inner is None else outer[inner]
        if operation is None:
            found["launch", args["correlation"]] = NO_OPERATOR
        else:
            found["operation", operation] = ops[operation]["name"]
    return Counter(found.values())


def _thread(e: Event) -> tuple[str, str]:
    return str(e.get("pid")), str(e.get("tid"))


def _operations_around(ops: Sequence[Event], composite: Callable[[str], bool]) -> list[int | None]:
    """For each of the sorted events the one that is the operation it is part of.

    Where all around it are composite the outermost is. Not every event is an operator: Dynamo's
    "Torch-Compiled Region", which is around all of them, is none.
    """
    outermost: list[int | None] = []
    dispatched: list[int | None] = []
    open_: list[int] = []
    for i, e in enumerate(ops):
        while open_ and not _within(e, ops[open_[-1]]):
            open_.pop()
        first = outermost[open_[-1]] if open_ else None
        operation = dispatched[open_[-1]] if open_ else None
        if re.fullmatch(r"\w+::[\w.]+", e["name"]):
            first = i if first is None else first
            if operation is None and not composite(e["name"]):
                operation = i
        outermost.append(first)
        dispatched.append(operation)
        open_.append(i)
    return [o if d is None else d for o, d in zip(outermost, dispatched, strict=True)]


def _within(e: Event, around: Event) -> bool:
    """Whether an event begins while another of its thread lasts."""
    begin: float = around["ts"]
    return _thread(e) == _thread(around) and begin <= e["ts"] < begin + around["dur"]


def _innermost(ops: Sequence[Event], launch: Event) -> int | None:
    """By time, where a launch does not name its operator."""
    around = [i for i, e in enumerate(ops) if _within(launch, e)]
    return around[-1] if around else None


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
    settle(compiled, lambda length: zoo.inputs(kind, length, DEVICE), lengths, MOST_CALLS)
    for length in lengths:
        x = zoo.inputs(kind, length, DEVICE)
        want = model(*x)
        before = torch_bcg.stats()
        results: list[Any] = []
        call = functools.partial(lambda given, kept: kept.append(compiled(*given)), x, results)
        events = traced(call)
        after = torch_bcg.stats()
        row.add(count_launches(events), operations(events))
        row.kernels += after.kernels - before.kernels
        row.recorded += after.recorded_kernels - before.recorded_kernels
        torch.testing.assert_close(
            list(zoo.tensors(results[0])), list(zoo.tensors(want)), rtol=1e-4, atol=1e-4
        )
        if not replayed(before, after):
            row.note = f"not replayed at length {length}"
    torch._dynamo.reset()
    row.operations = count_operations(zoo, kind, model, lengths)
    if row.launches and not row.graph:
        row.note = "the trace holds no kernel of a graph"
    return row


def settle(
    compiled: Callable[..., Any],
    inputs: Callable[[int], Sequence[Any]],
    lengths: Sequence[int],
    most: int,
) -> None:
    """Calls at every length until calls are replays, or ``most`` times.

    A second length may make Dynamo compile again, for sizes that vary: so it goes round twice.
    """
    for length in (*lengths, *lengths):
        for _ in range(most):
            before = torch_bcg.stats()
            compiled(*inputs(length))
            if replayed(before, torch_bcg.stats()):
                break


def count_operations(
    zoo: ModuleType, kind: str, model: Callable[..., Any], lengths: Sequence[int]
) -> int:
    """Operations that launch kernels, of one call at each length that records nothing.

    Of ``execute="off"``, as ``"segments"`` copies the results of every segment, which is work that
    the model does not have.
    """
    off = torch.compile(model, backend="bcg", options={"execute": "off"})
    settle(off, lambda length: zoo.inputs(kind, length, DEVICE), lengths, 1)
    found: Counter[str] = Counter()
    for length in lengths:
        x = zoo.inputs(kind, length, DEVICE)
        found += operations(traced(functools.partial(off, *x)))
    return sum(n for name, n in found.items() if name != NO_OPERATOR)


def text(rows: Sequence[Row]) -> str:
    """The table."""
    head = (
        *("model", "graph", "direct", "unknown", "profiler"),
        *("operations", "left outside", "by operation", "recorded", "kernels", "stats()"),
        *("copies in graphs", "direct", "graph launches", "note"),
    )
    body = [
        (
            *(r.model, r.graph, r.direct, r.unknown, f"{r.profiled:.1%}"),
            *(r.operations, r.direct_operations, f"{r.operated:.1%}"),
            *(r.recorded, r.kernels, f"{r.counted:.1%}"),
            *(r.graph_copies, r.direct_copies, r.launches, r.note or "-"),
        )
        for r in rows
    ]
    return table(head, body)


def records(rows: Sequence[Row], params: Mapping[str, Any]) -> list[Record]:
    """One record for each model and count."""
    return [
        Record.of(
            *("profile_zoo", r.model, "share", [share]),
            **{"count": count, **asdict(r), "direct_operations": r.direct_operations, **params},
        )
        for r in rows
        for count, share in r.shares.items()
    ]


def verdict(rows: Sequence[Row]) -> str:
    """The last line: how many models have enough, by each count."""
    launches, by_operation, by_stats = (
        sum(r.enough(count) for r in rows) for count in ("profiler", "operations", "stats")
    )
    return (
        f"of {len(rows)} models at least {ENOUGH:.0%} is recorded in {launches} by launches, "
        f"{by_operation} by operations, {by_stats} by stats()"
    )


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
    traced(lambda: torch.zeros(8, device="cuda") + 1)
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
    name = "profile_zoo_marked" if args.mark_attention else "profile_zoo"
    save(args.out, name, records(rows, params))
    print(text(rows))
    print(verdict(rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 counted, 1 refused."""
    options = parser(__doc__, device=False)
    options.add_argument("--zoo", type=Path, required=True, help="the script with the models")
    options.add_argument("--lengths", type=int, nargs="+", default=[12, 17, 33])
    options.add_argument("--mark-attention", action="store_true", help="cut every layer there")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
