"""What does a padded replay cost beside an exact one of the same bucket?

A model of 43 layers with one marked operation in each, compiled once for all sizes, each bucket
recorded once. The calls of one bucket replay the same program, in turn in one run:

  exact   as many rows as the bucket has
  again   the same: its distance from exact is what this run cannot tell apart
  near    one row fewer
  far     three quarters of the way down to the next smaller bucket
  moving  another number of rows at each call, all that are padded to this bucket in turn
  first   the first call with a number of rows: views for it are made, once and kept

Every result is checked against the model in float64, before and after, and every timed call has to
be a replay. Two times: host, from call to return, and wall, until the device has done its work.
The claim, on a GPU: near and far take at most 1.03 times as long as exact. A larger ratio in any
bucket refutes it. On a CPU everything runs and is checked, but nothing is claimed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import (
    Call,
    Claim,
    Record,
    Refused,
    fed,
    measure,
    parser,
    plans_of,
    replayed,
    save,
    say,
    status,
    table,
    wait_idle,
)
from layered import Case, check, distinct
from torch import Tensor

import torch_bcg
from torch_bcg.graph.buckets import LADDER

LIMIT = 1.03
JUDGED = ("near", "far")
TIMES = ("host", "wall")


@dataclass(frozen=True)
class Bucket:
    """A padded size, and the next smaller one that a call could be padded to."""

    size: int
    below: int

    @property
    def rows(self) -> dict[str, int]:
        """Rows of a call, by variant; "moving" is all that are padded."""
        far = self.size - max(1, round(0.75 * (self.size - self.below)))
        return {"exact": self.size, "again": self.size, "near": self.size - 1, "far": far}

    @property
    def padded(self) -> range:
        """Every number of rows that is padded to it."""
        return range(self.below + 1, self.size)


def buckets_of(sizes: Sequence[int]) -> list[Bucket]:
    """Those of the ladder, each with the one below."""
    unknown = sorted(set(sizes) - set(LADDER))
    if unknown:
        raise Refused(f"--buckets: not in the ladder: {unknown}. There are {list(LADDER)}.")
    below = dict(zip(LADDER, (0, *LADDER), strict=False))
    return [Bucket(n, below[n]) for n in sorted(set(sizes))]


def record(case: Case, compiled: Call, buckets: Sequence[Bucket]) -> None:
    """One program a bucket; the first padded call may be a trial of padding, which comes here too.

    Raises:
        Refused: a size is not replayed, or the graph is not padded.
    """

    def make(rows: int) -> tuple[Tensor]:
        (x,) = case.inputs(1, rows)
        return (x,)

    for w in torch_bcg.warm_up(compiled, make, [b.size for b in buckets], progress=False):
        if w.how != "replay":
            raise Refused(f"{w.size} rows: {w.how}.")
    compiled(*make(buckets[0].size - 1))
    for plan in plans_of(compiled):
        if plan.padding is None or plan.padding.refused is not None:
            raise Refused(f"{plan.name} is not padded: {plan.padding and plan.padding.refused}.")
    if len(torch_bcg.programs(compiled)) != len(buckets):
        raise Refused(f"{len(torch_bcg.programs(compiled))} programs, {len(buckets)} buckets.")


def first_calls(case: Case, compiled: Call, bucket: Bucket) -> list[float]:
    """Microseconds of the first call with each number of rows, from call to return."""
    new = [n for n in bucket.padded if n != bucket.size - 1]
    random.Random(0).shuffle(new)
    samples = []
    for rows in new:
        (x,) = case.inputs(1, rows)
        wait_idle(case.device)
        start = time.perf_counter_ns()
        result = compiled(x)
        samples.append((time.perf_counter_ns() - start) / 1000)
        del result
    return samples


def calls_of(case: Case, compiled: Call, bucket: Bucket) -> dict[str, Call]:
    """The variants, each on inputs of its own."""
    given = {name: case.inputs(8, rows) for name, rows in bucket.rows.items()}
    some = list(bucket.padded)
    random.Random(1).shuffle(some)
    given["moving"] = [x for rows in some for x in case.inputs(1, rows)]
    return {name: fed(compiled, inputs) for name, inputs in given.items()}


def verify(case: Case, compiled: Call, buckets: Sequence[Bucket]) -> float:
    """The largest relative error over buckets and variants."""
    rows = dict.fromkeys(n for b in buckets for n in (*b.rows.values(), b.below + 1))
    return check(case, {"bcg": compiled}, [x for n in rows for x in case.inputs(1, n)])["bcg"]


def judge(p50: Mapping[tuple[int, str, str], float]) -> list[Claim]:
    """The ratio of each bucket and time."""
    return [
        Claim.at_most(
            f"{variant} / exact, bucket {bucket}, {how}", us / p50[bucket, how, "exact"], LIMIT
        )
        for (bucket, how, variant), us in p50.items()
        if variant in JUDGED
    ]


def run(args: argparse.Namespace) -> None:
    """Records, checks, times one bucket after the other, checks again; then saves and prints."""
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    layers = args.layers or (43 if gpu else 4)
    repeats = args.repeats or (500 if gpu else 50)
    buckets = buckets_of(args.buckets)
    distinct(args.width, buckets[-1].size)
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = Case(layers, args.width, buckets[-1].size, device)
    compiled = case.for_buckets("padding", buckets="ladder")
    say("recording ...")
    record(case, compiled, buckets)
    params = {"layers": layers, "width": args.width, "device": str(device)}
    params |= {"dtype": str(case.dtype).removeprefix("torch.")}
    before = torch_bcg.stats()
    firsts = {b.size: first_calls(case, compiled, b) for b in buckets}
    error = verify(case, compiled, buckets)
    records: list[Record] = []
    for b in buckets:
        rows: dict[str, Any] = {**b.rows, "moving": [b.below + 1, b.size - 1]}
        calls = calls_of(case, compiled, b)
        for how in TIMES:
            say(f"bucket {b.size}, {how} time")
            for call in calls.values():
                call(torch.empty(0))  # warm again after another bucket
            samples = measure(calls, [torch.empty(0)], repeats, device, wall=how == "wall")
            if how == "host" and firsts[b.size]:
                samples["first"] = firsts[b.size]
                rows["first"] = rows["moving"]
            records += [
                Record.of(
                    *("padding", name, "us", taken),
                    **{"bucket": b.size, "time": how, "rows": rows[name], "error": error, **params},
                )
                for name, taken in samples.items()
            ]
    if not replayed(before, torch_bcg.stats()):
        raise Refused("not every timed call was a replay.")
    verify(case, compiled, buckets)

    p50 = {(r.params["bucket"], r.params["time"], r.variant): r.p50 for r in records}
    claims = [c.on(device) for c in judge(p50)]
    save(args.out, "padding", records, claims=claims)
    print(f"{layers} layers of width {args.width} on {device}, {repeats} calls each, microseconds")
    print(text(records), *claims, sep="\n")


def text(records: Sequence[Record]) -> str:
    """The table."""
    head = ("bucket", "time", "variant", "rows", "calls", "p20", "p50", "p80", "/ exact")
    base = {(r.params["bucket"], r.params["time"]): r.p50 for r in records if r.variant == "exact"}
    body = []
    for r in records:
        where = r.params["bucket"], r.params["time"]
        rows = r.params["rows"]
        shown = rows if isinstance(rows, int) else f"{rows[0]}..{rows[1]}"
        figures = (r.p20, r.p50, r.p80, f"{r.p50 / base[where]:.3f}")
        body.append((*where, r.variant, shown, r.n, *figures))
    return table(head, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__, only=False)
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--buckets", type=int, nargs="+", default=[16, 256, 1024])
    options.add_argument("--repeats", type=int, help="calls of each variant: 500; 50 on a CPU")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
