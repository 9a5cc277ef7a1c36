"""Plan -> Plan: until when each value is needed, and which of them may lie in one memory.

A replay runs the segments in order, so memory whose last reader ran is free for what is made later
in the same replay. Only memory that is made anew in every replay is shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch_bcg.graph.ir import GraphSegment, Plan, Value
from torch_bcg.graph.known import Facts


def with_lifetimes(plan: Plan, facts: Facts) -> Plan:
    """``plan`` with `Value.last` and `Value.memory`."""
    lives = _lives(plan, facts)
    written = {
        storage
        for s in plan.segments
        if isinstance(s, GraphSegment)
        for n in s.nodes
        for storage in facts.nodes[n].writes
    }
    values = [
        dataclasses.replace(v, last=lives[v.storage][1] if v.storage in lives else -1)
        for v in plan.values
    ]
    shared = _shared(values, lives, written, len(plan.segments))
    return dataclasses.replace(
        plan, values=tuple(dataclasses.replace(v, memory=shared.get(v.name, "")) for v in values)
    )


def _lives(plan: Plan, facts: Facts) -> Mapping[int, tuple[int, int]]:
    """Storage -> first and last segment that has to do with it; what is returned outlives all."""
    lives: dict[int, tuple[int, int]] = {}

    def touch(name: str, index: int) -> None:
        for t in facts.nodes[name].tensors:
            first, last = lives.get(t.storage, (index, index))
            lives[t.storage] = (min(first, index), max(last, index))

    for segment in plan.segments:
        for name in (*segment.inputs, *segment.carried, *segment.outputs, *segment.copy_back):
            touch(name, segment.index)
    for output in plan.outputs:
        if output.name in facts.nodes:
            touch(output.name, len(plan.segments))
    return lives


def _shared(
    values: Sequence[Value],
    lives: Mapping[int, tuple[int, int]],
    written: set[int],
    end: int,
) -> Mapping[str, str]:
    """Value -> the earlier value in whose memory it lies.

    Only equal geometries share, and nothing that a recorded segment writes in place: then the tail
    of a padded value stays as it was zeroed before the first segment, whoever lies there.
    """
    able = [
        v
        for v in values
        if v.home in ("scratch", "bridge")
        and v.spec is not None
        and v.storage in lives
        and v.last < end
        and v.storage not in written
    ]
    free: dict[object, list[tuple[int, str]]] = {}  # geometry -> (last, memory)
    shared = {}
    for v in sorted(able, key=lambda v: lives[v.storage][0]):
        first, last = lives[v.storage]
        places = free.setdefault(v.spec, [])
        found = next((p for p in places if p[0] < first), None)
        if found is not None:
            places.remove(found)
            shared[v.name] = found[1]
        places.append((last, shared.get(v.name, v.name)))
    return shared
