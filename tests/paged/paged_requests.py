"""Random requests that come and go, and the steps in which a scheduler runs their tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paged.paged_model import WHOLE, Paged, Sizes, Tokens

MOST_TOKENS, MOST_REQUESTS, CAPACITY = 32, 8, 14  # of a step, at a time, pages of one request


@dataclass
class Request:
    """One request: its tokens are known from the start, of which ``done`` have been run."""

    ids: list[int]
    prompt: int
    window: int
    pages: list[int] = field(default_factory=list)
    done: int = 0


class Work(NamedTuple):
    """Of a request the tokens from ``start`` to ``end``, which one step runs."""

    request: Request
    start: int
    end: int


class Step(NamedTuple):
    """What one call is given, and what it was made from.

    Attributes:
        input_ids: int64 [T].
        paged: the metadata, all of it new objects.
        works: of each request in the batch, decodes first.
        kind: prefill, chunked, mixed or decode.
    """

    input_ids: Tensor
    paged: Paged
    works: list[Work]
    kind: str


class Scheduler:
    """Fills each step with the next token of every running request, then with prompts.

    Args:
        seed: decides on all that is random.
        sizes: of the model; page 0 is reserved.
        device: of the tensors of each step.
    """

    def __init__(self, seed: int, sizes: Sizes, device: str) -> None:
        self.random, self.sizes, self.device = random.Random(seed), sizes, device
        self.free = list(range(1, sizes.pages))
        self.running: list[Request] = []

    def step(self) -> Step:
        """The next step; frees the pages of requests that end with it."""
        self.arrive()
        prompts = [r for r in self.running if r.done < r.prompt]
        decoding = [r for r in self.running if r.done >= r.prompt]
        if prompts and self.random.random() < 0.3:  # prompts first: the others wait
            decoding = []
        works = [Work(r, r.done, r.done + 1) for r in decoding]
        room = self.random.randint(4, MOST_TOKENS) - len(works)
        for r in prompts:
            if room > 0:
                works.append(Work(r, r.done, min(r.prompt, r.done + room)))
                room -= works[-1].end - r.done
        self.run(works)
        ids = [i for w in works for i in w.request.ids[w.start : w.end]]
        paged = self.paged(works, len(decoding))
        step = Step(self.tensor(ids, torch.int64), paged, works, kind_of(works, len(decoding)))
        self.leave()
        return step

    def arrive(self) -> None:
        """New requests, now and then and whenever there is none."""
        some = self.random.random() < 0.2
        while not self.running or (some and len(self.running) < MOST_REQUESTS):
            some = self.random.random() < 0.5
            prompt = self.random.randint(1, self.random.choice((6, 40)))
            answer = self.random.randint(1, 12)
            ids = [self.random.randrange(self.sizes.vocabulary) for _ in range(prompt + answer)]
            window = self.random.choice((WHOLE, WHOLE, WHOLE, 9))
            self.running.append(Request(ids, prompt, window))

    def run(self, works: list[Work]) -> None:
        """Takes pages for new tokens, in no order, and counts the tokens as run."""
        for r, _, end in works:
            while len(r.pages) * self.sizes.page_size < end:
                r.pages.append(self.free.pop(self.random.randrange(len(self.free))))
            r.done = end

    def leave(self) -> None:
        """Pages of requests that are done are free for others, with what is stored in them."""
        for r in [r for r in self.running if r.done == len(r.ids)]:
            self.free += r.pages
            self.running.remove(r)

    def paged(self, works: list[Work], decodes: int) -> Paged:
        """The metadata of a step."""
        size = self.sizes.page_size
        starts, slots, positions = [0], [], []
        for r, start, end in works:
            starts.append(starts[-1] + end - start)
            positions += range(start, end)
            slots += [r.pages[p // size] * size + p % size for p in range(start, end)]
        at = self.tensor(positions, torch.int64)
        windows = [w.request.window for w in works]
        return Paged(
            core=Tokens(slots=self.tensor(slots, torch.int64), positions=at),
            query_positions=at,
            page_table=self.table(works),
            block_counts=self.tensor([len(w.request.pages) for w in works]),
            seq_lens=self.tensor([w.end for w in works]),
            query_starts=self.tensor(starts),
            window=None if all(w == WHOLE for w in windows) else self.tensor(windows),
            page_size=size,
            decodes=decodes,
            sharpness=self.random.choice((0.5, 0.7, 1.0, 1.3)),
        )

    def table(self, works: list[Work]) -> Tensor:
        """int32 [R, CAPACITY]: the width is that of the longest request there may be."""
        rows = [[*w.request.pages, *w.request.pages[-1:] * CAPACITY][:CAPACITY] for w in works]
        return self.tensor(rows).view(-1, CAPACITY)

    def tensor(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device."""
        return torch.tensor(numbers, dtype=dtype, device=self.device)


def kind_of(works: list[Work], decodes: int) -> str:
    """What a step is: with decodes and prompts it is mixed, without decodes whole or not."""
    if decodes:
        return "decode" if decodes == len(works) else "mixed"
    whole = all(w.start == 0 and w.end == w.request.prompt for w in works)
    return "prefill" if whole else "chunked"
