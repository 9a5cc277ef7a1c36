"""What is true of each node of a graph: one symbolic pass with fake tensors, which adds no guard.

Facts come from the operators a node dispatches to and their schemas, because version counters miss
writes (foreach operators, operators made with `torch.library.Library`, ``.data``) and because a
function's name does not say whether it launches a kernel. They are kept per storage: who reads and
writes what is a question about memory, not about tensor objects. Facts decide nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torch_bcg.graph.dispatch import Dispatched, tensors_of
from torch_bcg.graph.geometry import (
    geometry,
    has_memory,
    is_number,
    storage_id,
    target_name,
    version,
)
from torch_bcg.graph.known import Facts, Kind, NodeFacts, TensorFact
from torch_bcg.graph.modes import is_mode, preserved
from torch_bcg.graph.rows.follow import Rows, RowsOf, in_place
from torch_bcg.graph.storages import Storages
from torch_bcg.graph.streams import role_of, stream_facts


def fake_arguments(example_inputs: Sequence[object]) -> tuple[FakeTensorMode, list[Any]]:
    """Fakes of Dynamo's example inputs in the mode it made for backends, with its own symbols.

    Without Dynamo (a plain FX graph) sizes are the numbers they are.
    """
    mode, fakes = _faked(example_inputs)
    seen: set[int] = set()
    for i, x in enumerate(fakes):
        if isinstance(x, torch.Tensor) and has_memory(x) and not is_traceable_wrapper_subclass(x):
            if storage_id(x) in seen:
                # The example arguments share memory; others will not, and Dynamo guards neither.
                with mode:
                    fakes[i] = x = torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype, device=x.device
                    )
            seen.add(storage_id(x))
    return mode, fakes


def _faked(example_inputs: Sequence[object]) -> tuple[FakeTensorMode, list[Any]]:
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None and context.fake_mode is not None else None
    if context is None or mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [
            mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x
            for x in example_inputs
        ]
        return mode, fakes
    fakes = []
    for x in example_inputs:
        if isinstance(x, torch.Tensor) and getattr(x, "fake_mode", None) is not mode:
            symbolic = context.tensor_to_context.get(x)
            x = mode.from_tensor(
                x,
                static_shapes=symbolic is None,
                symbolic_context=symbolic,
                source=getattr(symbolic, "tensor_source", None),
            )
        fakes.append(x)
    return mode, fakes


def facts_of(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    rows_of: RowsOf | None = None,
    static: Collection[str] = (),
) -> Facts:
    """Facts of every node of ``gm``; see `Facts`.

    ``rows_of`` names the symbol that counts rows, given the sizes of all tensor placeholders;
    without it, or where it says "", rows are not followed. ``static`` are the placeholders that
    keep their address.
    """
    mode, fakes = fake_arguments(example_inputs)
    shapes = mode.shape_env
    with preserved(), torch.no_grad(), torch.inference_mode(False):
        if shapes is None:
            with mode:
                return _Pass(gm, mode, fakes, Rows(rows_of), static).run()
        # Guards are suppressed, not added: Dynamo evaluated the same operators and has them all.
        with mode, shapes.suppress_guards(), shapes.ignore_fresh_unbacked_symbols():
            return _Pass(gm, mode, fakes, Rows(rows_of), static).run()


class _Pass:
    """The fake pass: values by node, storages numbered in the order in which they appear."""

    def __init__(
        self,
        gm: fx.GraphModule,
        mode: FakeTensorMode,
        fakes: Sequence[object],
        rows: Rows,
        static: Collection[str],
    ) -> None:
        self.gm = gm
        self.mode = mode
        self.fakes = iter(fakes)
        self.rows = rows
        self.static = static
        self.around: dict[int, str] = {}
        self.env: dict[fx.Node, Any] = {}
        self.storages = Storages()
        self.nodes: dict[str, NodeFacts] = {}
        self.unknown: set[fx.Node] = set()
        self.first: dict[int, str] = {}  # id of a tensor -> the first node that is it
        self.whole: tuple[str, str, str] | None = None

    def run(self) -> Facts:
        for node in self.gm.graph.nodes:
            if node.op != "placeholder" and self.rows.rows_of is not None:
                tensors = {n.name: x for n, x in self.env.items() if isinstance(x, torch.Tensor)}
                self.rows.start(tensors, self.nodes)
            self.nodes[node.name] = self.node(node)
        devices = [
            t.spec.device
            for n in self.nodes.values()
            for t in n.tensors
            if t.spec.device.startswith("cuda")
        ]
        written = frozenset(
            s for name, n in self.nodes.items() for s in n.writes if self.storages.origin[s] != name
        )
        symbols = frozenset(s for n in self.nodes.values() if n.tensors for s in n.symbols)
        return Facts(
            self.nodes,
            self.storages.origin,
            devices[0] if devices else "cpu",
            symbols,
            self.whole,
            written,
            self.rows.symbol,
            self.storages.shared({s for n in self.nodes.values() for s in n.writes}),
            self.around,
        )

    def node(self, node: fx.Node) -> NodeFacts:
        if node.op == "placeholder":
            self.env[node] = next(self.fakes)
            return self.result(node, "input")
        if node.op == "get_attr":
            value: Any = self.gm
            for atom in str(node.target).split("."):
                value = getattr(value, atom)
            if isinstance(value, torch.Tensor):
                value = self.rows.constant(self.mode.from_tensor(value, static_shapes=True))
            self.env[node] = value
            return self.result(node, "constant")
        if node.op == "output":
            return NodeFacts("output")
        if is_mode(node):
            self.env[node] = self.call(node)
            return NodeFacts("mode")
        stream = stream_facts(node)
        if stream is not None:
            self.env[node] = node.meta.get("example_value")
            if role_of(node) == "outside" and stream.cause is not None:
                self.whole = self.whole or (*stream.cause, node.name)
            return stream
        if any(p in self.unknown for p in node.all_input_nodes):
            return self.unknown_node(node, "depends on unknown facts")
        return self.computed(node)

    def call(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = (
            node.target if node.op == "call_function" else self.gm.get_submodule(str(node.target))
        )
        return target(*args, **kwargs)

    def computed(self, node: fx.Node) -> NodeFacts:
        arguments = self.operands(node)
        before = [(t, version(t), geometry(t)) for t in arguments]
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        seen = Dispatched(self.rows.follow)
        try:
            with contextlib.nullcontext() if higher else seen:
                self.env[node] = self.attempt(node)
        except Exception as error:  # a fake implementation is anybody's code and raises anything
            return self.unknown_node(node, f"{type(error).__name__}: {error}".splitlines()[0])
        writes = list(seen.writes)
        for tensor, number, shape in before:
            if version(tensor) != number:
                writes.append(tensor)
            if geometry(tensor) != shape:
                return self.moved(node)
        if node.target is torch.nn.functional.one_hot:  # of fakes it makes comparisons
            self.rows.looks_up("one_hot", arguments[0])
        if higher:  # its body is not seen: it may read and write all it is given
            seen.kernels, seen.reads, writes = 1, arguments, writes + arguments
            self.rows.opaque(target_name(node), (*arguments, *tree_leaves(self.env[node])))
        return self.result(node, None, seen, writes)

    def attempt(self, node: fx.Node) -> Any:
        """Calls the node, through the Python dispatcher where symbols are involved, as Dynamo did.

        Without it some kernels turn symbols into numbers. With it dropout returns a copy where the
        kernel returns its argument, so that one keeps to the kernels.
        """
        sizes = [s for t in self.operands(node) for s in t.shape]
        sizes += [self.env[p] for p in node.all_input_nodes]
        symbolic = any(isinstance(s, torch.SymInt) for s in sizes)
        if not symbolic or "dropout" in target_name(node):
            return self.call(node)
        with enable_python_dispatcher():
            return self.call(node)

    def operands(self, node: fx.Node) -> list[torch.Tensor]:
        return tensors_of([self.env[p] for p in node.all_input_nodes])

    def moved(self, node: fx.Node) -> NodeFacts:
        """``set_``, ``resize_``, ``t_`` …: a name means other memory from here on."""
        self.whole = self.whole or ("changed geometry", target_name(node), node.name)
        return self.unknown_node(node, "changes the geometry of its argument")

    def unknown_node(self, node: fx.Node, why: str) -> NodeFacts:
        """Nothing is known of the result, and anything given may have been written."""
        self.unknown.add(node)
        self.rows.forget()
        self.env[node] = None
        touched = frozenset(
            t.storage for p in node.all_input_nodes for t in self.nodes[p.name].tensors
        )
        return NodeFacts("object", (), touched, touched, 1, (), ("no facts", why))

    def result(
        self,
        node: fx.Node,
        kind: Kind | None,
        seen: Dispatched | None = None,
        writes: Iterable[torch.Tensor] = (),
    ) -> NodeFacts:
        seen = seen or Dispatched()
        value = self.env[node]
        leaves = tree_leaves(value)
        inputs = {t.storage for p in node.all_input_nodes for t in self.nodes[p.name].tensors}
        tensors = tuple(self.rows.cut(self.storages.tensor(node, x), x) for x in tensors_of(value))
        numbers = [
            x for x in leaves if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
        ]
        written = frozenset(self.storages.storage(node, t) for t in writes)
        for storage in {self.storages.storage(node, t) for t in seen.around} & inputs:
            origin = self.storages.origin[storage]
            if self.nodes[origin].kind == "input" and origin not in self.static:
                self.around.setdefault(storage, node.name)
        random = any(torch.Tag.nondeterministic_seeded in o.tags for o in seen.operators)
        if kind is None:
            if seen.kernels or written:
                kind = "kernel"
            elif tensors and all(t.storage in inputs for t in tensors):
                kind = "view"
            elif tensors and seen.allocations:
                kind = "alloc"
            elif tensors:  # from data of the host, which no dispatched operator shows
                kind, seen.kernels = "kernel", 1
            else:
                kind = "number" if all(is_number(x) for x in leaves) else "object"
        if kind == "input" and not tensors:
            kind = "number"
        return NodeFacts(
            kind,
            tensors,
            frozenset(self.storages.storage(node, t) for t in seen.reads),
            written,
            seen.kernels,
            tuple(seen.operators),
            self.cause(node, seen, tensors, numbers),
            frozenset(str(s) for t in tensors_of(value) for s in self.storages.backed(t))
            | frozenset(str(s) for n in numbers for s in free_symbols(n)),
            self.storages.expr(value) if not tensors and all(map(is_number, leaves)) else "",
            self.same_as(node, tensors, seen, bool(written)),
            random,
            isinstance(value, torch.Tensor),
            kind == "number" and node.op == "placeholder" and not numbers,
            self.rows.taken(lambda x: self.storages.storage(node, x)),
        )

    def cause(
        self,
        node: fx.Node,
        seen: Dispatched,
        tensors: tuple[TensorFact, ...],
        numbers: list[Any],
    ) -> tuple[str, str] | None:
        facts = [t for p in node.all_input_nodes for t in self.nodes[p.name].tensors]
        if any(t.unbacked for t in (*facts, *tensors)):
            return "data-dependent size", target_name(node)
        for o in seen.operators:
            if torch.Tag.data_dependent_output in o.tags:
                return "host read", o.name().removesuffix(".default")
            if torch.Tag.cudagraph_unsafe in o.tags:
                return "cudagraph_unsafe", o.name().removesuffix(".default")
        if seen.sent:
            return "CPU tensor", target_name(node)
        if seen.masked:
            return "host read", "index_put with a mask"
        if any(free_unbacked_symbols(n) for n in numbers) and seen.kernels:
            return "host read", target_name(node)
        for t in (*facts, *tensors):
            if t.special:
                return "special tensor", t.special
        return None

    def same_as(
        self, node: fx.Node, tensors: tuple[TensorFact, ...], seen: Dispatched, written: bool
    ) -> str:
        """The earlier node whose tensor comes back: in-place operations, copies not needed."""
        value = self.env[node]
        if not isinstance(value, torch.Tensor) or len(tensors) != 1:
            return ""
        first = self.first.setdefault(id(value), node.name)
        # Fakes return themselves from some views; where a view was dispatched it is a new tensor.
        if first != node.name and not seen.operators:
            return first
        for p in node.all_input_nodes if written else ():
            same = in_place(self.nodes[p.name].tensors, tensors)
            if same and isinstance(self.env[p], torch.Tensor):
                return self.nodes[p.name].same_as or p.name
        return ""
