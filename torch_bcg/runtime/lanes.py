"""Lanes of a recorded segment: what the user put on streams of his own runs beside the rest.

Every lane is a stream of the pool's. The first order or node of a lane forks it into the recording,
and at the end all of them are joined, so no recording ends with open work, whatever it began with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from torch_bcg.errors import CaptureError
from torch_bcg.graph.geometry import target_name
from torch_bcg.graph.lower import Code, Tracked, name_of
from torch_bcg.graph.streams import Order, place_of
from torch_bcg.runtime.kept import is_foreign


def lanes_of(code: fx.GraphModule) -> list[int]:
    """The side lanes of a lowered segment that works on any, or of what orders them."""
    places = [place_of(n) for n in code.graph.nodes if n.op not in ("placeholder", "output")]
    if not any(p.lane for p in places):
        return []
    lanes = {p.lane for p in places} | {o.lane for p in places for o in p.orders}
    return sorted(lanes - {0})


class OnLanes(Tracked):
    """Runs a segment on streams: ``streams[0]`` is the one being recorded.

    It holds every value until it is dropped itself, which has to be after the recording: a block
    freed by one lane would be taken again by that lane while another one still reads it.
    """

    def __init__(
        self,
        code: fx.GraphModule,
        streams: Mapping[int, Any],
        enter: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        super().__init__(code, collect=False)
        self.streams, self.enter = streams, enter
        self.forked = {0}
        self.events: dict[int | str, Any] = {}
        # Orders carried out. Those of earlier segments fork lanes at the beginning of this one,
        # which is as early as can be, and order nothing else.
        self.done = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the segment and joins its lanes."""
        try:
            results = super().run(*args, **kwargs)
        except BaseException:  # an interrupt too must not end the recording with open lanes
            with contextlib.suppress(RuntimeError):  # what ended the recording says more
                self.join()
            raise
        self.join()
        return results

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node in its lane, after the orders that came before it."""
        place = place_of(n)
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        self.follow(place.orders[self.done : place.before])
        self.done = max(self.done, place.before)
        if place.lane == 0:
            return super().run_node(n)
        if place.lane not in self.forked:
            self.wait(place.lane, 0)
        with self.enter(self.streams[place.lane]):
            return super().run_node(n)

    def wait(self, lane: int, other: int) -> None:
        """Lets a lane wait for one that is in the recording, which takes it in as well."""
        self.streams[lane].wait_stream(self.streams[other])
        self.forked.add(lane)

    def join(self) -> None:
        """Lets the recorded stream wait for every lane."""
        for lane in sorted(self.forked - {0}):
            self.wait(0, lane)

    def follow(self, orders: Iterable[Order]) -> None:
        """Carries out orders; there is nothing to wait for of what is not in the recording."""
        for order in orders:
            if order.name == "wait_stream":
                if order.other in self.forked:
                    self.wait(order.lane, order.other)
            elif order.name == "wait_event":
                if order.event in self.events:
                    self.streams[order.lane].wait_event(self.events[order.event])
                    self.forked.add(order.lane)
            elif order.lane in self.forked:
                self.events[order.event] = self.streams[order.lane].record_event()


def unjoined(code: Code, error: BaseException) -> CaptureError | None:
    """What a recording that ended with open work on a stream says about it; else None.

    Only an operator that is not PyTorch's own can have forked unseen. If it is one, the error is
    about its node.
    """
    if "unjoined" not in str(error):
        return None
    nodes = [n for n in code.graph.nodes if is_foreign(n)]
    names = ", ".join(dict.fromkeys(map(target_name, nodes))) or "none that is not PyTorch's own"
    segment = name_of(code)
    caught = CaptureError(
        f"Work that an operator put on a side stream was not joined; it may be of {names}",
        where=segment,
        expected="operators that join what they fork: current_stream().wait_stream(s)",
        found=str(error).splitlines()[0],
        fix="Join inside the operator, or mark it with torch_bcg.eager_on_graph.",
    )
    if len(nodes) == 1:
        caught.bcg_node = nodes[0].name  # type: ignore[attr-defined]
    return caught
