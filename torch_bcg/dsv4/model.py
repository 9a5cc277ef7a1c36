"""DeepSeek-V4 for a flat batch of tokens of many requests; where these lie is in the metadata.

P rows a step, one for each token and some that belong to nobody. A layer is one recorded segment up
to its attention: projections, the store of keys, compressors and the indexer; attention itself is
`deepseek_v4_attention_with_output`, the one marked operation; then what is left, and the experts.

Source: the DeepSeek-V4 report, sections 2.1 to 2.3, as ``modeling_deepseek_v4`` of transformers
has it; its logits are what the tests compare with.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_bcg
from torch_bcg.dsv4.attention import deepseek_v4_attention_with_output
from torch_bcg.dsv4.compressor import compress_, write_state
from torch_bcg.dsv4.configuration import Branch, DSV4Config
from torch_bcg.dsv4.experts import Experts, Router
from torch_bcg.dsv4.fields import CompressorPrefillPlan
from torch_bcg.dsv4.hyper import HyperConnection, HyperHead, expanded, normed
from torch_bcg.dsv4.indexer import select
from torch_bcg.dsv4.metadata import DSV4Metadata
from torch_bcg.dsv4.pools import LayerPools, Pools
from torch_bcg.dsv4.rotary import Rotary, Turns, rotate_

ROTARIES = "_extra_state"
"""Key of a state dict, torch's own, for the frequencies of a model."""


class Norm(nn.Module):
    """RMS norm with a float32 weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Compressor(nn.Module):
    """Tokens of a window -> one entry.

    Args:
        config: of the model.
        branch: ``c4`` (windows overlap) or ``c128``.
        width: of an entry: that of a head, or of an index key.
        rotary: of the entries; its frequencies are shared with the layer's queries.
    """

    def __init__(self, config: DSV4Config, branch: Branch, width: int, rotary: Rotary) -> None:
        super().__init__()
        self.eps, self.rotary = config.rms_norm_eps, rotary
        self.ratio = config.c4_ratio if branch == "c4" else config.c128_ratio
        wide = 2 * width if branch == "c4" else width
        self.kv_score = nn.Linear(config.hidden_size, 2 * wide, bias=False)
        self.bias = nn.Parameter(torch.empty(self.ratio, wide))
        self.norm = nn.Parameter(torch.ones(width))

    def forward(
        self, x: Tensor, plan: CompressorPrefillPlan, entries: Tensor, ring: Tensor, out: Tensor
    ) -> None:
        """Stores the entries whose windows close in this step, then what later ones need.

        Args:
            x: [P, D].
            plan: of the branch.
            entries: [slots, width], written.
            ring: float32 [rows, 2 or 4 x width], read, then written.
            out: int64 [P], where the entry of a row that closes a window goes.
        """
        projected = self.kv_score(x).float()
        compress_(
            entries, projected, ring, plan.plan_c, out, self.bias, self.norm,
            self.rotary.inv_freq, self.ratio, self.rotary.scaling, self.eps,
        )  # fmt: skip
        write_state(ring, projected, plan.plan_w)


class Indexer(nn.Module):
    """Picks entries of the sparse branch for each row, by keys of its own."""

    def __init__(self, config: DSV4Config, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        heads, width = config.index_n_heads, config.index_head_dim
        self.compressor = Compressor(config, "c4", width, rotary)
        self.q = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.weights = nn.Linear(config.hidden_size, heads, bias=False)

    def forward(self, x: Tensor, low: Tensor, turns: Turns, pools: LayerPools) -> None:
        """Writes what attention reads: slots and numbers of the entries picked.

        Args:
            x: [P, D].
            low: [P, q_lora_rank].
            turns: of the rows.
            pools: of the layer; keys and key_ring are written.
        """
        md = torch_bcg.current_metadata(DSV4Metadata)
        core, indexer = md.core_attn_metadata, md.indexer_metadata
        self.compressor(x, md.c4_compress_metadata, pools.keys, pools.key_ring, core.c4_out_loc)
        q = rotate_(self.q(low).unflatten(-1, (-1, self.config.index_head_dim)), *turns)
        weights = self.weights(x).float() * self.config.index_n_heads**-0.5
        slots, entries = select(
            q, weights, pools.keys, indexer.page_table, indexer.compressed_seq_lens,
            core.index_topk, indexer.compressed_page_size, core.c4_sparse_page_indices.shape[1],
        )  # fmt: skip
        core.c4_sparse_page_indices.copy_(slots)
        core.c4_sparse_raw_indices.copy_(entries)


class Attention(nn.Module):
    """Shared keys and values of one head, a window, a compressed branch, and a sink."""

    def __init__(self, config: DSV4Config, branch: Branch, rotary: Rotary) -> None:
        super().__init__()
        self.config, self.branch = config, branch
        heads, d, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.q_a = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_norm = Norm(config.q_lora_rank, eps)
        self.q_b = nn.Linear(config.q_lora_rank, heads * d, bias=False)
        self.kv = nn.Linear(config.hidden_size, d, bias=False)
        self.kv_norm = Norm(d, eps)
        self.sinks = nn.Parameter(torch.empty(heads))
        rank = config.o_groups * config.o_lora_rank
        self.o_a = nn.Parameter(
            torch.empty(config.o_groups, heads * d // config.o_groups, config.o_lora_rank)
        )
        self.o_b = nn.Linear(rank, config.hidden_size, bias=False)
        self.compressor = None if branch == "swa" else Compressor(config, branch, d, rotary)
        self.indexer = Indexer(config, rotary) if branch == "c4" else None

    def forward(self, x: Tensor, turns: Turns, pools: LayerPools) -> Tensor:
        """[P, D] -> [P, D]."""
        md = torch_bcg.current_metadata(DSV4Metadata)
        c, core = self.config, md.core_attn_metadata
        low = self.q_norm(self.q_a(x))
        q = normed(self.q_b(low).unflatten(-1, (-1, c.head_dim)), c.rms_norm_eps)
        q = rotate_(q, *turns)
        pools.swa[core.swa_out_cache_loc] = rotate_(self.kv_norm(self.kv(x)), *turns)
        if self.compressor is not None:
            sparse = self.branch == "c4"
            plan = md.c4_compress_metadata if sparse else md.c128_compress_metadata
            out = core.c4_out_loc if sparse else core.c128_out_loc
            self.compressor(x, plan, pools.entries, pools.ring, out)
        if self.indexer is not None:
            self.indexer(x, low, turns, pools)
        mixed = torch.empty_like(q)
        extra = None if self.branch == "swa" else pools.entries
        deepseek_v4_attention_with_output(
            q, pools.swa, extra, self.sinks, mixed, self.branch, c.head_dim**-0.5
        )
        mixed = rotate_(mixed, turns.cos, -turns.sin)
        groups = mixed.flatten(1).unflatten(1, (c.o_groups, -1)).transpose(0, 1)
        low = torch.bmm(groups, self.o_a).transpose(0, 1).flatten(1)
        return cast("Tensor", self.o_b(low))


class Layer(nn.Module):
    """Attention, then experts, each between a norm and hyper-connections."""

    def __init__(self, config: DSV4Config, index: int, rotary: Rotary) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attention_mix, self.experts_mix = HyperConnection(config), HyperConnection(config)
        self.attention_norm, self.experts_norm = Norm(d, eps), Norm(d, eps)
        self.attention = Attention(config, config.branches[index], rotary)
        self.router = Router(config, config.hash_layers[index])
        self.experts = Experts(config)

    def forward(
        self, streams: Tensor, input_ids: Tensor, turns: Turns, pools: LayerPools
    ) -> Tensor:
        """[P, n, D] -> [P, n, D]."""
        post, mix, x = self.attention_mix(streams)
        streams = expanded(self.attention(self.attention_norm(x), turns, pools), streams, post, mix)
        post, mix, x = self.experts_mix(streams)
        x = self.experts_norm(x)
        return expanded(self.experts(x, *self.router(x, input_ids)), streams, post, mix)


class DeepseekV4(nn.Module):
    """Tokens of one step -> what logits are made from; the step is the `DSV4Metadata` bound.

    Its weights are undefined: `convert_from_transformers` and `random_model` give some.

    Args:
        config: sizes.
        main: of layers without a compressed branch.
        compress: of the others.
    """

    def __init__(self, config: DSV4Config, main: Rotary, compress: Rotary) -> None:
        super().__init__()
        self.config, self.main, self.compress = config, main, compress
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, i, self.main if branch == "swa" else self.compress)
            for i, branch in enumerate(config.branches)
        )
        self.hyper_head = HyperHead(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, pools: Pools) -> Tensor:
        """int64 [P] -> [P, D]; rows that belong to nobody hold anything."""
        positions = torch_bcg.current_metadata(DSV4Metadata).core_attn_metadata.positions_casual
        x = self.embedding(input_ids)
        main, compress = self.main(positions, x.dtype), self.compress(positions, x.dtype)
        streams = x.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for layer, branch, mine in zip(
            self.layers, self.config.branches, pools.layers, strict=True
        ):
            turns = main if branch == "swa" else compress
            streams = layer(streams, input_ids, turns, cast("LayerPools", mine))
        return cast("Tensor", self.norm(self.hyper_head(streams)))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, D] -> float32 [n, vocabulary]; the rows wanted, and no others."""
        with torch.autocast(hidden.device.type, enabled=False):
            return cast("Tensor", self.head(hidden)).float()

    def get_extra_state(self) -> Tensor:
        """Of `Rotary` main and compress: float64 [2, 1 + frequencies], the scaling before all.

        One that has fewer frequencies than the other has zeros behind.
        """
        rotaries = (self.main, self.compress)
        rows = [F.pad(r.inv_freq.double(), (1, 0), value=r.scaling) for r in rotaries]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def set_extra_state(self, state: Tensor) -> None:
        """Frequencies belong to the weights: they come with those of `load_state_dict`."""
        for rotary, row in zip((self.main, self.compress), state, strict=True):
            rotary.inv_freq.copy_(row[1 : 1 + len(rotary.inv_freq)])
            rotary.scaling = float(row[0])
