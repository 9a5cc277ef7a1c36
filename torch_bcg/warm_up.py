"""``warm_up``: what a compiled function is to be called with is recorded before anybody waits."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.eval_frame import OptimizedModule

from torch_bcg.counters import counters
from torch_bcg.dynamo import Backend
from torch_bcg.errors import BCGError, BCGWarning
from torch_bcg.graph.buckets import LADDER
from torch_bcg.metadata import bind_metadata
from torch_bcg.options import Options
from torch_bcg.programs import graphs_of, is_compiled, wrapper_of

__all__ = ["Warmed", "warm_up"]

log = logging.getLogger("torch_bcg")
# The first call of a graph is its probe; another shape runs twice before it is recorded, and a
# padded size that a trial finds too large for a table leaves the next one to be tried.
_CALLS = 8
# A graph that Dynamo makes on the way may answer earlier sizes: more rounds than this are a model
# that is compiled again at every call.
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one size.

    Attributes:
        size: what ``make_inputs`` was given.
        seconds: time of all calls at this size, inputs and compilation included.
        bytes: memory that slots and recordings grew by; below 0 if some were freed.
        captures: programs recorded.
        how: ``replay``, or the reason why the last call was none.
    """

    size: int
    seconds: float
    bytes: int
    captures: int
    how: str


def warm_up(
    compiled: Callable[..., Any],
    make_inputs: Callable[[int], Sequence[Any]],
    sizes: Iterable[int] | None = None,
    *,
    metadata: Callable[[int], object] | None = None,
    progress: bool = True,
) -> tuple[Warmed, ...]:
    """Calls a compiled function at each size until a call is answered by a replay.

    The largest size comes first, so that the smaller ones find its memory. Every call is a real
    one, with its side effects, under the grad mode of the caller: use ``torch.inference_mode()``.
    A size is called again if Dynamo made another graph after it.

    Args:
        compiled: what ``torch.compile(..., backend="bcg")`` returned.
        make_inputs: gives the positional arguments of a call for a size, a tuple or list.
        sizes: numbers that ``make_inputs`` takes, in any order; None: those of the option
            ``buckets``, or the ladder if that is None.
        metadata: gives the object to bind for a call of a size, see `bind_metadata`.
        progress: whether to show a bar, where ``rich`` is installed and stderr is a terminal, or
            else to log a line a size, at level INFO of the logger ``torch_bcg``.

    With the option ``buckets``, graphs that are not padded to them are told in a warning: each size
    is a program of its own then, and one that was not warmed up is recorded when it comes.

    Returns:
        What became of each size, the largest first. The figures are differences of counters of the
        process: they are right if nothing else runs meanwhile.

    Raises:
        BCGError: ``compiled`` is not compiled with this backend, or ``make_inputs`` gives no tuple.
    """
    if not is_compiled(compiled):
        raise _no_program(repr(compiled).splitlines()[0])
    chosen = _ladder(compiled) if sizes is None else sizes
    ordered = sorted(set(chosen), reverse=True)
    warming = [_Warming(size, compiled, make_inputs, metadata) for size in ordered]
    with _shown(len(warming), progress) as tell:
        for w in warming:
            w.run()
            tell(w.result())
        for _ in range(_ROUNDS):
            known = _graphs(compiled)
            for w in (outdated := [w for w in warming if w.graphs != known]):
                w.run()
            if not outdated:
                break
    _tell_unpadded(compiled)
    return tuple(w.result() for w in warming)


class _Warming:
    """One size, while it is called."""

    def __init__(
        self,
        size: int,
        compiled: Callable[..., Any],
        make_inputs: Callable[[int], Sequence[Any]],
        metadata: Callable[[int], object] | None,
    ) -> None:
        self.size, self.compiled = size, compiled
        self.make_inputs, self.metadata = make_inputs, metadata
        self.seconds, self.bytes, self.captures, self.how = 0.0, 0, 0, ""
        self.graphs: frozenset[int] = frozenset()

    def result(self) -> Warmed:
        """The figures so far."""
        return Warmed(self.size, self.seconds, self.bytes, self.captures, self.how)

    def run(self) -> None:
        """Calls until it is known how calls of this size are answered."""
        held, captures, began = counters.pool_bytes, counters.captures, time.perf_counter()
        for _ in range(_CALLS):
            settled = self.call()
            if settled:
                break
        self.seconds += time.perf_counter() - began
        self.bytes += counters.pool_bytes - held
        self.captures += counters.captures - captures
        self.graphs = _graphs(self.compiled)

    def call(self) -> bool:
        """One call; whether the next one will be answered likewise."""
        arguments = self.make_inputs(self.size)
        if not isinstance(arguments, (tuple, list)):
            raise BCGError(
                "make_inputs gives no arguments of a call.",
                where=f"warm_up, size {self.size}",
                expected="a tuple of positional arguments",
                found=type(arguments).__name__,
                fix="return (x,) for one argument x",
            )
        real = counters.probes + counters.warming
        replays, before = counters.replays, dict(counters.eager_calls)
        bound = contextlib.nullcontext()
        with bound if self.metadata is None else bind_metadata(self.metadata(self.size)):
            self.compiled(*arguments)
        real = counters.probes + counters.warming - real
        reasons = [why for why, n in counters.eager_calls.items() if n > before.get(why, 0)]
        if not (real or reasons or counters.replays > replays or _graphs(self.compiled)):
            raise _no_program("a call that ran nothing of this backend")
        self.how = ", ".join(reasons) or ("replay" if counters.replays > replays else "")
        self.how = self.how or ("not replayed yet" if real else "not compiled")
        return real == 0


def _no_program(found: str) -> BCGError:
    return BCGError(
        "There is nothing to warm up.",
        where="warm_up",
        expected='what torch.compile(..., backend="bcg") returned',
        found=found,
        fix='pass torch.compile(model, backend="bcg")',
    )


def _tell_unpadded(compiled: Callable[..., Any]) -> None:
    """Warns of graphs whose sizes vary though nothing is padded, and of all if none is padded."""
    plans = [g.plan for g in graphs_of(compiled) if g.options.buckets is not None and g.probed]
    paddings = [(plan, plan.padding) for plan in plans if plan.padding is not None]
    padded = any(padding.refused is None for _, padding in paddings)
    unpadded = [
        f"{plan.name}: {padding.refused}"
        for plan, padding in paddings
        if padding.refused is not None and (plan.symbols or not padded)
    ]
    if unpadded:
        warnings.warn(
            f"warm_up: not padded to buckets, so each size is a program of its own: "
            f"{'; '.join(unpadded)}.",
            BCGWarning,
            stacklevel=3,
        )


def _graphs(compiled: Callable[..., Any]) -> frozenset[int]:
    return frozenset(graph.number for graph in graphs_of(compiled))


def _ladder(compiled: Callable[..., Any]) -> Sequence[int]:
    """The sizes of the option ``buckets``."""
    graphs = sorted(graphs_of(compiled), key=lambda graph: graph.number)
    options = graphs[0].options if graphs else _given(compiled)
    buckets = options.buckets if options is not None else None
    return buckets if isinstance(buckets, tuple) else LADDER


def _given(compiled: Any) -> Options | None:
    """The options of what is not compiled yet: Dynamo's wrapper holds backend and options.

    None where this version of torch keeps them elsewhere: the ladder is used then.
    """
    wrapper = wrapper_of(compiled)
    if isinstance(wrapper, OptimizedModule):
        context = getattr(wrapper, "dynamo_ctx", None)
    else:
        names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
        cells = dict(zip(names, getattr(wrapper, "__closure__", None) or (), strict=True))
        context = cells["self"].cell_contents if "self" in cells else None
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if not isinstance(getattr(backend, "compiler_fn", None), Backend):
        return None
    return Options.make(getattr(backend, "kwargs", {}).get("options"))


@contextlib.contextmanager
def _shown(total: int, wanted: bool) -> Iterator[Callable[[Warmed], None]]:
    """What is told of each size as it is done: a bar on a terminal, else a line in the log."""
    if not wanted:
        yield lambda warmed: None
    elif not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _logged
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("warming up", total=total)

            def advance(warmed: Warmed) -> None:
                bar.update(task, advance=1, description=f"{warmed.size}: {warmed.how}")

            yield advance


def _logged(warmed: Warmed) -> None:
    log.info(
        "warm_up: size %d: %s, %d captured, %s bytes, %.2f s",
        warmed.size, warmed.how, warmed.captures, f"{warmed.bytes:,}", warmed.seconds,
    )  # fmt: skip
