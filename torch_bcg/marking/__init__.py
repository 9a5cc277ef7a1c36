"""Marking: what must run eagerly, and which nodes of a graph that means.

``names`` knows how one operator is spelled in different calls; ``signature`` and ``operators`` turn
plain functions into operators; ``targets`` says what a mark means, ``marks`` makes it, and
``match`` answers for a node.
"""

from torch_bcg.marking.marks import Handle, eager_on_graph, generation
from torch_bcg.marking.match import Mark, mark_of
from torch_bcg.marking.operators import plain_function
from torch_bcg.marking.targets import Marked, resolve

__all__ = [
    "Handle",
    "Mark",
    "Marked",
    "eager_on_graph",
    "generation",
    "mark_of",
    "plain_function",
    "resolve",
]
