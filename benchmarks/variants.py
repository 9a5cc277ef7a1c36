"""What can be called for one step of DeepSeek-V4: engines, and recordings of a whole step."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from harness import Call, Refused, plans_of, replayed
from torch import Tensor

import torch_bcg
from torch_bcg.dsv4 import DeepseekV4, DSV4Metadata, Engine, Layout, Request, Scheduler, inputs
from torch_bcg.dsv4 import model as marking
from torch_bcg.errors import OptionError

META, MARKED = "breakable_cuda_graphs", "deepseek_v4_attention_with_output"
ENGINES: dict[str, dict[str, Any] | None] = {  # options of the backend; None: eager
    "eager": None,
    "meta": None,
    "bcg": {},
    "inductor": {"inner": "inductor"},
    "unchecked": {"inner": "inductor", "check": "off"},
    "segments": {"execute": "segments"},
}
FLOORS = {"floor": "bcg", "inductor-floor": "inductor"}  # of which engine
DECODES, PROMPTS = (16384, 8192, 4096, 1024), (12288, 6144, 2048, 0)  # positions that are done


class Lane:
    """An engine with memory and requests of its own; all lanes decide the same.

    Attributes:
        done: positions that are done, of requests that decode and of those with more of a prompt.
        compilations, seconds: of segments by another compiler, so far.
        unfused: segments that it could not compile.
    """

    def __init__(
        self, model: DeepseekV4, layout: Layout, done: Sequence[Sequence[int]], options: Any
    ) -> None:
        self.engine = Engine(model, layout, None if options is None else "bcg", options)
        self.done, self.options = done, options or {}
        self.compilations, self.seconds, self.unfused = 0, 0.0, 0

    def take(self, ids: Tensor) -> None:
        """Decides a step of so many tokens, and runs it until it is replayed.

        Raises:
            Refused: it has other tokens, or is not replayed.
        """
        engine, size, tokens = self.engine, self.engine.layout.context, len(ids)
        # Only their number counts here: which tokens they have is said at each call.
        decodes, prompts = self.done
        requests = [Request(range(size), n, n) for n in decodes]
        requests += [Request(range(size), size, n) for n in prompts]
        scheduler = Scheduler(requests, engine.layout)
        for _ in requests[2:]:  # one more comes in with each, the last one below
            scheduler.step(engine.pools, len(requests))
        _, self.batch = inputs(scheduler.step(engine.pools, tokens), engine.pools)
        if self.batch.num_tokens != tokens:
            raise Refused(f"a step of {tokens} tokens is too small or too large.")
        first = torch_bcg.stats()
        for _ in range(3):  # a real run or two, then a replay
            before = torch_bcg.stats()
            self.step(ids)
        after = torch_bcg.stats()
        if engine.backend and not replayed(before, after):
            raise Refused(f"a step of {tokens} tokens is not replayed with {self.options}.")
        if "inner" in self.options:
            self.compilations += after.inner_compilations - first.inner_compilations
            self.seconds += after.inner_seconds - first.inner_seconds
            self.unfused += sum(after.unfused.values()) - sum(first.unfused.values())
        # Where the program of this size reads it, if there is one.
        kept = engine.kept.get(tokens)
        self.md = DSV4Metadata.create(self.batch, engine.layout, tokens, out=kept)

    def forward(self, ids: Tensor) -> Tensor:
        """The step without building its metadata."""
        return self.engine.forward(ids, self.md)

    def step(self, ids: Tensor) -> Tensor:
        """The whole step."""
        return self.engine.step(ids, self.batch)

    def fill(self) -> None:
        """All memory as before the step: the same random numbers in every lane."""
        source = torch.Generator(self.batch.seq_lens.device).manual_seed(0)
        for pool in self.engine.pools.layers.buffers():
            pool.normal_(generator=source)

    @property
    def cuts(self) -> int:
        """Eager segments of a step."""
        plans = plans_of(self.engine.compiled) if self.engine.backend else ()
        return sum(len(p.segments) - len(p.graph_segments) for p in plans)


def meta(lane: Lane, ids: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """The model with Meta's package; its README says how."""
    package: Any = importlib.import_module(META)
    graph, stream = package.BreakableCUDAGraph(), torch.cuda.Stream()
    marked: Any = getattr(marking, MARKED)
    setattr(marking, MARKED, package.no_graph(marked.__wrapped__))  # the model finds it there
    try:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                lane.forward(ids)
        torch.cuda.current_stream().wait_stream(stream)
        with torch_bcg.bind_metadata(lane.md), package.breakable_graph(graph):
            result = lane.engine.compiled(ids)
    finally:
        setattr(marking, MARKED, marked)
    return result, graph.replay


def floor(lane: Lane, ids: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Everything in one graph: under a capture of somebody else's, bcg runs its segments inline."""
    graph = torch.cuda.CUDAGraph()
    with torch_bcg.bind_metadata(lane.md), torch.cuda.graph(graph):
        result = lane.engine.compiled(ids)
    return result, graph.replay


RECORDED = {"meta": meta, "floor": floor, "inductor-floor": floor}


def static(name: str, lane: Lane, ids: Tensor) -> Call:
    """A call of what is recorded as a whole, over memory of its own for tokens and rows."""
    given = ids.clone()
    result, replay = RECORDED[name](lane, given)

    def call(ids: Tensor) -> Tensor:
        with torch_bcg.bind_metadata(lane.md):
            given.copy_(ids)
            replay()
            return result.clone()

    return call


def missing(name: str, gpu: bool) -> str:
    """What a variant lacks to run here, or ""."""
    if name in RECORDED and not gpu:
        return "needs a GPU"
    return "not installed" if name == "meta" and not importlib.util.find_spec(META) else ""


def lanes_of(
    names: Sequence[str], model: DeepseekV4, sizes: Sequence[int]
) -> tuple[dict[str, Lane], dict[str, str]]:
    """Those that variants need, and eager; and why there is none for some variants."""
    gpu = model.embedding.weight.is_cuda
    done = [[n if gpu else n // 64 for n in each] for each in (DECODES, PROMPTS)]
    flat, most = list(chain(*done)), max(sizes)
    pages = (sum(flat) + most) // model.config.page_size + 2 * len(flat)
    layout = model.config.layout(max(flat) + most, len(flat), pages)
    notes = {name: why for name in names if (why := missing(name, gpu))}
    lanes: dict[str, Lane] = {}
    for name in dict.fromkeys(["eager", *(FLOORS.get(n, n) for n in names if n not in notes)]):
        options = ENGINES[name]
        if options is not None:
            options = {**options, "buckets": list(sizes), "on_eager_call": "count"}
        try:
            lanes[name] = Lane(model, layout, done, options)
        except OptionError as error:
            notes |= {n: error.args[0] for n in names if FLOORS.get(n, n) == name}
    return lanes, {n: notes[n] for n in names if n in notes}
