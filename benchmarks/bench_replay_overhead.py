"""What does a program cost over a loop that somebody writes by hand for this one model?

A model of 43 layers, 7 parameters each, with one marked operation in each layer that launches one
kernel. Five ways to call it, checked against eager first, then timed in turn in one run:

  hand             CUDAGraph.replay and the plain function in turn, over the same recordings and
                   the same memory as the program, with one copy in and one clone out
  program          the program, called directly
  compiled         the function that torch.compile(backend="bcg") returned, Dynamo's guards included
  reduce-overhead  torch.compile(mode="reduce-overhead"), the operation tagged cudagraph_unsafe
  eager            the model as it is

Two claims: a program costs at most 1.5 microseconds a step more than the loop, and a compiled call
takes less than half of reduce-overhead's. A larger figure refutes the claim. Steps are the segments
of the plan, the smaller count: copying in and out are steps as well and are in both. On a CPU
everything runs and is checked, but nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from harness import (
    Call,
    Claim,
    Record,
    Refused,
    check_names,
    measure,
    parser,
    progress,
    save,
    say,
    status,
    table,
    wait_idle,
)
from layered import Case, ForInductor, check, gate
from torch import Tensor
from watch import Dispatched, calls_of

STEP_LIMIT_US = 1.5
RATIO_LIMIT = 0.5
WARM_CALLS = 10


def hand(case: Case) -> Call:
    """The loop. What it calls, and on what memory, is watched in one call of the program."""
    (x,), program = case.inputs(1), case.program
    with Dispatched() as seen, calls_of(gate.__wrapped__.__code__) as operands:
        program(x)
    slot = next(args[0] for name, args in seen.calls if name == "copy_" and args[1] is x)
    *_, result = (args[0] for name, args in seen.calls if name == "clone")
    direct = [(f["q"], f["v"], f["out"]) for f in operands]
    recordings = [r for r in program._program.owners if hasattr(r, "replay")]
    segments = [type(s).__name__ for s in program.plan.segments]
    layers = len(case.layers)
    if (
        segments != ["GraphSegment", *["EagerSegment", "GraphSegment"] * layers]
        or len(recordings) != layers + 1
        or len(direct) != layers
    ):
        raise Refused(f"The program is not one call between two recordings a layer: {segments}.")
    *first, last = [getattr(r.owner, "replay", r.replay) for r in recordings]
    pairs = list(zip(first, direct, strict=True))
    plain = gate.__wrapped__

    def loop(x: Tensor) -> Tensor:
        slot.copy_(x)
        for replay, operands in pairs:
            replay()
            plain(*operands)
        last()
        return result.clone()

    return loop


def reduce_overhead(case: Case) -> Call:
    """Inductor with its own CUDA graphs."""
    return torch.compile(ForInductor(case.layers), mode="reduce-overhead")


MAKERS: dict[str, Callable[[Case], Call]] = {
    "hand": hand,
    "program": lambda case: case.program,
    "compiled": lambda case: case.compiled,
    "reduce-overhead": reduce_overhead,
    "eager": lambda case: case.model,
}


def make(case: Case, names: Sequence[str]) -> dict[str, Call]:
    """The variants, warm. What Inductor does here takes minutes at 43 layers."""
    calls: dict[str, Call] = {}
    with progress("making", len(names)) as step:
        for name in names:
            start = time.perf_counter()
            say(f"making {name} ...")
            calls[name] = MAKERS[name](case)
            for x in case.inputs(WARM_CALLS):
                calls[name](x)
            wait_idle(case.device)
            step(name)
            say(f"made {name} in {time.perf_counter() - start:.1f} s")
    return calls


def replays_of(call: Call, x: Tensor) -> int:
    """Recordings that one call replays, as far as Python sees it."""
    with calls_of(torch.cuda.CUDAGraph.replay.__code__) as replays:
        call(x)
    return len(replays)


def judge(p50: Mapping[str, float], segments: int) -> list[Claim]:
    """The two claims with what was measured."""
    claims = []
    if {"program", "hand"} <= p50.keys():
        value = (p50["program"] - p50["hand"]) / segments
        claim = f"(program - hand) / {segments} segments, in us"
        claims.append(Claim.at_most(claim, value, STEP_LIMIT_US))
    if {"compiled", "reduce-overhead"} <= p50.keys():
        value = p50["compiled"] / p50["reduce-overhead"]
        limit, met = f"below {RATIO_LIMIT}", value < RATIO_LIMIT
        claims.append(Claim("compiled / reduce-overhead", value, limit, met))
    return claims


def run(args: argparse.Namespace) -> None:
    """Makes the variants, checks them, times them, checks them again; then saves and prints."""
    names = check_names(args.only, MAKERS)
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    layers = args.layers or (43 if gpu else 4)
    repeats = args.repeats or (500 if gpu else 50)
    # Before anything is made: a reset later would free the programs.
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = Case(layers, args.width, args.tokens, device)
    made = make(case, sorted(names, key=lambda n: n != "reduce-overhead"))
    calls = {name: made[name] for name in names}
    errors = check(case, calls, case.inputs(3))
    inputs = case.inputs(8)
    replays = {name: replays_of(calls[name], inputs[0]) for name in names}
    samples = measure(calls, inputs, repeats, device)
    check(case, calls, case.inputs(3))

    params = {"layers": layers, "width": args.width, "tokens": args.tokens, "device": str(device)}
    params |= {"dtype": str(case.dtype).removeprefix("torch.")}
    records = [
        Record.of(
            "replay_overhead", n, "us", samples[n], error=errors[n], replays=replays[n], **params
        )
        for n in names
    ]
    p50 = {r.variant: r.p50 for r in records}
    segments = case.segments if {"hand", "program"} & p50.keys() else 0
    claims = [c.on(device) for c in judge(p50, segments)]
    save(args.out, "replay_overhead", records, claims=claims)
    print(f"{layers} layers on {device}, host time from call to return, {repeats} calls each")
    print(text(records))
    if gpu and replays.get("reduce-overhead") == 0:
        print("note: no replay of a CUDA graph was seen in reduce-overhead")
    print(*claims, sep="\n")


def text(records: Sequence[Record]) -> str:
    """The table."""
    head = ("variant", "p20 us", "p50 us", "p80 us", "/ eager", "replays", "error")
    base = next((r.p50 for r in records if r.variant == "eager"), float("nan"))
    rows = []
    for r in records:
        error = f"{r.params['error']:.1e}"
        rows.append((r.variant, r.p20, r.p50, r.p80, r.p50 / base, r.params["replays"], error))
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--repeats", type=int, help="calls of each variant: 500; 50 on a CPU")
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--tokens", type=int, default=16)
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
