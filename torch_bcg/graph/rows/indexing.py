"""Rules of operators that read or write at positions that a tensor says."""

from __future__ import annotations

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torch_bcg.graph.known import COUNTED_THROUGH, WRITTEN
from torch_bcg.graph.rows.call import POSITIONS, Call, dims_of
from torch_bcg.graph.rows.states import ODD, Merged, State, States, Token, fresh

MASKS = (torch.bool, torch.uint8)


def _at(call: Call, state: State, positions: torch.Tensor, size: object) -> None:
    """Notes that a tensor says positions of a dim, of rows or of a table.

    Where there is something in front of all rows, a row has another number in a padded run. What
    the graph itself makes of rows (``nonzero``, ``sort``) may have found it there, and a trial can
    tell; what is given to it, or fixed, has the number of the call.
    """
    if state is None:
        call.looks_up(positions, size)
    elif isinstance(state, Token) or (isinstance(state, Merged) and state.before == 1):
        call.undecided()
    elif _placed_rows(call.states(positions)) or free_unbacked_symbols(positions):
        call.rearranged()
    else:
        call.mixes(COUNTED_THROUGH)


def embedding(call: Call) -> list[States]:
    """Rows of a table; a table of rows is asked for at positions nobody knows."""
    weight, positions = call.states(call["weight"]), call["indices"]
    _at(call, weight[0], positions, call["weight"].shape[0])
    return [(*map(fresh, call.states(positions)), *map(fresh, weight[1:]))]


def index_select(call: Call) -> list[States]:
    """Positions of one dim."""
    x = call.first
    states = list(map(fresh, call.states(x)))
    if not states:
        return [()]
    (dim,) = dims_of(call["dim"], x.dim())
    _at(call, states[dim], call["index"], x.shape[dim])
    index = call.states(call["index"])
    states[dim] = fresh(index[0]) if index else None
    return [tuple(states)]


def _indexed(call: Call) -> tuple[States, list[int], list[torch.Tensor]]:
    """States of the indices together, dims that they index, the index tensors."""
    given = call["indices"]
    dims = [d for d, i in enumerate(given) if i is not None]
    tensors = [given[d] for d in dims]
    return call.broadcast(call.states(i) for i in tensors), dims, tensors


def _placed(states: States, dims: list[int], among: States) -> States:
    """Dims of ``x[indices]``: those of the indices where they stand together, else in front."""
    rest = [s for d, s in enumerate(states) if d not in dims]
    at = _place(dims)
    return (*rest[:at], *among, *rest[at:])


def _placed_rows(states: States) -> bool:
    return any(s is not None for s in states)


def index(call: Call) -> list[States]:
    """``index``: positions of some dims, by tensors broadcast together."""
    states = tuple(map(fresh, call.states(call.first)))
    among, dims, tensors = _indexed(call)
    if any(t.dtype in MASKS for t in tensors):
        if any(call.holds(n) for t in tensors for n in t.shape):
            call.undecided()
        return call.unknown()
    for d, tensor in zip(dims, tensors, strict=True):
        among = _at_positions(call, states[d], tensor, call.first.shape[d], among)
    return [_placed(states, dims, among) if dims else states]


def _at_positions(
    call: Call, state: State, positions: torch.Tensor, size: object, among: States
) -> States:
    """Rows at positions: where every position is its own, as masks ask for, they stay."""
    own = call.states(positions)
    holding = [d for d, s in enumerate(own) if s is not None]
    single = len(holding) == 1 and isinstance(own[holding[0]], Token)
    if call.known.name(positions) != POSITIONS or not isinstance(state, Token) or not single:
        _at(call, state, positions, size)
        return among
    at = holding[0] - len(own) + len(among)
    return (*among[:at], call.join(among[at], state), *among[at + 1 :])


def index_put(call: Call) -> list[States]:
    """``index_put``: values at positions of some dims."""
    states = call.states(call.first)
    among, dims, tensors = _indexed(call)
    values = call.states(call["values"])
    call.index = tensors
    if any(t.dtype in MASKS for t in tensors):
        call.undecided()
        return [tuple(map(fresh, states))]
    target = _placed(states, dims, among)
    written = call.broadcast([target, values], len(target))
    # Rows of values count as well: an index of another size is a symbol of its own.
    at = _place(dims)
    if _placed_rows(written[at : at + len(among)]) and not call.outward:
        call.mixes(WRITTEN)
        return [tuple(map(fresh, states))]
    for d, tensor in zip(dims, tensors, strict=True):
        if not call.outward:
            _at(call, states[d], tensor, call.first.shape[d])
    if any(states[d] is not None for d in dims):
        return [tuple(map(fresh, states))]
    rest = iter(_rest_of(written, dims, len(among)))
    return [tuple(fresh(s) if d in dims else next(rest) for d, s in enumerate(states))]


def _place(dims: list[int]) -> int:
    together = dims == list(range(dims[0], dims[-1] + 1))
    return dims[0] if together else 0


def _rest_of(placed: States, dims: list[int], among: int) -> list[State]:
    at = _place(dims)
    return [*placed[:at], *placed[at + among :]]


def gather(call: Call) -> list[States]:
    """``gather``: along one dim; position ``p`` of the others reads position ``p``."""
    x, positions = call.first, call.states(call["index"])
    states = call.states(x)
    if not states:
        return [tuple(map(fresh, positions))]
    (dim,) = dims_of(call["dim"], x.dim())
    _at(call, states[dim], call["index"], x.shape[dim])
    pairs = enumerate(zip(states, positions, strict=True))
    return [tuple(fresh(i) if d == dim or i is None else call.join(s, i) for d, (s, i) in pairs)]


def scatter(call: Call) -> list[States]:
    """``scatter`` and its family: along one dim, position ``p`` of the others to position ``p``.

    An index with rows where the target has none reaches memory that is not padded.
    """
    x = call.first
    states = call.states(x)
    positions, source = call.states(call["index"]), call.states(call["src"])
    call.index = [call["index"]]
    if not states:
        return [states]
    (dim,) = dims_of(call["dim"], x.dim())
    if states[dim] is None and not call.outward:
        call.looks_up(call["index"], x.shape[dim])
    result = []
    for d, (s, i) in enumerate(zip(states, positions, strict=True)):
        if i is not None and (s is None or d == dim):
            if not call.outward:
                call.mixes(WRITTEN)
            result.append(fresh(s))
        elif d == dim and s is not None:
            _at(call, s, call["index"], x.shape[dim])
            result.append(fresh(s))
        else:
            result.append(call.join(s, i, *(source[d : d + 1] if d != dim else ())))
    return [tuple(result)]


def along(call: Call) -> list[States]:
    """``index_add``, ``index_copy``, ``index_fill``: slices of one dim at positions."""
    x = call.first
    states = call.states(x)
    positions = call.states(call["index"])
    source = call.states(call["source"])
    call.index = [call["index"]]
    if not states:
        return [states]
    (dim,) = dims_of(call["dim"], x.dim())
    moved = (*positions, *source[dim : dim + 1])
    if _placed_rows(moved):
        if not call.outward:
            call.mixes(WRITTEN)
    elif states[dim] is not None:
        _at(call, states[dim], call["index"], x.shape[dim])
    if len(source) == len(states):
        source = (*source[:dim], None, *source[dim + 1 :])
        return [call.broadcast([states, source], len(states))]
    return [tuple(map(fresh, states))]


def masked_scatter(call: Call) -> list[States]:
    """Values in the order of the true elements: a later row never moves an earlier value."""
    states = tuple(map(fresh, call.states(call.first)))
    call.rearranged()
    return [tuple(ODD if s is not None else None for s in states)]


def put(call: Call) -> list[States]:
    """``put``: values at positions of all dims counted as one."""
    states, index = call.states(call.first), call["index"]
    call.index = [index]
    if _placed_rows(call.states(index)):
        if not call.outward:
            call.mixes(WRITTEN)
    else:
        _counted_through(call, states)
    return [tuple(map(fresh, states))]


def take(call: Call) -> list[States]:
    """``take``: positions of all dims counted as one."""
    states = call.states(call.first)
    _counted_through(call, states)
    return [tuple(map(fresh, call.states(call["index"])))]


def _counted_through(call: Call, states: States) -> None:
    """Of rows in the first dim alone a number is the same whatever comes behind them."""
    if _placed_rows(states[1:]):
        call.mixes(COUNTED_THROUGH)
    else:
        _at(call, states[0] if states else None, call["index"], call.first.numel())


def isin(call: Call) -> list[States]:
    """``isin``: whether values are among those of another tensor."""
    elements, among = list(call.arguments.values())[:2]
    if _placed_rows(call.states(among)):
        call.mixes("reduction over tokens")
    return [tuple(map(fresh, call.states(elements)))]
