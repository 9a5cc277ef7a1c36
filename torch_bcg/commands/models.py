"""Small models of ``transformers``, from configurations alone: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_bcg.commands.misuse import MisuseError

VOCABULARY = 128
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Sketch:
    """How one small model is built.

    Attributes:
        name: what the classes of ``transformers`` start with.
        attention: its attention class, which the demo marks.
        configuration: arguments of its configuration, but for the layers.
        head: what the name of the model class ends with.
        layers: the argument that holds the number of layers.
    """

    name: str
    attention: str
    configuration: Mapping[str, object]
    head: str = "ForCausalLM"
    layers: str = "num_hidden_layers"


MODELS: Mapping[str, Sketch] = {
    # 16 index heads: with few of them scores of the indexer tie at zero, and the top-k among equal
    # scores, so eager itself, may differ from call to call.
    "hf-deepseek-v4": Sketch(
        "DeepseekV4",
        "DeepseekV4Attention",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "head_dim": 32,
            "q_lora_rank": 32,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": 8,
            "partial_rotary_factor": 0.25,
            "max_position_embeddings": 4096,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
        },
    ),
    "gpt2": Sketch(
        "GPT2",
        "GPT2Attention",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_head": 4, "n_positions": 4096},
        head="LMHeadModel",
        layers="n_layer",
    ),
    "llama": Sketch("Llama", "LlamaAttention", _GROUPED),
    "mixtral": Sketch(
        "Mixtral",
        "MixtralAttention",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3": Sketch("Qwen3", "Qwen3Attention", {**_GROUPED, "head_dim": 16}),
}


def build(
    name: str, layers: int, device: str, seed: int
) -> tuple[torch.nn.Module, type[torch.nn.Module]]:
    """Builds a model with random weights.

    Args:
        name: a key of `MODELS`.
        layers: number of its layers.
        device: where it lies, in float32.
        seed: of its weights.

    Returns:
        The model in evaluation mode, and its attention class.

    Raises:
        MisuseError: ``transformers`` is not installed, or is too old for this model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MisuseError(f"--model {name} needs transformers: pip install '.[demo]'.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    transformers = importlib.import_module("transformers")
    sketch = MODELS[name]
    if not hasattr(transformers, f"{sketch.name}Config"):
        raise MisuseError(
            f"transformers {transformers.__version__} has no {sketch.name}: "
            "pip install --upgrade transformers, or choose another --model."
        )
    configuration = getattr(transformers, f"{sketch.name}Config")(
        **sketch.configuration, **{sketch.layers: layers}, use_cache=False
    )
    torch.manual_seed(seed)
    model = getattr(transformers, sketch.name + sketch.head)(configuration).eval().to(device)
    return model, getattr(sys.modules[type(model).__module__], sketch.attention)
