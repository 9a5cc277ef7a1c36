"""Which lowered segments are the same computation, so that one compilation serves them all."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

# Values that compare and print as what they are; 1 and True, 0.0 and -0.0 are not the same.
_PLAIN = (
    type(None), type(...), bool, int, float, complex, str,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def canonical(code: fx.GraphModule) -> fx.GraphModule:
    """A copy that takes its operands in the order in which it uses them.

    The order of a lowered segment is that of the whole graph, in which one layer reads an argument
    where the next reads a result. Of what Dynamo noted, where a node comes from alone is kept.
    """
    place = {node: i for i, node in enumerate(code.graph.nodes)}

    def first_use(node: fx.Node) -> tuple[int, int]:
        user = min(node.users, key=place.__getitem__, default=None)
        return (len(place), 0) if user is None else (place[user], user.all_input_nodes.index(node))

    graph = fx.Graph()
    taken = sorted(code.graph.find_nodes(op="placeholder"), key=first_use)
    env = {node: graph.placeholder(node.name) for node in taken}
    for node in code.graph.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
            env[node].meta = {k: x for k, x in node.meta.items() if k == "stack_trace"}
    return fx.GraphModule(code, graph, class_name=type(code).__name__)


def with_sizes(code: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy that takes these numbers first: a compiler has to be given a size to know it.

    From an operand of which one dim is ``n - 1`` it does not find out what ``n`` is.
    """
    graph = fx.Graph()
    for name in names:
        graph.placeholder(f"known_{name}")  # an operand may be called as the size itself is
    graph.output(graph.graph_copy(code.graph, {}))
    return fx.GraphModule(code, graph, class_name=type(code).__name__)


def code_key(code: fx.GraphModule) -> Hashable:
    """What a lowered segment computes, whatever its nodes are called.

    Objects that have no value of their own (attributes of the graph) count as like themselves
    alone; the key names them by identity, so they have to live as long as it is kept.
    """
    place = {node: i for i, node in enumerate(code.graph.nodes)}
    return tuple(
        (
            node.op,
            _target(code, node),
            _frozen(node.args, place),
            _frozen(node.kwargs, place),
        )
        for node in code.graph.nodes
    )


def _target(code: fx.GraphModule, node: fx.Node) -> Hashable:
    if node.op in ("placeholder", "output"):
        return None
    if node.op in ("get_attr", "call_module"):
        return id(operator.attrgetter(str(node.target))(code))
    return node.target


def _frozen(x: Any, place: dict[fx.Node, int]) -> Hashable:
    if isinstance(x, fx.Node):
        return "node", place[x]
    if isinstance(x, (tuple, list)):
        return type(x).__name__, *(_frozen(y, place) for y in x)
    if isinstance(x, dict):
        return "dict", *((k, _frozen(y, place)) for k, y in x.items())
    if isinstance(x, slice):
        return "slice", *(_frozen(y, place) for y in (x.start, x.stop, x.step))
    return type(x), repr(x) if isinstance(x, _PLAIN) else id(x)
