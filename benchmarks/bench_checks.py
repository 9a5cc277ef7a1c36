"""What does each check of a replay cost per call, in an exact and in a padded one?

A model of 43 layers with one marked operation in each, compiled once for each value of `check`:

  off, address, verify, poison   that one alone
  all                            address, verify and poison together

Each is called with as many rows as the bucket has (exact) and with one fewer (padded), all in turn
in one run. Every result is checked against the model in float64, before and after, and every timed
call has to be a replay. Times are host time, from call to return, and wall time, until the device
has done its work; the cost of a check is its median less that of off. Nothing is claimed: verify
and poison are for finding faults, and the table says what they take.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from harness import (
    Call,
    Record,
    Refused,
    check_names,
    fed,
    measure,
    parser,
    progress,
    replayed,
    save,
    say,
    status,
    table,
)
from layered import Case, check, distinct

import torch_bcg

CHECKS: dict[str, Any] = {
    "off": "off",
    "address": ("address",),
    "verify": ("verify",),
    "poison": ("poison",),
    "all": ("address", "verify", "poison"),
}
TIMES = ("host", "wall")


def make(case: Case, names: Sequence[str], bucket: int) -> dict[str, Call]:
    """The compiled variants, each with its one program."""
    made: dict[str, Call] = {}
    with progress("compiling", len(names)) as step:
        for name in names:
            say(f"compiling with check={CHECKS[name]!r} ...")
            options = {"buckets": (bucket,), "check": CHECKS[name]}
            compiled = made[name] = case.for_buckets(name, **options)
            # Probe, replay; then padded: perhaps a trial of padding, replay.
            for rows in (bucket, bucket, bucket - 1, bucket - 1):
                for x in case.inputs(1, rows):
                    before = torch_bcg.stats()
                    compiled(x)
            if not replayed(before, torch_bcg.stats()):
                raise Refused(f"{name}: a padded call is not replayed.")
            step(name)
    return made


def verify(case: Case, made: dict[str, Call], bucket: int) -> dict[str, float]:
    """The largest relative error of each variant."""
    rows = (bucket, bucket - 1)
    return check(case, made, [x for n in rows for x in case.inputs(1, n)])


def run(args: argparse.Namespace) -> None:
    """Makes the variants, checks them, times them, checks them again; then saves and prints."""
    names = check_names(args.only, CHECKS)
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    layers = args.layers or (43 if gpu else 4)
    repeats = args.repeats or (50 if gpu else 20)
    distinct(args.width, args.bucket)
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = Case(layers, args.width, args.bucket, device)
    made = make(case, names, args.bucket)
    errors = verify(case, made, args.bucket)
    shapes = {"exact": args.bucket, "padded": args.bucket - 1}
    calls: dict[str, Call] = {}
    which: dict[str, tuple[str, str]] = {}
    for name, compiled in made.items():
        for shape, rows in shapes.items():
            calls[f"{name} {shape}"] = fed(compiled, case.inputs(8, rows))
            which[f"{name} {shape}"] = name, shape
    params = {"layers": layers, "width": args.width, "bucket": args.bucket, "device": str(device)}
    params |= {"dtype": str(case.dtype).removeprefix("torch.")}
    before = torch_bcg.stats()
    records = []
    for how in TIMES:
        samples = measure(calls, [torch.empty(0)], repeats, device, wall=how == "wall")
        for key, taken in samples.items():
            name, shape = which[key]
            more = {"call": shape, "time": how, "error": errors[name], **params}
            records.append(Record.of("checks", name, "us", taken, **more))
    if not replayed(before, torch_bcg.stats()):
        raise Refused("not every timed call was a replay.")
    verify(case, made, args.bucket)

    save(args.out, "checks", records)
    print(f"{layers} layers of width {args.width} on {device}, {repeats} calls each, microseconds")
    print(text(records))


def text(records: Sequence[Record]) -> str:
    """The table."""
    head = ("check", "call", "time", "p20", "p50", "p80", "- off", "/ off")
    base = {(r.params["call"], r.params["time"]): r.p50 for r in records if r.variant == "off"}
    body = []
    for r in records:
        where = r.params["call"], r.params["time"]
        off = base.get(where, float("nan"))
        body.append((r.variant, *where, r.p20, r.p50, r.p80, r.p50 - off, r.p50 / off))
    return table(head, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--bucket", type=int, default=128)
    options.add_argument("--repeats", type=int, help="calls of each variant: 50; 20 on a CPU")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
