"""Steps of DeepSeek-V4 from requests of a seed, for several engines that take the same ones."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from harness import Refused, wait_idle
from torch import Tensor

from torch_bcg.dsv4 import DeepseekV4, DSV4Config, Engine
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.pools import Pools
from torch_bcg.dsv4.requests import Request, Scheduler, Work, inputs

AT_A_TIME, WAVE = 8, 12  # requests
IDS = 1024  # that requests draw from


@dataclass(frozen=True)
class Sizes:
    """What a GPU and a CPU differ in."""

    config: DSV4Config
    dtype: torch.dtype
    context: int
    tail: int
    ladder: tuple[int, ...]


FLASH = (2304, 32, (8, 16, 32, 64, 96, 128, 192, 256, 384, 512))
TINY = (256, 8, (8, 16, 32))


def waves(sizes: Sizes, seed: int) -> Iterator[list[Request]]:
    """Requests, without end: short, middling and nearly as long as the context."""
    source = random.Random(seed)
    ids = source.sample(range(sizes.config.vocab_size), min(IDS, sizes.config.vocab_size // 2))
    longest = sizes.context - sizes.tail
    while True:
        wave = []
        for _ in range(WAVE):
            bounds = source.choice(((1, 32), (33, longest // 2), (longest * 7 // 8, longest)))
            prompt, tail = source.randint(*bounds), source.randint(sizes.tail // 4, sizes.tail)
            wave.append(Request(source.choices(ids, k=prompt + tail), prompt))
        yield wave


def budgets(sizes: Sizes, steps: int, seed: int) -> list[int]:
    """Most tokens of each step: evenly by their logarithm."""
    source = random.Random(seed)
    low, high = math.log(AT_A_TIME), math.log(sizes.ladder[-1])
    return [round(math.exp(source.uniform(low, high))) for _ in range(steps)]


def kind_of(works: Sequence[Work]) -> str:
    """``prefill``, ``chunked``, ``mixed`` or ``decode``."""
    prompts = [w for w in works if w.start < w.request.prompt]
    if len(prompts) < len(works):
        return "mixed" if prompts else "decode"
    return "chunked" if any(w.start for w in prompts) else "prefill"


class Lane:
    """An engine with a scheduler of its own; all lanes decide the same."""

    def __init__(
        self, model: DeepseekV4, layout: Layout, sizes: Sizes, seed: int, **options: Any
    ) -> None:
        self.model, self.layout = model, layout
        self.engine = Engine(model, layout, "bcg" if options else None, options or None)
        self.waves, self.scheduler = waves(sizes, seed), Scheduler((), layout)

    @property
    def pools(self) -> Pools:
        """Of the engine."""
        return self.engine.pools

    def record(self, tokens: int) -> None:
        """A step of a request that nobody else has to do with."""
        ids = [i % self.model.config.vocab_size for i in range(tokens)]
        works = Scheduler([Request(ids, tokens)], self.layout).step(self.pools, tokens)
        self.engine.step(*inputs(works, self.pools))

    def decide(self, budget: int) -> list[Work]:
        """The next step; a new wave where all is done."""
        while not (works := self.scheduler.step(self.pools, budget)):
            self.scheduler = Scheduler(next(self.waves), self.layout)
        return works

    def step(self, works: Sequence[Work]) -> tuple[Tensor, float]:
        """Its rows, and milliseconds until the device is done."""
        given = inputs(works, self.pools)
        wait_idle(given[0].device)
        start = time.perf_counter_ns()
        hidden = self.engine.step(*given)
        wait_idle(given[0].device)
        return hidden, (time.perf_counter_ns() - start) / 1e6


def fit(model: DeepseekV4, lane: Lane, given: Sequence[int], seed: int) -> None:
    """Gives every row of the steps a word of its own: its hidden state less the mean of all."""
    rows = torch.cat([lane.step(lane.decide(budget))[0] for budget in given]).float()
    vocabulary = model.config.vocab_size
    if len(rows) > vocabulary:
        raise Refused(f"{len(rows)} rows in all, but {vocabulary} words: take fewer --steps.")
    source = torch.Generator().manual_seed(seed)
    words = torch.randperm(vocabulary, generator=source)[: len(rows)].to(rows.device)
    rows -= rows.mean(0)
    model.head.weight[words] = F.normalize(rows, dim=1).to(model.head.weight.dtype)
