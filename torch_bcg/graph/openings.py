"""What a call may begin with before it is known to be a program's: it can be done again.

While the device works on that the host compares the addresses of everything else. So a first
segment that writes somebody's memory is divided where there is much to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from torch_bcg.graph.known import Facts
from torch_bcg.graph.modes import is_mode

Item = Sequence[fx.Node]
# One more launch takes the host some 6 us, and one address that is in no cache up to 0.5 us
# (benchmarks/bench_transformer.py, H200); few kernels are done before anything is compared.
STATICS, KERNELS = 256, 8


def is_repeatable(nodes: Iterable[fx.Node], facts: Facts, is_given: Callable[[int], bool]) -> bool:
    """Whether nodes write memory of the program alone, draw nothing and talk to nobody.

    Args:
        nodes: of a segment.
        facts: of them.
        is_given: whether a storage is an argument's, or one that the graph holds.
    """
    for f in (facts.nodes[n.name] for n in nodes):
        if any(map(is_given, f.writes)):
            return False
        # An operator of somebody else's may be a collective: other processes count its calls.
        known = f.operators and all(o.namespace in ("aten", "prims") for o in f.operators)
        if f.kernels and (f.random or not known):
            return False
    return True


def given_in(gm: fx.GraphModule, facts: Facts) -> Callable[[int], bool]:
    """A function that tells whether a storage is an argument's, or one that the graph holds."""
    given = {n.name for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    return lambda storage: facts.origin[storage] in given


def divided(
    items: Sequence[Item], gm: fx.GraphModule, facts: Facts, static: Collection[str], least: int
) -> list[Sequence[Item]]:
    """The items of the first segment, in two where the first ones make an opening that pays.

    Args:
        items: of nodes that belong together, in order.
        gm: the graph.
        facts: of its nodes.
        static: names of the arguments whose addresses a call compares.
        least: kernels that each recorded segment has.
    """
    is_given = given_in(gm, facts)
    n = next((i for i, one in enumerate(items) if not is_repeatable(one, facts, is_given)), 0)
    first, rest = items[:n], items[n:]
    read = {s for one in first for node in one for s in facts.nodes[node.name].reads}
    late = [a for a in static if not any(t.storage in read for t in facts.nodes[a].tensors)]
    orders = (n for n in gm.graph.nodes if facts.nodes[n.name].kind == "mode" and not is_mode(n))
    streams = next(orders, None) is not None  # a fork is joined where it began
    enough = len(late) >= STATICS and _kernels(first, facts) >= max(KERNELS, least)
    if streams or not enough or _kernels(rest, facts) < least:
        return [items]
    return [first, rest]


def _kernels(items: Iterable[Item], facts: Facts) -> int:
    return sum(facts.nodes[n.name].kernels for one in items for n in one)
