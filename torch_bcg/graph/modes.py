"""Host state that stands in a graph as nodes: autocast, gradients, inference, functorch levels.

A mode that is entered and left with a pair of nodes, or set with one, can be put in force again
anywhere, so a segment is lowered with the modes of its own place. Pairs that cannot be entered
twice (functorch levels) bind everything between them into one unit that no cut divides.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import fx

_ENTER: dict[Any, Callable[..., Any]] = {
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}
_EXIT = set(_ENTER.values())
# What sets a mode, and what reads it so that it can be put back.
_SET: dict[Any, Callable[[], object]] = {
    torch._C._set_grad_enabled: torch.is_grad_enabled,
    torch.nn.attention._sdpa_kernel: torch.nn.attention._cur_sdpa_kernel_backends,
}
_AUTOCAST = torch.amp.autocast_mode._enter_autocast


@dataclass(frozen=True)
class Modes:
    """Modes in force at a place: enter nodes, outermost first, and the last node of each setter."""

    entered: tuple[fx.Node, ...] = ()
    settings: tuple[tuple[Any, fx.Node], ...] = ()


def is_mode(node: fx.Node) -> bool:
    """Whether the node enters, leaves or sets a mode that can be put in force again."""
    return node.op == "call_function" and (
        node.target in _ENTER or node.target in _EXIT or node.target in _SET
    )


def has_modes(graph: fx.Graph) -> bool:
    """Whether a lowered graph puts modes in force."""
    return any(is_mode(n) for n in graph.nodes)


def level_change(node: fx.Node) -> int:
    """1 where a level of functorch or of forward-mode begins, -1 where one ends, else 0."""
    if node.op != "call_function":
        return 0
    name = getattr(node.target, "__name__", "")
    begins = name.endswith(("_increment_nesting", "_enter_dual_level"))
    return int(begins) - int(name.endswith(("_decrement_nesting", "_exit_dual_level")))


def modes_at(graph: fx.Graph) -> dict[fx.Node, Modes]:
    """The modes in force at every node that is no mode itself."""
    now = Modes()
    found = {}
    for node in graph.nodes:
        if not is_mode(node):
            found[node] = now
        elif node.target in _ENTER:
            now = Modes((*now.entered, node), now.settings)
        elif node.target in _EXIT:
            now = Modes(tuple(n for n in now.entered if n is not node.args[0]), now.settings)
        else:
            others = tuple(s for s in now.settings if s[0] is not node.target)
            now = Modes(now.entered, (*others, (node.target, node)))
    return found


class ModeWriter:
    """Appends to a graph what puts modes in force; `close` puts back those of the beginning."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.now = Modes()
        self.open: dict[fx.Node, fx.Node] = {}
        self.before: dict[Any, fx.Node] = {}

    def change(self, new: Modes) -> None:
        """Leads from the modes in force to ``new``."""
        pairs = zip(self.now.entered, new.entered, strict=False)
        keep = sum(1 for _ in itertools.takewhile(lambda p: p[0] is p[1], pairs))
        for node in reversed(self.now.entered[keep:]):
            self.graph.call_function(_ENTER[node.target], (self.open.pop(node),))
        for node in new.entered[keep:]:
            args = node.args
            if node.target is _AUTOCAST:
                # A weight cast once and kept until the outermost exit would be memory that
                # outlives the recording that made it, so no segment uses autocast's cache.
                args = (*args[:3], False)
            target: Any = node.target
            self.open[node] = self.graph.call_function(target, args)
        for target, node in new.settings:
            if (target, node) not in self.now.settings:
                if target not in self.before:
                    self.before[target] = self.graph.call_function(_SET[target])
                self.copy(node)
        for target, _ in self.now.settings:
            if all(target is not t for t, _ in new.settings):
                self.graph.call_function(target, (self.before[target],))
        self.now = new

    def copy(self, node: fx.Node) -> fx.Node:
        """Copies a setter and the nodes that make its arguments from constants."""
        return self.graph.node_copy(node, self.copy)

    def close(self) -> None:
        """Puts the modes of the beginning back."""
        self.change(Modes())


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Puts the modes back afterwards, also after an exception."""
    settings = [(target, read()) for target, read in _SET.items()]
    cache = torch.is_autocast_cache_enabled()
    devices = ("cpu", "cuda")
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        for target, value in settings:
            target(value)
        torch.set_autocast_cache_enabled(cache)
        for device, enabled, dtype in casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        if nesting == 0:
            torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return int(depth) - 1
