"""Rules of operators that compute: position by position, over dims, by contraction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_bcg.graph.dispatch import tensors_of
from torch_bcg.graph.known import DIVIDED_BY
from torch_bcg.graph.rows.call import Call, dims_of
from torch_bcg.graph.rows.states import (
    NO_ROWS,
    ODD,
    Merged,
    Odd,
    States,
    fresh,
)

Rule = Callable[[Call], Sequence[States]]


def pointwise(call: Call) -> list[States]:
    """Position by position, with broadcasting."""
    tensors = tensors_of(list(call.arguments.values()))
    states = call.broadcast((call.states(x) for x in tensors), call.out[0].dim() if call.out else 0)
    return [states] * len(call.out)


def _is_inexact(x: object) -> bool:
    number = isinstance(x, (float, complex, torch.SymFloat))
    return number or (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()))


def divide(call: Call) -> list[States]:
    """Whole numbers by whole numbers: rows that hold zero, as padded ones may, end it on a CPU."""
    by = call["other"]
    inexact = call.name == "div" and call["rounding_mode"] is None
    inexact = inexact or any(map(_is_inexact, (call.first, by)))
    rows = by if isinstance(by, torch.Tensor) and by.device.type == "cpu" else None
    if not inexact and any(s is not None for s in call.states(rows)):
        call.mixes(DIVIDED_BY, decided=False)
    return pointwise(call)


def random(call: Call) -> list[States]:
    """The generator advances by the padded size, so that every draw differs."""
    call.mixes("random numbers")
    return call.unknown()


def factory(call: Call) -> list[States]:
    """Values that depend on positions at most; a size used as a value is seen by all rules."""
    return [call.known.symbol.constant(x.shape) for x in call.out]


def like(call: Call) -> list[States]:
    """``zeros_like`` and its family: the order of the argument's rows, no row's values."""
    return [tuple(fresh(s, NO_ROWS) for s in call.states(call.first))]


def triangle(call: Call) -> list[States]:
    """``tril``, ``triu``: a mask by position."""
    states = tuple(fresh(s) for s in call.states(call.first))
    for state in states[-2:]:
        if isinstance(state, (Merged, Odd)):
            call.rearranged()
            return [call.lost(call.out[0].shape)]
    return [states]


def outputs(call: Call, states: States, dims: Sequence[int]) -> list[States]:
    """States of results that keep the reduced dims, as size 1, or not."""
    found = []
    for x in call.out:
        kept = x.dim() == len(states)
        found.append(
            tuple(
                None if d in dims else fresh(s)
                for d, s in enumerate(states)
                if kept or d not in dims
            )
        )
    return found


def reduce(call: Call, kind: str = "reduction over tokens") -> list[States]:
    """Over the dims of ``dim``; all where the operator has none."""
    states = call.states(call.first)
    dims = dims_of(call["dim"], len(states))
    if any(states[d] is not None for d in dims):
        call.mixes(kind)
    return outputs(call, states, dims)


def reduce_all(call: Call) -> list[States]:
    """Over all dims, whatever the arguments."""
    if any(
        s is not None for x in tensors_of(list(call.arguments.values())) for s in call.states(x)
    ):
        call.mixes("reduction over tokens")
    return call.unknown()


def normalise(call: Call, kind: str) -> list[States]:
    """Over one dim, which stays: ``softmax``."""
    x = call.first
    states = tuple(fresh(s) for s in call.states(x))
    if any(states[d] is not None for d in dims_of(call["dim"], x.dim())):
        call.mixes(kind)
    return [states] * len(call.out)


def order(call: Call, kind: str) -> list[States]:
    """``sort``, ``topk``: over one dim, which may change its size."""
    x = call.first
    dim = -1 if call["dim"] is None else call["dim"]
    states = list(call.states(x))
    if states and states[dim] is not None:
        call.mixes(kind)
        states[dim] = ODD
    if call.out and call.out[0].dim() < len(states):
        del states[dim]
    return [tuple(map(fresh, states))] * len(call.out)


def search(call: Call) -> list[States]:
    """``bucketize``, ``searchsorted``: where values stand in a sorted sequence."""
    names = ("boundaries", "self") if call.name == "bucketize" else ("sorted_sequence", "self")
    boundaries, values = call[names[0]], call[names[1]]
    within = call.states(boundaries)
    if any(s is not None for s in within[-1:]):
        call.mixes("sort over tokens")
    lead = within[:-1] if len(within) > 1 else ()
    return [call.broadcast([call.states(values), (*lead, None) if lead else ()])]


def scan(call: Call) -> list[States]:
    """``cumsum`` and its family: a position depends on earlier ones."""
    x = call.first
    states = tuple(fresh(s) for s in call.states(x))
    for dim in dims_of(call["dim"], x.dim()):
        state = states[dim] if states else None
        if isinstance(state, Odd):
            call.rearranged()
        elif isinstance(state, Merged) and state.before != 1:
            call.mixes("scan over merged rows")
    return [states] * len(call.out)


def reorder(call: Call) -> list[States]:
    """``flip``, ``roll``."""
    dims = dims_of(call["dims"], call.first.dim())
    states = list(map(fresh, call.states(call.first)))
    if any(states[d] is not None for d in dims):
        call.mixes("reversed rows" if call.name == "flip" else "rolled rows")
        states = [ODD if s is not None and d in dims else s for d, s in enumerate(states)]
    return [tuple(states)]


def layer_norm(call: Call) -> list[States]:
    """Over the trailing dims of ``normalized_shape``."""
    states = call.states(call.first)
    dims = range(len(states) - len(call["normalized_shape"]), len(states))
    if any(states[d] is not None for d in dims):
        call.mixes("reduction over tokens")
    whole = tuple(map(fresh, states))
    rest = tuple(None if d in dims else s for d, s in enumerate(whole))
    return [whole, rest, rest]


def group_norm(call: Call) -> list[States]:
    """Over all dims but the first; batch norm over all but the second while it trains."""
    states = tuple(map(fresh, call.states(call.first)))
    keeps = 1 if "batch_norm" in call.name else 0
    frozen = call.name.endswith("no_training") or (keeps == 1 and call["training"] is False)
    over = () if frozen else states[:keeps] + states[keeps + 1 :]
    if any(s is not None for s in over) or (keeps == 1 and states[1] is not None):
        call.mixes("reduction over tokens")
    first = states[:1] if keeps == 0 else (None,)
    return [states, *((first + (None,) * (x.dim() - 1)) for x in call.out[1:])]


def contract(call: Call) -> list[States]:
    """``mm``, ``bmm``, ``addmm``, …: the last dim of one with the last but one of the other."""
    names = list(call.arguments)
    names = names[1:] if call.name.startswith(("add", "badd")) else names
    a, b = (call.states(call[n]) for n in names[:2])
    vector = len(b) == 1
    if a[-1] is not None or b[-1 if vector else -2] is not None:
        call.mixes("contraction over tokens")
    batch = call.broadcast([a[:-2], b[:-2]])
    if call.name == "addbmm":
        if any(s is not None for s in batch):
            call.mixes("contraction over tokens")
        batch = ()
    rows = (*batch, *map(fresh, a[-2:-1]), *(() if vector else map(fresh, b[-1:])))
    if len(names) == len(call.arguments):
        return [rows]
    return [call.broadcast([rows, call.states(call.first)], len(rows))]


def linear(call: Call) -> list[States]:
    """``linear`` as one operator."""
    x, weight = call.states(call["input"]), call.states(call["weight"])
    if x[-1] is not None or weight[-1] is not None:
        call.mixes("contraction over tokens")
    return [(*map(fresh, x[:-1]), *map(fresh, weight[:-1]))]


def convolution(call: Call) -> list[States]:
    """Batch, channels, then the dims that it slides over."""
    x, weight = call.states(call["input"]), call.states(call["weight"])
    if x[1] is not None or any(s is not None for s in weight):
        call.mixes("contraction over tokens")
    if any(s is not None for s in x[2:]):
        call.mixes("convolution over tokens")
    shape = call.out[0].shape
    return [(fresh(x[0]), *call.lost(shape[1:]))]


def pool(call: Call) -> list[States]:
    """``avg_pool2d`` and its family: over as many trailing dims as the name says."""
    slid = int(call.name[call.name.index("pool") + 4])
    states = call.states(call.first)
    if any(s is not None for s in states[-slid:]):
        call.mixes("pooling over tokens")
    return [(*map(fresh, states[:-slid]), *call.lost(x.shape[-slid:])) for x in call.out]


def loss(call: Call) -> list[States]:
    """``mse_loss`` and its family: position by position, then over all unless told otherwise."""
    return pointwise(call) if call["reduction"] == 0 else reduce_all(call)


def renorm(call: Call) -> list[States]:
    """Over all dims but one."""
    states = tuple(map(fresh, call.states(call.first)))
    kept = call["dim"] % len(states)
    if any(s is not None for d, s in enumerate(states) if d != kept):
        call.mixes("reduction over tokens")
    return [states]


def attention(call: Call) -> list[States]:
    """Fused attention: keys are contracted, heads and batch are not."""
    several = [call.states(x) for x in list(call.arguments.values())[:3]]
    if len(several) < 3 or min(map(len, several)) < 3:  # somebody's own, of some other form
        call.mixes("contraction over tokens")
        return call.unknown()
    q, k, v = several
    # scaled_dot_product_*: (batch, heads, keys, size); the others (batch, keys, heads, size) or
    # packed (keys, heads, size), of which facts see no borders of sequences.
    if call["dropout_p"]:
        call.mixes("random numbers")
    keys = -2 if "scaled_dot_product" in call.name else -3
    if any(s[d] is not None for s in (k, v) for d in (keys, -1)) or q[-1] is not None:
        call.mixes("contraction over tokens")
    others = [q, _without(k, keys), _without(v, keys)]
    mask = call["attn_mask"] if call["attn_bias"] is None else call["attn_bias"]
    if mask is not None:
        others.append(_without(call.states(mask), -1))
    first = call.broadcast(o[:-1] for o in others) if len(q) == len(k) else q[:-1]
    return [(*map(fresh, first), fresh(v[-1])), *call.unknown()[1:]]


def _without(states: States, dim: int) -> States:
    at = dim % len(states)
    return tuple(None if d == at else s for d, s in enumerate(states))


def unknown(call: Call) -> list[States]:
    """An operator that no rule knows."""
    call.mixes("operator", decided=False)
    return call.unknown()


def nothing(call: Call) -> list[States]:
    """Checks of sizes and values, without a result."""
    return []
