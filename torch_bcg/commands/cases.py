"""What ``demo`` calls: a model, eager and compiled, and one pair of calls after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_bcg.commands.models import MODELS, VOCABULARY, build
from torch_bcg.commands.results import Asked
from torch_bcg.dsv4 import DSV4Config, Engine
from torch_bcg.dsv4.attention import deepseek_v4_attention_with_output
from torch_bcg.dsv4.model import DeepseekV4
from torch_bcg.dsv4.random import random_model
from torch_bcg.dsv4.requests import AT_A_TIME, Request, Scheduler, Work, inputs

BUILT_IN = "deepseek_v4"
"""The model of this package; all others are those of ``transformers``."""

Thunk = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """The same call twice; each is to be made once, eager first, before the next is asked for.

    Attributes:
        size: calls of one size have one program.
        kind: of a step: ``"prefill"``, ``"mixed"`` or ``"decode"``; None: not a step.
        eager, compiled: give logits.
    """

    size: int
    kind: str | None
    eager: Thunk
    compiled: Thunk


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its calls.

    Attributes:
        title: what it is called.
        marked: the operation or class that runs between recorded segments.
        sizes: what the size of a call is: ``"rows"`` or ``"length"``.
        compiled: what `torch.compile` returned.
        calls: as many as were asked for.
    """

    title: str
    marked: str
    sizes: str
    compiled: Callable[..., Any]
    calls: Iterator[Call]


def case_of(asked: Asked) -> Case:
    """Builds and compiles the model that was asked for.

    Raises:
        MisuseError: it cannot be built here.
    """
    return _steps(asked) if asked.model == BUILT_IN else _whole(asked)


def _turns(asked: Asked) -> tuple[int, ...]:
    """Each length as often as was asked for, one after the other."""
    return asked.lengths * asked.calls


# A model of transformers: whole sequences.


def _whole(asked: Asked) -> Case:
    model, attention = build(asked.model, asked.layers, asked.device, asked.seed)
    options: dict[str, Any] = {"mark": [attention]}
    compiled = torch.compile(model, backend="bcg", options=options)

    def logits(called: Callable[..., Any], ids: Tensor) -> Tensor:
        found: Tensor = called(ids).logits
        return found

    def calls() -> Iterator[Call]:
        for length in _turns(asked):
            ids = torch.randint(3, VOCABULARY, (1, length), device=asked.device)
            # One graph for all lengths from the first call on; only sizes are symbols then.
            torch._dynamo.maybe_mark_dynamic(ids, 1)
            yield Call(length, None, partial(logits, model, ids), partial(logits, compiled, ids))

    title = f"{MODELS[asked.model].name} of transformers"
    return Case(title, attention.__name__, "length", compiled, calls())


# The model of this package: steps that hold tokens of several requests.


def _steps(asked: Asked) -> Case:
    config = DSV4Config.tiny(asked.layers)
    model = random_model(config, torch.device(asked.device), torch.float32, asked.seed)
    # Steps that only decode have a size of their own; beside a single length it might not repeat.
    small = {AT_A_TIME} if len(asked.lengths) > 1 else set()
    eager = _Side(model, asked)
    compiled = _Side(model, asked, "bcg", {"buckets": sorted(small | {*asked.lengths})})

    def calls() -> Iterator[Call]:
        for most in _turns(asked):
            works, expected = eager.step(most)
            _, found = compiled.step(most)
            size = compiled.engine.rows(sum(w.tokens for w in works))
            yield Call(size, _kind(works), expected, found)

    marked = deepseek_v4_attention_with_output.__name__
    return Case("DeepSeek-V4, mixed steps", marked, "rows", compiled.engine.compiled, calls())


class _Side:
    """One engine, and requests of its own: those of the other side, in other memory."""

    def __init__(self, model: DeepseekV4, asked: Asked, *backend: Any) -> None:
        requests = _requests(asked, model.config.vocab_size)
        layout = model.config.layout(max(len(r.ids) for r in requests), AT_A_TIME)
        self.engine = Engine(model, layout, *backend)
        self.scheduler = Scheduler(requests, layout)

    def step(self, most: int) -> tuple[list[Work], Thunk]:
        """What runs in the next step, and what runs it."""
        works = self.scheduler.step(self.engine.pools, most)
        return works, partial(self._logits, *inputs(works, self.engine.pools))

    def _logits(self, *step: Any) -> Tensor:
        return self.engine.model.logits(self.engine.step(*step))


def _requests(asked: Asked, vocabulary: int) -> list[Request]:
    """As many as all steps together have room for, so that none is empty."""
    source = random.Random(asked.seed)
    longest = 3 * max(asked.lengths) // 2  # some prompts need several steps
    requests: list[Request] = []
    room = asked.calls * sum(asked.lengths)
    while room > 0:
        prompt, answer = source.randint(1, longest), source.randint(2, 8)
        ids = source.choices(range(vocabulary), k=prompt + answer)
        requests.append(Request(ids, prompt))
        room -= len(ids)
    return requests


def _kind(works: list[Work]) -> str:
    decoding = {w.start >= w.request.prompt for w in works}
    return "mixed" if len(decoding) > 1 else "decode" if decoding == {True} else "prefill"
