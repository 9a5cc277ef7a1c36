"""Recorders: what turns a lowered segment into something that replays at fixed addresses.

`CudaRecorder` records a CUDA graph. `HostRecorder` keeps the same contract without a GPU: recording
allocates and binds and executes nothing; replay reads the operands bound when it was recorded and
writes to the memory made then, puts modes back, and raises where the segment reads the host. A new
recorder is one class and one row in `recorder_for`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_bcg.errors import CaptureError, HostReadError, OutputError
from torch_bcg.graph import modes
from torch_bcg.graph.lower import Code, Fused, Tracked, name_of
from torch_bcg.runtime import memory
from torch_bcg.runtime.device import CudaPool, Pool
from torch_bcg.runtime.lanes import OnLanes, lanes_of, unjoined


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded segment: ``replay`` recomputes ``outputs`` where they are."""

    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]
    owner: object = None


class Recorder(Protocol):
    """Records segments of one program."""

    def record(
        self,
        code: Code,
        operands: Sequence[object],
        allocate: Sequence[Callable[[], Tensor]],
    ) -> Recording:
        """Records ``code`` on ``operands``; ``allocate`` makes memory for each output."""
        ...


class HostRecorder:
    """Replays by running the segment again on the memory it was bound to."""

    def record(
        self,
        code: Code,
        operands: Sequence[object],
        allocate: Sequence[Callable[[], Tensor]],
    ) -> Recording:
        """Binds and allocates; nothing is executed."""
        outputs = tuple(make() for make in allocate)
        # Held no more than a CUDA graph would: what is freed after recording shows here too.
        bound = [
            weakref.ref(x) if isinstance(x, Tensor) else functools.partial(_same, x)
            for x in operands
        ]
        del operands
        results_of: Any = code.graph.output_node().args[0]
        names = [str(n.name) for n in results_of]
        forward = code.forward
        # The memory is not the recording's, as that of a CUDA graph is not.
        places = [memory.unowned(t) for t in outputs]
        narrowed = [memory.once(t) for t in places]
        segment = name_of(code)

        def replay() -> None:
            operands = [ref() for ref in bound]
            if any(
                x is None and isinstance(ref, weakref.ref)
                for ref, x in zip(bound, operands, strict=True)
            ):
                raise freed(segment, code, operands)
            with modes.preserved(), no_host_reads(segment):
                results = forward(*operands)
            for name, made, once, result in zip(names, places, narrowed, results, strict=True):
                put(result, made, once, name, segment)

        return Recording(replay, outputs)


class CudaRecorder:
    """Records CUDA graphs into the device's pool, on its capture stream."""

    def __init__(self, pool: CudaPool) -> None:
        self.pool = pool

    def record(
        self,
        code: Code,
        operands: Sequence[object],
        allocate: Sequence[Callable[[], Tensor]],
    ) -> Recording:
        """Records the segment's kernels; they run at replay, not now."""
        pool = self.pool
        pool.prepare()
        run = self.runner(code)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(pool.stream), modes.preserved():
            # A weight somebody cast before would be read at an address nobody keeps.
            torch.set_autocast_cache_enabled(False)
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                outputs = run(*operands)
            except BaseException:  # an interrupt too must end the capture
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                pool.abandon()
                raise
            try:
                with warnings.catch_warnings():  # a compiler may leave nothing of a segment
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    graph.capture_end()
            except RuntimeError as error:
                pool.abandon()
                named = unjoined(code, error)
                if named is None:
                    raise
                raise named from error
        # The method in C++: the one of the class in Python does nothing but call it.
        return Recording(super(torch.cuda.CUDAGraph, graph).replay, tuple(outputs), graph)

    def runner(self, code: Code) -> Callable[..., Sequence[Tensor]]:
        """What runs a segment once while it is recorded."""
        if isinstance(code, Fused):
            return code.forward
        lanes = lanes_of(code)
        if not lanes:
            return Tracked(code).run
        streams = self.pool.stream, *self.pool.sides(len(lanes))
        return OnLanes(code, dict(zip((0, *lanes), streams, strict=True))).run


def _same(x: object) -> object:
    return x


def freed(segment: str, code: Code, operands: Sequence[object]) -> CaptureError:
    """The error for a recording whose memory is gone: a program must own what it was bound to."""
    names = [n.name for n in code.graph.find_nodes(op="placeholder")]
    gone = [n for n, x in zip(names, operands, strict=True) if x is None]
    return CaptureError(
        f"Memory that a recording reads was freed: {', '.join(gone)}.",
        where=segment,
        expected="memory that lives as long as the program",
        found="memory that was given back",
        fix="This is a fault in torch_bcg; please report it.",
    )


def recorder_for(pool: Pool, unrecorded: bool) -> Recorder:
    """The recorder of a device; ``unrecorded`` runs the same segments from the same slots."""
    if isinstance(pool, CudaPool) and not unrecorded:
        return CudaRecorder(pool)
    return HostRecorder()


def put(
    result: object, place: Tensor, once: Callable[[Tensor], Tensor], name: str, segment: str
) -> None:
    """Copies a result of a segment to where it was planned, each address ``once``.

    Raises:
        OutputError: it has another shape or dtype.
    """
    if not isinstance(result, Tensor) or result.shape != place.shape or result.dtype != place.dtype:
        raise wrong_output(name, segment, place, result)
    once(place).copy_(once(result))


def wrong_output(name: str, segment: str, expected: Tensor, found: object) -> OutputError:
    """The error for a result that is not what its facts say."""

    def text(x: object) -> str:
        return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"

    return OutputError(
        f"The result of '{name}' is not what its fake implementation says.",
        where=segment,
        expected=text(expected),
        found=text(found),
        fix="Correct the fake= of the marked function (or register_fake of the operator): it must "
        "give the shape and dtype of the real result.",
    )


_HOST_READS = (
    "tolist", "item", "numpy", "cpu",
    "__bool__", "__int__", "__float__", "__index__", "__complex__",
)  # fmt: skip
_MOVES = ("to", "cuda", "copy_")  # a host read only if they cross between host and device
_PATCHING = threading.RLock()


@contextlib.contextmanager
def host_reads(found: Callable[[str], None]) -> Iterator[None]:
    """Calls ``found`` with the method's name where this thread reads a tensor's value on the host.

    Dispatch modes do not see ``tolist`` inside a custom operator, so the methods are replaced for
    the time being, under a lock; other threads keep the plain ones.
    """
    here = threading.get_ident()
    with _PATCHING:
        originals = {name: getattr(Tensor, name) for name in (*_HOST_READS, *_MOVES)}
        own = {name: Tensor.__dict__.get(name) for name in originals}

        def patched(name: str) -> Callable[..., Any]:
            original = originals[name]

            def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                read_here()
                return original(self, *args, **kwargs)

            def move(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                result = original(self, *args, **kwargs)
                other = args[0] if name == "copy_" and args else result
                if self.device.type != getattr(other, "device", self.device).type:
                    read_here()
                return result

            def read_here() -> None:
                if threading.get_ident() == here and not torch.compiler.is_compiling():
                    found(name)

            return move if name in _MOVES else read

        for name in originals:
            setattr(Tensor, name, patched(name))
        try:
            yield
        finally:
            for name, before in own.items():
                if before is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, before)


@contextlib.contextmanager
def no_host_reads(segment: str) -> Iterator[None]:
    """Raises where a recorded segment reads the host: a CUDA graph would replay the old value."""

    def found(name: str) -> None:
        raise HostReadError(
            f"A recorded segment reads a tensor's value on the host with Tensor.{name}.",
            where=segment,
            expected="only work that the device does alone",
            found=f"Tensor.{name}",
            fix="Mark the operation with torch_bcg.eager_on_graph.",
        )

    with host_reads(found):
        yield
