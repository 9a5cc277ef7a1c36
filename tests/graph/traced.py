"""Graphs as Dynamo hands them over, what is found out about them, and what is planned."""

from typing import NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext

from torch_bcg.dynamo import CompiledGraph
from torch_bcg.graph.facts import Facts, facts_of
from torch_bcg.options import Options


class Traced(NamedTuple):
    """One graph of Dynamo's and its facts; `guards` are those that the fact pass added."""

    gm: fx.GraphModule
    facts: Facts
    guards: int

    def written(self):
        """Names of the nodes whose storages others write."""
        return {self.facts.origin[s] for s in self.facts.written}

    def kinds(self):
        """Kind of every node that computes or views."""
        apart = ("input", "output", "number")
        return [n.kind for n in self.facts.nodes.values() if n.kind not in apart]

    def last(self):
        """Facts of the last node but the output."""
        return list(self.facts.nodes.values())[-2]


def traced(fn, *args, rows_of=None, **kwargs):
    """The only graph of ``fn``, in the compiling context of a backend."""
    seen = []

    def backend(gm, example_inputs):
        shapes = TracingContext.get().fake_mode.shape_env
        before = len(shapes.guards)
        facts = facts_of(gm, example_inputs, rows_of)
        seen.append(Traced(gm, facts, len(shapes.guards) - before))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, **kwargs)(*args)
    (one,) = seen
    return one


def planned(fn, *args, options=None, **kwargs):
    """The only graph of ``fn`` as the backend plans it; nothing is recorded."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(CompiledGraph(gm, example_inputs, Options.make(options)))
        return gm.forward

    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True, **kwargs)(*args)
    (one,) = seen
    return one


def homes(plan):
    """Home of every value by name."""
    return {v.name: v.home for v in plan.values}


def stretches(plan):
    """(kind, nodes) of every segment in order."""
    return [(s.kind, list(s.nodes)) for s in plan.segments]
