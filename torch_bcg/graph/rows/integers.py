"""What is known of the numbers in all memory of one fake pass: bounds, and what they follow from.

Padded rows hold zero, or what the author declares, only in arguments. What is computed of them may
lie outside a table in some call, and a GPU survives no index that does: bounds have to show that it
never does, or the numbers have to follow from sizes alone, so that a trial of a size is a proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.geometry import plain, storage_id
from torch_bcg.graph.rows.ranges import NOTHING, TRUTH, UNKNOWN, Range, bounds_of, hull, of_number

ANYTHING = frozenset({"anything"})  # the sources of what no rule follows
_MOST = 64  # what follows from more sources follows from anything
# Which take from a table; its rows come in any order.
READS = frozenset({"index", "_unsafe_index", "index_select", "gather", "embedding", "take"})


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bounds, and the placeholders and symbols that the numbers follow from."""

    range: Range = UNKNOWN
    sources: frozenset[str] = ANYTHING


@dataclass(frozen=True, slots=True)
class Memory:
    """One storage; ``base`` keeps its number in use.

    Attributes:
        whole: of all rows.
        tail: of padded ones.
    """

    base: torch.Tensor
    whole: Numbers = field(default_factory=Numbers)
    tail: Numbers = field(default_factory=Numbers)


Known = Callable[[torch.Tensor], Numbers]


def least_of(name: str) -> str:
    """The symbol of the least number of a placeholder."""
    return f"least of {name}"


def most_of(name: str) -> str:
    """The symbol of its largest number."""
    return f"most of {name}"


class Integers:
    """By storage, as operators are dispatched."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}

    def whole(self, x: torch.Tensor) -> Numbers:
        """Of all rows of a tensor."""
        return self._of(x, tail=False)

    def tail(self, x: torch.Tensor) -> Numbers:
        """Of the padded rows of a tensor, which has all of them behind its others."""
        return self._of(x, tail=True)

    def _of(self, x: torch.Tensor, tail: bool) -> Numbers:
        memory = self.memories.get(storage_id(x))
        if memory is None:
            if type(x) is torch.Tensor and x.dtype == torch.int64 and x.numel():
                with no_dispatch():  # numbers that stand in the code
                    return Numbers(Range(int(x.min()), int(x.max())), frozenset())
            return Numbers(TRUTH if x.dtype == torch.bool else UNKNOWN)
        known = memory.tail if tail else memory.whole
        if x.dtype == torch.bool:
            return Numbers(TRUTH, known.sources)
        return known if x.dtype == memory.base.dtype else Numbers(UNKNOWN, known.sources)

    def given(self, x: torch.Tensor, name: str, padded: bool) -> None:
        """An argument, whose padded rows hold one number if it has any, or a constant."""
        ends = Range(*(sympy.Symbol(end(name), integer=True) for end in (least_of, most_of)))
        whole = Numbers(ends, frozenset({name}))
        number = sympy.Symbol(name, integer=True)
        tail = Numbers(Range(number, number), frozenset()) if padded else whole
        shared = storage_id(x) in self.memories
        self.memories[storage_id(x)] = Memory(x) if shared else Memory(x, whole, tail)

    def forget(self, leaves: Iterable[object]) -> None:
        """Nothing is known of these any more."""
        for x in leaves:
            if isinstance(x, torch.Tensor):
                self.memories[storage_id(x)] = Memory(x)

    def follow(
        self,
        name: str,
        arguments: Mapping[str, Any],
        made: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        tail: Known | None,
    ) -> None:
        """One operator; ``tail`` tells of padded rows if they see no others."""
        given = [x for x in tree_leaves(list(arguments.values())) if x is not None]
        before = {storage_id(x) for x in given if isinstance(x, torch.Tensor)}
        results = [(i, x, False) for i, x in enumerate(made) if storage_id(x) not in before]
        results += [(0, x, True) for x in written]
        table = next(iter(arguments.values()), None) if name in READS else None

        def of_tail(x: torch.Tensor) -> Numbers:
            return self.whole(x) if tail is None or x is table else tail(x)

        sources = [_sources(given, self.whole), _sources(given, of_tail)]
        for i, x, in_place in results:
            parts = []
            for known, follows in zip((self.whole, of_tail), sources, strict=True):
                counts = x.dtype in (torch.int32, torch.int64)  # others are too short for places
                found = bounds_of(name, arguments, _bounds(known), i) if counts else UNKNOWN
                parts.append(Numbers(found, follows))
            whole, part = parts
            if in_place:
                self._write(name, x, whole, part)
            else:
                self.memories[storage_id(x)] = Memory(x, whole, part)

    def _write(self, name: str, x: torch.Tensor, whole: Numbers, tail: Numbers) -> None:
        """What memory holds once a tensor over it is written, to which others may be left."""
        old = self.memories.get(storage_id(x), Memory(x))
        ranges = [(old.whole, whole), (old.tail, tail)]
        # Who inverts a permutation writes to all places of what nobody has written to.
        everywhere = name in ("index_put", "scatter") or _count(x) == _count(old.base)
        unset = old.whole.range == NOTHING and not everywhere
        self.memories[storage_id(x)] = Memory(
            old.base,
            *(
                Numbers(UNKNOWN if unset else hull(a.range, b.range), a.sources | b.sources)
                for a, b in ranges
            ),
        )


def _bounds(known: Known) -> Callable[[object], Range]:
    return lambda x: known(x).range if isinstance(x, torch.Tensor) else of_number(x)


def _sources(given: Iterable[object], known: Known) -> frozenset[str]:
    found: set[str] = set()
    for x in given:
        if isinstance(x, torch.Tensor):
            found |= known(x).sources
        elif isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.update(map(str, x.node.expr.free_symbols))
    return ANYTHING if len(found) > _MOST else frozenset(found)


def _count(x: torch.Tensor) -> Any:
    return math.prod(map(plain, x.shape))
