"""Rules of operators that take positions of a dim, or put some in front and behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_bcg.graph.geometry import plain
from torch_bcg.graph.rows.call import Call, dims_of
from torch_bcg.graph.rows.states import (
    NO_ROWS,
    ODD,
    Merged,
    Odd,
    State,
    States,
    Token,
    fresh,
)
from torch_bcg.graph.rows.views import quotient


def from_the_front(index: Any) -> bool:
    """Whether a position is counted from the first one, whatever the values of symbols are."""
    if isinstance(index, torch.SymInt):
        return bool(statically_known_true(index >= 0))
    return not isinstance(index, int) or index >= 0  # a sum of sizes is


def select(call: Call) -> list[States]:
    """One position of a dim: of rows it must be counted from the first."""
    x, index = call.first, call["index"]
    (dim,) = dims_of(call["dim"], x.dim())
    states = call.states(x)
    state = states[dim]
    from_the_end = call.holds(index) or not from_the_front(index)
    if state is None:
        if call.holds(index):
            call.mixes("size used as a value")
    elif from_the_end:
        call.mixes("row counted from the end")
    elif isinstance(state, Odd) or (isinstance(state, Merged) and state.before != 1 and index != 0):
        call.rearranged()
    return [states[:dim] + states[dim + 1 :]]


def sliced(call: Call, state: State, sizes: tuple[Any, Any], start: Any, step: Any) -> State:
    """The state of positions ``start``, ``start + step``, … of a dim; ``sizes`` before and after.

    Any end gives a prefix of what the start leaves, so ends are not asked for.
    """
    before, after = sizes
    front = start is None or from_the_front(start)
    start = 0 if start is None else plain(start)
    holds = call.holds(after)
    lost = ODD if holds else None
    counted = call.holds(start) or not front
    if counted and (state is not None or holds or call.holds(start)):
        call.mixes("slice bound holds the size")
        return lost
    if state is None:
        return (Token(NO_ROWS, 0, True) if plain(step) == 1 else ODD) if holds else None
    if isinstance(state, Token):
        if not holds:
            return None
        if plain(step) != 1:
            return ODD
        if not isinstance(start, int):  # another symbol: by how much it shifts is not known
            call.rearranged()
            return ODD
        short = state.short or plain(before) - start != plain(after)
        return Token(state.lag - start, state.start + start, state.inside, short)
    if plain(before) == plain(after):
        return state
    if isinstance(state, Merged) and state.before == 1 and start == 0 and plain(step) == 1:
        size = quotient(plain(after), state.after)
        if not holds or size is not None:
            return Merged(1, size, state.after, replace(state.token, short=True)) if holds else None
    call.rearranged()
    return lost


def slice_(call: Call) -> list[States]:
    """``slice``."""
    x, out = call.first, call.out[0]
    (dim,) = dims_of(call["dim"], x.dim())
    states = list(call.states(x))
    sizes = (x.shape[dim], out.shape[dim])
    states[dim] = sliced(call, states[dim], sizes, call["start"], call["step"])
    return [tuple(states)]


def parts(call: Call) -> list[States]:
    """Slices of one dim, one after the other."""
    x = call.first
    (dim,) = dims_of(call["dim"], x.dim())
    states = call.states(x)
    start: Any = 0
    found = []
    for out in call.out:
        sizes = (x.shape[dim], out.shape[dim])
        state = sliced(call, states[dim], sizes, start, 1)
        found.append((*states[:dim], state, *states[dim + 1 :]))
        start = start + plain(out.shape[dim])
        start = int(start) if isinstance(start, sympy.Integer) else start
    return found


def unbind(call: Call) -> list[States]:
    """Every position of a dim by itself."""
    x = call.first
    (dim,) = dims_of(call["dim"], x.dim())
    states = call.states(x)
    if states[dim] is not None:
        call.rearranged()
    return [states[:dim] + states[dim + 1 :]] * len(call.out)


def shifted(call: Call, state: State, length: Any) -> State:
    """A dim behind ``length`` positions that hold no row."""
    if isinstance(state, Token):  # a length that is a symbol is at least 0
        known = isinstance(length, (int, sympy.Integer))
        return Token(state.lag + (int(length) if known else 0))
    call.rearranged()
    return ODD


def cat(call: Call) -> list[States]:
    """``cat``: along rows, only the last may hold any, or rows end up behind padding."""
    # An empty vector goes with anything: a cache that holds nothing yet.
    tensors = [x for x in call["tensors"] if x.dim() != 1 or plain(x.shape[0]) != 0]
    if not tensors:
        return [call.known.symbol.constant(call.out[0].shape)]
    (dim,) = dims_of(call["dim"], call.out[0].dim())
    several = [call.states(x) for x in tensors]
    along = [s[dim] for s in several]
    states = list(call.broadcast((*s[:dim], None, *s[dim + 1 :]) for s in several))
    holding = [i for i, s in enumerate(along) if s is not None]
    if not holding:
        return [tuple(states)]
    if len(tensors) == 1:
        states[dim] = fresh(along[0])
    elif holding != [len(tensors) - 1]:
        call.mixes("rows appended")
        states[dim] = ODD
    else:
        length = sum(plain(x.shape[dim]) for x in tensors[:-1])
        states[dim] = shifted(call, along[-1], length)
    return [tuple(states)]


def stack(call: Call) -> list[States]:
    """``stack``: a new dim, the others joined."""
    states = list(call.broadcast(call.states(x) for x in call["tensors"]))
    states.insert(call["dim"] % (len(states) + 1), None)
    return [tuple(states)]


def pad(call: Call) -> list[States]:
    """``constant_pad_nd``: from the last dim on, (before, after)."""
    x = call.first
    states = [fresh(s) for s in call.states(x)]
    amounts = [plain(p) for p in call["pad"]]
    for i in range(len(amounts) // 2):
        dim = x.dim() - 1 - i
        before, after = amounts[2 * i], amounts[2 * i + 1]
        shape = call.out[0].shape
        states[dim] = _padded(call, states[dim], (x.shape[dim], shape[dim]), before, after)
    return [tuple(states)]


def _padded(call: Call, state: State, sizes: tuple[Any, Any], before: Any, after: Any) -> State:
    if call.holds(before):
        call.mixes("slice bound holds the size")
        return ODD if call.holds(sizes[1]) else None
    if state is None:
        return Token(NO_ROWS) if call.holds(sizes[1]) else None
    if call.holds(after) or not isinstance(after, int) or after > 0:
        call.mixes("rows appended")
        return ODD if call.holds(sizes[1]) else None
    if isinstance(before, int) and before < 0:
        state = sliced(call, state, sizes, -before, 1)
    elif before != 0:
        state = shifted(call, state, before)
    if state is not None and not isinstance(state, Token) and after != 0:
        call.rearranged()
        state = ODD
    return fresh(state) if call.holds(sizes[1]) else None
