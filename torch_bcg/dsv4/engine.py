"""Runs steps of a model, eagerly or compiled, each with its metadata built on the device.

Compiled, one program serves one number of rows. A step is brought up to the next size of the ladder
here: the compressor joins rows of a request, so the backend could not add rows by itself. The
metadata of a size is made once, its tensors are what the program's segments read, and each step is
built straight into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from torch_bcg.dsv4.fields import ExtendBatch
from torch_bcg.dsv4.layout import Layout
from torch_bcg.dsv4.metadata import DSV4Metadata
from torch_bcg.dsv4.model import DeepseekV4
from torch_bcg.dsv4.pools import Pools
from torch_bcg.graph.buckets import LADDER


class Body(nn.Module):
    """What is compiled: the model on the pools of one engine."""

    def __init__(self, model: DeepseekV4, pools: Pools) -> None:
        super().__init__()
        self.model, self.pools = model, pools

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [P] -> [P, D]."""
        return cast("Tensor", self.model(input_ids, self.pools))


class Engine:
    """A model with memory for the requests of one layout.

    One step runs at a time, whatever the number of engines: programs of one graph share the memory
    in which metadata lies.

    Args:
        model: stays as it is; its device and dtype are those of everything here.
        layout: how much memory there is, and for what.
        backend: of `torch.compile`; None: eager, every step at its own number of rows.
        options: of the backend. ``buckets`` are sizes that steps are brought up to here; a step
            above them, and every step without them, has a program of its own size.

    Attributes:
        pools: the memory.
        layout, model, backend: as given.
        sizes: that steps are brought up to, ascending; empty: none is.
        compiled: what a step calls, compiled or not.
        kept: by number of rows, metadata whose tensors the program of that size reads.
    """

    def __init__(
        self,
        model: DeepseekV4,
        layout: Layout,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        weight = model.embedding.weight
        self.layout, self.model = layout, model
        self.pools = Pools(model.config, layout, weight.device, weight.dtype)
        body = Body(model, self.pools)
        self.sizes: tuple[int, ...] = ()
        self.compiled: Any = body
        if backend == "bcg":
            given = torch_bcg.Options.make(options)
            self.sizes = LADDER if given.buckets == "ladder" else given.buckets or ()
            programs = max(given.max_programs, len(self.sizes))
            options = {**(options or {}), "buckets": None, "max_programs": programs}
        if backend is not None:
            made = dict(options or {})
            self.compiled = torch.compile(body, backend=backend, options=made)
        self.backend = backend
        self.kept: dict[int, DSV4Metadata] = {}

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
        tokens = len(input_ids)
        rows = self.rows(tokens)
        md = DSV4Metadata.create(batch, self.layout, rows, out=self.kept.get(rows))
        padded = F.pad(input_ids, (0, rows - tokens))
        known = rows in self.kept or self.backend != "bcg"
        before = 0 if known else _recorded()
        if not known:
            _vary_rows(padded, md)
        with torch_bcg.bind_metadata(md):
            hidden: Tensor = self.compiled(padded)
        if not known and _recorded() > before:
            self._keep(rows, md)
        return hidden[:tokens]

    def close(self) -> None:
        """Frees what was recorded; engines of the same class record again when they are called."""
        self.kept.clear()
        if self.backend == "bcg":
            torch_bcg.reset(self.compiled)

    def rows(self, tokens: int) -> int:
        """P of a step of so many tokens."""
        return next((size for size in self.sizes if size >= tokens), tokens)

    def _keep(self, rows: int, md: DSV4Metadata) -> None:
        """From now on the metadata of a size lies where the program reads it that has just run.

        Other engines have programs of this size as well: the last one used comes first.
        """
        programs = torch_bcg.programs(self.compiled)
        mine = next((p for p in programs if rows in p.sizes.values()), None)
        if mine is not None:
            self.kept[rows] = mine.captured(md)


def _recorded() -> int:
    """Grows with a call that has a program, at its end at the latest."""
    counted = torch_bcg.stats()
    return counted.captures + counted.replays


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
