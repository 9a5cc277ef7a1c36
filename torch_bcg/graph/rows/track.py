"""States of all tensors of one fake pass, kept as its operators are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.geometry import plain, storage_id
from torch_bcg.graph.known import WRITTEN, Mixing
from torch_bcg.graph.rows.call import CHOSEN, LOOKED_AT, POSITIONS, Call, Found
from torch_bcg.graph.rows.states import (
    ODD,
    Merged,
    Odd,
    State,
    States,
    Symbol,
    Token,
    cut_of,
    lag_of,
)
from torch_bcg.graph.rows.table import VIEWS, base_name, entry_for

_CARRY = frozenset({"_to_copy", "clone", "arange", "add"})
_CHOOSE = frozenset({"topk", "sort", "argsort", "max", "min", "argmax", "argmin", "kthvalue"})
_LOOK_UP = frozenset({"embedding", "index", "_unsafe_index", "index_select"})


class Tracker:
    """The side table: states by tensor object, and what the operators of one node do to rows."""

    def __init__(self, symbol: str) -> None:
        self.symbol = Symbol(symbol)
        # By identity; the tensors are kept so that no id is used again.
        self.table: dict[int, tuple[torch.Tensor, States]] = {}
        self.over: dict[int, list[torch.Tensor]] = {}  # storage -> tensors of the table
        self.lowest: dict[int, float] = {}  # storage -> the lowest lag written into it
        self.names: dict[int, str] = {}
        self.outer: set[int] = set()  # storages of arguments and constants
        self.found: list[Found] = []

    # States.

    def states(self, x: torch.Tensor) -> States:
        """States of a tensor; of one never seen, by its size."""
        entry = self.table.get(id(x))
        if entry is not None and entry[0] is x and len(entry[1]) == x.dim():
            return entry[1]
        return self.symbol.given(x.shape)

    def name(self, x: object) -> str:
        """The placeholder whose values these are, or what else is known of them, or ""."""
        return self.names.get(id(x), "")

    def keep(self, x: torch.Tensor, states: States) -> None:
        """Notes the states of a tensor."""
        if id(x) not in self.table:
            self.over.setdefault(storage_id(x), []).append(x)
        self.table[id(x)] = (x, states)

    def given(self, x: torch.Tensor, placeholder: str = "") -> None:
        """Notes an argument or a constant of the graph."""
        self.outer.add(storage_id(x))
        if self.symbol.held_by(x):
            self.keep(x, self.symbol.given(x.shape))
            if placeholder:
                self.names[id(x)] = placeholder

    def cut(self, x: torch.Tensor) -> tuple[tuple[int, ...], str]:
        """`TensorFact.row_dims` and `TensorFact.uncut`."""
        if id(x) not in self.table and not self.symbol.held_by(x):
            return (), ""
        return cut_of(self.symbol, self.states(x), x.shape)

    # Operators.

    def touches(self, leaves: Iterable[object]) -> bool:
        """Whether a size or a number among the leaves depends on the number of rows."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in self.table or self.symbol.held_by(leaf):
                    return True
            elif isinstance(leaf, (torch.SymInt, torch.SymFloat)) and self.symbol.holds(leaf):
                return True
        return False

    def saw(
        self,
        operator: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: object,
    ) -> None:
        """Follows rows through one dispatched operator."""
        results = tree_leaves(out)
        if not self.touches((*tree_leaves((args, kwargs)), *results)):
            self._unsettled(args, operator)
            return
        name = base_name(operator)
        arguments = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(operator._schema.arguments)
        }
        made = [x for x in results if isinstance(x, torch.Tensor)]
        written = _written(operator, arguments)
        outward = any(not self.symbol.held_by(x) for x in written)
        call = Call(name, operator.name().removesuffix(".default"), arguments, made, self, outward)
        entry = entry_for(operator, name)
        for argument, value in arguments.items():
            if argument not in entry.sizes and self.symbol.holds(value):
                call.mixes("size used as a value")
        states = list(entry.rule(call))
        states += call.unknown()[len(states) :]
        for x, known in zip(made, states, strict=False):
            self._settle(call, x, known, any(x is w for w in written))
        for x in written:
            self._write(call, x)
        if name in VIEWS or name in _CARRY:
            self._carry(call)
        elif name in _CHOOSE:
            self._choose(call)
        elif name in _LOOK_UP:
            self._look_up(call)
        self.found += call.found

    def opaque(self, name: str, leaves: Iterable[object]) -> None:
        """A higher-order operator, of which nothing is seen."""
        if self.touches(leaves):
            self.found.append(Found("operator", name, decided=False))

    def looks_up(self, name: str, index: torch.Tensor) -> None:
        """An operator of which other ones are seen."""
        call = Call(name, name, {}, (), self)
        call.looks_up(index)
        self.found += call.found

    def taken(self, number: Callable[[torch.Tensor], int]) -> tuple[Mixing, ...]:
        """What the operators since the last call do to rows, with numbers for storages."""
        found, self.found = self.found, []
        made = (
            Mixing(
                f.kind,
                f.operator,
                f.decided,
                -1 if f.memory is None else number(f.memory),
                f.index,
                f.each,
            )
            for f in found
        )
        return tuple(dict.fromkeys(made))

    def _unsettled(self, args: Sequence[Any], operator: torch._ops.OpOverload) -> None:
        """``one_hot`` checks all classes: the check it makes in the same node is no row's value."""
        if args and operator._schema.name == "aten::_assert_async":
            self.found = [f for f in self.found if f.result is not args[0]]

    def _settle(self, call: Call, x: torch.Tensor, states: States, written: bool) -> None:
        if len(states) != x.dim():
            call.rearranged()
            states = self.symbol.given(x.shape)
        settled: list[State] = []
        for new, old, size in zip(states, self.states(x), x.shape, strict=True):
            if not self.symbol.holds(size):
                settled.append(None)
            elif new is None:  # no rule said what its rows are
                call.rearranged()
                settled.append(ODD)
            elif written and isinstance(new, Token) and isinstance(old, Token):
                settled.append(replace(old, lag=new.lag))
            else:
                settled.append(new)
        if any(s is not None for s in settled) or id(x) in self.table:
            self.keep(x, tuple(settled))

    def _carry(self, call: Call) -> None:
        """Names go with values: through views and casts; positions stay so from the first on."""
        origin = self.name(call.first)
        if call.name == "arange" and not call["start"] and call["step"] in (None, 1):
            origin = POSITIONS
        elif origin and call.name == "add":
            kept = origin == POSITIONS and isinstance(call["other"], int) and call["other"] == 0
            origin = POSITIONS if kept else ""
        elif origin == POSITIONS and call.name == "slice" and call["start"] not in (None, 0):
            origin = ""
        for i, x in enumerate(call.out):
            # Of several parts only the first begins where the whole does.
            kept = i == 0 and _keeps_numbers(call, x)
            if origin and kept and id(x) in self.table:
                self.names[id(x)] = origin

    def _choose(self, call: Call) -> None:
        """Positions of a dim lie in it."""
        x, dim = call.first, call["dim"]
        along = isinstance(dim, int) and x.dim() > 0
        for out in call.out[-1:]:
            if along and not self.symbol.holds(x.shape[dim]) and id(out) in self.table:
                self.names[id(out)] = f"{CHOSEN}{plain(x.shape[dim])}"

    def _look_up(self, call: Call) -> None:
        """What lies at a position that a row of a call may name is what a row may hold."""
        given = [x for x in tree_leaves(call.arguments) if isinstance(x, torch.Tensor)]
        table, *positions = given if call.name != "embedding" else (call["weight"], call["indices"])
        named = all(self.name(x) not in ("", POSITIONS) for x in positions)
        for out in call.out:
            if named and not self.symbol.held_by(table) and id(out) in self.table:
                self.names[id(out)] = LOOKED_AT

    def _write(self, call: Call, x: torch.Tensor) -> None:
        states = self.states(x)
        inside = any(isinstance(s, Token) and s.inside for s in states)
        memory = storage_id(x)
        if inside or not self.symbol.held_by(x):
            call.found.append(Found(WRITTEN, call.operator, True, x, self._index(call)))
        for other in self.over.get(memory, ()):
            self.names.pop(id(other), None)
        self._lower(call, x, states, memory)

    def _index(self, call: Call) -> str:
        """The placeholder that says where rows go, if it is one, and goes with them row by row."""
        given = call.index or [x for x in tree_leaves(call.arguments) if is_index(x)]
        holding = [i for i in given if self.symbol.held_by(i)]
        name = self.name(holding[0]) if len(holding) == 1 else ""
        others = name in ("", POSITIONS, LOOKED_AT) or name.startswith(CHOSEN)
        if others or not all(map(_whole, self.states(holding[0]))):
            return ""
        values = (call["values"], call["source"], call["src"])
        late = any(lag_of(s) < 0 for v in values for s in call.states(v))
        return "" if late else name

    def _lower(self, call: Call, x: torch.Tensor, states: States, memory: int) -> None:
        """What is written through one tensor is read through all over its memory."""
        others = [o for o in self.over.get(memory, ()) if o is not x]
        if not others:
            return
        if any(isinstance(s, Odd) for s in states):
            call.rearranged("unlike rows")
            return
        every = [s.token if isinstance(s, Merged) else s for s in states]
        tokens = [t for t in every if isinstance(t, Token)]
        if any(t.short for t in tokens):  # which row is the last one written depends on the size
            call.rearranged("some rows are written")
        low = min((t.lag + t.start for t in tokens), default=0)
        if low >= self.lowest.get(memory, float("inf")):
            return
        self.lowest[memory] = low
        for other in others:
            before = self.table[id(other)][1]
            after = tuple(_at_most(s, low) for s in before)
            self.table[id(other)] = (other, after)
            shifted = zip(before, after, strict=True)
            if any(lag_of(a) < 0 <= lag_of(b) for b, a in shifted):
                call.rearranged("shifted rows are written")


def is_index(x: object) -> bool:
    """Whether an argument may say where something is written."""
    return isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)


def _whole(state: State) -> bool:
    """Whether a dim has no rows, or all of them and each in its own place."""
    return state is None or state == Token(0)


def _keeps_numbers(call: Call, after: torch.Tensor) -> bool:
    """Whether a view or a cast keeps what says a place: an integer of at least 32 bits."""
    before = call.first
    if not isinstance(before, torch.Tensor) or before.dtype == after.dtype:
        return True
    return call.name == "_to_copy" and is_index(before) and is_index(after)


def _at_most(state: Any, low: float) -> Any:
    """The state of another view of memory whose positions depend on rows down to a lag."""
    if isinstance(state, Merged):
        return replace(state, token=_at_most(state.token, low))
    if isinstance(state, Token):
        return replace(state, lag=min(state.lag, low - state.start))
    return state


def _written(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that the schema says are written."""
    return [
        x
        for a in operator._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for x in tree_leaves(arguments[a.name])
        if isinstance(x, torch.Tensor)
    ]
