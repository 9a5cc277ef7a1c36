"""Facts, marks and what the probe found -> stretches of nodes, each recorded or eager with Reasons.

The order of computing nodes is the order of the program, always. Views and numbers do no work: they
belong to no stretch and are remade where they are needed. Nodes between the ends of a functorch
level form one item that no cut divides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from torch_bcg.graph.forks import check_joined
from torch_bcg.graph.ir import Reason
from torch_bcg.graph.known import Facts
from torch_bcg.graph.openings import divided
from torch_bcg.graph.sorting import Sorter, where
from torch_bcg.marking import Mark


@dataclass
class Stretch:
    """Neighbouring computing nodes with one fate; no reasons: recorded."""

    nodes: list[fx.Node] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)


@dataclass
class Partition:
    """What becomes of every computing node.

    Attributes:
        stretches: in the order of the program.
        scratch: allocations that stand in no stretch.
        constants: nodes made once a program from numbers alone, in order.
        numbers: nodes whose value is a number known from the arguments.
        live: nodes whose value is a number that changes between calls of one program.
        number_operands: (node, argument index) read from a number slot -> the node of the number.
    """

    stretches: list[Stretch]
    scratch: list[fx.Node]
    constants: list[fx.Node]
    live: set[fx.Node]
    numbers: set[fx.Node]
    number_operands: dict[tuple[fx.Node, int], fx.Node]


def partition(
    gm: fx.GraphModule,
    facts: Facts,
    mark_of: Callable[[fx.Node], Mark | None],
    found: Mapping[str, Reason],
    min_segment_kernels: int = 1,
    static: Collection[str] = (),
) -> Partition:
    """Cuts the graph.

    Args:
        gm: the graph.
        facts: of its nodes.
        mark_of: the mark on a node, if there is one.
        found: the probe's reasons by node name.
        min_segment_kernels: what fewer kernels make is not recorded.
        static: names of the arguments whose addresses are compared when a call has begun.
    """
    sorter = Sorter(gm, facts, mark_of, found)
    items = sorter.items()
    if facts.whole is None:
        check_joined(gm.graph, facts, items, found)
    stretches: list[Stretch] = []
    scratch: list[fx.Node] = []
    items_of_run: list[list[fx.Node]] = []

    def end_run() -> None:
        run = [n for item in items_of_run for n in item]
        kernels = sum(facts.nodes[n.name].kernels for n in run)
        if kernels == 0:
            scratch.extend(n for n in run if facts.nodes[n.name].kind == "alloc")
            rest = [n for n in run if facts.nodes[n.name].kind != "alloc"]
            if rest:
                _append(stretches, rest, [Reason("no kernels", rest[0].name, where(rest[0]))])
        elif kernels < min_segment_kernels:
            few = Reason("few kernels", run[0].name, where(run[0]), f"{kernels}")
            _append(stretches, run, [few])
        elif stretches or not static:
            stretches.append(Stretch(run))
        else:
            parts = divided(items_of_run, gm, facts, static, max(1, min_segment_kernels))
            stretches.extend(Stretch([n for item in part for n in item]) for part in parts)
        items_of_run.clear()

    for nodes, reasons in items:
        if not reasons and sorter.is_like(nodes):
            scratch.extend(nodes)
        elif reasons:
            end_run()
            _append(stretches, nodes, reasons)
        else:
            items_of_run.append(nodes)
    end_run()
    return Partition(
        stretches, scratch, sorter.constants, sorter.live, sorter.numbers, sorter.number_operands
    )


def recorded_symbols(gm: fx.GraphModule, facts: Facts, parts: Partition) -> frozenset[str]:
    """Symbols that recorded segments or memory of a program depend on: they make its key.

    A size that only eager segments and views in them see is another one at each call: a batch of
    requests around tokens, say.
    """
    recorded = {n for s in parts.stretches if not s.reasons for n in s.nodes}
    lasting = {n.name for n in (*recorded, *parts.scratch, *parts.constants)}
    touched = {s for n in recorded for s in facts.nodes[n.name].reads | facts.nodes[n.name].writes}
    touched |= {storage for storage, name in facts.origin.items() if name in lasting}
    (output,) = gm.graph.find_nodes(op="output")
    todo = [n for n in output.all_input_nodes if touched & _storages(facts, n)]
    todo += [*recorded, *parts.scratch, *parts.constants]
    eager = {n for s in parts.stretches if s.reasons for n in s.nodes}
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += () if node in eager else node.all_input_nodes
    return frozenset(
        symbol for n in seen for symbol in facts.nodes[n.name].symbols & facts.key_symbols
    )


def _storages(facts: Facts, node: fx.Node) -> set[int]:
    return {t.storage for t in facts.nodes[node.name].tensors}


def _append(stretches: list[Stretch], nodes: list[fx.Node], reasons: list[Reason]) -> None:
    """Adds eager nodes, joined to an eager stretch before them; one reason a unit."""
    if not stretches or not stretches[-1].reasons:
        stretches.append(Stretch())
    last = stretches[-1]
    last.nodes.extend(nodes)
    seen = {(r.kind, r.unit or r.node) for r in last.reasons}
    last.reasons.extend(r for r in reasons if (r.kind, r.unit or r.node) not in seen)
