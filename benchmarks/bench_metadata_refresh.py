"""What does `refresh` of a metadata object cost beside a loop of `copy_` over the same fields?

The object holds 20 tensors of 2,048 rows, half of them int64 and half int32, one of them in a
dataclass of its own; beside them two numbers that have to be equal and two fields that are bound
anew. All of them are declared, so that no graph is needed. Every step gives a new object, with
other values at other addresses, to each of these, in turn in one run:

  refresh   torch_bcg.metadata.refresh(captured, live), which also checks every field and binds anew
  loop      captured.x.copy_(live.x) for each of the 20, and nothing else
  foreach   torch._foreach_copy_ for each dtype, on lists made beforehand: the floor

What arrived is compared before and after, and no tensor may have moved. Two times: host, from call
to return, and wall, until the device has done its work. Launches are kernels and copies that the
device ran for one call, as the profiler sees them; without CUPTI they are not counted.
The claims, on a GPU: refresh takes at most 0.25 times as long on the host as the loop, and launches
at most once per dtype. On a CPU everything runs and is checked, but nothing is claimed.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from functools import partial
from typing import Any

import torch
from harness import Claim, Record, Refused, measure, parser, save, say, status, table
from torch import Tensor
from watch import launches

import torch_bcg
from torch_bcg.metadata import refresh

LIMIT = 0.25
TIMES = ("host", "wall")
CHECKED = 3  # steps that are compared before any is timed
Step = Callable[[Any], object]


# the class


@dataclass
class Core:
    """What lies in a dataclass of its own."""

    slots: Tensor


NAMES = {
    torch.int64: "core.slots tokens positions blocks offsets parents targets seeds first last",
    torch.int32: "lengths starts ends queries keys pages experts ranks groups orders",
}
COPIED = {name: dtype for dtype, names in NAMES.items() for name in names.split()}
EQUAL = {"page_size": 16, "heads": 8}
REBOUND = ("lengths_on_host", "cache")
Paged = make_dataclass(
    "Paged",
    [
        ("core", Core),
        *((name, Tensor) for name in COPIED if "." not in name),
        *((name, int) for name in EQUAL),
        *((name, Tensor) for name in REBOUND),
    ],
)
tensors: Callable[[Any], tuple[Tensor, ...]] = operator.attrgetter(*COPIED)
rebound: Callable[[Any], tuple[Tensor, ...]] = operator.attrgetter(*REBOUND)


def step(rows: int, device: torch.device) -> Any:
    """An object as a step of an engine makes it."""
    made = {n: torch.randint(rows, (rows,), dtype=d, device=device) for n, d in COPIED.items()}
    core = Core(made.pop("core.slots"))
    bound = {"lengths_on_host": torch.zeros(rows), "cache": torch.zeros(rows, device=device)}
    return Paged(core=core, **made, **EQUAL, **bound)


# the variants: each gives what is called with a step


def by_refresh(captured: Any, lives: Sequence[Any]) -> Step:
    """The function of torch_bcg."""
    return partial(refresh, captured)


def by_loop(captured: Any, lives: Sequence[Any]) -> Step:
    """One copy after the other."""

    def call(live: Any) -> None:
        for to, given in zip(tensors(captured), tensors(live), strict=True):
            to.copy_(given)

    return call


def by_foreach(captured: Any, lives: Sequence[Any]) -> Step:
    """One copy of all that have the same dtype; which these are is known beforehand."""

    def lists(md: Any) -> list[list[Tensor]]:
        return [[t for t in tensors(md) if t.dtype == dtype] for dtype in NAMES]

    to, given = lists(captured), {id(live): lists(live) for live in lives}

    def call(live: Any) -> None:
        for a, b in zip(to, given[id(live)], strict=True):
            torch._foreach_copy_(a, b)

    return call


MAKERS = {"refresh": by_refresh, "loop": by_loop, "foreach": by_foreach}


# checks, figures, claims


def addresses(captured: Mapping[str, Any]) -> dict[str, list[int]]:
    """Where the tensors of each variant lie."""
    return {name: [t.data_ptr() for t in tensors(md)] for name, md in captured.items()}


def verify(captured: Mapping[str, Any], live: Any, where: Mapping[str, list[int]]) -> None:
    """Every variant holds what ``live`` does, in the tensors it had before.

    Raises:
        Refused: one does not.
    """
    for name, md in captured.items():
        for field, has, given in zip(COPIED, tensors(md), tensors(live), strict=True):
            if not torch.equal(has, given):
                raise Refused(f"{name} is wrong: {field} is not what was given.")
    if addresses(captured) != where:
        raise Refused("a tensor has moved.")
    if any(a is not b for a, b in zip(rebound(captured["refresh"]), rebound(live), strict=True)):
        raise Refused(f"refresh is wrong: {' or '.join(REBOUND)} is not bound anew.")


def launched(call: Step, lives: Sequence[Any]) -> int | None:
    """Kernels and copies that the device runs for one call; None if the profiler sees nothing."""
    for live in lives:  # the last one counts: the first also wakes the profiler
        found = launches(partial(call, live))
    return sum(found.kernels.values()) + sum(found.copies.values()) or None


def judge(p50: Mapping[tuple[str, str], float], counts: Mapping[str, int | None]) -> list[Claim]:
    """Time and launches, if they were counted."""
    ratio = p50["refresh", "host"] / p50["loop", "host"]
    found = [Claim.at_most("refresh / loop, host", ratio, LIMIT)]
    if counts["refresh"] is not None:
        claim = f"launches of one refresh of {len(NAMES)} dtypes"
        found.append(Claim.at_most(claim, counts["refresh"], len(NAMES)))
    return found


def run(args: argparse.Namespace) -> None:
    """Checks, times and checks again, once for each time; then counts, saves and prints."""
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    repeats = args.repeats or (500 if gpu else 50)
    torch.manual_seed(0)
    captured = {name: step(args.rows, device) for name in MAKERS}
    where = addresses(captured)
    params = {"fields": len(COPIED), "rows": args.rows, "device": str(device)}
    params["dtypes"] = [str(dtype).removeprefix("torch.") for dtype in NAMES]
    records: list[Record] = []
    for how in TIMES:
        say(f"{how} time")
        lives = [step(args.rows, device) for _ in range(CHECKED + repeats)]
        calls = {name: make(captured[name], lives) for name, make in MAKERS.items()}
        for live in lives[:CHECKED]:
            for call in calls.values():
                call(live)
            verify(captured, live, where)
        samples = measure(calls, lives[CHECKED:], repeats, device, wall=how == "wall")
        verify(captured, lives[-1], where)
        records += [
            Record.of("metadata_refresh", name, "us", taken, time=how, **params)
            for name, taken in samples.items()
        ]
    counts = {name: launched(call, lives[:2]) if gpu else None for name, call in calls.items()}
    if counts["loop"] is None:
        say(f"launches are not counted: {'no CUPTI' if gpu else 'there is no GPU'}.")
    for r in records:
        r.params["launches"] = counts[r.variant]

    p50 = {(r.variant, r.params["time"]): r.p50 for r in records}
    claims = [c.on(device) for c in judge(p50, counts)]
    save(args.out, "metadata_refresh", records, claims=claims)
    print(f"{len(COPIED)} tensors of {args.rows} rows on {device}, {repeats} calls, microseconds")
    print(text(records), *claims, sep="\n")


def text(records: Sequence[Record]) -> str:
    """The table."""
    head = ("variant", "time", "launches", "p20", "p50", "p80", "/ loop")
    base = {r.params["time"]: r.p50 for r in records if r.variant == "loop"}
    body = []
    for r in records:
        how, count = r.params["time"], r.params["launches"]
        shown = "-" if count is None else count
        body.append((r.variant, how, shown, r.p20, r.p50, r.p80, r.p50 / base[how]))
    return table(head, body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__, only=False)
    options.add_argument("--rows", type=int, default=2048)
    options.add_argument("--repeats", type=int, help="calls of each variant: 500; 50 on a CPU")
    given = options.parse_args(argv)
    declared = {"equal": tuple(EQUAL), "copy": tuple(COPIED), "rebind": REBOUND}
    binding = torch_bcg.register_metadata_binding(Paged, **declared)
    try:
        return status(run, given)
    finally:
        binding.remove()


if __name__ == "__main__":
    sys.exit(main())
