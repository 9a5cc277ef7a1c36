"""What does it cost to start with 42 buckets, with and without Inductor?

A model of 43 layers with one marked operation in each is recorded at every size of the ladder by
`torch_bcg.warm_up`. Each variant runs in a process of its own, one after the other:

  eager   inner="eager": the operations are recorded as they are
  first   inner="inductor", with an empty cache of Inductor's
  second  the same once more, with the cache that first left
  kinds   as first, but 3 layers: the fewest that have a layer at each end and one in between

*all* is from `torch.compile` to the last replay of `warm_up`, in a process where the model had run
eagerly at every size. *Dynamo* is what `torch._dynamo.utils.compile_times` says, planning by the
backend included, *inner* what `torch_bcg.stats()` says, *capture* the rest: real calls and
recording.

Three more show where recording loses, with inner="eager":

  tiny    each segment is one kernel
  padded  a call has one row more than a bucket: nearly half of the rows of the next are padding
  once    no buckets, and another number of rows after each recording

Their *eager* and *replay* are times of one call until the device has done its work, all in turn in
one run. *capture* is for each program, in a process that has recorded another model before, and
capture / (eager - replay) the number of replays after which recording has paid.

Every result is checked against the model in float64. Three claims, on a GPU: second takes at most
1.5 times as long as eager; first compiles at most 4 segments more than there are distinct layers,
that is 5; inner takes at most 1.5 times as long in first as in kinds. On a CPU a small model runs
at few sizes, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import (
    Call,
    Claim,
    Record,
    Refused,
    check_names,
    measure,
    parser,
    replayed,
    save,
    say,
    status,
    table,
    wait_idle,
)
from layered import Case, Model, check, distinct, gate
from torch import Tensor, nn
from torch._dynamo.utils import compile_times

import torch_bcg
from torch_bcg.graph.buckets import LADDER

SECOND_LIMIT = 1.5
DISTINCT_LAYERS, MORE_COMPILATIONS = 1, 4
KINDS_LIMIT = 1.5
KINDS_LAYERS = 3
WARM_ROWS = 7  # a number of rows that nothing else has
MIB = 2**20

STARTS: dict[str, Any] = {  # compiler of the segments: a word, or a function
    "eager": "eager",
    "first": "inductor",
    "second": "inductor",
    "kinds": "inductor",
}
LOSSES = ("tiny", "padded", "once")
FIGURES = {"all": "s", "dynamo": "s", "inner": "s", "capture": "s",
           "compilations": "segments", "pool": "B"}  # fmt: skip


class Tiny(nn.Module):
    """One kernel, then the marked operation."""

    def forward(self, x: Tensor) -> Tensor:
        """One pass."""
        out = torch.empty_like(x)
        gate(torch.cos(x), x, out)
        return out


# one variant, in a process of its own


def in_dynamo() -> float:
    """Seconds in Dynamo so far."""
    names, seconds = compile_times(repr="csv", aggregate=True)
    return float(dict(zip(names, map(str, seconds), strict=True)).get("_compile.compile_inner", 0))


def started(case: Case, sizes: Sequence[int], **options: Any) -> tuple[Call, dict[str, float]]:
    """What is compiled and recorded at every size, and what that took.

    Raises:
        Refused: a size is not replayed, or a segment is not compiled.
    """
    for rows in sizes:  # what a first run loads is no cost of recording
        case.model(*case.inputs(1, rows))
    wait_idle(case.device)
    before, dynamo, begun = torch_bcg.stats(), in_dynamo(), time.perf_counter()
    compiled = case.for_buckets("start", **options)
    warmed = torch_bcg.warm_up(compiled, lambda rows: case.inputs(1, rows), sizes)
    wait_idle(case.device)
    seconds, dynamo, after = time.perf_counter() - begun, in_dynamo() - dynamo, torch_bcg.stats()
    wrong = [f"{w.size} rows: {w.how}" for w in warmed if w.how != "replay"]
    wrong += [f"a segment is not compiled: {why}" for why in after.unfused]
    if len(torch_bcg.programs(compiled)) != len(sizes):
        wrong.append(f"{len(torch_bcg.programs(compiled))} programs for {len(sizes)} sizes")
    if not dynamo:
        wrong.append("torch does not say what Dynamo took")
    if wrong:
        raise Refused("; ".join(wrong))
    inner = after.inner_seconds - before.inner_seconds
    return compiled, {
        "all": seconds,
        "dynamo": dynamo,
        "inner": inner,
        "capture": seconds - dynamo - inner,
        "compilations": after.inner_compilations - before.inner_compilations,
        "pool": after.pool_bytes - before.pool_bytes,
    }


def start(variant: str, args: argparse.Namespace) -> list[Record]:
    """Records all sizes, then checks the largest, a middle and the smallest one."""
    layers = KINDS_LAYERS if variant == "kinds" else args.layers
    sizes = sorted(set(args.sizes), reverse=True)
    distinct(args.width, sizes[0])
    case = Case(layers, args.width, sizes[0], torch.device(args.device))
    compiled, figures = started(case, sizes, buckets="ladder", inner=STARTS[variant])
    some = dict.fromkeys([sizes[0], sizes[len(sizes) // 2], sizes[-1]])
    errors = check(case, {variant: compiled}, [x for n in some for x in case.inputs(1, n)])
    params = {"layers": layers, "sizes": len(sizes), "error": errors[variant]}
    return [
        Record.of("start", variant, unit, [figures[kind]], kind=kind, **params)
        for kind, unit in FIGURES.items()
    ]


def lose(variant: str, args: argparse.Namespace) -> list[Record]:
    """Records few sizes, then times calls beside eager ones."""
    device = torch.device(args.device)
    options: dict[str, Any] = {}
    bucket = 1024 if device.type == "cuda" else 8
    rows, sizes = 16, [16]
    if variant == "padded":
        rows, sizes = bucket + 1, [2 * bucket, bucket]
        options["buckets"] = sizes
    if variant == "once":
        sizes = [rows + n for n in range(8)]
    distinct(args.width, max(sizes))
    distinct(args.width, WARM_ROWS)
    case = Case(0 if variant == "tiny" else args.layers, args.width, rows, device)
    if variant == "tiny":
        case.layers = nn.ModuleList(Tiny() for _ in range(args.layers))
        case.model = Model(case.layers)
    # What a first recording of the process loads is no cost of each program: there are 1, 2 or 8.
    started(Case(1, args.width, WARM_ROWS, device), [WARM_ROWS])
    compiled, figures = started(case, sizes, **options)
    calls: dict[str, Call] = {"eager": case.model, "replay": compiled}
    inputs = case.inputs(8)
    # A first padded call may be a trial of padding: it is here.
    error = check(case, calls, inputs[:3])["replay"]
    before = torch_bcg.stats()
    samples = measure(calls, inputs, args.repeats, device, wall=True)
    if not replayed(before, torch_bcg.stats()):
        raise Refused("not every timed call was a replay.")
    check(case, calls, inputs[:3])
    params: dict[str, Any] = {"layers": args.layers, "rows": rows, "error": error}
    eager, replay = (
        Record.of("losses", variant, "us", samples[name], kind=name, **params) for name in calls
    )
    capture, gained = figures["capture"] / len(sizes), (eager.p50 - replay.p50) / 1e6
    params["pays_after"] = capture / gained if gained > 0 else None
    recorded = Record.of("losses", variant, "s", [capture], kind="capture", **params)
    return [eager, replay, recorded]


def write(args: argparse.Namespace) -> None:
    """What a new process does: its records, or the reason if there must be none."""
    torch.manual_seed(0)
    content: dict[str, Any] = {"records": [], "note": ""}
    try:
        records = (lose if args.variant in LOSSES else start)(args.variant, args)
        content["records"] = [asdict(r) for r in records]
    except Refused as reason:
        content["note"] = f"refused: {reason}"
    args.write.write_text(json.dumps(content), encoding="utf-8")


def apart(variant: str, args: argparse.Namespace, caches: Path) -> tuple[list[Record], str]:
    """The records of a new process: nothing is shared with another variant, but for `second`."""
    path = caches / f"{variant}.json"
    options = ["--variant", variant, "--write", str(path), "--device", args.device]
    options += ["--layers", str(args.layers), "--width", str(args.width)]
    options += ["--repeats", str(args.repeats), "--sizes", *map(str, args.sizes)]
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    cache = caches / ("first" if variant == "second" else variant)
    # Triton's cache lies in Inductor's, unless it is said to be elsewhere.
    own = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    own["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    try:
        done = subprocess.run(command, timeout=args.timeout, check=False, env=own)
    except subprocess.TimeoutExpired:
        return [], f"more than {args.timeout} s"
    if not path.exists():
        return [], f"exit status {done.returncode}, see its last lines"
    content = json.loads(path.read_text(encoding="utf-8"))
    return [Record(**values) for values in content["records"]], content["note"]


# all of them


def judge(figures: Mapping[tuple[str, str], float]) -> list[Claim]:
    """The claims with what was measured."""
    claims = []
    variants = {variant for variant, _ in figures}
    if {"second", "eager"} <= variants:
        ratio = figures["second", "all"] / figures["eager", "all"]
        claims.append(Claim.at_most("second / eager, all seconds", ratio, SECOND_LIMIT))
    if "first" in variants:
        count, limit = figures["first", "compilations"], DISTINCT_LAYERS + MORE_COMPILATIONS
        claims.append(Claim.at_most("compilations of first", count, limit))
    if {"first", "kinds"} <= variants:
        ratio = figures["first", "inner"] / figures["kinds", "inner"]
        claims.append(Claim.at_most("first / kinds, seconds of inner", ratio, KINDS_LIMIT))
    return claims


def text(records: Sequence[Record], notes: Mapping[str, str]) -> str:
    """The two tables, each if there is something for it, and what was left out."""
    by = {(r.variant, r.params["kind"]): r for r in records}
    starts: list[Sequence[object]] = []
    losses: list[Sequence[object]] = []
    for name, params in {r.variant: r.params for r in records}.items():
        found = {kind: r.p50 for (variant, kind), r in by.items() if variant == name}
        if name in STARTS:
            seconds = [found[kind] for kind in ("all", "dynamo", "inner", "capture")]
            counts = f"{found['compilations']:.0f}", f"{found['pool'] / MIB:.1f}"
            starts.append((name, params["layers"], params["sizes"], *seconds, *counts))
        else:
            us = [f"{found[kind]:.1f}" for kind in ("eager", "replay")]
            after = by[name, "capture"].params["pays_after"]
            shown = "never" if after is None else f"{after:,.0f}"
            losses.append((name, params["rows"], *us, f"{found['capture']:.3f}", shown))
    seconds_of = ("all s", "Dynamo s", "inner s", "capture s")
    parts: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = [
        (("variant", "layers", "sizes", *seconds_of, "compilations", "pool MiB"), starts),
        (("variant", "rows", "eager us", "replay us", "capture s", "pays after"), losses),
        (("variant", "left out"), list(notes.items())),
    ]
    return "\n\n".join(table(head, body) for head, body in parts if body)


def run(args: argparse.Namespace) -> None:
    """Each variant in turn; then saves and prints."""
    names = check_names(args.only, [*STARTS, *LOSSES])
    device = torch.device(args.device)
    measured: dict[str, list[Record]] = {}
    notes: dict[str, str] = {}
    lost: list[str] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in names:
            if name == "second" and "first" not in measured:
                notes[name] = "needs first"
                continue
            say(f"starting {name} ...")
            begun = time.perf_counter()
            found, why = apart(name, args, Path(folder))
            say(f"{name} took {time.perf_counter() - begun:.1f} s in all {why}".rstrip())
            if why:
                notes[name] = why
                lost.append(f"{name}: {why}")
            else:
                measured[name] = found
    records = [r for each in measured.values() for r in each]
    if not records:
        raise Refused("; ".join(f"{name}: {why}" for name, why in notes.items()))
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for r in records:
        r.params |= {"width": args.width, "device": args.device, "dtype": dtype}
    figures = {(r.variant, r.params["kind"]): r.p50 for r in records}
    claims = [c.on(device) for c in judge(figures)]
    save(args.out, "start", records, claims=claims, notes=notes)
    print(f"{args.layers} layers of width {args.width} on {args.device}")
    print(text(records, notes), *claims, sep="\n")
    if lost:
        raise Refused("; ".join(lost))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused, be it one variant."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--width", type=int, help="4096; 64 on a CPU")
    options.add_argument("--sizes", type=int, nargs="+", help="the ladder; 4 8 16 on a CPU")
    options.add_argument("--repeats", type=int, help="calls of each: 200; 20 on a CPU")
    options.add_argument("--timeout", type=float, default=300, help="seconds for one variant")
    options.add_argument("--variant", choices=[*STARTS, *LOSSES], help=argparse.SUPPRESS)
    options.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    gpu = torch.device(args.device).type == "cuda"
    args.layers = args.layers or (43 if gpu else 4)
    args.width = args.width or (4096 if gpu else 64)
    args.sizes = args.sizes or (list(LADDER) if gpu else [4, 8, 16])
    args.repeats = args.repeats or (200 if gpu else 20)
    return status(write if args.variant else run, args)


if __name__ == "__main__":
    sys.exit(main())
