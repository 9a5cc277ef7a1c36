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
# One more launch takes the host some 20 us and 1,353 addresses 340 us, where nothing is in a cache
# (within bench_dsv4.py on an H200). Few kernels are done before any of that is.
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
    again = [is_repeatable(one, facts, is_given) for one in items]
    if all(again):  # it is an opening as it is
        return [items]
    end = again.index(False)
    first, rest = items[:end], items[end:]
    read = {s for one in first for node in one for s in facts.nodes[node.name].reads}
    late = [a for a in static if not any(t.storage in read for t in facts.nodes[a].tensors)]
    enough = len(late) >= STATICS and _kernels(first, facts) >= max(KERNELS, least)
    kinds = ((n, facts.nodes[n.name].kind) for n in gm.graph.nodes)
    streams = any(kind == "mode" and not is_mode(n) for n, kind in kinds)  # forks are joined there
    if streams or not enough or _kernels(rest, facts) < least:
        return [items]
    return [first, rest]


def _kernels(items: Iterable[Item], facts: Facts) -> int:
    return sum(facts.nodes[n.name].kernels for one in items for n in one)
