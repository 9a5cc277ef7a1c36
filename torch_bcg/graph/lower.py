"""A segment of a plan -> an FX module that computes it, in the program's order and modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_bcg.graph.ir import Segment
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
        self.lowered: dict[Hashable, fx.GraphModule] = {}

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
        walk = _Walk(self, own, fixed)
        for name in nodes:
            node = self.nodes[name]
            args = [a for i, a in enumerate(node.args) if (name, i) not in replaced]
            fx.node.map_arg((args, node.kwargs), lambda p: walk.visit(p.name))
        walk.needs.outside.sort(key=self.order.__getitem__)
        return walk.needs

    def segment(self, segment: Segment) -> fx.GraphModule:
        """The module of one segment of a plan, made once; an eager one calls plain functions."""
        form = (
            segment.kind, segment.index, segment.nodes, segment.inputs, segment.carried,
            segment.outputs, segment.number_slots,
        )  # fmt: skip
        if form not in self.lowered:  # for all sizes
            self.lowered[form] = self.code(segment)
        return self.lowered[form]

    def code(self, segment: Segment) -> fx.GraphModule:
        """Lowers a segment."""
        taken = (*segment.inputs, *segment.carried)
        replaced = [(node, i) for node, i, _ in segment.number_slots]
        needs = self.needs(segment.nodes, set(segment.nodes), taken.__contains__, replaced)
        return self.lower(
            f"{segment.kind}_{segment.index:03d}",
            segment.nodes,
            needs.inside,
            taken,
            segment.outputs,
            segment.number_slots,
            direct=segment.kind == "eager",
        )

    def call(self, name: str, value: Callable[[str], Any]) -> Any:
        """What a node returns for operands that ``value`` gives by name."""
        node = self.nodes[name]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda p: value(p.name))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)

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


class _Walk:
    """Follows operands backwards until something that is bound outside or made inside."""

    def __init__(self, lowering: Lowering, own: set[str], fixed: Callable[[str], bool]) -> None:
        self.lowering, self.own, self.fixed = lowering, own, fixed
        self.needs = Needs()
        self.seen: set[str] = set()
        self.stem: dict[str, bool] = {}

    def stems(self, name: str) -> bool:
        """Whether a value is made inside, or remade from something that is."""
        lowering = self.lowering
        name = name if name in self.own else lowering.canonical.get(name, name)
        if name not in self.stem:
            inputs = lowering.nodes[name].all_input_nodes if name in lowering.floats else ()
            self.stem[name] = name in self.own or any(self.stems(p.name) for p in inputs)
        return self.stem[name]

    def visit(self, name: str) -> None:
        """Sorts one operand into what is taken and what is remade."""
        lowering = self.lowering
        if name not in self.own:
            name = lowering.canonical.get(name, name)
        if name in self.seen or name in self.own:
            return
        self.seen.add(name)
        node = lowering.nodes[name]
        if node.op == "get_attr" and name in lowering.floats:
            self.needs.inside.add(name)
        elif name in lowering.floats and (self.stems(name) or not self.fixed(name)):
            self.needs.inside.add(name)
            for p in node.all_input_nodes:
                self.visit(p.name)
        else:
            self.needs.outside.append(name)


class Needs:
    """What a stretch takes: values from outside, and floats remade inside it."""

    def __init__(self) -> None:
        self.outside: list[str] = []
        self.inside: set[str] = set()


@dataclass(frozen=True)
class Fused:
    """A lowered segment whose results one function makes; the rest is as in ``plain``.

    Attributes:
        plain: the operations.
        forward: takes the operands of ``plain``, returns its results.
        source: of whoever made it.
    """

    plain: fx.GraphModule
    forward: Callable[..., Sequence[Any]]
    source: Any = None

    @property
    def graph(self) -> fx.Graph:
        """Of the operations, with the names of operands and results."""
        return self.plain.graph


Code = fx.GraphModule | Fused


def name_of(code: Code) -> str:
    """What a segment is called in messages."""
    return type(code.plain if isinstance(code, Fused) else code).__name__


class Tracked(fx.Interpreter):
    """Runs a lowered module node by node; an exception names the node (see `failed_node`).

    ``collect``: lets go of each value after its last reader.
    """

    def __init__(self, gm: fx.GraphModule, collect: bool = True) -> None:
        super().__init__(gm, garbage_collect_values=collect)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node; an exception names it."""
        try:
            return super().run_node(n)
        except Exception as error:  # annotated and raised again, whatever it is
            if not hasattr(error, "bcg_node"):
                error.bcg_node = n.name  # type: ignore[attr-defined]
            raise


def failed_node(error: BaseException) -> str:
    """Name of the node at which `Tracked` failed, or ""."""
    return str(getattr(error, "bcg_node", ""))
