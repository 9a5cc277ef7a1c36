"""A segment of a plan -> an FX module that computes it, in the program's order and modes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from torch_bcg.graph.modes import ModeWriter, is_mode, modes_at
from torch_bcg.marking import plain_function


class Lowering:
    """Lowers stretches of one graph; ``floats`` are the nodes remade wherever they are needed."""

    def __init__(self, gm: fx.GraphModule, canonical: Mapping[str, str], floats: set[str]) -> None:
        self.gm = gm
        self.nodes = {n.name: n for n in gm.graph.nodes}
        self.order = {n.name: i for i, n in enumerate(gm.graph.nodes)}
        self.canonical = canonical
        self.floats = floats
        self.modes = modes_at(gm.graph)

    def needs(
        self,
        nodes: Iterable[str],
        own: set[str],
        fixed: Callable[[str], bool],
        replaced: Collection[tuple[str, int]] = (),
    ) -> Needs:
        """What ``nodes`` take from outside ``own``.

        Args:
            nodes: whose operands are followed.
            own: what is made inside.
            fixed: which floats are bound outside.
            replaced: (node, argument) read from number slots.
        """
        needs = Needs()
        seen: set[str] = set()

        @functools.cache
        def stems(name: str) -> bool:
            """Whether a float is remade from something in ``own``."""
            name = name if name in own else self.canonical.get(name, name)
            inputs = self.nodes[name].all_input_nodes if name in self.floats else ()
            return name in own or any(stems(p.name) for p in inputs)

        def visit(name: str) -> None:
            if name not in own:
                name = self.canonical.get(name, name)
            if name in seen or name in own:
                return
            seen.add(name)
            node = self.nodes[name]
            if node.op == "get_attr" and name in self.floats:
                needs.inside.add(name)
            elif name in self.floats and (stems(name) or not fixed(name)):
                needs.inside.add(name)
                for p in node.all_input_nodes:
                    visit(p.name)
            else:
                needs.outside.append(name)

        for name in nodes:
            node = self.nodes[name]
            args = [a for i, a in enumerate(node.args) if (name, i) not in replaced]
            fx.node.map_arg((args, node.kwargs), lambda p: visit(p.name))
        needs.outside.sort(key=self.order.__getitem__)
        return needs

    def lower(
        self,
        name: str,
        nodes: Sequence[str],
        inside: Iterable[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        number_slots: Sequence[tuple[str, int, str]] = (),
        direct: bool = False,
    ) -> fx.GraphModule:
        """The module of one segment: takes ``inputs`` then number slots, returns ``outputs``.

        Args:
            name: class name of the module, for dumps.
            nodes: what it computes.
            inside: floats it remakes.
            inputs: what it takes.
            outputs: what it returns.
            number_slots: (node, argument, slot) of operands read from slots.
            direct: call the plain function behind a marked operator, without the dispatcher.
        """
        graph = fx.Graph()
        env = {i: graph.placeholder(i) for i in inputs}
        slots = {s: graph.placeholder(s) for s in dict.fromkeys(s for _, _, s in number_slots)}
        operands = {(n, i): slots[s] for n, i, s in number_slots}
        own = set(nodes) | set(inside)
        writer = ModeWriter(graph)

        def at(p: fx.Node) -> fx.Node:
            return env[p.name if p.name in env else self.canonical.get(p.name, p.name)]

        for original in sorted(own, key=self.order.__getitem__):
            node = self.nodes[original]
            if is_mode(node):
                continue  # put in force by the writer, where the next node needs it
            if original in nodes:
                writer.change(self.modes[node])
            replaced = {i: operands[original, i] for i in (0, 1) if (original, i) in operands}
            args = tuple(
                replaced[i] if i in replaced else fx.node.map_arg(a, at)
                for i, a in enumerate(node.args)
            )
            kwargs = fx.node.map_arg(node.kwargs, at)
            target: Any = plain_function(node.target) if direct else None
            copy = graph.create_node(node.op, target or node.target, args, kwargs, original)
            copy.meta = dict(node.meta)
            env[original] = copy
        writer.close()
        graph.output(tuple(env[o] for o in outputs))
        return fx.GraphModule(self.gm, graph, class_name=name)


class Needs:
    """What a stretch takes: values from outside, and floats remade inside it."""

    def __init__(self) -> None:
        self.outside: list[str] = []
        self.inside: set[str] = set()


def interpret(gm: fx.GraphModule, args: Sequence[object]) -> Any:
    """Runs a lowered module node by node; an exception names the node (see `failed_node`)."""
    return _Tracked(gm).run(*args)


class _Tracked(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:  # annotated and raised again, whatever it is
            if not hasattr(error, "bcg_node"):
                error.bcg_node = n.name  # type: ignore[attr-defined]
            raise


def failed_node(error: BaseException) -> str:
    """Name of the node at which `interpret` failed, or ""."""
    return str(getattr(error, "bcg_node", ""))
