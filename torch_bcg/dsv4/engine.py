"""Runs steps of a model, eagerly or compiled, each with its metadata built on the device.

Compiled, one program serves one number of rows. A step is brought up to the next size of the ladder
here: the compressor joins rows of a request, so the backend could not add rows by itself. The
metadata of a size is made once, its tensors are what the program's segments read, and each step is
built straight into them.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from torch_bcg.dsv4.fields import ExtendBatch
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import MOST_ROWS, DSV4Metadata
from torch_bcg.dsv4.model import DeepseekV4
from torch_bcg.dsv4.pools import Pools
from torch_bcg.errors import BCGError, MisfitError
from torch_bcg.graph.buckets import LADDER
from torch_bcg.handle import ProgramHandle
from torch_bcg.programs import forget_graphs

MOST_REFUSALS = 3
OF_TORCH_COMPILE = ("guard_filter_fn",)  # options that it takes, and the backend never sees


class Body(nn.Module):
    """What is compiled: the model on the pools of one engine."""

    def __init__(self, model: DeepseekV4, pools: Pools) -> None:
        super().__init__()
        self.model, self.pools = model, pools

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [P] -> [P, D]."""
        return cast("Tensor", self.model(input_ids, self.pools))


_numbers = itertools.count()


def _body_of(model: DeepseekV4, pools: Pools) -> Body:
    """A body whose code nobody else has.

    Dynamo keeps graphs by code object, eight of them at most, and what it learned of their sizes by
    name: engines would share both, and the ninth would silently not be compiled.
    """
    plain = Body.forward
    code = plain.__code__.replace(co_name=f"forward_{next(_numbers)}")
    forward = types.FunctionType(code, plain.__globals__)
    own: type[Body] = type(Body.__name__, (Body,), {"forward": forward})
    body = own(model, pools)
    # Dynamo keeps graphs with the code, and names them in the globals: they would never go.
    weakref.finalize(body, forget_graphs, code).atexit = False
    return body


class Engine:
    """A model with memory for the requests of one layout.

    One step runs at a time, of all engines: its metadata is bound. Compiled engines that are open
    together have one ``page_size``, ``index_topk``, ``c4_ratio`` and ``c128_ratio``: these are
    declared equal in all calls, and a step that has others is a `BindingError`. An engine is open
    from its first step until it is closed, or gone.

    Steps of a size whose program is known go past Dynamo. Between them weights, modules and numbers
    of the model may be set anew; what else is (a hook, a forward) takes another engine.

    A step may come in any mode of autograd, each has programs of its own, and with autocast, which
    is off within.

    Args:
        model: stays as it is; its device and dtype are those of everything here.
        layout: how much memory there is, and for what.
        backend: ``"bcg"``; None: eager, every step at its own number of rows.
        options: of the backend, and ``guard_filter_fn`` of `torch.compile`. ``buckets`` are sizes
            that steps are brought up to here; a step above them, and every step without them, has a
            program of its own size. Other options of padding do nothing here.

    Attributes:
        pools: the memory.
        layout, model, backend: as given.
        sizes: that steps are brought up to, ascending; empty: none is.
        compiled: what a step calls, compiled or not; `torch_bcg.explain` and `programs` take it.
        programs: by number of rows, in the mode of autograd of the last step; none of a graph that
            takes numbers of the model as arguments.
        kept: by number of rows, metadata whose tensors that program reads.

    Raises:
        BCGError: no model, or a layout that is not one of the model, see `DSV4Config.layout`.
        ValueError: another backend, or ``buckets`` larger than a step may be.
    """

    def __init__(
        self,
        model: DeepseekV4,
        layout: Layout,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_model(model)
        if backend not in (None, "bcg") or (options and backend is None):
            raise ValueError(
                f"Engine: backend is {backend!r}, options are {options!r}; expected 'bcg', or None "
                "without options. Others may delay what the indexer writes until attention read it."
            )
        weight = model.embedding.weight
        self.layout, self.model = layout, model
        self.pools = Pools(model.config, layout, weight.device, weight.dtype)
        body = _body_of(model, self.pools)
        self.sizes: tuple[int, ...] = ()
        self.compiled: Any = body
        if backend is not None:
            options = dict(options or {})
            own = {n: x for n, x in options.items() if n not in OF_TORCH_COMPILE}
            given = torch_bcg.Options.make(own)
            self.sizes = LADDER if given.buckets == "ladder" else given.buckets or ()
            if max(self.sizes, default=0) > MOST_ROWS:
                raise ValueError(
                    f"Engine: buckets has {max(self.sizes)}; expected sizes up to {MOST_ROWS}, the "
                    "most rows of a step."
                )
            programs = max(given.max_programs, len(self.sizes))
            mine = {**options, "buckets": None, "max_programs": programs}
            self.compiled = torch.compile(body, backend=backend, options=mine)
        self.backend = backend
        self.kept: dict[int, DSV4Metadata] = {}
        self.programs: dict[int, ProgramHandle] = {}
        self._refused: dict[int, int] = {}  # one after another, of the programs of a size
        self._mode = _mode()

    def step(self, input_ids: Tensor, batch: ExtendBatch) -> Tensor:
        """Runs the tokens of one step.

        Args:
            input_ids: int64 [T].
            batch: where they belong; `Pools.req_to_token` and ``full_to_swa`` hold their slots.

        Returns:
            [T, D], see `DeepseekV4.logits`.

        Raises:
            ValueError: the batch does not fit ``input_ids`` or the layout.
        """
        tokens = batch.num_tokens
        if input_ids.shape != (tokens,):
            raise ValueError(
                f"Engine.step: input_ids is {list(input_ids.shape)}; expected [{tokens}], a token "
                "for each that the batch has."
            )
        rows = self.rows(tokens)
        self._settle()
        md = DSV4Metadata.create(batch, self.layout, rows, out=self.kept.get(rows))
        return self.forward(F.pad(input_ids, (0, rows - tokens)), md)[:tokens]

    def forward(self, input_ids: Tensor, md: DSV4Metadata) -> Tensor:
        """The model alone, past Dynamo where the program of this size is known.

        Args:
            input_ids: int64 [P], whatever in rows that belong to nobody.
            md: of a step of P rows, over the memory of this engine.

        Returns:
            [P, D].
        """
        self._settle()
        rows = len(input_ids)
        with _without_autocast(input_ids.device.type):
            if rows in self.programs:
                try:
                    (hidden,) = self.programs[rows](input_ids, metadata=md)
                    self._refused.pop(rows, None)
                    return cast("Tensor", hidden)
                except MisfitError as error:  # weights, marks, settings: Dynamo finds out which
                    if error.program is not self.programs[rows]:
                        raise
                    self._refused[rows] = self._refused.get(rows, 0) + 1
                    self._forget()  # of other sizes too: handles keep weights alive
            known = self.backend is None or rows in self.kept
            before = {} if known else {p: p.replays for p in torch_bcg.programs(self.compiled)}
            if not known:
                _vary_rows(input_ids, md)
            with torch_bcg.bind_metadata(md):
                hidden = self.compiled(input_ids)
        if not known:
            self._keep(rows, md, before)
        return cast("Tensor", hidden)

    def close(self) -> None:
        """Frees what was recorded; a step after that records again."""
        self._forget()
        self._refused.clear()
        if self.backend == "bcg":
            torch_bcg.reset(self.compiled)

    def rows(self, tokens: int) -> int:
        """P of a step of so many tokens."""
        return next((size for size in self.sizes if size >= tokens), tokens)

    def _keep(self, rows: int, md: DSV4Metadata, before: Mapping[ProgramHandle, int]) -> None:
        """From now on steps of a size go to the program that has just run, or was recorded.

        Their metadata lies where it is read.
        """
        for program in torch_bcg.programs(self.compiled):
            ran = program.replays > before.get(program, -1)
            if ran and rows in program.sizes.values():
                self.kept[rows] = program.captured(md)
                # Else numbers of the model are arguments as well, or it is refused every time.
                if len(program.arguments) == 1 and self._refused.get(rows, 0) < MOST_REFUSALS:
                    self.programs[rows] = program

    def _settle(self) -> None:
        """Forgets what another mode knew: it has another graph, and may write other tensors."""
        if (mode := _mode()) != self._mode:
            self._forget()
            self._mode = mode

    def _forget(self) -> None:
        self.kept.clear()
        self.programs.clear()


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    if not torch.is_autocast_enabled(device):  # to enter it takes longer than to ask
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def check_model(model: object) -> None:
    """Refuses what is no model of this package.

    Raises:
        BCGError: it is not, with what to do.
    """
    if not isinstance(model, DeepseekV4):
        raise BCGError(
            f"A {type(model).__name__} cannot be run here.",
            where="torch_bcg.dsv4",
            expected="a torch_bcg.dsv4.DeepseekV4",
            found=type(model).__name__,
            fix="Give torch_bcg.dsv4.convert_from_transformers(model), of a DeepseekV4ForCausalLM.",
        )


def _mode() -> tuple[bool, bool]:
    """What Dynamo has a graph for each of."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


def _vary_rows(input_ids: Tensor, md: DSV4Metadata) -> None:
    """Tells Dynamo that P changes from step to step, and nothing else: no width, no number.

    ``dynamic=True`` would make variables of the widths and of every float of the model as well.
    """
    parts = (md.core_attn_metadata, md.indexer_metadata, md.c4_compress_metadata)
    for part in (*parts, md.c128_compress_metadata):
        for field in vars(part).values():
            if isinstance(field, Tensor):
                torch._dynamo.maybe_mark_dynamic(field, 0)
    torch._dynamo.maybe_mark_dynamic(input_ids, 0)
