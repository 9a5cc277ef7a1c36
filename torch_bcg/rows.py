"""The padded size of one graph: what is asked of facts and plan, and where a call is padded to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import torch
from torch import fx
from torch._guards import TracingContext

from torch_bcg.frame import argument_names, names_in_scope, static_arguments
from torch_bcg.graph.buckets import LADDER, RowDim, SizeGuards, find, row_dim
from torch_bcg.graph.facts import fake_arguments
from torch_bcg.graph.ir import Plan, Reason
from torch_bcg.graph.known import OF_SIZE, Facts
from torch_bcg.graph.lower import Lowering
from torch_bcg.graph.padding import Request, fills_of, with_padding
from torch_bcg.metadata.instances import Instance
from torch_bcg.options import Options
from torch_bcg.runtime.trial import OUTSIDE

Key = tuple[int, ...]


_GUARD = Reason("guard", "", detail="Dynamo made the graph for no size of the ladder")


class Rows:
    """One graph's; made while Dynamo calls the backend.

    Attributes:
        options: of the compile.
        refused: what a trial found, or None.
        agreed: what a trial has shown to change nothing.
        read: what the author calls the tensors that the graph is given.
        known: these, and all else that an argument may be called where the graph comes from.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[object],
        options: Options,
        instances: Sequence[Instance] = (),
    ) -> None:
        self.options = options
        self.ladder = LADDER if options.buckets == "ladder" else tuple(options.buckets or ())
        fields = {a: i.names(path) for i in instances for path, a in i.arguments.items()}
        self.names = argument_names(gm) | {a: names[0] for a, names in fields.items()}
        placeholders = gm.graph.find_nodes(op="placeholder")
        called = {p.name: (self.names.get(p.name, p.name), p.name) for p in placeholders} | fields
        self.fills = fills_of(dict(options.pad), called)
        static = static_arguments(gm, example_inputs)
        self.read = tuple(
            called[p.name][0]
            for p, x in zip(placeholders, example_inputs, strict=True)
            if isinstance(x, torch.Tensor) and p.name not in static
        )
        self.known = names_in_scope().union(*called.values()) if options.pad else frozenset()
        if self.ladder:
            self.tie([p.name for p in placeholders], example_inputs)
        # Of [tokens, features] both may vary; nobody pads features.
        self.with_features = {
            p.name
            for p, x in zip(placeholders, example_inputs, strict=True)
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1
        }
        context = TracingContext.try_get()
        shapes = context.fake_mode.shape_env if context and context.fake_mode else None
        self.guards = SizeGuards(shapes) if shapes is not None else None
        self.dim: RowDim | str = "no size varies"
        self.symbols: tuple[str, ...] = ()
        self.place = -1
        self.untried: tuple[Reason, ...] = ()
        self.each = self.of_size = False
        self.reset()

    def tie(self, placeholders: Sequence[str], example_inputs: Sequence[object]) -> None:
        """Makes the graph one for calls in which all tensors have as many rows as were declared.

        Dynamo gives sizes of several tensors symbols of their own, and an indexed write never
        compares them. A call in which they differ is compiled again.
        """
        _, fakes = fake_arguments(example_inputs)
        declared = {name for name, _ in self.fills}
        wanted = self.options.bucket_dim
        rows: list[tuple[int, torch.SymInt]] = []
        others: list[tuple[int, torch.SymInt]] = []
        for name, real, fake in zip(placeholders, example_inputs, fakes, strict=True):
            if not isinstance(real, torch.Tensor):
                continue
            for d, (number, size) in enumerate(zip(real.shape, fake.shape, strict=True)):
                asked = wanted is not None and wanted[0] in (name, self.names.get(name))
                known = (d == 0 and name in declared) or (
                    asked and wanted is not None and d == wanted[1] % real.dim()
                )
                if isinstance(size, torch.SymInt):
                    (rows if known else others).append((number, size))
        if declared and wanted is None:  # as Dynamo does where it takes equal sizes for one
            rows += others
        for number, size in rows[1:]:
            if number == rows[0][0]:
                bool(size == rows[0][1])  # asking is what makes it a guard

    def reset(self) -> None:
        """Back to the state before the first call."""
        self.refused: Reason | None = None
        self.agreed: tuple[Reason, ...] = ()
        self.usable = self.ladder
        self.inside: set[int] = set()  # padded sizes at which no index leaves its table
        self.outside: set[int] = set()
        self.found: dict[Key, Key | str] = {}
        self.shown: dict[Key, int] = {}  # calls that were tried, and the rows they were padded by

    def choose(self, sizes: Mapping[str, tuple[str, ...]]) -> str:
        """The symbol of rows, for `graph.facts`; "" if there is none."""
        wanted = self.options.bucket_dim
        if self.ladder:
            if wanted is None:  # what is declared of padded rows says which size has them
                declared = (name for name, _ in self.fills if sizes.get(name))
                wanted = next(((n, 0) for n in declared if sizes[n][0].isidentifier()), None)
            if wanted is None:
                sizes = {
                    n: (*s[:-1], "") if n in self.with_features else s for n, s in sizes.items()
                }
            self.dim = row_dim(sizes, self.names, wanted)
        return self.dim.symbol if isinstance(self.dim, RowDim) else ""

    def plan(self, plan: Plan, facts: Facts, lowering: Lowering) -> Plan:
        """The pass that decides on padding; nothing where nobody asked."""
        if not self.ladder:
            return plan
        request = Request(
            self.dim,
            self.usable,
            self.options.rows == "independent",
            self.fills,
            self.refused or (None if self.usable else _GUARD),
        )
        plan = with_padding(plan, facts, lowering, request)
        self.found.clear()
        self.symbols = tuple(s for s, _, _ in plan.symbols)
        padded = plan.padding is not None and plan.padding.refused is None
        self.place = self.symbols.index(plan.padding.symbol) if padded and plan.padding else -1
        tried = plan.padding.tried if padded and plan.padding else ()
        self.untried = tuple(r for r in tried if r not in self.agreed)
        self.shown.clear()
        self.of_size = any(r.kind in OF_SIZE for r in tried)
        self.each = plan.padding is not None and plan.padding.each
        return plan

    @property
    def unnamed(self) -> tuple[str, ...]:
        """Keys of ``pad`` that are the name of nothing here; those of another graph are too."""
        return tuple(k for k, _ in self.options.pad if self.ladder and k not in self.known)

    @property
    def padded(self) -> bool:
        """Whether calls are padded, by what is known so far."""
        return self.place >= 0

    def key_for(self, key: Key) -> Key | str:
        """The key that a call is padded to, its own, or why it is an eager call."""
        if self.place < 0:
            return key
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = self._key_for(key)
        return found

    def _key_for(self, key: Key) -> Key | str:
        size = find(
            key[self.place], self.ladder, self.options.max_padding, lambda n: self.allows(key, n)
        )
        if size == "guard":  # the graph is not for any padded size: recorded as it is
            return key
        return size if isinstance(size, str) else self.at(key, size)

    def at(self, key: Key, size: int) -> Key:
        """``key`` with another number of rows."""
        return (*key[: self.place], size, *key[self.place + 1 :])

    def allows(self, key: Key, size: int) -> bool:
        """Whether the graph is for that number of rows: its guards hold, its indices are inside."""
        if size in self.outside:
            return False
        values = dict(zip(self.symbols, self.at(key, size), strict=True))
        return self.guards is None or self.guards.allows(values)

    def look(self, key: Key) -> bool:
        """Which padded sizes the graph is for, once Dynamo has finished; whether that is news."""
        before = self.usable
        if self.padded:
            self.usable = tuple(n for n in self.ladder if self.allows(key, n))
        return self.usable != before

    def count(self, key: Key) -> int:
        """Rows of a call, 0 where they are not padded."""
        return key[self.place] if self.place >= 0 else 0

    def most(self, key: Key) -> Key:
        """The largest key that memory has to be taken for: slots are shared by all sizes."""
        if self.place < 0:
            return key
        usable = [n for n in self.ladder if self.allows(key, n)]
        return self.at(key, max([key[self.place], *usable]))

    def due(self, key: Key, target: Key) -> bool:
        """Whether a trial has to come before this call is padded."""
        if key == target:
            return False
        if self.untried and key not in self.shown:
            return True
        return self.of_size and target[self.place] not in self.inside

    def tried(self, key: Key, target: Key, refused: Reason | None) -> None:
        """What a trial found; the graph is planned again if it refuses for every size.

        An operator that works on rows in groups joins no row of a call with a padded one if both
        are whole groups. So other sizes are tried as well, until no size of a group divides the
        rows of all calls that were tried, or all that they were padded by; or each, where a trial
        tells of its own number of rows alone.
        """
        size, whole = key[self.place], target[self.place]
        if refused is not None and refused.kind == OUTSIDE:
            self.outside.add(whole)
            self.found.clear()
            return
        self.inside.add(whole)
        self.refused = refused
        self.shown[key] = whole - size
        rows = (shown[self.place] for shown in self.shown)
        apart = not self.each and gcd(*rows) == gcd(*self.shown.values()) == 1
        if refused is not None or apart:
            self.agreed, self.untried = (*self.agreed, *self.untried), ()

    def limit(self) -> int:
        """Most programs of one set of static tensors: the ladder comes on top of other shapes."""
        return self.options.max_programs + (len(self.ladder) if self.padded else 0)
