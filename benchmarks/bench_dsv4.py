"""How fast is a step of DeepSeek-V4 on bcg, beside eager and Meta's package?

On a GPU: 43 layers and 16 experts of Flash's real shape, random weights in bf16. A step of 256 to
2,048 tokens serves eight requests: four decode behind prefixes of 1k to 16k positions, four go on
with prompts of which 0 to 12k positions are done. The same step is taken again and again, by

  eager           the model as it is
  meta            Meta's package breakable-cuda-graphs: the model recorded for this number of tokens
  bcg             the backend, this number of tokens a bucket
  inductor        the same with inner="inductor"
  unchecked       inductor with check="off": of addresses of weights it compares one, and of the
                  model nothing
  segments        the same as bcg with execute="segments": nothing is recorded
  floor           all segments and operations of bcg for this very step in one CUDA graph
  inductor-floor  the same for inductor

over one set of weights, each with memory of its own (floors with that of theirs) and the same
random numbers in it. A call is `Engine.forward`: in all of them the metadata is built before and
bound in the call, token ids are copied in and rows copied out. Times:

  latency       until the device is idle, of a call right after one of the same variant
  host          until the call returns
  cold          latency right after a call of another variant; cold host: those until they return
  back to back  of 20 calls, or of as many as take half a second, but 3, divided by their number
  step          latency of `Engine.step`, which builds the metadata first, and its host time; what
                is only a recording has none

Before and after the timing, each time once other tokens were run: segments, meta, bcg and floor are
equal to the bit, and the error of every variant, beside the same layers in float32, is at most
twice that of eager and below 1. What is not so is refused.

The claims, on a GPU, are about latency: eager takes at least 5 times as long as the faster of bcg
and inductor at 256 tokens, meta 1.8 times at 256 and 1.3 times at 2,048, and inductor and unchecked
take at most 6 us more than inductor-floor for each cut, that is each eager segment. On a CPU a tiny
model in float32 runs, without what needs CUDA graphs of its own, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from harness import (
    Call,
    Claim,
    Record,
    Refused,
    check_names,
    measure,
    noting,
    parser,
    progress,
    save,
    status,
    table,
    wait_idle,
)
from torch import Tensor, nn
from variants import ENGINES, FLOORS, RECORDED, Lane, lanes_of, static

import torch_bcg
from torch_bcg.dsv4 import DeepseekV4, DSV4Config, Pools, random_model

ALIKE = ("segments", "meta", "bcg", "floor")  # equal to the bit
TIMES = ("latency", "host", "cold", "cold host", "back to back", "step", "step host")
LEAST, TOGETHER, TOGETHER_US = 5, 20, 5e5  # rounds; calls back to back, and how long they may take
AT_LEAST = (("eager", 256, 5), ("meta", 256, 1.8), ("meta", 2048, 1.3))  # over the faster of ours
CUT_US = 6
SIZES = {True: (256, 512, 1024, 2048), False: (16, 24)}  # on a GPU, on a CPU


# checks


class Finer(nn.Module):
    """A layer in float32 that is there while it runs: all of them together would not fit."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.held = (layer,)  # no part of this module, which is brought to float32 itself

    def forward(self, *args: Any) -> Any:
        """As the layer."""
        return copy.deepcopy(self.held[0]).float()(*args)


def exact(model: DeepseekV4, lane: Lane, ids: Tensor) -> Tensor:
    """The step in float32."""
    instead: dict[int, Any] = {id(model.layers): nn.ModuleList(map(Finer, model.layers))}
    finer = copy.deepcopy(model, instead | {id(model.head): nn.Identity()}).float()
    pools = Pools(model.config, lane.engine.layout, ids.device, torch.float32)
    lane.fill()
    for mine, its in zip(pools.buffers(), lane.engine.pools.buffers(), strict=True):
        mine.copy_(its)
    with torch_bcg.bind_metadata(lane.md):
        return cast("Tensor", finer(ids, pools))


def check(
    calls: Mapping[str, Call], lanes: Mapping[str, Lane], given: Sequence[Tensor], want: Tensor
) -> dict[str, float]:
    """The error of each variant for the first of some tokens.

    Raises:
        Refused: one is wrong.
    """
    results: dict[str, Tensor] = {}
    for name, call in calls.items():
        for ids in reversed(given):  # the first ones last, so that a stale result shows
            lanes[FLOORS.get(name, name)].fill()
            results[name] = call(ids)
    errors = {n: float((x.float() - want).norm() / want.norm()) for n, x in results.items()}
    limit = min(2 * errors["eager"], 1.0) + 1e-5
    alike = [n for n in ALIKE if n in results]
    for name, error in errors.items():
        if not error <= limit:  # NaN is refused as well
            raise Refused(f"{name} is wrong: relative error {error:.2e}, limit {limit:.2e}.")
        if name in alike and not torch.equal(results[name], results[alike[0]]):
            raise Refused(f"{name} is wrong: it is not equal to {alike[0]}.")
    return errors


# times


def times_of(
    calls: Mapping[str, Call], lanes: Mapping[str, Lane], given: Sequence[Tensor],
    repeats: int, seconds: float,
) -> dict[tuple[str, str], list[float]]:  # fmt: skip
    """Microseconds by variant and kind of time."""
    device = given[0].device
    once = {n: us for n, (us,) in measure(calls, given, 1, device, wall=True).items()}
    rounds = min(repeats, max(LEAST, int(seconds * 1e6 / sum(once.values()))))
    steps = {n: lanes[n].step for n in calls if n not in RECORDED}
    taken: dict[tuple[str, str], list[float]] = {}
    for group, whole, part, untimed in (
        (calls, "latency", "host", 1),
        (calls, "cold", "cold host", 0),
        (steps, "step", "step host", 1),
    ):
        host: dict[str, list[float]] = {n: [] for n in group}
        noted = {n: noting(call, host[n]) for n, call in group.items()}
        latency = measure(noted, given, rounds if group else 0, device, wall=True, untimed=untimed)
        taken |= {(n, whole): us for n, us in latency.items()}
        taken |= {(n, part): us[untimed :: untimed + 1] for n, us in host.items()}
    count = {n: max(3, min(TOGETHER, int(TOGETHER_US / us))) for n, us in once.items()}
    bursts = {n: noting(call, [], count[n]) for n, call in calls.items()}
    for n, us in measure(bursts, given, max(1, repeats // 10), device, wall=True).items():
        taken[n, "back to back"] = [each / count[n] for each in us]
    return taken


# all of it


def one_size(
    model: DeepseekV4, lanes: Mapping[str, Lane], names: Sequence[str], tokens: int,
    made: dict[str, dict[int, float]], args: argparse.Namespace,
) -> list[Record]:  # fmt: skip
    """Records, checks, times and checks again a step of so many tokens."""
    device, words = model.embedding.weight.device, model.config.vocab_size
    given = [torch.randint(words, (tokens,), device=device) for _ in range(2)]
    calls: dict[str, Call] = {}
    every = dict.fromkeys([*lanes, *names])
    with progress(f"recording {tokens} tokens", len(every)) as shown:
        for name in every:
            start, lane = time.perf_counter(), lanes[FLOORS.get(name, name)]
            if name in lanes:
                lane.take(given[0])
            calls[name] = static(name, lane, given[0]) if name in RECORDED else lane.forward
            wait_idle(device)
            made.setdefault(name, {})[tokens] = time.perf_counter() - start
            shown(name)
    want = exact(model, lanes["eager"], given[0])
    errors = check(calls, lanes, given, want)
    taken = times_of({n: calls[n] for n in names}, lanes, given, args.repeats, args.seconds)
    check(calls, lanes, given, want)
    return [
        Record.of("dsv4", name, "us", us, time=kind, tokens=tokens, error=errors[name])
        for (name, kind), us in taken.items()
    ]


def judge(p50: Mapping[tuple[str, int], float], cuts: Mapping[str, int]) -> list[Claim]:
    """The claims about latency, in us."""
    found = []
    for other, tokens, limit in AT_LEAST:
        ours = [p50[n, tokens] for n in ("bcg", "inductor") if (n, tokens) in p50]
        if ours and (other, tokens) in p50:
            value = p50[other, tokens] / min(ours)
            claim = f"{tokens} tokens: {other} / the faster of bcg and inductor"
            found.append(Claim.at_least(claim, value, limit))
    for (name, tokens), us in p50.items():
        if name in ("inductor", "unchecked") and ("inductor-floor", tokens) in p50:
            value = (us - p50["inductor-floor", tokens]) / cuts[name]
            claim = f"{tokens} tokens: ({name} - inductor-floor) / {cuts[name]} cuts, us"
            found.append(Claim.at_most(claim, value, CUT_US))
    return found


def recordings(
    made: Mapping[str, Mapping[int, float]], lanes: Mapping[str, Lane]
) -> Iterator[Record]:
    """Seconds until a step is replayed: of each variant all sizes, and what its compiler took."""
    for name, each in made.items():
        lane = lanes.get(name)
        params: dict[str, Any] = {str(tokens): round(s, 2) for tokens, s in each.items()}
        if lane and "inner" in lane.options:
            params |= {"inner_compilations": lane.compilations, "unfused": lane.unfused}
            params["inner_seconds"] = round(lane.seconds, 2)
        if name != "eager":
            yield Record.of("dsv4", name, "s", [sum(each.values())], time="record", **params)


def run(args: argparse.Namespace) -> None:
    """All numbers of tokens, the largest first; saves and prints each."""
    names = check_names(args.only, [*ENGINES, *FLOORS])
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    args.repeats = args.repeats or (30 if gpu else 3)
    sizes = sorted({*(args.tokens or SIZES[gpu])}, reverse=True)
    if gpu:
        config = DSV4Config.flash(args.layers or 43, args.experts or 16)
    else:
        config = DSV4Config.tiny(args.layers or 4, num_experts=args.experts or 4)
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    model = random_model(config, device, dtype)
    lanes, notes = lanes_of(names, model, sizes)
    names = [n for n in names if n not in notes]
    if not names:
        raise Refused("; ".join(f"{n}: {why}" for n, why in notes.items()))
    made: dict[str, dict[int, float]] = {}
    records: list[Record] = []
    print(f"{config.num_layers} layers, {config.num_experts} experts, on {device}; milliseconds")
    for tokens in sizes:
        records += one_size(model, lanes, names, tokens, made, args)
        cuts = {n: lane.cuts for n, lane in lanes.items() if lane.engine.backend}
        for r in records:
            r.params |= {"layers": config.num_layers, "experts": config.num_experts}
            r.params |= {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
            r.params["cuts"] = cuts.get(FLOORS.get(r.variant, r.variant))
        starts = list(recordings(made, lanes))
        claims = [c.on(device) for c in judge(latencies(records), cuts)]
        # After each size: a run that is ended early has said what it knew.
        save(args.out, "dsv4", [*records, *starts], claims=claims, notes=notes)
        print(text([r for r in records if r.params["tokens"] == tokens], names, notes))
        gc.collect()  # recordings of this size
    for r in starts:
        print(f"{r.variant} recorded in {r.p50:.1f} s: {r.params}")
    print(*claims, sep="\n")


def latencies(records: Sequence[Record]) -> dict[tuple[str, int], float]:
    """The median by variant and number of tokens, in us."""
    return {
        (r.variant, r.params["tokens"]): r.p50 for r in records if r.params["time"] == "latency"
    }


def text(records: Sequence[Record], names: Sequence[str], notes: Mapping[str, str]) -> str:
    """The table: medians, and how often each was timed."""
    by = {(r.params["tokens"], r.variant, r.params["time"]): r for r in records}
    body: list[Sequence[object]] = []
    for tokens in dict.fromkeys(r.params["tokens"] for r in records):
        base = by.get((tokens, "eager", "latency"))
        for name in names:
            found = [by.get((tokens, name, kind)) for kind in TIMES]
            whole = by[tokens, name, "latency"]
            span = f"{whole.p20 / 1000:.2f} to {whole.p80 / 1000:.2f}"
            ms = [r.p50 / 1000 if r else "-" for r in found]
            ratio = base.p50 / whole.p50 if base else "-"
            error = f"{whole.params['error']:.1e}"
            body.append((tokens, name, ratio, ms[0], span, *ms[1:], whole.n, error))
    body += [("-", name, *["-"] * (len(TIMES) + 3), why) for name, why in notes.items()]
    columns = ("latency", "p20 to p80", *TIMES[1:], "calls", "error")
    return table(("tokens", "variant", "eager /", *columns), body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, nargs="+", help="256 512 1024 2048; 16 24 on a CPU")
    options.add_argument("--layers", type=int, help="43; 4 on a CPU")
    options.add_argument("--experts", type=int, help="16; 4 on a CPU")
    options.add_argument("--repeats", type=int, help="calls of each variant: 30; 3 on a CPU")
    options.add_argument(
        "--seconds", type=float, default=10, help="10; where calls take longer there are fewer"
    )
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
