"""A DeepSeek-V4 of transformers -> the model here, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from torch_bcg.dsv4.configuration import Branch, DSV4Config, Score
from torch_bcg.dsv4.convertible import (
    Reading,
    check_all_read,
    check_dtypes,
    check_forwards,
    check_numbers,
    unfit,
)
from torch_bcg.dsv4.model import ROTARIES, DeepseekV4
from torch_bcg.dsv4.rotary import Rotary
from torch_bcg.errors import BCGError

_BRANCHES: dict[str, Branch] = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "c4",
    "heavily_compressed_attention": "c128",
}

# Others have frequencies that follow the length of a call, so of each prompt by itself.
_FIXED_ROTARIES = ("default", "linear", "yarn", "llama3")


def convert_from_transformers(hf_model: Any) -> DeepseekV4:
    """The model here that gives the logits of a ``transformers.DeepseekV4ForCausalLM``.

    Weights of the same layout are not copied: both models share them, on the device and in the
    dtype that they have; the others do not follow, so convert again after changing any. Norms,
    hyper-connections, sinks and biases are float32. Rotary frequencies are taken as loaded, so
    scaled ones (YaRN) come along.

    Raises:
        BCGError: no such model; or its configuration asks for an activation, a scoring or rotary
            frequencies that are not there; or it has weights, hooks or forwards beside those of
            transformers (biases, adapters), numbers that are no longer those of its configuration,
            or weights of several dtypes.
        ValueError: a size is none that there can be, see `DSV4Config`.
    """
    kind = getattr(getattr(hf_model, "config", None), "model_type", type(hf_model).__name__)
    if kind != "deepseek_v4" or not hasattr(hf_model, "lm_head"):
        raise BCGError(
            f"A {type(hf_model).__name__} cannot be converted.",
            where="convert_from_transformers",
            expected="a transformers.DeepseekV4ForCausalLM",
            found=f"{type(hf_model).__name__}, of kind {kind}",
            fix="Give the whole model, with its head.",
        )
    check_forwards(hf_model)
    inner = hf_model.model
    config = _config_of(hf_model.config, inner.layers)
    rotaries = _rotary(inner, "main"), _rotary(inner, "compress")
    check_dtypes(hf_model)
    check_numbers(hf_model, config)
    read: set[int] = set()
    weights = dict(_weights(Reading(hf_model, read), config))
    check_all_read(hf_model, read)
    with torch.device("meta"):
        model = DeepseekV4(config, *rotaries)
    _check_shapes(model.state_dict(), weights)
    model.load_state_dict({**weights, ROTARIES: model.get_extra_state()}, assign=True)
    return model.requires_grad_(False).eval()


def _config_of(hf: Any, layers: Any) -> DSV4Config:
    """Sizes of a ``transformers.DeepseekV4Config``, kinds of the layers that were made by it."""
    shared = [layer.mlp.shared_experts for layer in layers]
    biases = [x.bias for s in shared for x in (s.gate_proj, s.up_proj, s.down_proj)]
    _check_is("hidden_act", hf.hidden_act, ("silu",))
    _check_is("scoring_func", hf.scoring_func, get_args(Score))
    return DSV4Config(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.moe_intermediate_size,
        branches=tuple(_BRANCHES[layer.self_attn.layer_type] for layer in layers),
        hash_layers=tuple(layer.mlp.is_hash for layer in layers),
        num_attention_heads=hf.num_attention_heads,
        head_dim=hf.head_dim,
        rope_dim=hf.qk_rope_head_dim,
        q_lora_rank=hf.q_lora_rank,
        o_groups=hf.o_groups,
        o_lora_rank=hf.o_lora_rank,
        index_n_heads=hf.index_n_heads,
        index_head_dim=hf.index_head_dim,
        index_topk=hf.index_topk,
        num_experts=hf.n_routed_experts,
        num_experts_per_tok=hf.num_experts_per_tok,
        window=hf.sliding_window,
        c4_ratio=hf.compress_rates.get("compressed_sparse_attention", 4),
        c128_ratio=hf.compress_rates.get("heavily_compressed_attention", 128),
        scoring=hf.scoring_func,
        routed_scaling_factor=hf.routed_scaling_factor,
        swiglu_limit=hf.swiglu_limit,
        hc_mult=hf.hc_mult,
        hc_sinkhorn_iters=hf.hc_sinkhorn_iters,
        hc_eps=hf.hc_eps,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_theta,
        compress_rope_theta=hf.compress_rope_theta,
        mlp_bias=bool(biases) and all(bias is not None for bias in biases),
    )


def _check_is(name: str, found: str, known: Sequence[str]) -> None:
    if found not in known:
        fix = "Convert a model with one of these; the published ones have them."
        raise unfit(name, " or ".join(known), found, fix)


def _check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, x in found.items():
        if x.shape != expected[name].shape:
            raise unfit(
                f"the shape of what becomes {name}",
                f"{list(expected[name].shape)}, by the configuration",
                str(list(x.shape)),
                "Change sizes in the configuration before the model is made, and not afterwards.",
            )


def _rotary(inner: Any, label: str) -> Rotary:
    _check_is("rope_type", inner.rotary_emb.rope_type[label], _FIXED_ROTARIES)
    frequencies: Tensor = getattr(inner.rotary_emb, f"{label}_inv_freq")
    scaling = getattr(inner.rotary_emb, f"{label}_attention_scaling")
    return Rotary(frequencies.detach().float().clone(), scaling)


def _weights(hf_model: Any, config: DSV4Config) -> Iterator[tuple[str, Tensor]]:
    """Names here, and tensors; which HF weights go where."""
    inner = hf_model.model
    yield "embedding.weight", inner.embed_tokens.weight.data
    yield "head.weight", hf_model.lm_head.weight.data
    yield "norm.weight", inner.norm.weight.data.float()
    for name in ("fn", "base", "scale"):
        yield f"hyper_head.{name}", getattr(inner.hc_head, f"hc_{name}").data.float()
    for i, layer in enumerate(inner.layers):
        for name, tensor in _of_layer(layer, config, config.branches[i], config.hash_layers[i]):
            yield f"layers.{i}.{name}", tensor


def _of_layer(
    layer: Any, config: DSV4Config, branch: Branch, by_token: bool
) -> Iterator[tuple[str, Tensor]]:
    yield "attention_norm.weight", layer.input_layernorm.weight.data.float()
    yield "experts_norm.weight", layer.post_attention_layernorm.weight.data.float()
    for mine, theirs in (("attention_mix", layer.attn_hc), ("experts_mix", layer.ffn_hc)):
        for name in ("fn", "base", "scale"):
            yield f"{mine}.{name}", getattr(theirs, name).data.float()
    for name, tensor in _of_attention(layer.self_attn, config, branch):
        yield f"attention.{name}", tensor
    mlp = layer.mlp
    yield "router.weight", mlp.gate.weight.data
    if by_token:
        yield "router.tokens", mlp.gate.tid2eid[: config.vocab_size].long()
    else:
        yield "router.bias", mlp.gate.e_score_correction_bias.float()
    yield "experts.gate_up", mlp.experts.gate_up_proj.data
    yield "experts.down", mlp.experts.down_proj.data
    shared = mlp.shared_experts
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        halves = [getattr(shared.gate_proj, kind).data, getattr(shared.up_proj, kind).data]
        yield f"experts.shared_gate_up.{kind}", torch.cat(halves)
        yield f"experts.shared_down.{kind}", getattr(shared.down_proj, kind).data


def _of_attention(
    attention: Any, config: DSV4Config, branch: Branch
) -> Iterator[tuple[str, Tensor]]:
    for mine, theirs in (
        ("q_a", attention.q_a_proj),
        ("q_b", attention.q_b_proj),
        ("kv", attention.kv_proj),
        ("o_b", attention.o_b_proj),
    ):
        yield f"{mine}.weight", theirs.weight.data
    yield "q_norm.weight", attention.q_a_norm.weight.data.float()
    yield "kv_norm.weight", attention.kv_norm.weight.data.float()
    yield "sinks", attention.sinks.data.float()
    grouped = attention.o_a_proj.weight.data.unflatten(0, (config.o_groups, -1))
    yield "o_a", grouped.transpose(1, 2).contiguous()
    if branch == "swa":
        return
    yield from _of_compressor(attention.compressor, "compressor")
    if branch == "c4":
        indexer = attention.compressor.indexer
        yield from _of_compressor(indexer, "indexer.compressor")
        yield "indexer.q.weight", indexer.q_b_proj.weight.data
        yield "indexer.weights.weight", indexer.scorer.weights_proj.weight.data


def _of_compressor(compressor: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    halves = [compressor.kv_proj.weight.data, compressor.gate_proj.weight.data]
    yield f"{prefix}.kv_score.weight", torch.cat(halves)
    yield f"{prefix}.bias", compressor.position_bias.data.float()
    yield f"{prefix}.norm", compressor.kv_norm.weight.data.float()
