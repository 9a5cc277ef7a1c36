"""Small models of many families from transformers: equal to eager, recorded, replayed."""

import copy

import pytest
import torch
import torch.nn.functional as F

import torch_bcg
from twin import counted

transformers = pytest.importorskip("transformers")

# Models under warnings of their own; what this package says is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

BASE = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 300,
}  # fmt: skip
SIDES = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "max_position_embeddings": 256,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
T5 = {
    "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
KV = {"num_key_value_heads": 2}
EXPERTS = {**BASE, **KV, "num_local_experts": 4, "num_experts_per_tok": 2}
# name of the model's and of the configuration's class, configuration, kind of input
FAST = {
    "Persimmon": ("ForCausalLM", BASE, "ids"),
    "GraniteMoe": ("ForCausalLM", EXPERTS, "ids"),
    "XGLM": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "d_model": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": 256,
        },
        "ids",
    ),
    "ConvNext": ("Model", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}, "pixels"),
    "ResNet": (
        "Model",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "pixels",
    ),
    "Pegasus": ("ForConditionalGeneration", SIDES, "two sides"),
}
SLOW = {
    "BioGpt": ("ForCausalLM", BASE, "ids"),
    "CodeGen": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "n_ctx": 256,
            "rotary_dim": 8,
        },
        "ids",
    ),
    "RecurrentGemma": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "lru_width": 64,
            "attention_window_size": 16,
        },
        "ids",
    ),
    "Rwkv": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "attention_hidden_size": 64,
            "context_length": 256,
        },
        "ids",
    ),
    "Olmoe": ("ForCausalLM", {**BASE, **KV, "num_experts": 4, "num_experts_per_tok": 2}, "ids"),
    "GptOss": ("ForCausalLM", {**EXPERTS, "head_dim": 16, "sliding_window": 16}, "ids"),
    "Phimoe": ("ForCausalLM", EXPERTS, "ids"),
    "Glm4": ("ForCausalLM", {**BASE, **KV, "head_dim": 16, "pad_token_id": 0}, "ids"),
    "Mamba2": (
        "ForCausalLM",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
        "ids",
    ),
    "Albert": ("ForMaskedLM", {**BASE, "embedding_size": 32}, "ids"),
    "XLMRoberta": ("ForMaskedLM", BASE, "ids"),
    "DebertaV2": (
        "ForMaskedLM",
        {**BASE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        "ids",
    ),
    "MPNet": ("ForMaskedLM", BASE, "ids"),
    "Funnel": (
        "BaseModel",
        {
            "vocab_size": 128,
            "block_sizes": [1, 1],
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 96,
        },
        "ids",
    ),
    "CLIPVision": ("Model", VISION, "pixels"),
    "SiglipVision": ("Model", VISION, "pixels"),
    "Swin": (
        "Model",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "pixels",
    ),
    "Segformer": (
        "Model",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
        },
        "pixels",
    ),
    "Wav2Vec2": (
        "Model",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        "audio",
    ),
    "Whisper": (
        "Model",
        {
            **SIDES,
            "num_mel_bins": 8,
            "max_source_positions": 24,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        "mel",
    ),
    "Bart": ("ForConditionalGeneration", SIDES, "ids"),
    "T5": ("ForConditionalGeneration", T5, "two sides"),
    "MT5": ("ForConditionalGeneration", T5, "two sides"),
}
CASES = [
    *FAST.items(),
    *(pytest.param(n, s, marks=pytest.mark.slow) for n, s in SLOW.items()),
]


def inputs(kind, length, device):
    def ids(n):
        return torch.randint(3, 128, (2, n), device=device)

    if kind == "pixels":
        return {"pixel_values": torch.randn(1 + length % 3, 3, 32, 32, device=device)}
    if kind == "audio":
        return {"input_values": torch.randn(1, 400 + 20 * length, device=device)}
    if kind == "mel":
        return {
            "input_features": torch.randn(2, 8, 48, device=device),
            "decoder_input_ids": ids(length),
        }
    if kind == "two sides":
        return {"input_ids": ids(length), "decoder_input_ids": ids(length // 2)}
    return {"input_ids": ids(length)}


def tensors(x):
    if isinstance(x, torch.Tensor):
        return [x]
    items = x.values() if hasattr(x, "values") else x if isinstance(x, (list, tuple)) else ()
    return [t for item in items for t in tensors(item)]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_a_model_at_three_lengths(device, name, spec):
    kind, config, given = spec
    config = getattr(transformers, f"{name}Config")(**config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(transformers, name + kind)(config).eval().to(device)
    compiled = torch.compile(model, backend="bcg", options={"on_eager_call": "error"})
    with torch.no_grad():
        for length in (12, 17, 33):
            for _ in range(3):
                x = inputs(given, length, device)
                for g, w in zip(tensors(compiled(**x)), tensors(model(**x)), strict=True):
                    torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
        with counted() as counts:
            compiled(**inputs(given, 33, device))
    assert counts.replays >= 1
    assert counts.probes == counts.warming == 0
    assert counts.recorded_kernels >= 0.95 * counts.kernels


@pytest.mark.slow
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("how", ["static", "dynamic", "sample", "beams"])
def test_generate(device, how, marked):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**BASE, **KV)
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    twin = copy.deepcopy(model)
    handle = torch_bcg.eager_on_graph(F.scaled_dot_product_attention) if marked else None
    choice = {
        "static": {"cache_implementation": "static"},
        "dynamic": {},
        "sample": {"cache_implementation": "static", "do_sample": True},
        "beams": {"num_beams": 2},
    }[how]
    model.forward = torch.compile(model.forward, backend="bcg", options={"on_eager_call": "error"})
    try:
        with counted() as counts:
            for seed, length in enumerate((7, 7, 9)):
                ids = torch.randint(3, 128, (2, length), device=device)
                results = []
                for m in (twin, model):
                    torch.manual_seed(seed)
                    results.append(
                        m.generate(
                            ids,
                            **{
                                "do_sample": False,
                                "max_new_tokens": 8,
                                "pad_token_id": 0,
                                **choice,
                            },
                        )
                    )
                assert torch.equal(*results)
    finally:
        if handle is not None:
            handle.remove()
    assert counts.replays >= 5
