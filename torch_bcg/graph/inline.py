"""Rewrites of a graph before anything is found out about it, none of which changes what it means.

Without gradients a checkpointed or nested compile region means no more than its body, but Dynamo
hands it over as one node, in which a mark would go unseen. A tensor whose geometry changes in place
is two values under one name. A list of numbers as an index is sent from the host at every call. An
embedding takes the order of a norm that it does not use.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from torch_bcg.graph.streams import note_streams

# Changes of a tensor's own geometry that are views otherwise.
_GEOMETRY = {
    n + "_": n
    for n in ("t", "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "as_strided")
}
_INLINED = ("tag_activation_checkpoint", "invoke_subgraph", "wrap", "wrap_activation_checkpoint")


def inlined(gm: fx.GraphModule, names: Mapping[str, str] | None = None) -> fx.GraphModule:
    """A copy of ``gm`` in which those regions are nodes like others.

    Names stay the same, but for placeholders that ``names`` calls otherwise. What Dynamo knows of
    streams is noted on its nodes, see `graph.streams`.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        called = (names or {}).get(node.name, node.name)
        env[node] = copy = graph.create_node("placeholder", called, node.args, name=called)
        copy.meta = dict(node.meta)
        copy.type = node.type
        copy._dynamo_source = getattr(node, "_dynamo_source", None)
    _copy(gm, graph, env, prefix="")
    result = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    result.meta = dict(gm.meta)
    forget_arguments(result.graph)
    note_streams(result.graph)
    return result


def forget_arguments(graph: fx.Graph) -> None:
    """Drops Dynamo's references to the tensors it traced with; it drops its own after a compile."""
    for node in graph.nodes:
        node.meta.pop("grapharg", None)


def without_geometry_changes(gm: fx.GraphModule, same_as: Mapping[str, str]) -> fx.GraphModule:
    """``gm`` with ``y.t_()`` of an intermediate as a view that takes the place of ``y`` from there.

    Changes of arguments stay, and keep the graph from being recorded.

    Args:
        gm: the graph.
        same_as: node -> the earlier node whose very tensor it returns, as far as that is known.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        name = (
            str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        )
        if first is None or not (name in _GEOMETRY or (name == "set_" and len(node.args) == 2)):
            continue
        root = same_as.get(first.name, first.name)
        names = [n for n in env if same_as.get(n.name, n.name) == root]
        if any(n.op not in ("call_method", "call_function") for n in names):
            continue
        copy = env[node]
        if name == "set_":
            now = copy.args[1]
        else:
            now = graph.call_method(_GEOMETRY[name], copy.args, copy.kwargs)
            now.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        for n in (*names, node):
            env[n] = now
        graph.erase_node(copy)
    return fx.GraphModule(gm, graph, class_name=type(gm).__name__)


def _copy(gm: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any], prefix: str) -> Any:
    """Copies nodes but placeholders given in ``env``; returns what the graph returns."""

    def at(p: fx.Node) -> Any:
        return env[p]

    for node in gm.graph.nodes:
        if node.op == "output":
            returned = fx.node.map_arg(node.args[0], at)
            if not prefix:
                graph.output(returned)
            return returned
        if node in env:
            continue
        body = _body(gm, node)
        if body is not None:
            module, operands = body
            inner = {
                p: at(o) if isinstance(o, fx.Node) else o
                for p, o in zip(module.graph.find_nodes(op="placeholder"), operands, strict=True)
            }
            path = prefix + str(node.args[0].target) + "."
            env[node] = _copy(module, graph, inner, path)
        elif node.target is operator.getitem and isinstance(env[node.args[0]], (tuple, list)):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = copy = graph.node_copy(node, at)
            if node.op in ("get_attr", "call_module"):
                copy.target = prefix + str(node.target)
            elif node.target in (operator.getitem, operator.setitem):
                _index_by_tensors(copy)
            elif node.target is torch.nn.functional.embedding:
                _without_norm(copy)
    raise AssertionError("a graph without an output node")


def _without_norm(node: fx.Node) -> None:
    """``embedding`` without the order of a norm that it does not take.

    With ``dynamic=True`` Dynamo makes an argument of that number, which varies for all it knows.
    """
    max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    if max_norm is None and len(node.args) > 4:
        node.args = (*node.args[:4], 2.0, *node.args[5:])
    elif max_norm is None:
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "norm_type"}


def _index_by_tensors(node: fx.Node) -> None:
    """``x[..., [-2]]`` -> ``x[..., i]`` with a tensor ``i``, which is a node that can be made once.

    A list of booleans is a mask, an empty list sends nothing: both stay.
    """
    indexed, index = node.args[0], node.args[1]
    value = indexed.meta.get("example_value") if isinstance(indexed, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return

    def tensor_for(part: Any) -> Any:
        if not isinstance(part, list) or not part or any(type(i) is not int for i in part):
            return part
        with node.graph.inserting_before(node):
            made = node.graph.call_function(
                torch.tensor, (list(part),), {"device": value.device}, name=f"{node.name}_index"
            )
        made.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        return made

    parts = tuple(map(tensor_for, index)) if isinstance(index, tuple) else tensor_for(index)
    node.args = (indexed, parts, *node.args[2:])


def _body(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The body of a region and what it takes, or None for any other node."""
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator) or target.name() not in _INLINED:
        return None
    first = node.args[0]
    if not isinstance(first, fx.Node) or first.op != "get_attr":
        return None
    module = gm.get_submodule(str(first.target))
    operands = [a for a in node.args[1:] if not isinstance(a, str)]
    if not isinstance(module, fx.GraphModule):
        return None
    if len(module.graph.find_nodes(op="placeholder")) != len(operands):
        return None
    return module, tuple(operands)
