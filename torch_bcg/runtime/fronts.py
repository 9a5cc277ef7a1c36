"""The rows of a call in the memory of a padded program, and what lies behind them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bcg.graph.ir import EagerSegment, Front, GraphSegment, Segment, Value
from torch_bcg.runtime import memory, steps
from torch_bcg.runtime.fillings import LARGE, VOUCHED, uneven
from torch_bcg.runtime.memory import Aliases
from torch_bcg.runtime.recorders import Recording
from torch_bcg.runtime.steps import Step
from torch_bcg.runtime.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Scene:
    """What a program was recorded into: memory, recordings by segment, outputs, checks.

    ``opening`` is the segment that may run before static tensors it does not read are compared.
    """

    space: Workspace
    recordings: Mapping[int, Recording]
    aliases: Aliases | None
    checks: tuple[str, ...] = ()
    opening: GraphSegment | None = None


class Fronts:
    """What there is of each value for calls of one key.

    Attributes:
        space, plan, values: the program's memory, its plan, the plan's values by name.
        key: values of the plan's symbols in the call.
        padded: the call has other sizes than the program.
        live: geometries of the plan's tensors in the call.
        numbers: the plan's sizes in the call.
        fronts: what eager segments are given of padded values.
        current: copied fronts that agree with their values, at this place among the steps.
        fills: argument -> what its padded rows hold, where that is declared.
        checks: see `runtime.checks`.
        steps: of a replay, in order.
        copied: bytes that they copy.
    """

    def __init__(self, scene: Scene, key: tuple[int, ...]) -> None:
        self.space, self.checks, self.key = scene.space, scene.checks, key
        self.plan, self.values = self.space.plan, self.space.values
        self.padded = key != self.space.key
        self.live = self.space.at(*key) if self.padded else self.space.geometries
        self.numbers = self.space.numbers_at(key)
        self.fronts: dict[str, Tensor] = {}
        self.current: set[str] = set()
        self.fills = dict(self.plan.padding.fills) if self.plan.padding else {}
        self.steps: list[Step] = []
        self.copied = 0

    def rowless(self, name: str) -> bool:
        """Whether a value is as large in the call as in the program."""
        whole = self.space.geometries.get(name)
        return whole is not None and whole == self.live[name]

    def dead_after(self, index: int) -> list[Tensor]:
        """Memory made in this replay whose last reader is the segment of that index."""
        dead = [
            v
            for v in self.plan.values
            if v.last == index and v.home in ("recorded", "bridge", "scratch")
        ]
        # The rows of the call alone of a slot: the tail is filled once, for all who lie there.
        return [self.space.bound[v.name] if v.home == "recorded" else self.front(v) for v in dead]

    def rows(self, key: tuple[int, ...]) -> int:
        """Rows at a key, 0 where none are padded."""
        padding = self.plan.padding
        if padding is None or padding.refused is not None:
            return 0
        return key[self.space.symbols.index(padding.symbol)]

    def front(self, v: Value) -> Tensor:
        """The rows of the call of a value in program memory, where they are."""
        whole: Tensor = self.space.resolve(v.name)
        return self.narrowed(whole, v.name, v.row_dims)

    def narrowed(self, whole: Tensor, name: str, dims: Sequence[int]) -> Tensor:
        """The first rows of a padded tensor, as many as the call has."""
        for d in dims if self.padded else ():
            whole = whole.narrow(d, 0, self.live[name][0][d])
        return whole

    def operand(self, name: str, segment: EagerSegment, cuts: Mapping[str, Front]) -> Any:
        """What an eager segment is given of a fixed value."""
        if segment.live and name in self.numbers:
            return self.numbers[name]
        if not self.padded or name not in cuts:
            return self.space.resolve(name)
        if name not in self.fronts:
            cut = cuts[name]
            whole = self.space.resolve(name)
            size, stride, _ = self.live[name]
            if cut.copied:
                room = self.space.slot(f"{name}, copied", cut.spec, name)
                bits = whole.is_conj(), whole.is_neg()
                front = memory.lazily(room.as_strided(size, stride), bits)
            else:
                front = whole.as_strided(size, stride, whole.storage_offset())
            self.fronts[name] = memory.shared(front)  # to an operator that writes, views cost more
        return self.fronts[name]

    def copy_fronts(self, segment: EagerSegment, back: bool) -> None:
        """Copies of fronts to what an eager segment is given, or back what it wrote there."""
        for cut in segment.fronts if self.padded else ():
            if (
                not cut.copied
                or (back and not cut.written)
                or (not back and cut.name in self.current)
            ):
                continue
            copy = self.fronts[cut.name]
            there = self.narrowed(self.space.resolve(cut.name), cut.name, cut.row_dims)
            target, source = (there, copy) if back else (copy, there)
            self.copied += copy.numel() * copy.itemsize
            once = memory.once(copy)  # of expanded dims there is one index in memory
            self.steps.append(functools.partial(once(target).copy_, once(source)))
            self.current.add(cut.name)

    def written(self, segment: Segment) -> None:
        """Copied fronts of what a segment wrote are out of date."""
        made = {self.values[n].storage for n in segment.outputs} | set(segment.writes)
        for s in self.plan.segments if self.padded else ():
            if isinstance(s, EagerSegment):
                self.current -= {c.name for c in s.fronts if c.storage in made}

    def fill_tails(self) -> None:
        """Fills them before each call where something writes them, else where sizes change."""
        fills = self.tail_fills() if self.padded else []
        if self.tails_are_written():
            self.steps += fills
        else:
            self.steps.append(steps.fill_tails(self.space.slots, fills))

    def tails_are_written(self) -> bool:
        """Whether a replay, or a check of it, leaves something else in padded rows."""
        homes = ("slot", "bridge", "scratch")
        filled = {v.storage for v in self.plan.values if v.home in homes and v.row_dims}
        written: set[int] = set()
        for s in self.plan.segments:
            if not (isinstance(s, EagerSegment) and s.live):
                written |= {*s.writes, *(self.values[n].storage for n in s.outputs)}
        return "poison" in self.checks or not filled.isdisjoint(written)

    def tail_fills(self) -> list[Step]:
        """What fills the rows of slots, bridges and scratch memory that the call does not have."""
        fills: list[Step] = []
        zeros: list[Tensor] = []
        for v in self.plan.values:
            if v.home not in ("slot", "bridge", "scratch") or v.memory:
                continue
            tails = self.tails(v)
            if v.name in self.fills:
                fills += [functools.partial(t.fill_, self.fills[v.name]) for t in tails]
            elif (
                "poison" in self.checks and v.spec and v.spec.dtype.startswith(("float", "bfloat"))
            ):
                fills += [functools.partial(t.copy_, uneven(t, self.poison())) for t in tails]
            elif any(v.lazy):  # no foreach operation writes these
                fills += [t.zero_ for t in tails]
            else:
                zeros += tails
        for dtype in dict.fromkeys(
            t.dtype for t in zeros
        ):  # one launch each, and only of like ones
            alike = [t for t in zeros if t.dtype == dtype]
            if len(alike) == 1 or dtype.itemsize == 1:
                fills += [t.zero_ for t in alike]
            else:
                fills.append(functools.partial(torch._foreach_zero_, alike))
        return fills

    def poison(self) -> float:
        """What padded rows hold under ``check="poison"``.

        Zero times it must be zero where the author vouches for masks, or declares memory that
        padded rows are written to.
        """
        padding = self.plan.padding
        vouched = padding is not None and any(r.kind in VOUCHED for r in padding.tried)
        return LARGE if vouched or self.fills else float("nan")

    def tails(self, v: Value) -> list[Tensor]:
        """What is left of a padded value beside its front, without overlap."""
        rest: Tensor = self.space.resolve(v.name)
        found = []
        for d in v.row_dims:
            have, want = rest.shape[d], self.live[v.name][0][d]
            if have > want and rest.stride(d):  # expanded rows are one row
                found.append(rest.narrow(d, want, have - want))
            rest = rest.narrow(d, 0, want)
        return [memory.once(t)(t) for t in found if t.numel()]
