"""The programs of one graph: which one fits a call, and which ones are over."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_bcg.counters import counters
from torch_bcg.runtime.device import Pool
from torch_bcg.runtime.program import Program
from torch_bcg.runtime.statics import Statics


class Programs:
    """One for each key and set of static tensors, the last used first.

    A program ends with the first of its static tensors, whenever that is garbage collected.

    Attributes:
        wasted: programs that ended before their first replay.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.list: list[Program] = []
        self.departed: Statics | None = None  # of the last program that lost a tensor
        self.wasted = 0

    def __iter__(self) -> Iterator[Program]:
        """The programs, the last used first."""
        return iter(self.list)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.list)

    def find(
        self,
        key: tuple[int, ...],
        args: Sequence[Any],
        fits: Callable[[Statics, Sequence[Any]], bool] = Statics.match,
    ) -> Program | None:
        """The program of this key whose static tensors are these, as far as ``fits`` looks."""
        for i, program in enumerate(self.list):
            if program.key == key and not program.dead and fits(program.statics, args):
                if i:
                    self.list.insert(0, self.list.pop(i))
                return program
        return None

    def of_the_set(self, args: Sequence[Any]) -> int:
        """How many were recorded with the static tensors of ``args``."""
        return sum(p.statics.match(args) for p in self.list)

    def add(self, program: Program) -> None:
        """Takes a program that was just recorded."""
        self.list.insert(0, program)
        self.pool.programs.add(program)
        program.statics.watch(functools.partial(_died, weakref.ref(self), weakref.ref(program)))
        counters.pool_bytes += program.grown

    def moved(self, args: Sequence[Any]) -> list[str]:
        """Names of static tensors that a live module has elsewhere than when recorded."""
        sets = [p.statics for p in self.list] + ([self.departed] if self.departed else [])
        return list(dict.fromkeys(name for s in sets for name in s.moved(args)))

    def sweep(self, args: Sequence[Any]) -> None:
        """Frees programs whose static tensors are gone, or lie elsewhere in ``args``."""
        self.departed = None
        for program in list(self.list):
            if program.dead or program.statics.dead() or program.statics.moved(args):
                self.end(program)

    def drop(self, program: Program) -> None:
        """Frees a program that lost a tensor: at once, or else at the next sweep."""
        program.dead = True
        if self.pool.lock.acquire(blocking=False):
            try:
                if not self.pool.busy and program in self.list:
                    self.departed = program.statics
                    self.end(program)
            finally:
                self.pool.lock.release()

    def end(self, program: Program) -> None:
        """Frees one program."""
        self.wasted += program.replays == 0
        self.list.remove(program)
        self.pool.settle()
        program.free()

    def free(self) -> None:
        """Frees all of them."""
        if self.list:
            self.pool.settle()
        for program in self.list:
            program.free()
        self.list.clear()
        self.departed = None


def _died(programs: weakref.ref[Programs], program: weakref.ref[Program], _: object) -> None:
    """A static tensor of a program was garbage collected, at any moment, on any thread."""
    some, one = programs(), program()
    if some is not None and one is not None:
        some.drop(one)
