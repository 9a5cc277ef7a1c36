"""Recorded segments through another compiler: a lowered segment in, one function out.

Segments that are alike are compiled once, for sizes that are symbols. Likeness is the code with its
literals, and of each operand what the compiler may rely on: sizes, strides, dtype, device,
alignment, whether it is written and which of those that are written share memory. Sizes follow from
the plan's symbols; what the compiler takes for granted about those (a guard) is asked again for
each size, and another size that breaks it is compiled for itself.

What cannot be compiled stays as it is, with a reason that is counted and told.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_bcg.counters import counters
from torch_bcg.errors import BCGWarning
from torch_bcg.graph.buckets import SizeGuards
from torch_bcg.graph.ir import GraphSegment
from torch_bcg.graph.known import Facts
from torch_bcg.graph.likeness import canonical, code_key, with_sizes
from torch_bcg.graph.lower import Code, Fused
from torch_bcg.graph.sizes import at_sizes, symbols_of
from torch_bcg.runtime import memory
from torch_bcg.runtime.inductor import Compiler, Function, Symbols, inductor
from torch_bcg.runtime.operands import (
    Layout,
    Operand,
    alike,
    copied,
    crossing,
    layout_of,
    unfit,
    unshare,
)
from torch_bcg.runtime.workspace import Workspace


@dataclass
class _Made:
    """What the compiler made of like segments, and for which sizes.

    Attributes:
        number: of the compilation.
        function: takes the values of ``names``, then the operands; returns the results.
        fixed: symbols that are numbers in it.
        guards: of the other symbols.
        names: symbol of the plan -> that of the guards.
        refused: why it cannot be recorded, or "".
    """

    number: int
    function: Function
    fixed: Mapping[str, int]
    guards: SizeGuards
    names: Mapping[str, str]
    refused: str = ""

    def at(self, sizes: Mapping[str, int]) -> Function:
        """What takes the operands alone."""
        return functools.partial(self.function, *(sizes[s] for s in self.names))

    def allows(self, sizes: Mapping[str, int]) -> bool:
        if any(sizes[s] != n for s, n in self.fixed.items()):
            return False
        return self.guards.allows({mine: sizes[s] for s, mine in self.names.items()})


class Inner:
    """Compiles the recorded segments of one graph.

    Args:
        compiler: ``inductor``, settings of it, or what is called as a backend of ``torch.compile``
            is: with a module and its example inputs, fake tensors and sizes, some of them symbols.
        facts: of the graph.
    """

    def __init__(
        self, compiler: str | tuple[tuple[str, object], ...] | Compiler, facts: Facts
    ) -> None:
        self.facts = facts
        if isinstance(compiler, (str, tuple)):
            compiler = inductor(() if isinstance(compiler, str) else compiler)
        self.compiler = compiler
        self.forget()

    def forget(self) -> None:
        """Back to nothing compiled."""
        self.made: dict[Hashable, list[_Made]] = {}
        self.asked: set[Hashable] = set()  # likeness and hints
        self.failed: dict[Hashable, str] = {}  # those with nothing
        self.forms: dict[fx.GraphModule, _Form] = {}  # keys name objects of theirs
        self.told: set[str] = set()
        self.numbers = itertools.count()

    def refuse(self, code: Fused, reason: str) -> None:
        """What was compiled cannot be recorded: like segments do not try again."""
        code.source.refused = reason

    def of(self, space: Workspace, segment: GraphSegment, code: fx.GraphModule) -> Code:
        """``code`` as one call of what the compiler made of it, or as it is."""
        operands = space.operands(segment)
        reason = unfit(code, operands.values())
        if reason is None:
            form = self.forms.get(code)
            if form is None:
                form = self.forms[code] = _Form.of(code)
            given = [self.operand(space, segment, n, operands[n]) for n in form.names]
            sizes = dict(zip(space.symbols, space.key, strict=True))
            made = crossing(given) or copied(given) or self.find(space, form, given, sizes)
            if not isinstance(made, str):
                wanted = [_Wanted.of(space, n) for n in segment.outputs]
                order = [list(operands).index(n) for n in form.names]
                call = functools.partial(
                    _apart, code, made.at(sizes), order, layout_of(given), wanted
                )
                return Fused(code, call, made)
            reason = made
        self.tell(reason, space, segment)
        return code

    def operand(self, space: Workspace, segment: GraphSegment, name: str, x: Any) -> Operand:
        """What the compiler may rely on about an operand of a segment."""
        name = space.lowering.canonical.get(name, name)
        known, v = self.facts.nodes.get(name), space.values.get(name)
        if not isinstance(x, Tensor):
            return Operand(x, expr=v.expr if v is not None and v.home == "size" else repr(x))
        size, stride = tuple(map(str, x.shape)), tuple(map(str, x.stride()))
        written = static = False
        if known is not None and known.is_tensor:
            (fact,) = known.tensors
            written = fact.storage in segment.writes
            owner = space.values.get(self.facts.origin[fact.storage])
            static = owner is not None and owner.home == "static"
            if symbols_of(fact.spec):
                at = space.geometries.get(name)
                at = at or at_sizes({name: fact.spec}, space.symbols, space.key)[name]
                if at[:2] == (tuple(x.shape), x.stride()):  # else it is of this size alone
                    size, stride = fact.spec.size, fact.spec.stride
        storage, offset = x.untyped_storage().data_ptr(), int(x.storage_offset()) * x.itemsize
        return Operand(x, size, stride, "", written, storage, offset, static)

    def find(
        self,
        space: Workspace,
        form: _Form,
        given: Sequence[Operand],
        sizes: Mapping[str, int],
    ) -> _Made | str:
        """What was made of a segment like this one for sizes like these, or is made now.

        Returns:
            It, or why there is nothing.
        """
        key = form.key, layout_of(given), *(g.key for g in given)
        there = self.made.setdefault(key, [])
        # For the largest size that is expected, so that it does not matter which comes first.
        for hints in dict.fromkeys((space.most_key, space.key)):
            for made in there:
                if made.allows(sizes):
                    return made.refused or made
            if (key, hints) not in self.asked:
                self.asked.add((key, hints))
                hinted = dict(zip(space.symbols, hints, strict=True))
                new = self.tried(form.code, given, hinted, sizes)
                if isinstance(new, str):
                    self.failed[key, hints] = new
                else:
                    there.append(new)
        fit = next((made for made in there if made.allows(sizes)), None)
        return fit or self.failed.get((key, space.key)) or "what was compiled is for other sizes"

    def tried(
        self,
        code: fx.GraphModule,
        given: Sequence[Operand],
        hinted: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> _Made | str:
        """What the compiler makes of a segment, or what it raises."""
        begun = time.perf_counter()
        counters.inner_compilations += 1
        try:
            made = self.compile(code, given, hinted)
            if made.allows(sizes):
                _warm(made.at(sizes), given)
        except Exception as error:  # compilers raise anything; the segment works without
            return reason_of(error)
        finally:
            counters.inner_seconds += time.perf_counter() - begun
        return made

    def compile(
        self, code: fx.GraphModule, given: Sequence[Operand], sizes: Mapping[str, int]
    ) -> _Made:
        """Compiles a segment for symbols that have these values now."""
        known = Symbols(sizes)
        named = with_sizes(code, list(known.names))
        function = known.compile(self.compiler, named, known.examples(given))
        return _Made(next(self.numbers), function, known.fixed, known.guards, known.names)

    def tell(self, reason: str, space: Workspace, segment: GraphSegment) -> None:
        """Notes and counts a segment that stays as it is, and says so once a reason."""
        space.unfused[segment.index] = reason
        counters.unfused[reason] = counters.unfused.get(reason, 0) + 1
        if reason not in self.told:
            self.told.add(reason)
            text = f"Segment {segment.index} is recorded without inner= ({reason})."
            warnings.warn(text, BCGWarning, stacklevel=2)


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass(frozen=True)
class _Form:
    """A lowered segment as the compiler is given it.

    Attributes:
        code: takes operands in the order in which it uses them.
        names: of the operands.
        key: what it computes.
    """

    code: fx.GraphModule
    names: tuple[str, ...]
    key: Hashable

    @classmethod
    def of(cls, code: fx.GraphModule) -> _Form:
        own = canonical(code)
        return cls(
            own, tuple(n.name for n in own.graph.find_nodes(op="placeholder")), code_key(own)
        )


def _warm(function: Function, given: Sequence[Operand]) -> None:
    """Calls it once on stand-ins: a GPU loads and tunes kernels at the first call of each.

    All of them are zero, an index that is never out of range: an operator may write what its schema
    does not say. Without room for that the first call is the recording.
    """
    tensors = [g.value for g in given if isinstance(g.value, Tensor)]
    if not any(t.is_cuda for t in tensors):
        return
    device = next(t.device for t in tensors if t.is_cuda)
    known = [(x.shape, x.stride()) if isinstance(x := g.value, Tensor) else x for g in given]

    def zeros(*form: Any, **kind: Any) -> Tensor:
        return torch.empty_strided(*form, **kind).zero_()

    # Random numbers are drawn as if this had not been.
    with torch.random.fork_rng([device]), contextlib.suppress(torch.OutOfMemoryError):
        function(*alike(given, known, zeros))
    torch.cuda.synchronize(device)


@dataclass(frozen=True)
class _Wanted:
    """What a result has to be."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, space: Workspace, name: str) -> _Wanted:
        size, stride, _ = space.geometries[name]
        spec = space.values[name].spec
        assert spec is not None
        return cls(size, stride, getattr(torch, spec.dtype))


def _apart(
    code: fx.GraphModule,
    function: Function,
    order: Sequence[int],
    layout: Layout,
    wanted: Sequence[_Wanted],
    *operands: Any,
) -> Sequence[Tensor]:
    """Results as eager has them: no two in one memory, none in an operand's, strides as planned.

    Args:
        code: the operations.
        function: what the compiler made of them; it takes the operands in another order.
        order: place of each of them here.
        layout: of the operands that it was compiled for.
        wanted: of the results.
        operands: of the segment.

    Raises:
        TypeError: a result is something else than the plan says.
    """
    own = [operands[i] for i in order]
    for room, members in layout:
        storages = [own[i].untyped_storage() for i, _ in members]
        whole = max(storages, key=torch.UntypedStorage.nbytes)
        if whole.nbytes() != room or any(memory.first_byte(own[i]) != at for i, at in members):
            # The memory of a call that is not replayed may lie otherwise; places are compiled in.
            results: Sequence[Tensor] = code.forward(*operands)
            return results
        for i, _ in members:
            own[i] = memory.in_storage(whole, own[i])
    if layout:
        unshare(own, {i for _, members in layout for i, _ in members})
    taken = {x.untyped_storage().data_ptr() for x in operands if isinstance(x, Tensor)}
    made: list[Tensor] = []
    for x, like in zip(function(*own), wanted, strict=True):
        if x.shape != like.size or x.dtype is not like.dtype:
            raise TypeError(f"the compiler gives {x.dtype}{list(x.shape)} for {like}")
        if x.numel() and (x.untyped_storage().data_ptr() in taken or x.stride() != like.stride):
            x = torch.empty_strided(like.size, like.stride, dtype=x.dtype, device=x.device).copy_(x)
        taken.add(x.untyped_storage().data_ptr())
        made.append(x)
    return made
