"""Checks of replays: each is wrapped around the steps when they are bound, none changes a result.

``verify`` runs each recorded segment once more, eagerly, on copies of what it writes, and compares.
``poison`` fills what nobody may read: the rows that a call does not have, and memory whose last
reader ran. In a padded program it also runs each segment again on copies in which those rows are
zero: if the call's own rows then come out otherwise, one of them was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from torch_bcg.errors import CheckError
from torch_bcg.graph import modes
from torch_bcg.graph.ir import GraphSegment
from torch_bcg.graph.lower import Code
from torch_bcg.graph.sorting import where
from torch_bcg.runtime import memory
from torch_bcg.runtime.compare import SAME, difference, is_sampled, unreserved
from torch_bcg.runtime.fillings import Filling, fill
from torch_bcg.runtime.steps import Step
from torch_bcg.runtime.workspace import Workspace


class Again:
    """A recorded segment that can be run a second time, on copies of what it writes.

    Args:
        space, segment: where it was recorded, and which one it is.
        code: what is run: the very code that was recorded, or that of the plain operations.
    """

    def __init__(self, space: Workspace, segment: GraphSegment, code: Code) -> None:
        self.space, self.segment, self.code = space, segment, code
        operands = space.operands(segment)
        self.names, self.operands = list(operands), list(operands.values())
        self.outputs = [space.resolve(n) for n in segment.outputs]
        self.skipped = set(segment.unwritten)  # whatever lay there before
        bases = (
            (v.storage, space.bound[v.name])
            for v in space.plan.values
            if v.storage in segment.writes and isinstance(space.bound.get(v.name), Tensor)
        )
        written = {b.untyped_storage().data_ptr(): storage for storage, b in bases}
        self.written = {
            i: x
            for i, x in enumerate(self.operands)
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in written
        }
        padding = space.plan.padding
        reserved = padding.reserved if padding is not None else ()
        self.reserved = {
            self.names[i]: [
                row for s, row in reserved if s == written[x.untyped_storage().data_ptr()]
            ]
            for i, x in self.written.items()
        }

    def copies(self, of: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copies of operands, which share memory where the operands do."""
        made = {}
        with torch.inference_mode(False), torch.no_grad():
            for make, parts in memory.out_of(of):
                whole = make()
                made.update({i: part(whole) for i, part in parts})
        return made

    def run(self, copies: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """Results of the segment, which writes the copies."""
        operands = [copies.get(i, x) for i, x in enumerate(self.operands)]
        with modes.preserved(), torch.inference_mode(False), torch.no_grad():
            results: Sequence[Tensor] = self.code.forward(*operands)
        return results

    def pairs(
        self, copies: Mapping[int, Tensor], results: Sequence[Tensor]
    ) -> list[tuple[str, Tensor, Tensor]]:
        """(name, replayed, run eagerly) of all that the segment makes and writes."""
        made = zip(self.segment.outputs, self.outputs, results, strict=True)
        written = ((self.names[i], x, copies[i]) for i, x in self.written.items())
        return [*(m for m in made if m[0] not in self.skipped), *written]

    def fail(self, check: str, name: str, apart: str, fix: str, sampled: bool) -> CheckError:
        """The error for a value that is not what it should be."""
        node = self.space.lowering.nodes[name]
        return CheckError(
            f"Segment {self.segment.index} gives another '{name}' replayed than run eagerly.",
            where=f"{self.segment}, node '{name}'{', ' + where(node) if where(node) else ''}",
            expected=f"what the same operations give eagerly (check={check!r})",
            found=apart + (", of the rows that were sampled" if sampled else ""),
            fix=fix,
        )


def verified(again: Again, replay: Step, tolerance: Mapping[torch.dtype, float] = SAME) -> Step:
    """``replay``, then the same segment eagerly, compared in all that it makes and writes.

    Args:
        again: the plain operations of the segment.
        replay: the step.
        tolerance: see `runtime.compare`: another one where a compiler made the recorded kernels.
    """
    if again.segment.random:
        return replay  # it draws other numbers, rightly

    def step() -> None:
        copies = again.copies(again.written)
        replay()
        results = again.run(copies)
        for name, ours, real in again.pairs(copies, results):
            apart = difference(ours, real, tolerance)
            if apart:
                fix = (
                    f"Run it unrecorded with execute='segments:{again.segment.index}', with "
                    "inner='eager' if it is fused; if that is right, mark what reads host state "
                    "in it with torch_bcg.eager_on_graph."
                )
                raise again.fail("verify", name, apart, fix, is_sampled(real))

    return step


Front = Callable[[Tensor, str, Sequence[int]], Tensor]


def without_padding(
    again: Again,
    replay: Step,
    front: Front,
    clean: Mapping[str, float],
    rowless: Callable[[str], bool],
) -> Step:
    """``replay``, then the same segment on copies whose padded rows are zero, compared in front.

    Args:
        again: the segment.
        replay: the step.
        front: (whole tensor, name, row dims) -> the rows of the call.
        clean: argument -> the number its padded rows hold, where that is not zero.
        rowless: whether a value has no rows, so that it is compared whole.
    """
    cuts = {c.name: c for c in again.segment.fronts}
    rows = {i: again.operands[i] for i, n in enumerate(again.names) if n in cuts}
    # What has rows and cannot be cut is compared where somebody cuts a view of it.
    compared = {n: c.row_dims for n, c in cuts.items()}
    compared |= {n: () for n in (*again.names, *again.segment.outputs) if rowless(n)}
    if again.segment.random:
        return replay

    def step() -> None:
        copies = again.copies({**again.written, **rows})
        for i in rows:
            name = again.names[i]
            dims = cuts[name].row_dims
            real = front(copies[i], name, dims).clone()
            # Integers as well hold something else than in the replay, but for what is declared.
            fill(copies[i], dims, real, Filling(clean.get(name, 0.0)), declared=name in clean)
        replay()
        results = again.run(copies)
        for name, ours, real in again.pairs(copies, results):
            if name not in compared:
                continue
            dims = compared[name]
            ours, real = (front(x, name, dims) for x in (ours, real))
            if not dims:
                reserved = again.reserved.get(name, ())
                ours, real = (unreserved(x, reserved) for x in (ours, real))
            apart = difference(ours, real, SAME)
            if apart:
                fix = (
                    "A row of the call follows from rows it does not have. Leave buckets out, or "
                    "mark the operation with torch_bcg.eager_on_graph."
                )
                raise again.fail("poison", name, apart, fix, is_sampled(real))

    return step


def spoil(tensors: Sequence[Tensor]) -> Step:
    """Fills memory that nobody may read any more."""
    places = [memory.once(t)(t) for t in tensors]

    def step() -> None:
        for t in places:
            if t.is_floating_point() or t.is_complex():
                t.fill_(float("nan"))
            elif t.dtype != torch.bool:
                t.fill_(torch.iinfo(t.dtype).max)

    return step
