"""Small random DeepSeek-V4 models of transformers, prompts for them, and their logits."""

import functools
import random

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCABULARY = 97
SWA, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    # Fewer heads leave scores of exactly zero, of which any may be picked.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.25,
    "layer_types": [SWA, CSA, HCA],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "max_position_embeddings": 4096,
    "hc_sinkhorn_iters": 2,  # most of the nodes of a graph, and of the time it takes to compile
}
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
RATIOS = {"compress_rates": {CSA: 4, HCA: 16}, "sliding_window": 24}
CONFIGS = {
    "published ratios": {},
    "short windows": RATIOS,
    "picks everything": {**RATIOS, "index_topk": 512},
    "no layer of the window alone": {
        "layer_types": None,
        "num_hidden_layers": 5,
        "mlp_layer_types": None,
        "compress_rates": {CSA: 2, HCA: 8},
        "sliding_window": 5,
        "hc_mult": 2,
    },
    "yarn": {**RATIOS, "rope_parameters": YARN, "num_attention_heads": 8, "o_groups": 4},
    "windows of three and ten": {
        "compress_rates": {CSA: 3, HCA: 10},
        "sliding_window": 7,
        "index_n_heads": 20,
        "index_topk": 5,
        "scoring_func": "sigmoid",
        "num_experts_per_tok": 3,
    },
    "as many iterations as published": {
        **RATIOS,
        "layer_types": [CSA, CSA],
        "num_hidden_layers": 2,
        "mlp_layer_types": ["moe", "hash_moe"],
        "hc_sinkhorn_iters": 20,
    },
    "the window alone": {
        "layer_types": [SWA] * 3,
        "num_hidden_layers": 3,
        "mlp_bias": True,
        "compress_rates": {},
    },
}
LENGTHS = (3, 4, 5, 127, 128, 129, 255, 256, 257)
FEW = (5, 129, 3, 21, 40, 9)  # more than run at a time: slots and pages have several owners


@functools.cache
def model(name):
    """One of `CONFIGS`, every weight random: transformers leaves sinks, biases and tables zero."""
    given = {**SIZES, **CONFIGS[name]}
    given["mlp_layer_types"] = (
        given["mlp_layer_types"] and given["mlp_layer_types"][: given["num_hidden_layers"]]
    )
    torch.manual_seed(0)
    hf = DeepseekV4ForCausalLM(DeepseekV4Config(**given)).eval()
    with torch.no_grad():
        for n, p in hf.named_parameters():
            if n.endswith(("sinks", "position_bias", "base", "bias")):
                p.normal_(0, 0.5)
            elif "norm" in n:
                p.uniform_(0.5, 1.5)
            elif p.dim() > 1 and "embed" not in n:
                p.normal_(0, p.shape[-1] ** -0.5)
        for n, b in hf.named_buffers():
            if n.endswith("tid2eid"):
                b.random_(0, hf.config.n_routed_experts)
            elif n.endswith("e_score_correction_bias"):
                b.normal_(0, 0.1)
    return hf


def prompts(lengths):
    """Token ids, the same ones each time."""
    source = random.Random(0)
    return [[source.randrange(VOCABULARY) for _ in range(n)] for n in lengths]


@functools.cache
def logits(name, lengths):
    """Of each prompt by itself, whole: float32 [length, vocabulary]."""
    with torch.no_grad():
        return [model(name)(torch.tensor([p])).logits[0] for p in prompts(lengths)]
