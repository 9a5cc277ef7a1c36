"""How fast is a step of a transformer with a marked attention in each layer, beside all else?

On a GPU: 43 layers of width 2048 as Hugging Face writes them (16 heads with rotary positions,
RMSNorm through float32, SwiGLU of 5632), random weights in bf16, causal attention over the 16 to
2,048 tokens of the step. Everything is compiled or recorded for each number of tokens by itself.

  eager              the model as it is
  cudagraphs         torch.compile(backend="cudagraphs"): it may refuse the marked operation
  reduce-overhead    torch.compile(mode="reduce-overhead") with graph_partition, the operation
                     tagged cudagraph_unsafe; its result is not copied
  meta               Meta's package breakable-cuda-graphs around the same function
  bcg                torch.compile(backend="bcg")
  program            its program, called directly: no Dynamo, no guards
  hand               a bare loop over the steps of that program, which checks nothing
  floor              the kernels of bcg, those of the marked operation as well, in one CUDA graph
  bcg-inductor, program-inductor, hand-inductor, floor-inductor
                     the same with inner="inductor"
  filtered-inductor  bcg-inductor without Dynamo's guards about modules, see docs/fusing.md
  unchecked-inductor program-inductor with check="off": of the addresses of weights it compares one
  segments-inductor  bcg-inductor with execute="segments": the same segments, unrecorded
  full-inductor      Inductor over the whole model, the attention an operator that nobody marked,
                     in one CUDA graph

Whatever is recorded has its input copied in and its result copied out. Inductor over all layers
takes long to compile: reduce-overhead and full-inductor take part with --full, or where --only
names them. Times, all variants in turn in one run:

  latency       until the device is idle, of a call right after one of the same variant
  host          until the call returns, of the same calls
  cold          latency right after a call of another variant; cold host: those until they return
  back to back  of 50 calls, or of as many as take 50 ms, but 3, divided by their number

Before and after the timing every variant is compared with the model in float64: an error of more
than twice that of eager is refused.

The claims, on a GPU. Latency: meta takes at least 1.15 times as long as bcg-inductor at 16 and 256
tokens, 1.08 times at 1,024 and 1.10 times at 2,048; bcg-inductor, filtered-inductor,
program-inductor and unchecked-inductor take at most 5 us more than floor-inductor for each cut at
16 and 256, at most 1.05 times as long at 1,024 and 1.03 times at 2,048. Host: program takes at most
0.5 us more than hand for each step of the plan. On a CPU a small model in float32 runs, without
what needs CUDA graphs of its own, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from harness import (
    Call,
    Claim,
    Record,
    check_names,
    measure,
    noting,
    parser,
    save,
    say,
    status,
    table,
    wait_idle,
)
from torch import Tensor, nn
from transformer import Case, Layer, Model, attention, check, unmarked

import torch_bcg
from torch_bcg.errors import OptionError

META = "breakable_cuda_graphs"
UNGUARDED = torch.compiler.skip_guard_on_all_nn_modules_unsafe
SLOW = ("reduce-overhead", "full-inductor")
TIMES = ("latency", "host", "cold", "cold host", "back to back")
PAIRS = (("latency", "host", 1), ("cold", "cold host", 0))  # and how many calls come untimed before
LEAST, TOGETHER, TOGETHER_US = 10, 50, 5e4  # rounds; calls back to back, and how long they may take

META_LIMITS = {16: 1.15, 256: 1.15, 1024: 1.08, 2048: 1.10}  # by number of tokens
FLOOR_LIMITS = {1024: 1.05, 2048: 1.03}
CUT_LIMITS_US = {16: 5, 256: 5}
STEP_LIMIT_US = 0.5
SIZES, SMALL = (16, 256, 1024, 2048), (4, 8)  # on a GPU, on a CPU


# the variants


def hand(case: Case, inner: str) -> Call:
    """The steps of a program in a loop. Here alone its inside is looked at."""
    program = case.program(inner)._program
    bound = program.at(program.key)
    ((cell, _),) = bound.loads
    cells, steps, result = bound.cells, bound.steps, bound.result

    def loop(x: Tensor) -> Any:
        cells[cell] = x
        for step in steps:
            step()
        return result(cells)

    return loop


def program_of(compiled: Call) -> Call:
    """Its one program."""
    (program,) = torch_bcg.programs(compiled)
    return program


def static(given: Tensor, result: Tensor, replay: Callable[[], None]) -> Call:
    """A call of a recording."""

    def call(x: Tensor) -> Tensor:
        given.copy_(x)
        replay()
        return result.clone()

    return call


def whole(case: Case, call: Call) -> Call:
    """All of a warm call in one graph; amid a capture bcg runs its segments one after another."""
    (given,), graph = case.inputs(1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(given)
    return static(given, result, graph.replay)


def meta(case: Case) -> Call:
    """Meta's package; its README says how."""
    package: Any = importlib.import_module(META)
    model = case.of(Model, package.no_graph(attention.__wrapped__))
    (given,), graph, stream = case.inputs(1), package.BreakableCUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(given)
    torch.cuda.current_stream().wait_stream(stream)
    with package.breakable_graph(graph):
        result = model(given)
    return static(given, result, graph.replay)


def reduce_overhead(case: Case) -> Call:
    """What the mode stands for, and that marked operations stay out of its graphs."""
    options = {"triton.cudagraphs": True, "graph_partition": True}
    return case.compiled("reduce_overhead", options=options)


def ours(ending: str, inner: str) -> dict[str, Callable[[Case], Call]]:
    """What is made of one compiled model."""
    return {
        f"bcg{ending}": lambda case: case.bcg(inner),
        f"program{ending}": lambda case: case.program(inner),
        f"hand{ending}": lambda case: hand(case, inner),
        f"floor{ending}": lambda case: whole(case, case.bcg(inner)),
    }


# Those that record for themselves come first: cudagraph trees clear the workspaces of cuBLAS.
MAKERS: dict[str, Callable[[Case], Call]] = {
    "eager": lambda case: case.model,
    "cudagraphs": lambda case: case.compiled("cudagraphs", backend="cudagraphs"),
    "reduce-overhead": reduce_overhead,
    "meta": meta,
    **ours("", "eager"),
    **ours("-inductor", "inductor"),
    "filtered-inductor": lambda case: case.by_bcg(
        "inductor", "filtered", guard_filter_fn=UNGUARDED
    ),
    "unchecked-inductor": lambda case: program_of(
        case.by_bcg("inductor", "unchecked", check="off")
    ),
    "segments-inductor": lambda case: case.by_bcg("inductor", "segments", execute="segments"),
    "full-inductor": lambda case: whole(case, case.compiled("full", unmarked)),
}
OTHERS = ("cudagraphs", "reduce-overhead", "meta", "full-inductor")  # left out where they raise
RECORDED = ("meta", "floor", "floor-inductor", "full-inductor")


def missing(name: str, gpu: bool) -> str:
    """What a variant lacks to run here, or ""."""
    if name in RECORDED and not gpu:
        return "needs a GPU"
    if name == "meta" and importlib.util.find_spec(META) is None:
        return "not installed"
    if name not in OTHERS and name.endswith("-inductor"):
        try:
            torch_bcg.Options.make({"inner": "inductor"})
        except OptionError as error:
            return str(error.args[0])
    return ""


def make(case: Case, names: Iterable[str], notes: dict[str, str]) -> dict[str, tuple[Call, float]]:
    """The variants, warm, with the seconds that took; and why one is left out."""
    made: dict[str, tuple[Call, float]] = {}
    for name in names:
        start = time.perf_counter()
        say(f"{case.tokens} tokens: making {name} ...")
        try:
            call = MAKERS[name](case)
            call(*case.inputs(1))
        except Exception as error:
            if name not in OTHERS:
                raise
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            notes[name] = f"at {case.tokens} tokens {why}"
            continue
        wait_idle(case.kind["device"])
        made[name] = call, time.perf_counter() - start
        say(f"made {name} in {made[name][1]:.1f} s")
    return made


# times


def times_of(
    calls: Mapping[str, Call], inputs: Sequence[Tensor], repeats: int, seconds: float
) -> dict[tuple[str, str], list[float]]:
    """Microseconds by variant and kind of time."""
    device = inputs[0].device
    once = {n: us for n, (us,) in measure(calls, inputs, 1, device, wall=True).items()}
    rounds = min(repeats, max(LEAST, int(seconds * 1e6 / sum(once.values()))))
    taken: dict[tuple[str, str], list[float]] = {}
    for whole, part, untimed in PAIRS:
        host: dict[str, list[float]] = {n: [] for n in calls}
        noted = {n: noting(call, host[n]) for n, call in calls.items()}
        latency = measure(noted, inputs, rounds, device, wall=True, untimed=untimed)
        taken |= {(n, whole): us for n, us in latency.items()}
        taken |= {(n, part): us[untimed :: untimed + 1] for n, us in host.items()}
    count = {n: max(3, min(TOGETHER, int(TOGETHER_US / us))) for n, us in once.items()}
    bursts = {n: noting(call, [], count[n]) for n, call in calls.items()}
    for n, us in measure(bursts, inputs, max(1, repeats // 10), device, wall=True).items():
        taken[n, "back to back"] = [each / count[n] for each in us]
    return taken


def judge(records: Iterable[Record]) -> list[Claim]:
    """The claims with what was measured."""
    by = {(r.variant, r.params["time"], r.params["tokens"]): r for r in records}
    steps = dict.fromkeys([tokens for *_, tokens in by], STEP_LIMIT_US)
    claims = []
    for one, other, kind, parts, limits in (
        ("meta", "bcg-inductor", "latency", "", META_LIMITS),
        *(
            (f"{name}-inductor", "floor-inductor", "latency", parts, limits)
            for name in ("bcg", "filtered", "program", "unchecked")
            for parts, limits in (("cuts", CUT_LIMITS_US), ("", FLOOR_LIMITS))
        ),
        ("program", "hand", "host", "steps", steps),
        ("program-inductor", "hand-inductor", "host", "steps", steps),
    ):
        make = Claim.at_least if one == "meta" else Claim.at_most
        for tokens, limit in limits.items():
            x, y = by.get((one, kind, tokens)), by.get((other, kind, tokens))
            if x is None or y is None:
                continue
            if parts:
                count = x.params[parts]
                value, what = (x.p50 - y.p50) / count, f"({one} - {other}) / {count} {parts}, us"
            else:
                value, what = x.p50 / y.p50, f"{one} / {other}"
            claims.append(make(f"{tokens} tokens, {kind}: {what}", value, limit))
    return claims


# all of it


def one_size(case: Case, names: Sequence[str], notes: dict[str, str], args: Any) -> list[Record]:
    """Makes the variants, checks them, times them and checks them again."""
    made = make(case, names, notes)
    start = time.perf_counter()
    calls = {name: call for name, (call, _) in made.items()}
    errors = check(case, calls, case.inputs(2))
    taken = times_of(calls, case.inputs(4), args.repeats, args.seconds)
    check(case, calls, case.inputs(2))
    say(f"{case.tokens} tokens: timed in {time.perf_counter() - start:.1f} s")
    params: dict[str, Any] = {"tokens": case.tokens}
    if case.plan is not None:
        params["steps"] = len(case.plan.segments)
        params["cuts"] = params["steps"] - len(case.plan.graph_segments)
    records = [
        Record.of("transformer", n, "us", us, time=kind, error=errors[n], **params)
        for (n, kind), us in taken.items()
    ]
    for n, (_, seconds) in made.items():
        records.append(Record.of("transformer", n, "s", [seconds], time="made", **params))
    return records


def run(args: argparse.Namespace) -> None:
    """Each number of tokens in turn; saves and prints each."""
    names = check_names(args.only, MAKERS)
    if args.only is None and not args.full:
        names = [n for n in names if n not in SLOW]
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    count, width = args.layers or (43 if gpu else 2), args.width or (2048 if gpu else 64)
    args.repeats = args.repeats or (100 if gpu else 10)
    notes = {n: why for n in names if (why := missing(n, gpu))}
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(width, device=device, dtype=dtype) for _ in range(count))
    layers.requires_grad_(False).eval()
    records: list[Record] = []
    sizes = args.tokens or (SIZES if gpu else SMALL)
    for tokens in sizes:
        torch._dynamo.reset()  # frees what was made for the last one
        gc.collect()
        case = Case(layers, width, tokens, device)
        new = one_size(case, [n for n in names if n not in notes], notes, args)
        for r in new:
            r.params |= {"layers": count, "width": width, "device": str(device)}
            r.params["dtype"] = str(dtype).removeprefix("torch.")
        records += new
        claims = [c.on(device) for c in judge(records)]
        # After each size: a run that is ended early has said what it knew.
        save(args.out, "transformer", records, claims=claims, notes=notes)
        print(f"{count} layers of width {width} on {device}; microseconds")
        print(text(new, notes if tokens == sizes[-1] else {}), flush=True)
    print(*claims, sep="\n")


def text(records: Iterable[Record], notes: Mapping[str, str]) -> str:
    """The table."""
    by = {(r.params["tokens"], r.variant, r.params["time"]): r for r in records}
    body: list[Sequence[object]] = []
    for tokens, name in dict.fromkeys((tokens, name) for tokens, name, _ in by):
        base, whole = by.get((tokens, "eager", "latency")), by[tokens, name, "latency"]
        ratio = base.p50 / whole.p50 if base else "-"
        us = [f"{by[tokens, name, kind].p50:.0f}" for kind in TIMES]
        span, error = f"{whole.p20:.0f} to {whole.p80:.0f}", f"{whole.params['error']:.1e}"
        made = f"{by[tokens, name, 'made'].p50:.1f}"
        body.append((name, tokens, ratio, us[0], span, *us[1:], whole.n, error, made))
    body += [(name, *["-"] * (len(TIMES) + 5), why) for name, why in notes.items()]
    columns = ("latency", "p20 to p80", *TIMES[1:], "calls", "error", "made s")
    return table(("variant", "tokens", "eager /", *columns), body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", help="16 256 1024 2048; 4 8 on a CPU")
    options.add_argument("--layers", type=int, help="43; 2 on a CPU")
    options.add_argument("--width", type=int, help="2048; 64 on a CPU")
    options.add_argument("--repeats", type=int, help="calls of each variant: 100; 10 on a CPU")
    options.add_argument(
        "--seconds", type=float, default=6, help="6; where calls take longer there are fewer"
    )
    options.add_argument("--full", action="store_true", help=f"{' and '.join(SLOW)} as well")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
