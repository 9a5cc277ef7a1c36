"""Rules of operators that move, cut and join dims without computing."""

from __future__ import annotations

import math
from typing import Any

import sympy

from torch_bcg.graph.geometry import plain
from torch_bcg.graph.rows.call import Call, dims_of
from torch_bcg.graph.rows.states import (
    NO_ROWS,
    ODD,
    Merged,
    State,
    States,
    Token,
    fresh,
)

Atom = tuple[Any, State]  # size, what it holds


def permute(call: Call) -> list[States]:
    """``permute``, ``transpose``, ``t``."""
    states = call.states(call.first)
    rank = len(states)
    order = list(range(rank))
    if call.name == "permute":
        order = list(dims_of(call["dims"], rank)) if rank else []
    elif rank > 1:
        a, b = dims_of([call["dim0"], call["dim1"]] if call.name == "transpose" else [0, 1], rank)
        order[a], order[b] = order[b], order[a]
    return [tuple(states[d] for d in order)]


def unsqueeze(call: Call) -> list[States]:
    """A new dim of size 1."""
    states = list(call.states(call.first))
    states.insert(call["dim"] % (len(states) + 1), None)
    return [tuple(states)]


def squeeze(call: Call) -> list[States]:
    """Dims of size 1 go."""
    x = call.first
    dims = dims_of(call["dim"], x.dim())
    gone = {d for d in dims if plain(x.shape[d]) == 1}
    return [tuple(s for d, s in enumerate(call.states(x)) if d not in gone)]


def expand(call: Call) -> list[States]:
    """Size 1 to any: all positions are equal, and depend on no row."""
    states = call.states(call.first)
    shape = call.out[0].shape
    states = (None,) * (len(shape) - len(states)) + states
    return [
        tuple(
            Token(NO_ROWS, 0, True) if state is None and call.holds(size) else state
            for state, size in zip(states, shape, strict=True)
        )
    ]


def quotient(a: Any, b: Any) -> Any:
    """``a / b`` if that is whole for all values of the symbols, else None."""
    if a == b:
        return 1
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if b == 0:
        return None
    over, under = sympy.fraction(sympy.cancel(sympy.sympify(a) / b))
    return over if under == 1 else None


def _taken(left: list[Atom], size: Any) -> list[Atom] | None:
    """Consecutive atoms whose product is a size, taken from ``left``; None if none are."""
    taken: list[Atom] = []
    missing = size
    while missing != 1:
        if not left:
            return None
        first, state = left[0]
        rest = quotient(missing, first)
        if rest is None:
            # Dims without rows may be divided; those with rows may not.
            over = quotient(first, missing) if state is None else None
            if over is None:
                return None
            taken.append((missing, None))
            left[0] = (over, None)
            return taken
        taken.append(left.pop(0))
        missing = rest
    return taken


def _merged(taken: list[Atom]) -> tuple[State, bool]:
    """The state of one dim made of atoms, and whether its order is known."""
    holding = [i for i, (_, state) in enumerate(taken) if state is not None]
    if not holding:
        return None, True
    at = holding[0]
    size, token = taken[at]
    if len(taken) == 1:
        return token, True
    if len(holding) > 1 or not isinstance(token, Token):
        return ODD, False
    before, after = (math.prod(s for s, _ in part) for part in (taken[:at], taken[at + 1 :]))
    return Merged(before, size, after, token), True


def reshape(call: Call) -> list[States]:
    """Any view of other sizes: output dims are products of consecutive atoms of input dims."""
    x = call.first
    left: list[Atom] = []
    for size, state in zip(x.shape, call.states(x), strict=True):
        if isinstance(state, Merged):
            left += [(state.before, None), (state.size, state.token), (state.after, None)]
        else:
            left.append((plain(size), state))
    left = [atom for atom in left if atom[0] != 1]
    shape = call.out[0].shape
    states: list[State] = []
    for dim, size in enumerate(shape):
        taken = _taken(left, plain(size))
        if taken is None:
            call.rearranged("view")
            return [(*states, *call.lost(shape[dim:]))]
        state, known = _merged(taken)
        if not known:
            call.rearranged("view")
        states.append(state)
    return [tuple(states)]


def view_dtype(call: Call) -> list[States]:
    """``view(dtype)`` may resize the last dim."""
    states, x, out = call.states(call.first), call.first, call.out[0]
    if not states or plain(x.shape[-1]) == plain(out.shape[-1]) or states[-1] is None:
        return [states]
    call.rearranged()
    return [(*states[:-1], ODD)]


def view(call: Call) -> list[States]:
    """``view`` by size or by dtype."""
    return view_dtype(call) if "dtype" in call.arguments else reshape(call)


def repeat(call: Call) -> list[States]:
    """``repeat``: rows may not be repeated, a single position may."""
    x = call.first
    repeats = [plain(r) for r in call["repeats"]]
    lead = len(repeats) - x.dim()
    states: list[State] = [None] * lead + [fresh(s) for s in call.states(x)]
    sizes = [1] * lead + [plain(n) for n in x.shape]
    for dim, (count, size) in enumerate(zip(repeats, sizes, strict=True)):
        if states[dim] is None:
            if call.holds(count):
                states[dim] = Token(NO_ROWS) if size == 1 else ODD
        elif count != 1:
            states[dim] = ODD
        if states[dim] is ODD:
            call.rearranged()
    return [tuple(states)]


def scattered_view(call: Call) -> list[States]:
    """``unfold``, ``as_strided``, ``diagonal``: facts cannot follow rows through them."""
    dims = []
    if call.name == "unfold":
        dims = list(dims_of(call["dimension"], call.first.dim()))
    elif call.name == "diagonal":
        dims = list(dims_of([call["dim1"], call["dim2"]], call.first.dim()))
    states = call.states(call.first)
    if dims and all(states[d] is None for d in dims):
        kept = list(states)
        if call.name == "diagonal":
            kept = [s for d, s in enumerate(states) if d not in dims]
        return [(*kept, None)]
    call.rearranged()
    return [call.lost(call.out[0].shape)]


def complex_view(call: Call) -> list[States]:
    """A complex number as two real ones in a last dim, or the other way round."""
    states = call.states(call.first)
    return [(*states, None) if call.name == "view_as_real" else states[:-1]]


def same(call: Call) -> list[States]:
    """``detach``, ``alias``, ``lift_fresh``."""
    return [call.states(call.first)]
