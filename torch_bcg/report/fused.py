"""What of each program is fused -> what readers are told: programs that come out alike, once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.values import counted

TITLE = "fused segments"
NOT_RECORDED = "known once a program is recorded"
T = TypeVar("T")
_Alike = tuple[tuple[int, ...], ...]
_Unfused = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Programs of which the same segments are fused, alike and unfused, for the same reasons.

    Attributes:
        alike: segments of one compilation, for each that made any.
        unfused: (reason, segments recorded as they are for it).
        programs: by size.
    """

    alike: _Alike
    unfused: _Unfused
    programs: tuple[Fusing, ...]

    @property
    def title(self) -> str:
        """``6 of 7, by 2 compilations``, which are more where sizes are compiled apart."""
        fused = sum(map(len, self.alike))
        every = fused + sum(len(segments) for _, segments in self.unfused)
        made = len({number for p in self.programs for _, number in p.fused})
        return f"{fused} of {every}, by {counted(made, 'compilation')}"

    @property
    def many(self) -> str:
        """``2 programs``."""
        return counted(len(self.programs), "program")

    @property
    def sizes(self) -> list[str]:
        """``s0 = 8``, and the other sizes; none where the key has no symbol."""
        symbols = [s for s, _ in self.programs[0].sizes]
        if not symbols:
            return []
        keys = dict.fromkeys(tuple(n for _, n in p.sizes) for p in self.programs)
        first, *others = [_several(key) for key in keys]
        return [f"{_several(symbols)} = {first}", *others]

    @property
    def notes(self) -> list[tuple[str, list[str]]]:
        """Which are alike, and which are unfused and why: a name and items each."""
        alike = [("alike", [*map(str, s)]) for s in self.alike if len(s) > 1]
        unfused = [
            ("unfused", [*map(str, segments[:-1]), f"{segments[-1]}: {reason}"])
            for reason, segments in self.unfused
        ]
        return alike + unfused


def outcomes(fusings: Iterable[Fusing]) -> list[Outcome]:
    """Programs grouped by what came out, in the order of their sizes."""
    groups: dict[tuple[_Alike, _Unfused], list[Fusing]] = {}
    for f in sorted(fusings):
        alike = tuple(segments for _, segments in _grouped(f.fused))
        groups.setdefault((alike, _grouped(f.unfused)), []).append(f)
    return [Outcome(*same, tuple(programs)) for same, programs in groups.items()]


def _grouped(pairs: Iterable[tuple[int, T]]) -> tuple[tuple[T, tuple[int, ...]], ...]:
    """(segment, what) pairs -> each thing, and its segments."""
    groups: dict[T, list[int]] = {}
    for segment, what in pairs:
        groups.setdefault(what, []).append(segment)
    return tuple((what, tuple(segments)) for what, segments in groups.items())


def _several(items: Sequence[object]) -> str:
    text = ", ".join(map(str, items))
    return text if len(items) == 1 else f"({text})"
