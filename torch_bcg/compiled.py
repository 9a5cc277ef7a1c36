"""One graph of Dynamo's: planned once, then found a program at every call, or run and recorded.

`CompiledGraph.__init__` runs once a graph: facts, partition, plan, passes. `CompiledGraph.__call__`
runs at every call: find the program and replay it, or run for real and record. Everything else is
in the modules named on the way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_bcg import marking, passes
from torch_bcg.counters import counters
from torch_bcg.eager import (
    plain,
    tell_cuts,
    tell_eager_call,
    tell_execute,
    tell_moved,
    tell_pad,
)
from torch_bcg.errors import CaptureError
from torch_bcg.frame import (
    has_tangents,
    kinds_of,
    static_arguments,
    type_of_self,
    watched_settings,
)
from torch_bcg.graph.facts import facts_of
from torch_bcg.graph.fusing import Fusing
from torch_bcg.graph.inline import inlined, without_geometry_changes
from torch_bcg.graph.ir import Plan, Reason
from torch_bcg.graph.known import Facts
from torch_bcg.graph.partition import Partition, partition, recorded_symbols
from torch_bcg.graph.plan import NoAddressError, make_plan
from torch_bcg.graph.sizes import call_geometries, call_sizes, geometries, key_reader
from torch_bcg.graph.sorting import where
from torch_bcg.metadata import registration
from torch_bcg.metadata.deriving import shown_by
from torch_bcg.metadata.instances import names_of, renamed
from torch_bcg.metadata.watching import reads_noted
from torch_bcg.options import Options
from torch_bcg.report import files, trace
from torch_bcg.rows import Key, Rows
from torch_bcg.runtime.calls import Bound
from torch_bcg.runtime.capture import capture
from torch_bcg.runtime.collection import Programs
from torch_bcg.runtime.device import new_pool, pool_of
from torch_bcg.runtime.inline import inline
from torch_bcg.runtime.inner import Inner
from torch_bcg.runtime.memory import Aliases
from torch_bcg.runtime.probe import probe
from torch_bcg.runtime.program import Misfit, Program
from torch_bcg.runtime.slots import Slots
from torch_bcg.runtime.statics import Statics
from torch_bcg.runtime.trial import Trial
from torch_bcg.runtime.workspace import Workspace
from torch_bcg.sources import (
    check_apart,
    let_integers_vary,
    metadata_behind,
    premises_of,
)


def current_generation() -> tuple[int, int]:
    """Changes whenever a mark or a metadata class is made or removed."""
    return marking.generation(), registration.generation()


Late = Callable[[Sequence[Any]], bool]
_graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
_number = itertools.count()


def live_graphs() -> list[CompiledGraph]:
    """Every graph that somebody can still call, in the order of compilation."""
    return sorted(_graphs, key=lambda g: g.number)


class CompiledGraph:
    """One graph of Dynamo's: its plan, and a program for each key and set of static tensors."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        options: Options,
        given: object = None,
    ) -> None:
        self.number = next(_number)
        self.name, self.options = f"graph_{self.number}", options
        self.given = given  # to torch.compile: one object for all graphs of one call of it
        instances = metadata_behind(gm)
        check_apart(gm)
        let_integers_vary(instances)
        names = names_of(instances)
        self.premises = premises_of(gm)
        self.instances = renamed(instances, names)
        self.gm = gm = inlined(gm, names)
        self.eager = plain(self.gm)
        self.static = static_arguments(gm, example_inputs)
        self.kinds = kinds_of(gm, example_inputs)
        self.ambient: frozenset[tuple[type, str]] = frozenset()
        self.rows = Rows(gm, example_inputs, options, self.instances)
        self.facts = facts_of(self.gm, example_inputs, self.rows.choose, self.static)
        if self.facts.whole is not None:
            same_as = {n: f.same_as for n, f in self.facts.nodes.items() if f.same_as}
            self.gm = without_geometry_changes(self.gm, same_as)
            self.facts = facts_of(self.gm, example_inputs, self.rows.choose, self.static)
        self.marks = [marking.resolve(m) for m in options.mark]
        self.owner = type_of_self()
        self.changed_settings = watched_settings()
        self.warned: set[str] = set()
        self.unnamed = self.rows.unnamed
        self.inner = None if options.inner == "eager" else Inner(options.inner, self.facts)
        self.aliases = Aliases() if options.outputs == "alias" else None
        # What is handed out uncopied must not be memory that another graph's replay uses.
        self.pool = (new_pool if self.aliases is not None else pool_of)(self.facts.device)
        self.told: tuple[Plan, bool] | None = None
        self.dump_directory, self.compile_id = files.chosen(options.dump), trace.compile_id()
        self.found: dict[str, Reason] = {}
        self.lost: Reason | None = None
        self.generation = (-1, -1)
        self.programs = Programs(self.pool)
        self.fits = Statics.match_early if "address" in options.check else Statics.match_first
        self.slots = Slots()
        self.seen: dict[Key, int] = {}  # real runs by key
        self.full: set[Key] = set()  # for which there was no memory
        self.probed = False
        self.plan = Plan(self.name, self.facts.device, (), (), (), (), (), ())
        self.make_plan()
        self.tell()
        _graphs.add(self)

    def make_plan(self) -> None:
        """Facts, marks and what the probe found -> plan; programs of an older plan are freed."""
        generation = current_generation()
        if generation != self.generation:
            self.rows.reset()
        plan = self.planned()
        while isinstance(plan, NoAddressError):
            self.found.update((n, Reason("no address", n)) for n in plan.nodes)
            plan = self.planned()
        if self.lost is not None:
            plan = replace(plan, unrecorded=self.lost)
        if self.plan != plan:
            tell_cuts(plan, self.options, self.warned)
            tell_execute(plan, self.options, self.warned)
            self.free()
            self.plan = plan
            self.geometries = geometries(plan)
            self.key = key_reader(plan)
        registration.remember(self, shown_by(plan, self.instances))
        self.generation = generation

    def planned(self) -> Plan | NoAddressError:
        """One attempt: graph.partition, then graph.plan."""
        facts = self.facts
        parts = self.partition(facts)
        symbols = recorded_symbols(self.gm, facts, parts) | ({facts.rows} & facts.key_symbols)
        if symbols != facts.key_symbols:  # sizes that eager segments alone see make no program
            facts = replace(facts, key_symbols=symbols)
            parts = self.partition(facts)
        try:
            plan, self.lowering = make_plan(self.name, self.gm, facts, parts, self.static)
        except NoAddressError as values:
            return values
        context = passes.Context(facts, self.lowering, self.rows, self.instances, self.ambient)
        return passes.run(plan, context, self.options.passes)

    def partition(self, facts: Facts) -> Partition:
        """The graph cut at marks and at what cannot be recorded."""
        least = self.options.min_segment_kernels
        static = self.static if self.options.opens else ()
        return partition(self.gm, facts, self.mark_of, self.found, least, static)

    def mark_of(self, node: fx.Node) -> marking.Mark | None:
        """The mark on a node: made for everybody, for this compile, or on the module that runs."""
        operators = self.facts.nodes[node.name].operators
        return marking.mark_of(node, self.marks, dispatched=operators, owner=self.owner)

    def __call__(self, *args: Any) -> Any:
        """One call: replay if there is a program, else run for real, and record if it is time."""
        with self.pool.lock:
            if has_tangents(args):
                return self.run_eagerly(args, "tangents")
            prevented = self.pool.prevented()
            if prevented:
                return self.run_inline(args, prevented)
            if self.generation != current_generation():
                self.make_plan()
            if self.unnamed and self.probed:
                self.tell_pads()
            key = self.key(args)
            target = self.rows.key_for(key)
            if isinstance(target, str):
                return self.run_eagerly(args, target)
            program = self.programs.find(target, args, self.fits)
            while program is not None and not self.rows.due(key, target):
                try:
                    return self.run_program(program, args, key)
                except Misfit:  # noqa: PERF203 - it began like a call of this one, or this one ended
                    program = self.programs.find(target, args)
            return self.run_for_real(key, args, target)

    def is_current(self, program: Program) -> bool:
        """Whether a program is one of the plan that marks and metadata classes make now."""
        if self.generation != current_generation():
            self.make_plan()
        return not program.dead

    def replay(self, program: Program, args: Sequence[Any], late: Late) -> Any:
        """A call that names its program, past Dynamo and the search for a key.

        Args:
            program: that fits as far as ``fits`` looks.
            args: of the graph.
            late: whether it fits in all else; asked once the opening runs, if there is one.

        Raises:
            Misfit: it does not.
        """
        with self.pool.lock:
            prevented, key = self.pool.prevented(), self.key(args)
            if not prevented and program.at(key).early:
                return self.run_program(program, args, key, late)
            if not late(args):
                raise Misfit
            if prevented:
                return self.run_inline(args, prevented)
            return self.run_program(program, args, key)

    def number_expressions(self) -> dict[str, str]:
        """Arguments that are numbers, by symbols."""
        nodes = ((a, self.facts.nodes[a]) for a in self.plan.arguments)
        return {a: f.expr for a, f in nodes if not f.tensors and f.expr}

    def allows(self, sizes: Mapping[str, int]) -> bool:
        """Whether Dynamo made the graph for such values of symbols."""
        return self.rows.guards is None or self.rows.guards.allows(sizes)

    def run_program(
        self, program: Program, args: Sequence[Any], key: Key, late: Late | None = None
    ) -> Any:
        """Replays a program that fits as far as ``fits`` looked, unless memory overlaps.

        ``late`` is asked of the rest; None: its static tensors are compared.

        Raises:
            Misfit: a static tensor lies elsewhere, or is gone.
        """
        late = late or program.statics.match_late
        try:
            bound = program.at(key)
        except torch.OutOfMemoryError:  # copies for a size that is new; nothing has run
            return self.run_eagerly(args, "out of memory")
        if bound.overlaps is not None and bound.overlaps.found(args) is not None:
            if bound.early and not late(args):
                raise Misfit  # it overlaps where a static tensor was, not where it is
            return self.run_eagerly(args, "overlapping arguments")
        if self.aliases is not None:
            apart = self.aliases.apart(args, bound.in_place)
            if apart is None:
                return self.run_eagerly(args, "an argument is an output of an earlier call")
            args = apart
        self.pool.order()
        with self.pool.in_use():
            result = program.replay(args, bound, late)
        self.count_replay(program, bound)
        return result

    def run_for_real(self, key: Key, args: Sequence[Any], target: Key) -> Any:
        """A call without a program: the probe, a trial, a warming call, or an eager one."""
        if self.plan.unrecorded is not None:
            return self.run_eagerly(args, str(self.plan.unrecorded))
        moved = self.programs.moved(args)
        if moved:
            tell_moved(moved, self.options)
        self.programs.sweep(args)
        if target in self.full:
            return self.run_eagerly(args, "out of memory")
        if self.programs.of_the_set(args) >= self.rows.limit():
            return self.run_eagerly(args, "max_programs")
        if self.programs.wasted >= self.options.max_programs:
            return self.run_eagerly(args, "static tensors that are new at every call")
        self.pool.order()
        with self.pool.in_use():
            if not self.probed:
                result = self.run_probe(key, args)
            elif self.rows.due(key, target):
                result = self.run_trial(key, args, target)
            else:
                result = self.run_warming(key, args)
        found = self.rows.key_for(key)
        if not isinstance(found, str) and self.is_time(key, found, args):
            self.record(found, args)
        return result

    def run_probe(self, key: Key, args: Sequence[Any]) -> Any:
        """The first call: its report adds cuts, with which the graph is planned again."""
        counters.probes += 1
        with reads_noted() as noted:
            result = self.run_watched(key, args)
        self.ambient = frozenset(noted)
        if self.rows.look(key) or self.ambient:
            self.make_plan()
        shown = shown_by(self.plan, self.instances)  # forgotten by a reset
        registration.remember(self, registration.as_bound(shown))
        self.probed = True
        self.seen[key] = 2  # recorded at once: the probe looked at this very key
        self.tell()
        return result

    def run_watched(self, key: Key, args: Sequence[Any]) -> Any:
        """A real run, node by node; plans again with the cuts that it adds."""
        sizes = call_geometries(self.plan, key, args)
        result, reasons = probe(self.gm, args, self.plan, sizes, self.pool)
        self.found.update((r.node, r) for r in reasons)
        if reasons:
            self.make_plan()
        return result

    def run_trial(self, key: Key, args: Sequence[Any], target: Key) -> Any:
        """A call that is run for real and then tried at the padded size it would have had."""
        counters.warming += 1
        again = not self.rows.untried
        sizes = call_sizes(self.plan, args)
        trial = Trial(self.gm, self.plan, self.facts, self.lowering, key, target, sizes, again)
        result, reason = trial.run(args)
        self.rows.tried(key, target, reason)
        if self.rows.refused is not None:
            self.make_plan()
        self.seen[key] = self.seen.get(key, 0) + 1
        return result

    def run_warming(self, key: Key, args: Sequence[Any]) -> Any:
        """A call of a key or of static tensors not met before; what a size is new to is watched."""
        counters.warming += 1
        new = key not in self.seen
        self.seen[key] = self.seen.get(key, 0) + 1
        return self.run_watched(key, args) if new else self.eager(*args)

    def is_time(self, key: Key, target: Key, args: Sequence[Any]) -> bool:
        """Whether to record now: at once where sizes are padded, else at the second call."""
        if self.rows.due(key, target) or self.programs.find(target, args):
            return False
        return self.rows.padded or self.seen[key] >= 2

    def record(self, key: Key, args: Sequence[Any]) -> None:
        """Captures a program; what fails to record is cut, with its error as the reason."""
        while self.plan.unrecorded is None and key not in self.full:
            most = self.rows.most(key)
            try:
                with self.pool.in_use():
                    space = Workspace(
                        self.plan, self.lowering, self.geometries, key, most, args, self.pool,
                        self.slots,
                    )  # fmt: skip
                    options = self.options
                    program = capture(
                        space, options.unrecorded, self.aliases, options.check, self.inner,
                        options.opens,
                    )  # fmt: skip
            except CaptureError as error:
                self.cut(error, key)
                continue
            self.programs.add(program)
            counters.captures += 1
            self.tell()
            if self.dump is not None:
                figures: dict[str, object] = {
                    "bytes": program.bytes, "copied_bytes": program.at(key).copied_bytes,
                }  # fmt: skip
                if program.fusing is not None:
                    figures["fused"] = dict(program.fusing.fused)
                    figures["unfused"] = dict(program.fusing.unfused)
                sizes = dict(zip((s for s, _, _ in self.plan.symbols), key, strict=True))
                self.dump.captured(sizes, figures, self.fusings)
            return

    def cut(self, error: CaptureError, key: Key) -> None:
        """Makes the operation at which a capture failed eager.

        Where the device is full, other sizes may still fit; without any, nothing is recorded.
        """
        if error.out_of_memory and (self.rows.padded or len(self.programs)):
            self.full.add(key)
            return
        if error.out_of_memory:
            self.lost = Reason("out of memory", error.node, detail=error.found)
            self.make_plan()
            return
        segment = self.plan.segments[error.segment]
        known = error.node in segment.nodes and error.node not in self.found
        for name in (error.node,) if known else segment.nodes:
            place = where(self.lowering.nodes[name])
            self.found[name] = Reason("cannot be recorded", name, place, error.found)
        self.make_plan()

    def run_eagerly(self, args: Sequence[Any], reason: str) -> Any:
        """An eager call: never silent."""
        self.count_eager_call(args, reason)
        return self.eager(*args)

    def count_eager_call(self, args: Sequence[Any], reason: str) -> None:
        """What an eager call adds to the counters, and ``on_eager_call``."""
        counters.eager_call(reason)
        tell_eager_call(reason, self.options, self.warned)
        counters.kernels += self.plan.kernels
        counters.rows += self.rows.count(self.key(args))

    def run_inline(self, args: Sequence[Any], reason: str) -> Any:
        """An eager call amid a capture or a replay: of fused segments, where some fit it."""
        key = self.key(args)
        program = None if self.inner is None else self.programs.find(key, args)
        if program is None:
            return self.run_eagerly(args, reason)
        try:
            overlaps = program.at(key).overlaps
        except Misfit:  # it has ended since it was found
            return self.run_eagerly(args, reason)
        if overlaps is not None and overlaps.found(args) is not None:
            return self.run_eagerly(args, reason)
        self.count_eager_call(args, reason)
        return inline(program.space, args)

    def count_replay(self, program: Program, bound: Bound) -> None:
        """What one replay adds to the counters."""
        counters.replays += 1
        counters.kernels += program.kernels
        counters.recorded_kernels += program.recorded_kernels
        counters.copied_bytes += bound.copied_bytes
        counters.rows += bound.rows
        counters.replayed_rows += bound.rows
        counters.pad_rows += bound.pad_rows

    def tell(self) -> None:
        """The plan -> logs, TORCH_TRACE, files; again once it changed or is probed."""
        if self.told == (self.plan, self.probed):
            return
        self.told = (self.plan, self.probed)
        trace.log_plan(self.plan)
        trace.trace_plan(self.plan, self.probed, self.compile_id)
        self.dump = files.planned(
            self.name, self.plan, self.gm, self.lowering, self.dump_directory, self.probed,
            self.fusings,
        )  # fmt: skip

    @property
    def fusings(self) -> tuple[Fusing, ...] | None:
        """What is fused of each program; None: nothing is to be."""
        if self.inner is None:
            return None
        return tuple(p.fusing for p in self.programs if p.fusing is not None)

    def tell_pads(self) -> None:
        """Keys of ``pad`` that name nothing, once a compile.

        Dynamo may make many graphs of one function, each with arguments of its own; those that the
        first call needs are there at the second call of one of them.
        """
        unnamed, self.unnamed = self.unnamed, ()
        graphs = [g for g in live_graphs() if g.given is self.given]
        known = frozenset[str]().union(*(g.rows.known for g in graphs))
        read = sorted({name for g in graphs for name in g.rows.read})
        for key in unnamed:
            if key not in known and not any(f"pad {key}" in g.warned for g in graphs):
                self.warned.add(f"pad {key}")
                tell_pad(key, [g.name for g in graphs], read, known, self.options)

    def free(self) -> None:
        """Frees the programs; the next calls record again."""
        self.programs.free()
        if self.aliases is not None:
            self.aliases.expire()

    def reset(self) -> None:
        """Back to the state before the first call."""
        with self.pool.lock:
            self.free()
            self.found.clear()
            self.lost = None
            self.seen.clear()
            self.full.clear()
            self.programs.wasted = 0
            self.probed = False
            if self.inner is not None:
                self.inner.forget()
            self.rows.reset()
            self.make_plan()
            registration.forget(self)
            self.pool.let_go()
