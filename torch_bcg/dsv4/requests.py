"""Whole requests through an engine: which tokens of which request are in which step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from torch_bcg.dsv4.engine import Engine, check_model
from torch_bcg.dsv4.fields import ExtendBatch
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import MOST_ROWS
from torch_bcg.dsv4.model import DeepseekV4
from torch_bcg.dsv4.pools import Pools

AT_A_TIME = 4
"""Requests that are in steps together; the next one takes the place of one that ended."""


@torch.no_grad()
def run_requests(
    model: DeepseekV4,
    prompts: Iterable[Sequence[int]],
    *,
    chunk_size: int,
    backend: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Logits of every token of every prompt, run in mixed steps over paged memory.

    At most `AT_A_TIME` requests are in steps together, see `Scheduler`.

    Args:
        model: see `convert_from_transformers`.
        prompts: lists of token ids; none is empty.
        chunk_size: most tokens of a step, from 1 up; more than 65,536 count as 65,536.
        backend: ``"bcg"`` compiles, for this call; keep an `Engine` for many. None runs eagerly.
        options: of the backend, see `Engine`.

    Returns:
        For each prompt float32 ``[len(prompt), vocabulary]``, on the model's device: row i says
        what follows its token i. Nothing is sampled.

    Raises:
        ValueError: an empty prompt, a token id that is none, or a chunk size below 1.
        BCGError: see `Engine`.
    """
    check_model(model)
    prompts = list(prompts)
    for i, prompt in enumerate(prompts):
        _check_prompt(i, prompt, model.config.vocab_size)
    if not isinstance(chunk_size, Integral) or int(chunk_size) < 1:
        raise ValueError(f"run_requests: chunk_size is {chunk_size!r}; expected an int from 1 up.")
    if not prompts:
        return []
    layout = model.config.layout(max(map(len, prompts)), min(AT_A_TIME, len(prompts)))
    requests = [Request(ids, len(ids)) for ids in prompts]
    rows: dict[int, list[Tensor]] = {id(r): [] for r in requests}
    scheduler = Scheduler(requests, layout)
    with contextlib.closing(Engine(model, layout, backend, options)) as engine:
        while works := scheduler.step(engine.pools, min(int(chunk_size), MOST_ROWS)):
            logits = model.logits(engine.step(*inputs(works, engine.pools)))
            for work, mine in zip(works, logits.split([w.tokens for w in works]), strict=True):
                rows[id(work.request)].append(mine)
    return [torch.cat(rows[id(r)]) for r in requests]


def _check_prompt(i: int, prompt: object, vocabulary: int) -> None:
    expected = f"expected a list of token ids, each from 0 to {vocabulary - 1}"
    if not isinstance(prompt, (list, tuple)) or not prompt:
        found = "empty" if isinstance(prompt, (list, tuple)) else f"a {type(prompt).__name__}"
        raise ValueError(f"run_requests: prompts[{i}] is {found}; {expected}.")
    for token in prompt:
        if not isinstance(token, Integral) or not 0 <= int(token) < vocabulary:
            raise ValueError(f"run_requests: prompts[{i}] has the token {token!r}; {expected}.")


@dataclass
class Request:
    """Tokens of one request; which they are is known from the start.

    Attributes:
        ids: token ids.
        prompt: how many of them may share a step; each of the others has one of its own.
        done: how many have been run.
        slot: its row in the tables, 0 before it has one.
        pages: full pages, in order of its positions.
    """

    ids: Sequence[int]
    prompt: int
    done: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def ready(self) -> int:
        """Tokens that the next step may run."""
        left = min(self.prompt, len(self.ids)) - self.done
        return left if left > 0 else min(1, len(self.ids) - self.done)


@dataclass(frozen=True)
class Work:
    """Tokens of one request in one step.

    Attributes:
        request: whose.
        start, end: positions, the last one not included.
    """

    request: Request
    start: int
    end: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.start


class Scheduler:
    """Decides who runs, and gives out pages and slots.

    Two requests begin with the first step and one more with each step after it, as long as there
    is a slot. Those that are past their prompt come first, then the others share what is left.

    Args:
        requests: in the order in which they begin.
        layout: of the engine; page 0 and slot 0 are nobody's. All slots can be in use at a time.

    Raises:
        ValueError: a request is empty or has more tokens than ``layout.context``, or there is no
            slot, or another scheduler had it.
    """

    def __init__(self, requests: Iterable[Request], layout: Layout) -> None:
        self.layout, self.waiting = layout, deque(requests)
        for r in self.waiting:
            _check_new(r)
            if not 0 < len(r.ids) <= layout.context or layout.requests < 2:
                raise ValueError(
                    f"Scheduler: a request of {len(r.ids)} tokens, a layout of {layout.context}"
                    f" positions and {layout.requests} request slots; expected 1 token up to as "
                    "many as positions, and a slot beside the reserved one."
                )
        self.running: list[Request] = []
        self.slots = list(range(1, layout.requests))
        # Two orders, so that a full page and its page in the window's space differ in number.
        self.pages = list(range(1, layout.pages))
        half = -(-layout.pages // 2)
        self.swa_pages = deque([*range(half, layout.pages), *range(1, half)])
        self.swa_of: dict[int, int] = {}

    def step(self, pools: Pools, most: int) -> list[Work]:
        """The next step, its tokens mapped in the tables of ``pools``; empty when all is done.

        Args:
            pools: of the engine.
            most: tokens of the step, from 1 up.

        Raises:
            ValueError: ``most`` is less than 1, or requests need more pages than there are.
        """
        if most < 1:
            raise ValueError(f"Scheduler.step: most is {most}; expected 1 or more.")
        self._leave()
        self._arrive(1 if self.running else 2)
        works: list[Work] = []
        order = sorted(self.running, key=lambda r: r.done < r.prompt)
        for i, r in enumerate(order):
            share = -(-most // (len(order) - i))
            tokens = min(share, r.ready)
            if tokens:
                works.append(Work(r, r.done, r.done + tokens))
                most -= tokens
                r.done += tokens
                self._map(r, pools)
        self.running = self.running[1:] + self.running[:1]  # who is first gets the larger share
        return works

    def _arrive(self, most: int) -> None:
        """Lets waiting requests in, while there is a slot."""
        while self.waiting and self.slots and most:
            r = self.waiting.popleft()
            _check_new(r)
            r.slot = self.slots.pop()
            self.running.append(r)
            most -= 1

    def _leave(self) -> None:
        """Gives back what requests had that are done; what is stored there stays."""
        for r in [r for r in self.running if r.done == len(r.ids)]:
            self.running.remove(r)
            self.slots.append(r.slot)
            self.pages += r.pages
            self.swa_pages.extend(self.swa_of.pop(page) for page in r.pages)

    def _map(self, r: Request, pools: Pools) -> None:
        """Gives a request pages for the tokens that it has now."""
        size = self.layout.page_size
        while len(r.pages) * size < r.done:
            if not self.pages:
                raise ValueError(
                    f"Scheduler: no page is free of the {self.layout.pages - 1} that requests can "
                    "have. Make the layout with more pages, or with fewer requests at a time."
                )
            page, swa = self.pages.pop(), self.swa_pages.popleft()
            self.swa_of[page] = swa
            first = len(r.pages) * size
            r.pages.append(page)
            offsets = torch.arange(size, dtype=torch.int32, device=pools.req_to_token.device)
            pools.req_to_token[r.slot, first : first + size] = page * size + offsets
            pools.full_to_swa[page * size : (page + 1) * size] = swa * size + offsets


def _check_new(r: Request) -> None:
    """Pages and slots are those of the scheduler that gave them."""
    if r.slot or r.pages:
        raise ValueError(
            f"Scheduler: a request has slot {r.slot} and {len(r.pages)} pages; expected one that "
            "no scheduler has had, this one neither. Make a new Request of its ids."
        )


def inputs(works: Sequence[Work], pools: Pools) -> tuple[Tensor, ExtendBatch]:
    """Token ids int64 [T] of a step, and the batch that says where they belong."""
    device, size = pools.req_to_token.device, pools.layout.page_size
    lengths = [w.tokens for w in works]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    slots = [
        w.request.pages[p // size] * size + p % size for w in works for p in range(w.start, w.end)
    ]

    def tensor(numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    ids = [token for w in works for token in w.request.ids[w.start : w.end]]
    batch = ExtendBatch(
        req_pool_indices=tensor([w.request.slot for w in works], torch.int64),
        seq_lens=tensor([w.end for w in works]),
        extend_seq_lens=tensor(lengths),
        extend_start_loc=tensor(starts),
        out_cache_loc=tensor(slots, torch.int64),
        req_to_token=pools.req_to_token,
        full_to_swa=pools.full_to_swa,
        num_tokens=len(ids),
    )
    return tensor(ids, torch.int64), batch
