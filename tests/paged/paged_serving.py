"""Two ways to serve steps of a compiled model, each beside an eager twin that every step must equal.

`by_calls` calls it with whatever size a step has, and what is compiled pads. `by_engine` is what a
serving engine does: it pads to a few sizes itself and keeps one metadata object for each, whose
tensors the recorded segments read where they lie.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_bcg
import torch_bcg.metadata
from paged.paged_model import RESERVED, Llama, Paged, Sizes
from paged.paged_requests import MOST_REQUESTS, MOST_TOKENS, Scheduler, Step
from twin import Counts, assert_same, counted

LADDER = [4, 8, 16, MOST_TOKENS]
OPTIONS = {
    "buckets": LADDER,
    "bucket_dim": ("input_ids", 0),
    "pad": {"core.slots": RESERVED},
    "check": "poison",
    "on_eager_call": "error",
}


class Served:
    """A compiled model, and an eager twin with pools of its own."""

    def __init__(self, model: Llama) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.compiled = torch.compile(model, backend="bcg", dynamic=True, options=OPTIONS)

    def serve(self, call: Callable[[Step], Tensor], source: Scheduler, steps: int) -> Counter[str]:
        """Compares every step -> how many there were of each kind."""
        kinds: Counter[str] = Counter()
        for _ in range(steps):
            step = source.step()
            kinds[step.kind] += 1
            self.compare(call(step), step)
        return kinds

    def call(self, step: Step) -> Tensor:
        """Logits of a step at its own size: float32 [T, vocabulary]."""
        with torch_bcg.bind_metadata(step.paged):
            return self.compiled(step.input_ids)

    def compare(self, got: Tensor, step: Step) -> None:
        """The logits and all that lies in the pools are those of eager."""
        with torch_bcg.bind_metadata(step.paged):
            want = self.twin(step.input_ids)
        assert_same(got, want, exact=False)  # a kernel for more rows may round otherwise
        assert_same(self.model.pools(), self.twin.pools(), exact=False)


class Engine:
    """Replays at the sizes of the ladder, each with the one metadata object it was captured with.

    Args:
        compiled: the model.
        empty: metadata of no request, from which that of each size is made.
    """

    def __init__(self, compiled: torch.nn.Module, empty: Paged) -> None:
        self.compiled, self.device = compiled, empty.page_table.device
        self.captured = {n: self.capture(n, empty) for n in sorted(LADDER, reverse=True)}

    def capture(self, size: int, empty: Paged) -> Paged:
        """Records a size with a step of nobody -> metadata that lies in the program's slots."""
        live = empty.padded(size, MOST_REQUESTS)
        with torch_bcg.bind_metadata(live):
            torch_bcg.warm_up(self.compiled, self.ids, [size], progress=False)
        (program,) = [p for p in torch_bcg.programs(self.compiled) if size in p.sizes.values()]
        return program.captured(live)

    def ids(self, size: int) -> tuple[Tensor]:
        """Arguments for a number of tokens."""
        return (torch.zeros(size, dtype=torch.int64, device=self.device),)

    def call(self, step: Step) -> Tensor:
        """Logits of a step: float32 [T, vocabulary]."""
        tokens = len(step.input_ids)
        size = min(n for n in self.captured if n >= tokens)
        captured = self.captured[size]
        torch_bcg.metadata.refresh(captured, step.paged.padded(size, MOST_REQUESTS))
        with torch_bcg.bind_metadata(captured):
            return self.compiled(F.pad(step.input_ids, (0, size - tokens)))[:tokens]

    def addresses(self) -> list[int]:
        """Where lies what recorded segments read of the metadata."""
        cores = [c.core for c in self.captured.values()]
        return [t.data_ptr() for core in cores for t in (core.slots, core.positions)]


class Report(NamedTuple):
    """What was served.

    Attributes:
        kinds: how many steps of each kind.
        counts: what torch_bcg counted meanwhile.
        compiled: what was called.
    """

    kinds: Counter[str]
    counts: Counts
    compiled: torch.nn.Module


@contextlib.contextmanager
def registered(**more: tuple[str, ...]) -> Iterator[None]:
    """torch_bcg knows `Paged` and what inherits from it; what is not declared is derived."""
    handle = torch_bcg.register_metadata_binding(
        Paged, equal=("page_size",), copy=("page_table",), **more
    )
    try:
        yield
    finally:
        handle.remove()


def by_calls(
    device: str,
    steps: int,
    model: type[Llama] = Llama,
    scheduler: type[Scheduler] = Scheduler,
    seed: int = 0,
) -> Report:
    """Each step at its own size."""
    served, source = Served(model(Sizes()).to(device)), scheduler(seed, Sizes(), device)
    with registered(), torch.no_grad(), counted() as counts:
        kinds = served.serve(served.call, source, steps)
    return Report(kinds, counts, served.compiled)


def by_engine(
    device: str,
    steps: int,
    model: type[Llama] = Llama,
    scheduler: type[Scheduler] = Scheduler,
    seed: int = 0,
) -> Report:
    """Each step at a size of the ladder, with metadata that stays where it is."""
    served, source = Served(model(Sizes()).to(device)), scheduler(seed, Sizes(), device)
    with registered(), torch.no_grad():
        engine = Engine(served.compiled, source.paged([], 0))
        addresses = engine.addresses()
        with counted() as counts:
            kinds = served.serve(engine.call, source, steps)
        assert counts.captures == 0, "recorded again"
        assert engine.addresses() == addresses, "moved"
    return Report(kinds, counts, served.compiled)
