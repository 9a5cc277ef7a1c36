"""How much memory do the programs of many buckets take beside that of the largest one?

A model of 43 layers with one marked operation in each is recorded at every size of the ladder, the
largest first. Each variant runs in a process of its own, one after the other:

  bcg      torch.compile(backend="bcg") and torch_bcg.warm_up, all sizes
  largest  the same, the largest size alone
  meta     Meta's package breakable-cuda-graphs, all sizes, as its README has it: one pool for all,
           static memory for input and result, three runs on a side stream before each capture

Memory is what was added since the model had run eagerly at every size, once what nobody holds was
given back. *pool* is the total size of the allocator's segments that belong to a private pool.
Nothing may hide outside of it, so all others are counted as well: slots of bcg and static memory of
meta lie there. *device* is everything by mem_get_info, with what the driver takes for the graphs.

Two claims, on a GPU: the pool of bcg is at most 1.10 times that of largest, and no more than that
of meta. A larger one refutes the claim. The same ratios with the memory outside the pool stand
beside. On a CPU everything but meta runs and is checked, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import layered
import torch
from harness import (
    Call,
    Claim,
    Record,
    Refused,
    check_names,
    parser,
    progress,
    save,
    say,
    status,
    table,
)
from layered import Case, Model, check, distinct
from torch import Tensor

import torch_bcg
from torch_bcg.graph.buckets import LADDER

LARGEST_LIMIT = 1.10
META_LIMIT = 1.0
META = "breakable_cuda_graphs"
MIB = 2**20


@dataclass
class Made:
    """What a variant recorded: how to call it, and the seconds that each size took.

    Attributes:
        held: whatever else has to live as long as the memory is measured.
    """

    call: Call
    seconds: dict[int, float]
    held: object = None


@dataclass
class Memory:
    """Bytes, of the allocator and of the device; -1 where nothing tells."""

    pool: int  # of private pools
    outside: int  # of all other segments
    allocated: int  # given out, of both
    counted: int  # by torch_bcg.stats()
    device: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        """What is held once everything that nobody holds was given back."""
        gc.collect()
        counted = torch_bcg.stats().pool_bytes
        if device.type != "cuda":
            return cls(counted, 0, 0, counted, -1)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        sizes = {True: 0, False: 0}
        for segment in torch.cuda.memory_snapshot():
            sizes[tuple(segment["segment_pool_id"]) != (0, 0)] += segment["total_size"]
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return cls(sizes[True], sizes[False], allocated, counted, total - free)

    def since(self, before: Memory) -> Memory:
        """What came to it."""
        if self.device < 0:
            return self
        now, then = asdict(self), asdict(before)
        return Memory(**{name: now[name] - then[name] for name in now})


@dataclass
class Row:
    """One variant: bytes and seconds, or why there are none."""

    variant: str
    sizes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    error: float = 0.0
    note: str = ""

    @property
    def whole(self) -> int:
        """Bytes of the allocator, inside and outside the pool."""
        return self.memory["pool"] + self.memory["outside"]


# the variants


def bcg(case: Case, sizes: Sequence[int]) -> Made:
    """Every size, through `torch_bcg.warm_up`."""
    compiled = case.for_buckets("memory", buckets="ladder")

    def make(rows: int) -> tuple[Tensor]:
        (x,) = case.inputs(1, rows)
        return (x,)

    warmed = torch_bcg.warm_up(compiled, make, sizes)
    wrong = [f"{w.size}: {w.how}" for w in warmed if w.how != "replay"]
    programs = torch_bcg.programs(compiled)
    if wrong or len(programs) != len(sizes):
        raise Refused(f"{len(programs)} programs for {len(sizes)} sizes; {', '.join(wrong)}.")
    return Made(compiled, {w.size: w.seconds for w in warmed})


def meta(case: Case, sizes: Sequence[int]) -> Made:
    """Every size with Meta's package; its README says how."""
    package: Any = importlib.import_module(META)
    plain: Any = layered.gate
    layered.gate = package.no_graph(plain.__wrapped__)  # Layer.forward finds it there
    model = Model(case.layers)
    (given,) = case.inputs(1, max(sizes))
    result = torch.empty_like(given)
    stream, pool = torch.cuda.Stream(), None
    graphs: dict[int, Any] = {}
    seconds: dict[int, float] = {}

    def work(rows: int) -> None:
        result[:rows].copy_(model(given[:rows]))

    with progress("recording", len(sizes)) as step:
        for rows in sizes:
            start = time.perf_counter()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    work(rows)
            torch.cuda.current_stream().wait_stream(stream)
            graphs[rows] = package.BreakableCUDAGraph(pool=pool)
            with package.breakable_graph(graphs[rows]):
                work(rows)
            pool = graphs[rows].pool()
            torch.cuda.synchronize()
            seconds[rows] = time.perf_counter() - start
            step(str(rows))

    def call(x: Tensor) -> Tensor:
        rows = x.shape[0]
        given[:rows].copy_(x)
        graphs[rows].replay()
        return result[:rows].clone()

    return Made(call, seconds, (graphs, stream))


VARIANTS: dict[str, Callable[[Case, Sequence[int]], Made]] = {
    "bcg": bcg,
    "largest": lambda case, sizes: bcg(case, sizes[:1]),
    "meta": meta,
}


# one variant, in a process of its own


def one(variant: str, args: argparse.Namespace) -> Row:
    """Records, measures, then checks at the largest, a middle and the smallest size."""
    device = torch.device(args.device)
    torch.manual_seed(0)
    sizes = sorted(set(args.sizes), reverse=True)
    distinct(args.width, sizes[0])
    case = Case(args.layers, args.width, sizes[0], device)
    # All that a first run loads and keeps, such as kernels and cuBLAS's workspace, is there before.
    for rows in sizes:
        for x in case.inputs(1, rows):
            case.model(x)
    before = Memory.now(device)
    made = VARIANTS[variant](case, sizes)
    memory = Memory.now(device).since(before)
    recorded = sorted(made.seconds, reverse=True)
    some = dict.fromkeys([recorded[0], recorded[len(recorded) // 2], recorded[-1]])
    errors = check(case, {variant: made.call}, [x for n in some for x in case.inputs(1, n)])
    return Row(variant, len(recorded), asdict(memory), made.seconds, errors[variant])


def missing(variant: str, args: argparse.Namespace) -> str:
    """What a variant lacks to run here, or ""."""
    if variant != "meta":
        return ""
    if importlib.util.find_spec(META) is None:
        return "not installed"
    return "" if torch.device(args.device).type == "cuda" else "needs a GPU"


def apart(variant: str, args: argparse.Namespace) -> Row:
    """The same in a new process: nothing is shared with another variant."""
    lacks = missing(variant, args)
    if lacks:
        return Row(variant, note=lacks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        options = ["--variant", variant, "--write", str(path), "--device", args.device]
        options += ["--layers", str(args.layers), "--width", str(args.width)]
        options += ["--sizes", *map(str, args.sizes)]
        command = [sys.executable, str(Path(__file__).resolve()), *options]
        try:
            status = subprocess.run(command, timeout=args.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            return Row(variant, note=f"more than {args.timeout} s")
        if not path.exists():
            return Row(variant, note=f"exit status {status}, see its last lines")
        values = json.loads(path.read_text(encoding="utf-8"))
    values["seconds"] = {int(rows): s for rows, s in values["seconds"].items()}
    return Row(**values)


def write(args: argparse.Namespace) -> None:
    """What a new process does: its row, with the reason if it must not be reported."""
    try:
        row = one(args.variant, args)
    except Refused as reason:
        row = Row(args.variant, note=f"refused: {reason}")
    args.write.write_text(json.dumps(asdict(row)), encoding="utf-8")


# all of them


def judge(rows: Mapping[str, Row]) -> list[Claim]:
    """The ratios with what was claimed."""
    claims = []
    measured = {name: row for name, row in rows.items() if row.memory}
    for other, limit in (("largest", LARGEST_LIMIT), ("meta", META_LIMIT)):
        if {"bcg", other} <= measured.keys():
            ours, its = measured["bcg"], measured[other]
            value = ours.memory["pool"] / max(1, its.memory["pool"])
            claims.append(Claim.at_most(f"pool of bcg / pool of {other}", value, limit))
            value = ours.whole / max(1, its.whole)
            claim = f"the same with what lies outside the pool, bcg / {other}"
            claims.append(Claim(claim, value, "none set", None))
    return claims


def records_of(row: Row, **params: Any) -> list[Record]:
    """A record for each kind of memory, in bytes, and the seconds of all sizes."""
    params |= {"sizes": row.sizes, "error": row.error}
    records = [
        Record.of("memory", row.variant, "B", [value], kind=kind, **params)
        for kind, value in row.memory.items()
        if value >= 0 or kind != "device"
    ]
    total = sum(row.seconds.values())
    each = {str(rows): round(s, 4) for rows, s in row.seconds.items()}
    records.append(Record.of("capture", row.variant, "s", [total], each=each, **params))
    return records


def text(rows: Sequence[Row]) -> str:
    """The table."""
    kinds = ("pool", "outside", "allocated", "counted", "device")
    heads = ("pool", "outside", "allocated", "stats()", "device")
    head = ("variant", "sizes", *(f"{h} MiB" for h in heads), "capture s", "first s", "note")
    body: list[Sequence[object]] = []
    for r in rows:
        if not r.memory:
            body.append((r.variant, *["-"] * 8, r.note))
            continue
        sizes = [f"{r.memory[k] / MIB:.1f}" if r.memory[k] >= 0 else "-" for k in kinds]
        first = r.seconds[max(r.seconds)]
        body.append((r.variant, r.sizes, *sizes, sum(r.seconds.values()), first, r.note or "-"))
    return table(head, body)


def run(args: argparse.Namespace) -> None:
    """Each variant in turn; then saves and prints."""
    names = check_names(args.only, VARIANTS)
    # CUDA is not touched here before the end: this process would hold memory of the device.
    device = torch.device(args.device)
    rows: dict[str, Row] = {}
    for name in names:
        say(f"recording {name} ...")
        start = time.perf_counter()
        rows[name] = apart(name, args)
        say(f"{name} took {time.perf_counter() - start:.1f} s in all {rows[name].note}".rstrip())
    # Without the package there is nothing to compare with; without bcg there is nothing to say.
    lost = [f"{n}: {r.note}" for n, r in rows.items() if n != "meta" and not r.memory]
    if lost:
        raise Refused("; ".join(lost))
    params = {"layers": args.layers, "width": args.width, "device": args.device}
    params |= {"largest": max(args.sizes)}
    measured = [r for r in rows.values() if r.memory]
    records = [record for r in measured for record in records_of(r, **params)]
    claims = [c.on(device) for c in judge(rows)]
    notes = {n: r.note for n, r in rows.items() if r.note}
    save(args.out, "memory", records, claims=claims, notes=notes)
    print(f"{args.layers} layers of width {args.width} on {args.device}, {len(args.sizes)} sizes")
    print(text(list(rows.values())), *claims, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--width", type=int, help="4096; 64 on a CPU")
    options.add_argument("--sizes", type=int, nargs="+", default=list(LADDER), help="the ladder")
    options.add_argument("--timeout", type=float, default=240, help="seconds for one variant")
    options.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    gpu = torch.device(args.device).type == "cuda"
    args.layers = args.layers or (43 if gpu else 4)
    args.width = args.width or (4096 if gpu else 64)
    return status(write if args.variant else run, args)


if __name__ == "__main__":
    sys.exit(main())
