"""(Plan, key, static addresses) -> Program: takes memory and records. Runs no eager operation.

Everything was decided before: this module walks the plan once and turns each recorded segment into
a recording; `runtime.calls` makes the steps around them. Slots and recordings are made outside
inference mode, so that a call in any mode may write them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch

from torch_bcg.errors import CaptureError
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.ir import GraphSegment
from torch_bcg.graph.lower import Fused, failed_node
from torch_bcg.runtime.calls import Bound, bind
from torch_bcg.runtime.device import no_collection
from torch_bcg.runtime.fronts import Scene
from torch_bcg.runtime.inner import Inner, reason_of
from torch_bcg.runtime.memory import Aliases
from torch_bcg.runtime.program import Program
from torch_bcg.runtime.recorders import Recording, recorder_for
from torch_bcg.runtime.statics import statics_of
from torch_bcg.runtime.workspace import Workspace


def capture(
    space: Workspace,
    unrecorded: Callable[[int], bool],
    aliases: Aliases | None = None,
    checks: tuple[str, ...] = (),
    inner: Inner | None = None,
    opens: bool = False,
) -> Program:
    """Builds the program of one key and one set of static tensors.

    Args:
        space: the plan, its key, and where memory comes from.
        unrecorded: segments, by index, to run unrecorded from the same slots.
        aliases: hands out program memory itself as outputs; None: copies.
        checks: what is checked in a replay, see `runtime.checks`.
        inner: compiles what is recorded; None: as it is.
        opens: a replay may begin before all addresses are compared.

    Raises:
        CaptureError: a segment cannot be recorded; its ``node`` is the one that failed.
    """
    with torch.inference_mode(False), torch.no_grad(), no_collection():
        taken = space.slots.taken
        with no_room():
            space.bind()
        recordings = {}
        recorded_kernels = 0
        for segment in space.plan.graph_segments:
            space.release(segment.index)
            recordings[segment.index] = record(space, segment, unrecorded(segment.index), inner)
            recorded_kernels += 0 if unrecorded(segment.index) else segment.kernels
        space.held.clear()
        grown = space.grown
        opening = space.plan.opening if opens else None
        scene = Scene(space, recordings, aliases, checks, opening)

        def at(key: tuple[int, ...]) -> Bound:
            with torch.inference_mode(False), torch.no_grad():
                return bind(scene, key)

        program = Program(
            plan=space.plan,
            key=space.key,
            statics=statics_of(space.plan, list(space.args.values()), space.attribute, opening),
            bind=at,
            kernels=space.plan.kernels,
            recorded_kernels=recorded_kernels,
            grown=grown,
            # A recording knows addresses and holds nothing: what it was bound to lives with it.
            owners=[space, *recordings.values()],
            pool=space.pool,
            fusing=None if inner is None else fusing_of(space),
        )
        with no_room():
            program.at(space.key)
        program.bytes = grown + space.slots.taken - taken
        space.forget_call()
        return program


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Says of a device that is full what a segment would say that cannot be recorded."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        caught = CaptureError(
            "There is no memory for the slots of a program.",
            where="capture",
            expected="room for its slots",
            found=str(error).splitlines()[0],
            fix="Record fewer or smaller sizes (buckets, max_programs).",
        )
        caught.out_of_memory = True
        raise caught from error


def record(
    space: Workspace, segment: GraphSegment, unrecorded: bool, inner: Inner | None
) -> Recording:
    """Records one segment and binds what it makes."""
    plain = space.lowering.segment(segment)
    code = plain if inner is None else inner.of(space, segment, plain)
    operands = list(space.operands(segment).values())
    made = [lambda v=space.values[n]: space.recorded(v) for n in segment.outputs]
    recorder = recorder_for(space.pool, unrecorded)
    before = space.pool.reserved()
    try:
        recording = recorder.record(code, operands, made)
    except Exception as error:  # anybody's operator raises anything; it becomes a reason
        if (
            inner is None
            or not isinstance(code, Fused)
            or isinstance(error, torch.OutOfMemoryError)
        ):
            raise capture_error(segment, failed_node(error), error) from error
        inner.refuse(code, reason_of(error))
        inner.tell(reason_of(error), space, segment)
        return record(space, segment, unrecorded, None)
    space.grown += max(0, space.pool.reserved() - before)
    space.codes[segment.index] = code
    space.keep(segment.outputs, recording.outputs)
    return dataclasses.replace(recording, outputs=())


def fusing_of(space: Workspace) -> Fusing:
    """What was recorded of each segment."""
    return Fusing(
        tuple(zip(space.symbols, space.key, strict=True)),
        tuple((i, c.source.number) for i, c in space.codes.items() if isinstance(c, Fused)),
        tuple(space.unfused.items()),
    )


def capture_error(segment: GraphSegment, node: str, error: BaseException) -> CaptureError:
    """The error for a segment that cannot be recorded; ``node`` is where it failed."""
    caught = CaptureError(
        f"Segment {segment.index} cannot be recorded.",
        where=f"segment {segment.index}, node '{node or '?'}'",
        expected="operations that the device does alone",
        found=f"{type(error).__name__}: {error}".splitlines()[0],
        fix="Mark the operation with torch_bcg.eager_on_graph.",
    )
    caught.segment, caught.node = segment.index, node
    caught.out_of_memory = isinstance(error, torch.OutOfMemoryError)
    return caught
