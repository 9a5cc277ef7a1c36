"""Who makes a value, who reads it, and what crosses each cut: questions that reports ask a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_bcg.graph.values import Segment, Value


class Flow:
    """The ways of values through the segments of one plan.

    Attributes:
        values: by name.
        maker: value -> index of the segment that makes it.
        readers: value -> indices of the segments that read it, in order.
    """

    def __init__(self, values: Sequence[Value], segments: Sequence[Segment]) -> None:
        self.values: Mapping[str, Value] = {v.name: v for v in values}
        self.segments = segments
        self.maker = {n: s.index for s in segments for n in s.outputs}
        self.readers: dict[str, list[int]] = {}
        for segment in segments:
            for name in self.names(segment):
                self.readers.setdefault(name, []).append(segment.index)

    def names(self, segment: Segment) -> tuple[str, ...]:
        """Names of the values that a segment reads, through views."""
        return segment.reads or (*segment.inputs, *segment.carried)

    def reads(self, segment: Segment) -> list[Value]:
        """The values that a segment reads, through views."""
        return [self.values[n] for n in self.names(segment) if n in self.values]

    def crossing(self, index: int) -> list[Value]:
        """Values made by segment ``index`` or before it, and read after it."""
        return [
            self.values[name]
            for name, maker in self.maker.items()
            if maker <= index < max(self.readers.get(name, [-1]))
        ]

    def bridged(self, segment: Segment) -> list[Value]:
        """What an eager segment makes and a copy brings into fixed memory."""
        made = [self.values[n] for n in segment.outputs]
        return [v for v in made if v.home == "bridge"]
