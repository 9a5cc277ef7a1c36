"""Everything that stays between steps, at addresses that never change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_bcg.dsv4.configuration import Branch, DSV4Config
from torch_bcg.dsv4.layout import Layout
from torch_bcg.errors import BCGError


class LayerPools(nn.Module):
    """Keys and compressor state of one layer. Row 0 of each is reserved: padded rows go there.

    Attributes:
        swa: [slots, head_dim], a key, which is the value as well, for each token.
        entries: [slots / ratio, head_dim], of the compressed branch; none in a ``swa`` layer.
        ring: float32 [state rows, 2 or, of ``c4``, 4 x head_dim], projections that the next entries
            need, see `torch_bcg.dsv4.compressor`; where entries are.
        keys: [slots / ratio, index_head_dim], of the indexer; in a ``c4`` layer alone.
        key_ring: float32 [state rows, 4 x index_head_dim], what ring is to entries.
    """

    swa: Tensor
    entries: Tensor
    ring: Tensor
    keys: Tensor
    key_ring: Tensor

    def __init__(
        self,
        config: DSV4Config,
        layout: Layout,
        branch: Branch,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def add(name: str, rows: int, width: int, of: torch.dtype = dtype) -> None:
            pool = torch.zeros(rows, width, device=device, dtype=of)
            self.register_buffer(name, pool, persistent=False)

        d, key = config.head_dim, config.index_head_dim
        add("swa", layout.slots, d)
        if branch == "c4":
            add("entries", layout.slots // layout.c4_ratio, d)
            add("ring", layout.c4_state_rows, 4 * d, torch.float32)
            add("keys", layout.slots // layout.c4_ratio, key)
            add("key_ring", layout.c4_state_rows, 4 * key, torch.float32)
        elif branch == "c128":
            add("entries", layout.slots // layout.c128_ratio, d)
            add("ring", layout.c128_state_rows, 2 * d, torch.float32)


class Pools(nn.Module):
    """Those of all layers, and the tables that say where requests have their tokens.

    Args:
        config: of the model.
        layout: how much there is of what.
        device: where.
        dtype: of keys and entries; that of the model.

    Attributes:
        layout: as given.
        req_to_token: int32 [request slots, context], the slot of each position of each request.
        full_to_swa: int64 [slots + 1], slots of the window's space; 0 is unmapped, -1 stays -1.

    Raises:
        BCGError: the layout has another window, ratio or ``index_topk`` than the model.
    """

    req_to_token: Tensor
    full_to_swa: Tensor

    def __init__(
        self, config: DSV4Config, layout: Layout, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        _check_layout(config, layout)
        self.layout = layout
        with torch.inference_mode(False):  # what is made in it, nobody else may write
            self.layers = nn.ModuleList(
                LayerPools(config, layout, branch, device, dtype) for branch in config.branches
            )
            table = torch.zeros(layout.requests, layout.context, dtype=torch.int32, device=device)
            full_to_swa = torch.zeros(layout.slots + 1, dtype=torch.int64, device=device)
        full_to_swa[-1] = -1
        self.register_buffer("req_to_token", table, persistent=False)
        self.register_buffer("full_to_swa", full_to_swa, persistent=False)


def _check_layout(config: DSV4Config, layout: Layout) -> None:
    """Where the two differ, indices would be those of another model, or lie outside of a pool."""
    for name in ("window", "c4_ratio", "c128_ratio", "index_topk"):
        expected, found = getattr(config, name), getattr(layout, name)
        if found != expected:
            raise BCGError(
                f"This layout is not one of the model: {name}.",
                where=f"Layout.{name}",
                expected=f"{expected}, as in model.config",
                found=str(found),
                fix="Make it with model.config.layout(context, requests).",
            )
