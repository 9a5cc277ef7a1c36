"""Streams of the user's, as Dynamo leaves them in a graph: lanes, and what orders them.

``with torch.cuda.stream(s)`` is a note on nodes. Waits and events are nodes, which differ by
version of torch: operators with indices of Dynamo's table of objects, or methods of the objects.
All of it is noted here once on every node, when the graph arrives, so no segment holds such a node.
A CUDA recorder works on lanes of its own by these notes; everything else runs in the order of the
program, which the waits allow too.

An order with work outside the graph keeps the graph from being recorded: arguments are copied in
before its first node and outputs copied out after its last, which such an order would not cover.

Not kept: what is on the user's stream before the graph forks it, and events that the graph waits
for are not recorded for anybody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._dynamo import graph_bytecode_inputs as table

from torch_bcg.graph.known import NodeFacts

_PLACE, _ROLE = "bcg_place", "bcg_stream"
_ORDERS = ("wait_stream", "wait_event", "record_event")
_FREES = ("record_stream", "sync_dealloc")
_STOPS = ("synchronize", "synchronize_event", "synchronize_stream", "synchronize_device")
Role = Literal["object", "order", "free", "outside", "host"]


@dataclass(frozen=True, slots=True)
class Order:
    """One node that orders lanes.

    Attributes:
        name: of the operation, e.g. ``wait_event``.
        lane: which waits or records.
        other: lane that ``wait_stream`` waits for.
        event: key of the event; "" for none.
    """

    name: str
    lane: int = 0
    other: int = 0
    event: int | str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands: its lane, 0 for the caller's stream, and how many orders came before."""

    lane: int = 0
    before: int = 0
    orders: Sequence[Order] = ()


def place_of(node: fx.Node) -> Place:
    """What was noted on a node, or on the one it was copied from."""
    place: Place = node.meta.get(_PLACE, Place())
    return place


def role_of(node: fx.Node) -> Role | None:
    """What a node is to streams, or None: it computes.

    An ``object`` is a stream or event, an ``order`` concerns the graph alone, ``free`` says when
    the memory of a call may be used again, ``outside`` is an order with work of the caller's, and
    ``host`` waits on the host, or records the event for it.
    """
    role: Role | None = node.meta.get(_ROLE)
    return role


def stream_facts(node: fx.Node) -> NodeFacts | None:
    """The facts of a node that is something to streams."""
    role = role_of(node)
    name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    if role == "object":
        return NodeFacts("number", given=True)  # of this call, wherever it is needed
    if role in ("order", "free"):
        return NodeFacts("mode")
    if role == "outside":
        return NodeFacts("kernel", cause=("outside stream", name))
    return NodeFacts("kernel", cause=("host read", name)) if role == "host" else None


# What Dynamo says.


def note_streams(graph: fx.Graph) -> None:
    """Notes lanes and orders on nodes; called while Dynamo compiles, which knows the streams."""
    lanes = _Lanes(graph)
    orders = {n: o for n in graph.nodes if (o := lanes.order(n)) is not None}
    for node in graph.nodes:
        if lanes.is_object(node, orders):
            node.meta[_ROLE] = "object"
    outside, awaited = _outside(graph, orders, lanes)
    for node, order in orders.items():
        role = "free" if order.name in _FREES else "order"
        role = "host" if order.name in _STOPS or node in awaited else role
        node.meta[_ROLE] = "outside" if node in outside else role
    kept = [n for n in orders if role_of(n) == "order"]
    if not any(map(lanes.of, graph.nodes)):
        return
    noted, before = tuple(orders[n] for n in kept), 0
    for node in graph.nodes:
        node.meta[_PLACE] = Place(lanes.of(node), before, noted)
        before += before < len(kept) and node is kept[before]


class _Lanes:
    """Reads one graph: which lane an index of Dynamo's table is, and what a node orders."""

    def __init__(self, graph: fx.Graph) -> None:
        self.objects: dict[int, Any] = {}
        for node in graph.nodes:
            if node.target is table.get_external_object_by_index:
                self.objects[int(node.args[0])] = node.meta.get("example_value")
        self.lanes: dict[int, int] = {}
        self.streams: dict[tuple[Any, int], int] = {}  # one stream may have several indices

    def lane(self, index: Any) -> int:
        """The lane of an index, or of the node that stands for the stream."""
        if isinstance(index, fx.Node):
            index = index.args[0]
        if index is None:
            return 0
        if index not in self.lanes:
            self.lanes[index] = self.read(int(index))
        return self.lanes[index]

    def read(self, index: int) -> int:
        reference = table.index_to_external_object_weakref.get(index)
        stream = self.objects.get(index)
        if stream is None and reference is not None:
            stream = reference()
        if isinstance(stream, torch.Stream):
            if torch.accelerator.is_available():
                now = torch.accelerator.current_stream(stream.device)
                if (now.device, now.stream_id) == (stream.device, stream.stream_id):
                    return 0
            # From 1, whatever the index: before torch 2.12 the caller's stream may have any.
            return self.streams.setdefault((stream.device, stream.stream_id), index + 1)
        caller = getattr(table, "CURRENT_STREAM_INDEX", None)
        return 0 if index == caller else index + 1

    def of(self, node: fx.Node) -> int:
        """The lane of a node that computes."""
        if node.op not in ("call_function", "call_method", "call_module"):
            return 0
        return self.lane((node.meta.get("custom") or {}).get("stream"))

    def order(self, node: fx.Node) -> Order | None:
        """What a node orders, if it does."""
        target: Any = node.target
        args = [*node.args, *node.kwargs.values()]
        if node.op == "call_method":
            objects = [a for a in args if isinstance(a, fx.Node) and self.stands_for_object(a)]
            name = str(target)
            if name not in (*_ORDERS, *_STOPS, "record_stream") or not objects:
                return None
            if name == "wait_stream":
                return Order(name, self.lane(args[0]), self.lane(args[1]))
            if name in ("wait_event", "record_event"):
                event = self.event(args[1]) if len(args) > 1 else node.name
                return Order(name, self.lane(args[0]), event=event)
            if name == "record_stream":
                return Order(name, self.lane(args[1]))
            return Order(name, event=self.event(args[0]))
        qualified = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", "")
        space, _, name = str(qualified).partition("::")
        if node.op != "call_function" or space != "streams":
            return None
        name = name.removesuffix(".default")
        if name == "wait_stream":
            return Order(name, self.lane(args[0]), self.lane(args[1]))
        if name in ("wait_event", "record_event", "sync_dealloc"):
            return Order(name, self.lane(args[1]), event=self.event(args[0]))
        if name == "record_stream":
            return Order(name, self.lane(args[1]))
        return Order(name, event=self.event(args[0]) if args else "")

    def event(self, event: Any) -> int | str:
        """The key of an event: its index, or the node that made it."""
        if not isinstance(event, fx.Node):
            return int(event) if isinstance(event, int) else str(event)
        found = event.target is table.get_external_object_by_index
        return int(event.args[0]) if found else event.name  # type: ignore[arg-type]

    def stands_for_object(self, node: fx.Node) -> bool:
        """Whether a node's value is a stream or event."""
        made = node.op == "call_method" and node.target == "record_event"
        return made or node.target is table.get_external_object_by_index

    def is_object(self, node: fx.Node, orders: Mapping[fx.Node, Order]) -> bool:
        """Whether a node fetches a stream or event, not a module."""
        if node.target is not table.get_external_object_by_index:
            return False
        value = node.meta.get("example_value")
        if value is not None:
            return isinstance(value, (torch.Stream, torch.Event))
        return all(u in orders for u in node.users)


def _outside(
    graph: fx.Graph, orders: Mapping[fx.Node, Order], lanes: _Lanes
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Orders with work outside the graph, and records of events that the host waits for.

    The former are a wait for a stream or event that nothing in the graph leads to, and an event or
    a fork that nothing in the graph follows, for which somebody else must be waiting.
    """
    outside, awaited, unused = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    inside = {0}
    records: dict[int | str, fx.Node] = {}
    idle: dict[int, list[fx.Node]] = {}  # waits of a lane that has done nothing since
    for node in graph.nodes:
        order = orders.get(node)
        if order is None:
            if lanes.of(node) and role_of(node) is None:
                inside.add(lanes.of(node))
                idle.pop(lanes.of(node), None)
            continue
        record = records.get(order.event)
        if order.name == "record_event":
            followed = order.lane in inside and all(u in orders for u in node.users)
            records[order.event] = node
            (unused if followed else outside).add(node)
        elif order.name in _STOPS or order.name == "sync_dealloc":
            if record is not None and order.name in _STOPS and record not in outside:
                awaited.add(record)
            unused.discard(record)
        elif order.name in ("wait_stream", "wait_event"):
            known = record is not None and record not in outside
            if not (known if order.name == "wait_event" else order.other in inside):
                outside.add(node)
                continue
            unused.discard(record)
            idle.pop(orders[record].lane if record is not None else order.other, None)
            if order.lane:
                inside.add(order.lane)
                idle.setdefault(order.lane, []).append(node)
        elif order.name != "record_stream" or order.lane not in inside:
            outside.add(node)
    return outside | unused | {n for nodes in idle.values() for n in nodes}, awaited
