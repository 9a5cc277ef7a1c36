"""One trial of a padded size: does what a call's own rows become depend on rows it does not have?

A real run of the call keeps what crosses between recorded and eager segments. Then everything but
the live eager segments runs again, padded, on clones of all it writes, once for each filling of the
rows that the call does not have; whatever the kept run knows has to come out the same. Rows of a
call may hide what padded ones do, by doing it themselves: so the same is asked of rows of which all
are one, which hold no number that padded rows hold. No marked operation runs twice and nothing of
the caller's is written; the Python of operators that nobody marked runs again, as it does where
they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from torch_bcg.graph import modes
from torch_bcg.graph.ir import EagerSegment, Plan, Reason
from torch_bcg.graph.known import OF_SIZE, Facts, TensorFact
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.padding import row_dims
from torch_bcg.graph.sizes import Geometry, at_sizes
from torch_bcg.graph.sorting import where
from torch_bcg.marking import plain_function
from torch_bcg.runtime import memory
from torch_bcg.runtime.bounds import InRange, OutOfRange
from torch_bcg.runtime.compare import SAME, difference, unreserved
from torch_bcg.runtime.fillings import (
    BEHIND_LEAST,
    BEHIND_MOST,
    FILLINGS,
    VOUCHED,
    Filling,
    alike,
    fill,
)

FULL = Reason("out of memory", "", detail="a trial copies what crosses cuts")
OUTSIDE = "padded rows index outside"  # this size is not for the graph, others may be


Seen = tuple[str, str, bool]  # reader, value, whether it is memory of the caller


@dataclass(frozen=True, slots=True)
class Sizes:
    """What numbers and tensors of a run have: of the call, or of the padded size."""

    numbers: Mapping[str, int]
    geometries: Mapping[Any, Geometry]


@dataclass(slots=True)
class Kept:
    """What one live node took and made: clones, by the node they come from.

    Attributes:
        taken: tensors with rows, as they were before it.
        written: operands that it wrote, as they were after it.
        made: its result.
    """

    taken: dict[fx.Node, Tensor] = field(default_factory=dict)
    written: dict[fx.Node, Tensor] = field(default_factory=dict)
    made: Any = None


class Trial:
    """One graph, one call, one padded size; ``again`` if another size was tried before."""

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: Plan,
        facts: Facts,
        lowering: Lowering,
        key: tuple[int, ...],
        padded: tuple[int, ...],
        others: Mapping[str, int],
        again: bool = False,
    ) -> None:
        self.gm, self.plan, self.facts, self.lowering = gm, plan, facts, lowering
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        symbols = [s for s, _, _ in plan.symbols]
        whole = dict(zip(symbols, padded, strict=True)) | dict(others)
        own = dict(zip(symbols, key, strict=True)) | dict(others)
        live = [s for s in plan.segments if isinstance(s, EagerSegment) and s.live]
        self.live = {n for s in live for n in s.nodes}
        rest = [n for n in facts.nodes if n not in self.live]
        self.written_again = {s for n in rest for s in facts.nodes[n].writes}
        specs = {
            (n, i): t.spec
            for n, f in facts.nodes.items()
            if n in self.live or n in plan.arguments
            for i, t in enumerate(f.tensors)
            if not t.unbacked and not t.special
        }
        self.whole, self.own = (
            Sizes(numbers, at_sizes(specs, list(numbers), list(numbers.values())))
            for numbers in (whole, own)
        )
        self.sizes = self.whole
        self.static = {v.name for v in plan.values if v.home == "static"}
        padding = plan.padding
        assert padding is not None
        self.fills = dict(padding.fills)
        vouched = any(r.kind in VOUCHED for r in padding.tried)
        doubtful = any(r.kind not in OF_SIZE for r in padding.tried) and not again
        self.changes = (BEHIND_MOST, BEHIND_LEAST) if doubtful else ()
        # Another size of a graph that was tried: only what a replay has can be news.
        self.fillings = FILLINGS[:1] if again else FILLINGS[:-1] if vouched else FILLINGS
        self.reserved = padding.reserved
        self.unwritten = unwritten(gm, facts)
        self.full = False
        self.kept: dict[str, Kept] = {}
        self.most: bool | None = None  # rows of the call as they are, or the largest, or the least
        self.expected: dict[Seen, Tensor] | None = None
        self.first: dict[Seen, Tensor] = {}
        self.before: dict[int, Tensor] = {}

    def rows(self, t: TensorFact) -> tuple[int, ...]:
        """Dims of a tensor that hold rows."""
        return row_dims(t, self.facts.rows)

    def run(self, args: Sequence[Any]) -> tuple[Any, Reason | None]:
        """The result of the call, and why its size cannot be padded, or None."""
        for i, p in enumerate(self.placeholders):
            tensors = self.facts.nodes[p.name].tensors
            if any(t.storage in self.written_again for t in tensors):
                self.before[i] = self.copy(args[i])
        with modes.preserved():
            result = _Real(self).run(*args)
        if self.full:
            self.kept.clear()
            return result, FULL
        for filling in self.fillings:
            reason = self.padded_run(args, result, filling)
            # Other numbers than a replay has may lead out of a table without telling anything.
            if reason is not None and not (reason.kind == OUTSIDE and filling is not FILLINGS[0]):
                return result, reason
        for fillings in self.changes:
            reason = self.changed_runs(args, result, fillings)
            if reason is not None:
                return result, reason
        return result, None

    def changed_runs(
        self, args: Sequence[Any], result: Any, fillings: Sequence[Filling]
    ) -> Reason | None:
        """What padding shows of rows that are all one; nothing if the call takes none such."""
        self.most, self.expected, self.first = fillings is BEHIND_MOST, {}, {}
        self.sizes = self.own
        failed = self.padded_run(args, result, fillings[0])
        self.sizes = self.whole
        if failed is not None:
            return failed if failed is FULL else None
        for filling in fillings:
            reason = self.padded_run(args, result, filling)
            if reason is not None and reason.kind != OUTSIDE:
                return reason
        return None

    def copy(self, x: Tensor) -> Tensor:
        """A clone for the trial, of which the call itself must not fail."""
        try:
            return x if self.full else x.clone()
        except torch.OutOfMemoryError:
            self.full = True
            return x

    def padded_run(self, args: Sequence[Any], result: Any, filling: Filling) -> Reason | None:
        """One run at the padded size; what it shows against padding."""
        try:
            self.run_padded(args, result, filling)
        except _Differs as found:
            return found.reason
        except OutOfRange as found:
            return Reason(OUTSIDE, "", detail=str(found))
        except torch.OutOfMemoryError:
            return FULL
        except Exception as error:  # anybody's operator, at a size it was never called with
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return Reason("fails at a padded size", "", detail=text)
        return None

    def run_padded(self, args: Sequence[Any], result: Any, filling: Filling) -> None:
        """Runs and compares; raises where anything differs."""
        places = enumerate(zip(self.plan.arguments, args, strict=True))
        given = [self.argument(i, n, x, filling) for i, (n, x) in places]
        devices = [torch.device(self.plan.device)] if "cuda" in self.plan.device else []
        with modes.preserved(), torch.random.fork_rng(devices), InRange():
            outputs = _Padded(self, filling).run(*given)
        (node,) = self.gm.graph.find_nodes(op="output")
        trees = map(pytree.tree_leaves, (node.args[0], outputs, result))
        for leaf, ours, real in zip(*trees, strict=True):
            if isinstance(leaf, fx.Node) and isinstance(real, Tensor):
                self.compare(leaf, ours, real)
        for i in self.before:
            self.compare(self.placeholders[i], given[i], args[i], memory_of_caller=True)

    def argument(self, i: int, name: str, x: Any, filling: Filling) -> Any:
        """An argument of the padded run."""
        f = self.facts.nodes[name]
        if not isinstance(x, Tensor):
            return self.sizes.numbers.get(f.expr, x)
        x = self.before.get(i, x)
        (t,) = f.tensors
        if not self.rows(t):
            return x.clone() if i in self.before else x
        declared = name in self.fills
        if declared:
            filling = Filling(self.fills[name])
        return self.padded((name, 0), t, x, filling, declared)

    def padded(
        self,
        place: tuple[str, int],
        t: TensorFact,
        x: Tensor,
        filling: Filling,
        declared: bool = False,
    ) -> Tensor:
        """``x`` with more rows."""
        x = self.changed(t, x, self.fills.get(place[0], 0))
        whole = memory.allocate(t.spec, self.sizes.geometries[place])
        front = fill(whole, self.rows(t), x, filling, declared)
        memory.once(front)(front).copy_(memory.once(front)(x))
        return whole

    def changed(self, t: TensorFact, x: Tensor, padded: float = 0) -> Tensor:
        """Rows of the call, or what stands for them in this run."""
        return x if self.most is None else alike(x, self.rows(t), self.most, padded)

    def compare(
        self,
        node: fx.Node,
        ours: Tensor,
        real: Tensor,
        reader: str = "",
        memory_of_caller: bool = False,
    ) -> None:
        """Raises where a padded run gives a call's own rows otherwise.

        The call itself ran other kernels, which round otherwise. The first padded run did not: if
        another filling changes anything at all, however little, it was read.
        """
        (t,) = self.facts.nodes[node.name].tensors
        dims = self.rows(t)
        if t.special or (t.uncut and not dims):
            return
        front = ours
        for d in dims:
            front = front.narrow(d, 0, min(real.shape[d], front.shape[d]))
        if memory_of_caller and not dims:
            rows = [row for storage, row in self.reserved if storage == t.storage]
            front, real = (unreserved(x, rows) for x in (front, real))
        place = reader, node.name, memory_of_caller
        if self.expected is not None:
            if self.sizes is self.own:
                self.expected[place] = front.clone()
                return
            real = self.expected[place]
        apart = difference(front, real)
        if not apart and place in self.first:
            apart = difference(front, self.first[place], SAME)
        elif not apart:
            self.first[place] = front.clone()
        if apart:
            raise _Differs(
                Reason(
                    "padded rows change others", node.name, where(node),
                    f"written memory, {apart}" if memory_of_caller else apart,
                )
            )  # fmt: skip


class _Differs(Exception):  # noqa: N818 - it ends a run, it is no error of anybody
    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Interpreter(fx.Interpreter):
    def __init__(self, trial: Trial) -> None:
        super().__init__(trial.gm, garbage_collect_values=True)
        self.extra_traceback = False
        self.trial = trial

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(plain_function(target) or target, args, kwargs)

    def operands(self, n: fx.Node, wanted: Callable[[TensorFact], bool]) -> dict[fx.Node, Tensor]:
        """Tensors that a node takes, by the node they come from."""
        facts = self.trial.facts.nodes
        return {
            p: self.env[p]
            for p in n.all_input_nodes
            if isinstance(self.env[p], Tensor) and any(map(wanted, facts[p.name].tensors))
        }


class _Real(_Interpreter):
    """The call itself, which keeps clones of what live nodes take and make."""

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self.trial.live:
            return super().run_node(n)
        f = self.trial.facts.nodes[n.name]
        kept = self.trial.kept[n.name] = Kept()
        empty = self.trial.unwritten[n.name]
        taken = self.operands(n, lambda t: bool(self.trial.rows(t)) and t.storage not in empty)
        kept.taken = {p: self.trial.copy(x) for p, x in taken.items()}
        result = super().run_node(n)
        written = self.operands(n, lambda t: t.storage in f.writes and self.is_made(t))
        kept.written = {p: self.trial.copy(x) for p, x in written.items()}
        kept.made = pytree.tree_map_only(Tensor, self.trial.copy, result)
        return result

    def is_made(self, t: TensorFact) -> bool:
        """Whether memory is the graph's own, or an argument that is padded."""
        origin = self.trial.facts.origin[t.storage]
        return origin not in self.trial.static


class _Padded(_Interpreter):
    """All but the live nodes, on padded values."""

    def __init__(self, trial: Trial, filling: Filling) -> None:
        super().__init__(trial)
        self.filling = filling

    def run_node(self, n: fx.Node) -> Any:
        trial = self.trial
        if n.name not in trial.live:
            return super().run_node(n)
        kept, facts = trial.kept[n.name], trial.facts.nodes
        for p, real in kept.taken.items():
            trial.compare(p, self.env[p], real, n.name)
        for p, real in kept.written.items():
            (t,) = facts[p.name].tensors
            real = trial.changed(t, real)
            front = fill(self.env[p], trial.rows(t), real, self.filling)
            front.copy_(real)
        leaves, spec = pytree.tree_flatten(kept.made)
        made, i = [], 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf, i = self.made(n, i, leaf), i + 1
            made.append(leaf)
        return pytree.tree_unflatten(made, spec)

    def made(self, n: fx.Node, i: int, real: Tensor) -> Tensor:
        """A result of a live node, with more rows."""
        trial = self.trial
        f = trial.facts.nodes[n.name]
        t = f.tensors[i]
        if f.same_as:
            same: Tensor = self.env[trial.lowering.nodes[f.same_as]]
            return same
        rows = trial.rows(t)
        if trial.facts.origin[t.storage] != n.name and rows:
            raise _Differs(Reason("cannot be tried", n.name, where(n), "returns a view"))
        return trial.padded((n.name, i), t, real, self.filling) if rows else real.clone()


def unwritten(gm: fx.GraphModule, facts: Facts) -> Mapping[str, frozenset[int]]:
    """Node -> storages that hold nothing yet when it runs."""
    empty: set[int] = set()
    found = {}
    for node in gm.graph.nodes:
        f = facts.nodes[node.name]
        found[node.name] = frozenset(empty)
        if f.kind == "alloc":
            empty |= {t.storage for t in f.tensors}
        empty -= f.writes
    return found
