"""A fork of the user's has to be joined in the recorded segment that it began in.

Lanes and orders are those that `graph.streams` notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from torch_bcg.errors import StreamError
from torch_bcg.graph.ir import Reason
from torch_bcg.graph.known import Facts
from torch_bcg.graph.sorting import where
from torch_bcg.graph.streams import Order, place_of, role_of


class _Clocks:
    """How much work each lane was given, and how much of it each lane has waited for."""

    def __init__(self) -> None:
        self.work: Counter[int] = Counter()
        self.known: dict[int, Counter[int]] = {}
        self.events: dict[int | str, Counter[int]] = {}
        self.forks: dict[int, fx.Node] = {}

    def follow(self, node: fx.Node, order: Order) -> None:
        """One order."""
        if order.name == "record_event":
            self.events[order.event] = self.now(order.lane)
            return
        if order.lane and not self.is_open(order.lane):
            self.forks[order.lane] = node
        by_event = order.name == "wait_event"
        # Of an event for the host there is nothing: it is a cut, before which all is joined.
        known = self.events.get(order.event, Counter())
        before = known if by_event else self.now(order.other)
        self.known[order.lane] = self.of(order.lane) | before

    def works(self, node: fx.Node, lane: int) -> None:
        """A node that computes; without a fork it is the fork itself."""
        if lane not in self.forks and lane:
            self.forks[lane] = node
        self.work[lane] += 1

    def of(self, lane: int) -> Counter[int]:
        return self.known.get(lane, Counter())

    def now(self, lane: int) -> Counter[int]:
        return self.of(lane) | Counter({lane: self.work[lane]})

    def is_open(self, lane: int) -> bool:
        """Whether the caller's lane has not waited for all that a lane was given."""
        return self.work[lane] > self.of(0)[lane]

    def join(self) -> None:
        """Everything is waited for."""
        self.known[0] = self.of(0) | self.work


def check_joined(
    graph: fx.Graph,
    facts: Facts,
    items: Sequence[tuple[list[fx.Node], list[Reason]]],
    found: Mapping[str, Reason],
) -> None:
    """A lane that works in a recorded segment is joined before the next cut, or it is an error.

    Not so at a cut that only a run has shown, which nobody can see coming: there the recorder
    joins what is open, and values are right in any case.

    Raises:
        StreamError: names the fork and the cut.
    """
    clocks = _Clocks()
    reasons = {n: r for nodes, r in items for n in nodes}
    for node in graph.nodes:
        place = place_of(node)
        if role_of(node) == "order" and place.orders:
            clocks.follow(node, place.orders[place.before])
        elif reasons.get(node):
            if all(r == found.get(r.node) for r in reasons[node]):
                clocks.join()
            _raise_open(clocks, node, reasons[node][0])
        elif node in reasons and facts.nodes[node.name].kernels:
            clocks.works(node, place.lane)
        elif node.op == "output":
            _raise_open(clocks, node, None)


def _raise_open(clocks: _Clocks, cut: fx.Node, reason: Reason | None) -> None:
    open_ = [lane for lane in clocks.work if lane and clocks.is_open(lane)]
    if not open_:
        return
    fork = clocks.forks[open_[0]]
    place = f"the fork is {_named(fork)}"
    if reason is None:
        ends, end = "the graph ends", "the end of the graph"
        fix = "Join before the compiled function returns"
    else:
        ends, end = f"the cut at '{cut.name}'", f"the cut is {_named(cut)}"
        fix = "Move the fork behind the cut, or join before it"
    raise StreamError(
        f"Work on the stream that '{fork.name}' forks is not joined before {ends}.",
        where=f"{place}; {end}",
        expected="fork and join in one recorded segment",
        found="no join" if reason is None else f"between them {reason}",
        fix=f"{fix}: torch.cuda.current_stream().wait_stream(s).",
    )


def _named(node: fx.Node) -> str:
    place = where(node)
    return f"'{node.name}' at {place}" if place else f"'{node.name}'"
