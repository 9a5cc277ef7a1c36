"""What is true of each node of a graph: one symbolic pass with fake tensors, which adds no guard.

Facts come from the operators a node dispatches to and their schemas, because version counters miss
writes (foreach operators, operators made with `torch.library.Library`, ``.data``) and because a
function's name does not say whether it launches a kernel. They are kept per storage: who reads and
writes what is a question about memory, not about tensor objects. Facts decide nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.printers import PythonPrinter

from torch_bcg.graph.ir import TensorSpec
from torch_bcg.graph.modes import is_mode

Kind = Literal["input", "constant", "number", "view", "mode", "alloc", "kernel", "object", "output"]

# Operators whose schema claims fresh memory though they return their argument's.
_VIEWS_BY_NAME = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::lift"}
_ALLOCATIONS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# With a mask as index these look for the true elements on the host.
_MASKS = (torch.bool, torch.uint8)
_INDEX_PUT = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


@dataclass(frozen=True, slots=True)
class TensorFact:
    """One tensor a node returns: its storage, its geometry, and why it cannot be in a slot ("")."""

    storage: int
    spec: TensorSpec
    special: str = ""
    unbacked: bool = False
    overlapping: bool = False
    lazy: tuple[bool, bool] = (False, False)  # conjugate and negative bits


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node does.

    Attributes:
        kind: see `Kind`; ``view`` and ``number`` nodes do no work and belong to no segment.
        tensors: leaves of the result that are tensors, in order.
        reads: storages its kernels read.
        writes: storages its kernels write.
        kernels: dispatched operations that are no view and no allocation.
        operators: what it dispatched.
        cause: (kind, detail) of an automatic cut, or None.
        symbols: backed symbols in the sizes and strides of the result, or in a number.
        live: the number differs from call to call for one key (unbacked, float, or not in a shape).
        expr: expression of a number.
        same_as: the argument it returns unchanged, or "".
        random: draws random numbers.
        is_tensor: the result is one tensor, not a sequence of them.
    """

    kind: Kind
    tensors: tuple[TensorFact, ...] = ()
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    kernels: int = 0
    operators: tuple[torch._ops.OpOverload, ...] = ()
    cause: tuple[str, str] | None = None
    symbols: frozenset[str] = frozenset()
    expr: str = ""
    same_as: str = ""
    random: bool = False
    is_tensor: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one graph.

    Attributes:
        nodes: by node name.
        origin: storage -> name of the node that made it or brought it in.
        device: the device whose kernels are recorded.
        key_symbols: symbols that occur in a tensor's geometry; they make the key of a program.
        whole: (kind, detail, node) that keeps the whole graph from being recorded, or None.
        written: storages written by another node than the one that made them.
    """

    nodes: Mapping[str, NodeFacts]
    origin: Mapping[int, str]
    device: str
    key_symbols: frozenset[str]
    whole: tuple[str, str, str] | None
    written: frozenset[int]


@dataclass
class _Dispatched(TorchDispatchMode):
    """Notes what one node dispatches to."""

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    operators: list[torch._ops.OpOverload] = field(default_factory=list)
    kernels: int = 0
    masked: bool = False
    sent: bool = False

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("prim", "prims_host"):
            return out
        self.operators.append(func)
        schema = func._schema
        written = [
            value
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
            for value in [args[i] if i < len(args) else (kwargs or {}).get(a.name)]
        ]
        returns_view = any(r.alias_info is not None for r in schema.returns)
        if schema.name in _VIEWS_BY_NAME or (returns_view and not written):
            return out
        if schema.name in _ALLOCATIONS:
            return out
        if schema.name in _INDEX_PUT and any(i.dtype in _MASKS for i in _tensors(args[1])):
            self.masked = True
        self.kernels += 1
        taken = _tensors((args, kwargs))
        self.sent = self.sent or _sends(schema.name, taken, _tensors(out))
        self.reads += taken
        self.writes += _tensors(written)
        return out


def _tensors(tree: object) -> list[torch.Tensor]:
    """Tensor leaves with memory of their own; inside a functorch level values are wrapped."""
    return [
        x
        for x in tree_leaves(tree)
        if isinstance(x, torch.Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    ]


def _sends(operator: str, taken: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator moves data between host and device.

    Recorded, it would read host memory that is gone at replay. A 0-dim CPU operand of a pointwise
    kernel is not moved: its value goes along with the launch.
    """
    devices = {t.device.type for t in (*taken, *made)}
    if len(devices) < 2:
        return False
    copies = operator in ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
    return copies or any(t.device.type == "cpu" and t.dim() > 0 for t in taken)


def fake_arguments(example_inputs: Sequence[object]) -> tuple[FakeTensorMode, list[object]]:
    """Fakes of Dynamo's example inputs in the mode it made for backends, with its own symbols.

    Without Dynamo (a plain FX graph) sizes are the numbers they are.
    """
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


def facts_of(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Facts:
    """Facts of every node of ``gm``; see `Facts`."""
    mode, fakes = fake_arguments(example_inputs)
    shapes = mode.shape_env
    with torch.no_grad(), torch.inference_mode(False):
        if shapes is None:
            with mode:
                return _Pass(gm, mode, fakes).run()
        # Guards are suppressed, not added: Dynamo evaluated the same operators and has them all.
        with mode, shapes.suppress_guards(), shapes.ignore_fresh_unbacked_symbols():
            return _Pass(gm, mode, fakes).run()


class _Pass:
    """The fake pass: values by node, storages numbered in the order in which they appear."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, fakes: Sequence[object]) -> None:
        self.gm = gm
        self.mode = mode
        self.fakes = iter(fakes)
        self.env: dict[fx.Node, Any] = {}
        self.storages: dict[int, int] = {}
        self.keep: list[torch.Tensor] = []  # a freed storage's id could be used again
        self.origin: dict[int, str] = {}
        self.offsets: dict[int, tuple[Any, int]] = {}
        self.nodes: dict[str, NodeFacts] = {}
        self.unknown: set[fx.Node] = set()
        self.first: dict[int, str] = {}  # id of a tensor -> the first node that is it
        self.whole: tuple[str, str, str] | None = None
        self.printer = PythonPrinter()

    def run(self) -> Facts:
        for node in self.gm.graph.nodes:
            self.nodes[node.name] = self.node(node)
        devices = [
            t.spec.device
            for n in self.nodes.values()
            for t in n.tensors
            if t.spec.device.startswith("cuda")
        ]
        written = frozenset(
            s for name, n in self.nodes.items() for s in n.writes if self.origin[s] != name
        )
        symbols = frozenset(
            s for n in self.nodes.values() if n.tensors for s in n.symbols
        )
        return Facts(
            self.nodes, self.origin, devices[0] if devices else "cpu", symbols, self.whole, written
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
                value = self.mode.from_tensor(value, static_shapes=True)
            self.env[node] = value
            return self.result(node, "constant")
        if node.op == "output":
            return NodeFacts("output")
        if is_mode(node):
            self.env[node] = self.call(node)
            return NodeFacts("mode")
        if any(p in self.unknown for p in node.all_input_nodes):
            return self.unknown_node(node, "depends on unknown facts")
        return self.computed(node)

    def call(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.env.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target if node.op == "call_function" else self.gm.get_submodule(
            str(node.target)
        )
        return target(*args, **kwargs)

    def computed(self, node: fx.Node) -> NodeFacts:
        arguments = self.operands(node)
        before = [(t, _version(t), _geometry(t)) for t in arguments]
        higher = isinstance(node.target, torch._ops.HigherOrderOperator)
        seen = _Dispatched()
        try:
            with contextlib.nullcontext() if higher else seen:
                self.env[node] = self.attempt(node)
        except Exception as error:  # a fake implementation is anybody's code and raises anything
            return self.unknown_node(node, f"{type(error).__name__}: {error}".splitlines()[0])
        writes = list(seen.writes)
        for tensor, version, geometry in before:
            if _version(tensor) != version:
                writes.append(tensor)
            if _geometry(tensor) != geometry:
                return self.moved(node, tensor)
        if higher:  # its body is not seen: it may read and write all it is given
            seen.kernels, seen.reads, writes = 1, arguments, writes + arguments
        return self.result(node, None, seen, writes)

    def attempt(self, node: fx.Node) -> Any:
        """Calls the node, through the Python dispatcher where symbols are involved, as Dynamo did.

        Without it some kernels turn symbols into numbers. With it dropout returns a copy where the
        kernel returns its argument, so that one keeps to the kernels.
        """
        symbolic = any(isinstance(s, torch.SymInt) for t in self.operands(node) for s in t.shape)
        if not symbolic or "dropout" in target_name(node):
            return self.call(node)
        with enable_python_dispatcher():  # type: ignore[no-untyped-call]
            return self.call(node)

    def operands(self, node: fx.Node) -> list[torch.Tensor]:
        return _tensors([self.env[p] for p in node.all_input_nodes])

    def moved(self, node: fx.Node, tensor: torch.Tensor) -> NodeFacts:
        """``set_``, ``resize_``, ``t_`` …: a name means other memory from here on."""
        self.whole = self.whole or ("changed geometry", target_name(node), node.name)
        return self.unknown_node(node, "changes the geometry of its argument")

    def unknown_node(self, node: fx.Node, why: str) -> NodeFacts:
        """Nothing is known of the result, and anything given may have been written."""
        self.unknown.add(node)
        self.env[node] = None
        touched = frozenset(
            t.storage for p in node.all_input_nodes for t in self.nodes[p.name].tensors
        )
        return NodeFacts("object", (), touched, touched, 1, (), ("no facts", why))

    def result(
        self,
        node: fx.Node,
        kind: Kind | None,
        seen: _Dispatched | None = None,
        writes: Iterable[torch.Tensor] = (),
    ) -> NodeFacts:
        seen = seen or _Dispatched()
        value = self.env[node]
        leaves = tree_leaves(value)
        inputs = {t.storage for p in node.all_input_nodes for t in self.nodes[p.name].tensors}
        tensors = tuple(self.tensor(node, x) for x in _tensors(value))
        numbers = [x for x in leaves if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))]
        written = frozenset(self.storage(node, t) for t in writes)
        random = any(torch.Tag.nondeterministic_seeded in o.tags for o in seen.operators)
        if kind is None:
            if seen.kernels or written:
                kind = "kernel"
            elif tensors and all(t.storage in inputs for t in tensors):
                kind = "view"
            elif tensors:
                kind = "alloc"
            else:
                kind = "number" if all(_is_number(x) for x in leaves) else "object"
        if kind == "input" and not tensors:
            kind = "number"
        return NodeFacts(
            kind,
            tensors,
            frozenset(self.storage(node, t) for t in seen.reads),
            written,
            seen.kernels,
            tuple(seen.operators),
            self.cause(node, seen, tensors, numbers),
            frozenset(str(s) for t in _tensors(value) for s in self.backed(t))
            | frozenset(str(s) for n in numbers for s in free_symbols(n)),
            self.expr(value) if not tensors and all(map(_is_number, leaves)) else "",
            self.same_as(node, tensors, seen, bool(written)) if kind not in ("mode", "output") else "",
            random,
            isinstance(value, torch.Tensor),
        )

    def cause(
        self,
        node: fx.Node,
        seen: _Dispatched,
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

    def tensor(self, node: fx.Node, x: torch.Tensor) -> TensorFact:
        special = ""
        if is_traceable_wrapper_subclass(x):
            special = type(x).__name__
        elif x.layout != torch.strided or x.is_nested:
            special = f"{x.layout}".removeprefix("torch.") + " layout"
        if special:
            spec = TensorSpec(_dtype(x), str(x.device), tuple(map(str, x.shape)), ())
            return TensorFact(self.storage(node, x), spec, special)
        storage = self.storage(node, x)
        first, itemsize = self.offsets.setdefault(storage, (x.storage_offset(), x.itemsize))
        delta = x.storage_offset() * x.itemsize - first * itemsize
        stride = x.stride()
        spec = TensorSpec(
            _dtype(x),
            str(x.device),
            tuple(self.expr(s) for s in x.shape),
            tuple(self.expr(s) for s in stride),
            self.expr(delta),
        )
        unbacked = bool(free_unbacked_symbols([*x.shape, *stride]))
        overlapping = not unbacked and _overlaps_itself(x)
        return TensorFact(storage, spec, "", unbacked, overlapping, (x.is_conj(), x.is_neg()))

    def backed(self, x: torch.Tensor) -> Iterator[sympy.Symbol]:
        if x.layout != torch.strided or is_traceable_wrapper_subclass(x):
            return
        first, itemsize = self.offsets[self.storages[_storage_id(x)]]
        delta = x.storage_offset() * x.itemsize - first * itemsize
        unbacked = free_unbacked_symbols([*x.shape, *x.stride(), delta])
        yield from (s for s in free_symbols([*x.shape, *x.stride(), delta]) if s not in unbacked)

    def storage(self, node: fx.Node, x: torch.Tensor) -> int:
        key = _storage_id(x)
        if key not in self.storages:
            self.keep.append(x)
            number = len(self.storages)
            self.storages[key] = number
            self.origin[number] = node.name
        return self.storages[key]

    def same_as(
        self, node: fx.Node, tensors: tuple[TensorFact, ...], seen: _Dispatched, written: bool
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
            if isinstance(self.env[p], torch.Tensor) and self.nodes[p.name].tensors == tensors:
                return self.nodes[p.name].same_as or p.name
        return ""

    def expr(self, x: Any) -> str:
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.printer.doprint(x.node.expr)
        if isinstance(x, (tuple, list)):
            return f"({''.join(self.expr(i) + ',' for i in x)})"
        return repr(x)


def _plain(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_number(x: object) -> bool:
    return x is None or isinstance(
        x, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def target_name(node: fx.Node) -> str:
    """What a node calls, as a person would write it."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    if isinstance(node.target, torch._ops.OperatorBase):
        return str(node.target.name()).removesuffix(".default")
    return str(getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", node.target))


def _storage_id(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata if has_memory(x) else id(x)


def has_memory(x: torch.Tensor) -> bool:
    """Whether the tensor has a storage of its own: neither sparse nor wrapped by functorch."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.layout == torch.strided and not wrapped


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _geometry(x: torch.Tensor) -> tuple[object, ...]:
    if not has_memory(x):
        return (id(x),)
    return (_storage_id(x), *(_plain(s) for s in (*x.shape, *x.stride())))


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices mean one address in a way that a stride of zero does not explain."""
    dims = [
        (st, si) for si, st in zip(x.shape, x.stride(), strict=True)
        if not (isinstance(st, int) and st == 0) and not (isinstance(si, int) and si == 1)
    ]
    if not all(isinstance(v, int) for d in dims for v in d) or 0 in x.shape:
        return False
    reach = 1
    for stride, size in sorted(dims):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False

