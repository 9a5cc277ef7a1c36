"""Do steps of DeepSeek-V4, replayed, give what the same segments give unrecorded, and eager?

On a GPU: 12 layers and 16 experts of Flash's real shape with random weights in bf16, 200 steps of 8
to 512 tokens over 8 requests at a time of up to 2,304 positions. Requests come in waves, each until
all of it is done, so that steps are of every kind: ``prefill`` (prompts from their first token),
``chunked`` (prompts, at least one of them continued), ``mixed`` (prompts and single tokens) and
``decode`` (single tokens). Which tokens they have is known from the start. Four engines take each
step one after the other, each with its own memory and scheduler:

  replayed   backend "bcg", steps brought up to ten sizes, each recorded before
  segments   the same with execute="segments"
  eager      no backend, and no row that is not a token's
  exact      the same in float32, with the same weights; float64 where the model is float32

The error of bf16 is the RMS of eager's logits less those of exact: over all words, or over the best
two of each row, whichever is larger. A row is judged where its best word is ahead of the next by
more than 4 times that error. An error has a long tail, since rounding decides now and then which
expert a row goes to; so it is said as well how many rows differ that are ahead by 4 times the error
that eager has in that very row.

With a random head there are too few of those: of 129,280 normal logits the best is ahead by 0.2
deviations, and two errors of rounding make up for it. So the head is fit, as training does it, to
hidden states: eager runs all steps once before, each row is given a word of its own, and the word's
weights are the row's hidden state less the mean of all. Requests draw from 1,024 ids, so that most
rows have the same token as others, and only what came before it tells them apart. Then the best
word says which of all rows this one is most like: a row that has seen less, or the row of another
step, gives another word.

The claims, on a GPU: in every step rows of replayed and segments are equal to the bit, and at the
end so is all memory, reserved rows excepted; every step is a replay; at least 0.95 of the rows are
judged, and in none of them replayed has another best word than eager. Nothing is claimed about
time. On a CPU a tiny model in float32 takes few steps; what differs there is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Claim, Record, Refused, parser, progress, replayed, save, say, status, table
from steps import AT_A_TIME, FLASH, TINY, Lane, Sizes, budgets, fit, kind_of
from torch import Tensor

import torch_bcg
from torch_bcg.dsv4 import DSV4Config
from torch_bcg.dsv4.pools import Pools
from torch_bcg.dsv4.random import random_model

GAPS, ENOUGH = 4.0, 0.95  # errors that a judged row is ahead by; share of rows that are judged
UP_TO = (32, 64, 128, 256, 512)  # tokens of a step: rows of the table
RESERVED = 1  # row 0 of all memory


# what came out


@dataclass
class Found:
    """Sums and rows over all steps.

    Attributes:
        unequal: steps in which replayed and segments differ.
        pools: buffers that differ at the end.
        squares: of eager less exact, summed over all logits, and over the best two of each row.
        worst: the largest of those differences.
        against: squares of replayed less eager.
        logits: how many of them, and of those of the best two.
        gaps: of each row, how far its best word is ahead in eager.
        own: of each row, by how much exact has another gap between the same two words.
        others: of each row, whether replayed has another best word.
        replays: steps that were nothing but replays.
    """

    unequal: int = 0
    pools: list[str] = field(default_factory=list)
    squares: tuple[float, float] = (0.0, 0.0)
    worst: float = 0.0
    against: float = 0.0
    logits: tuple[int, int] = (0, 0)
    gaps: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)
    replays: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, eager: Tensor, again: Tensor, exact: Tensor) -> None:
        """Logits of one step.

        Raises:
            Refused: some are no numbers, or eager has nothing to do with exact.
        """
        error = eager - exact
        if not error.norm() < exact.norm():  # NaN is refused as well
            raise Refused("eager is wrong: its logits are not near those of exact.")
        best = eager.topk(2)
        decisive = error.gather(1, best.indices)
        self.squares = (
            self.squares[0] + float(error.square().sum(dtype=torch.float64)),
            self.squares[1] + float(decisive.square().sum(dtype=torch.float64)),
        )
        self.against += float((again - eager).square().sum(dtype=torch.float64))
        self.logits = self.logits[0] + error.numel(), self.logits[1] + decisive.numel()
        self.worst = max(self.worst, float(error.abs().max()))
        self.gaps.append((best.values[:, 0] - best.values[:, 1]).cpu())
        self.own.append((decisive[:, 0] - decisive[:, 1]).abs().cpu())
        self.others.append((again.argmax(1) != best.indices[:, 0]).cpu())

    def figures(self) -> dict[str, float]:
        """All numbers, by name."""
        every, two = ((s / n) ** 0.5 for s, n in zip(self.squares, self.logits, strict=True))
        gaps, own, others = map(torch.cat, (self.gaps, self.own, self.others))
        judged = gaps > GAPS * max(every, two)
        return {
            "rows": len(gaps),
            "rms, all words": every,
            "rms, best two": two,
            "largest": self.worst,
            "rms, replayed - eager": (self.against / self.logits[0]) ** 0.5,
            "median gap": float(gaps.median()),
            "judged": float(judged.float().mean()),
            "differ": int((judged & others).sum()),
            "differ, ahead by errors of their own": int((others & (gaps > GAPS * own)).sum()),
            "differ anywhere": int(others.sum()),
        }


def unequal(one: Pools, other: Pools) -> list[str]:
    """Names of the memory that differs, reserved rows left out."""
    theirs = dict(other.named_buffers())
    return [
        name
        for name, mine in one.named_buffers()
        if not torch.equal(mine[RESERVED:], theirs[name][RESERVED:])
    ]


def judge(found: Found, steps: int) -> list[Claim]:
    """The claims with what was found."""
    said = found.figures()
    none = {
        "steps in which replayed and segments differ": found.unequal,
        "pools that differ at the end": len(found.pools),
        "rows ahead in which replayed has another word than eager": said["differ"],
    }
    return [
        Claim.at_least("share of steps that are replays", found.replays / steps, 1),
        Claim.at_least(f"share of rows ahead by {GAPS:g} errors", said["judged"], ENOUGH),
        *(Claim(claim, value, "none", value == 0) for claim, value in none.items()),
    ]


# the run


def lanes_of(
    sizes: Sizes, device: torch.device, given: Sequence[int], seed: int
) -> dict[str, Lane]:
    """The four, over a model with a head that is fit to these steps."""
    layout = sizes.config.layout(sizes.context, AT_A_TIME)
    model = random_model(sizes.config, device, sizes.dtype, seed)
    say("fitting the head")
    fit(model, Lane(model, layout, sizes, seed), given, seed)
    finer = torch.float64 if sizes.dtype is torch.float32 else torch.float32
    exact = random_model(sizes.config, device, finer, seed)
    exact.load_state_dict(model.state_dict())
    ladder: dict[str, Any] = {"buckets": list(sizes.ladder)}
    return {
        "replayed": Lane(model, layout, sizes, seed, **ladder, on_eager_call="error"),
        "segments": Lane(
            model, layout, sizes, seed, **ladder, execute="segments", on_eager_call="count"
        ),
        "eager": Lane(model, layout, sizes, seed),
        "exact": Lane(exact, layout, sizes, seed),
    }


def one_step(
    lanes: dict[str, Lane], budget: int, found: Found, taken: dict[tuple[str, int], list[float]]
) -> None:
    """The next step of all lanes, compared and timed."""
    hidden, decided = {}, set()
    for name, lane in lanes.items():
        works = lane.decide(budget)
        decided.add(tuple((w.request.slot, w.start, w.end) for w in works))
        before = torch_bcg.stats()
        hidden[name], ms = lane.step(works)
        if name == "replayed":
            found.replays += replayed(before, torch_bcg.stats())
            found.kinds[kind_of(works)] += 1
        tokens = len(hidden[name])
        taken[name, next(n for n in UP_TO if n >= tokens)].append(ms)
    if len(decided) > 1:
        raise Refused("engines have decided for other tokens than each other.")
    found.unequal += not torch.equal(hidden["replayed"], hidden["segments"])
    logits = {name: lanes[name].model.logits(x) for name, x in hidden.items() if name != "segments"}
    found.add(logits["eager"], logits["replayed"], logits["exact"])


def run(args: argparse.Namespace) -> None:
    """Records every size, takes all steps, compares; then saves and prints."""
    device = torch.device(args.device)
    gpu, seed = device.type == "cuda", args.seed
    if gpu:
        sizes = Sizes(DSV4Config.flash(args.layers, args.experts), torch.bfloat16, *FLASH)
    else:
        sizes = Sizes(DSV4Config.tiny(vocab_size=2048), torch.float32, *TINY)
    steps = args.steps or (200 if gpu else 12)
    given = budgets(sizes, steps, seed)
    lanes = lanes_of(sizes, device, given, seed)
    found, taken = Found(), defaultdict(list)
    with progress("recording", len(sizes.ladder)) as shown:
        for size in reversed(sizes.ladder):
            for name in ("replayed", "segments", "eager"):
                for _ in range(1 if name == "eager" else 3):  # probe, capture, replay
                    lanes[name].record(size)
            shown(f"{size} rows")
    with progress("steps", steps) as shown:
        for budget in given:
            one_step(lanes, budget, found, taken)
            shown("")
    found.pools = unequal(lanes["replayed"].pools, lanes["segments"].pools)
    claims, said = [c.on(device) for c in judge(found, steps)], found.figures()
    differ = [c.claim for c in claims if c.limit == "none" and c.value]
    if differ and not gpu:
        raise Refused(f"replayed is wrong: there are {differ[0]}.")
    params = {"layers": sizes.config.num_layers, "experts": sizes.config.num_experts}
    params |= {"device": str(device), "dtype": str(sizes.dtype).removeprefix("torch.")}
    records = [
        Record.of("dsv4_steps", name, "ms", ms, **params, tokens=most)
        for (name, most), ms in sorted(taken.items(), key=lambda pair: UP_TO.index(pair[0][1]))
    ]
    more = {"figures": said, "kinds": found.kinds, "replays": found.replays, "pools": found.pools}
    save(args.out, "dsv4_steps", records, claims=claims, **more)
    print(f"{params['layers']} layers, {params['experts']} experts, {params['dtype']}, on {device}")
    print(", ".join(f"{n} {kind}" for kind, n in found.kinds.most_common()), "steps;", end=" ")
    print(f"{found.replays} replays. Logits, eager - exact:")
    print(", ".join(f"{name} {value:.4g}" for name, value in said.items()))
    print("\nmilliseconds a step, until the device is done, p50")
    print(text(records, list(lanes)), *claims, sep="\n")


def text(records: Sequence[Record], names: Sequence[str]) -> str:
    """The table of times."""
    by = {(r.variant, r.params["tokens"]): r for r in records}
    sizes = [n for n in UP_TO if (names[0], n) in by]
    body = [(f"up to {n}", by[names[0], n].n, *(by[name, n].p50 for name in names)) for n in sizes]
    return table(("tokens", "steps", *names), body)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 measured, 1 refused."""
    options = parser(__doc__, only=False)
    options.add_argument("--layers", type=int, default=12, help="12; of the model for a GPU")
    options.add_argument("--experts", type=int, default=16, help="16; likewise")
    options.add_argument("--steps", type=int, help="200; 12 on a CPU")
    options.add_argument("--seed", type=int, default=0, help="of weights, requests and steps")
    return status(run, options.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
