"""What a model of transformers has to be like, so that its weights and sizes say what it computes.

Its configuration is that of its parts when these are made, and may be changed afterwards. Its parts
may be replaced, or watched by hooks that change what they give. What is not as transformers makes
it is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_bcg.dsv4.configuration import DSV4Config
from torch_bcg.dsv4.experts import scored
from torch_bcg.errors import BCGError

# Parts of names of what transformers keeps in float32 whatever the dtype.
_FLOAT32 = ("norm", "_hc.", "hc_head.", "sinks", "position_bias", "e_score_correction_bias")

# What transformers makes of torch's own; functions (`torch.nn.SiLU`) are compared by what they do.
_OF_TORCH = (nn.Linear, nn.Embedding, nn.ModuleList)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def unfit(name: str, expected: str, found: str, fix: str) -> BCGError:
    """The error for a model that cannot be converted because of one of its parts."""
    return BCGError(
        f"This DeepSeek-V4 cannot be converted: {name}.",
        where="convert_from_transformers",
        expected=expected,
        found=found,
        fix=fix,
    )


def check_forwards(hf_model: nn.Module) -> None:
    """Refuses modules that compute something else than those of transformers, and hooks.

    Raises:
        BCGError: the first of them.
    """
    fix = "Merge adapters into the weights (merge_and_unload of PEFT), and remove hooks."
    for path, module in _modules(hf_model):
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch._dynamo.OptimizedModule):
            continue  # computes what the module in it does, which is looked at as well
        of = type(module).__module__
        theirs = of.startswith(("transformers.", torch.nn.modules.activation.__name__))
        own = [n for n, x in vars(module).items() if callable(x) and callable(_of_class(module, n))]
        if own or not (theirs or type(module) in _OF_TORCH):
            name = own[0] if own else "forward"
            raise unfit(path, f"the {name} of transformers", f"a {kind} with another one", fix)
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            # Those of transformers only watch.
            if not getattr(hook, "__module__", "").startswith("transformers."):
                raise unfit(path, "no hook around a forward", f"{hook!r} on a {kind}", fix)


def check_dtypes(hf_model: nn.Module) -> None:
    """Refuses weights that cannot be multiplied with each other.

    Raises:
        BCGError: the first of them.
    """
    every = hf_model.state_dict(keep_vars=True).items()
    held = {n: t for n, t in every if isinstance(t, Tensor) and not n.endswith("tid2eid")}
    first, like = next(iter(held.items()))
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
    for name, t in held.items():
        exact = t.dtype is torch.float32 and any(part in name for part in _FLOAT32)
        one = like.dtype in _DTYPES and t.dtype is like.dtype
        if not (exact or one) or t.device != like.device:
            raise unfit(
                name,
                f"{like.dtype} on {like.device}, as {first}; one of {known}",
                f"{t.dtype} on {t.device}",
                "Bring it to one dtype and device, as hf_model.to(torch.bfloat16) does; quantized "
                "weights cannot be run here.",
            )


def check_numbers(hf_model: nn.Module, config: DSV4Config) -> None:
    """Refuses a model whose modules were made with other numbers than its configuration has now.

    Raises:
        BCGError: the first that differs.
    """
    fix = "Change the configuration before the model is made from it, and not afterwards."
    numbers, functions = _numbers(config), _functions(config)
    rotary = hf_model.get_submodule("model.rotary_emb")
    points = torch.linspace(-9, 9, 37, dtype=torch.float32, device="cpu")
    for path, module in _modules(hf_model):
        known = {n: x for c in type(module).__mro__ for n, x in numbers.get(c.__name__, {}).items()}
        for name, expected in known.items():
            if (found := getattr(module, name, expected)) != expected:
                raise unfit(f"{path}.{name}", f"{expected}, of the configuration", str(found), fix)
        if hasattr(module, "layer_type"):
            turns = "main" if module.layer_type == "sliding_attention" else "compress"
            if (found := module.rope_layer_type) != turns:
                raise unfit(f"{path}.rope_layer_type", turns, str(found), fix)
        for name, function in functions.items():
            theirs = getattr(module, name, None)
            if theirs is not None and not torch.allclose(theirs(points), function(points)):
                raise unfit(f"{path}.{name}", "that of the configuration", repr(theirs), fix)
        table = getattr(module, "tid2eid", None)
        if table is not None and len(table) < config.vocab_size:
            raise unfit(
                f"{path}.tid2eid",
                f"experts for each of {config.vocab_size} token ids, which vocab_size says",
                f"{len(table)} rows",
                "Give the table rows for tokens that were added to the vocabulary.",
            )
        if hasattr(module, "compress_inv_freq") and not _alike(module, rotary):
            raise unfit(path, "frequencies of model.rotary_emb", "others", fix)


def check_all_read(hf_model: nn.Module, read: Container[int]) -> None:
    """Refuses weights that have no place here.

    Args:
        hf_model: a model of transformers.
        read: ids of the tensors that were taken over.

    Raises:
        BCGError: the first of them.
    """
    left = [name for name, t in hf_model.state_dict(keep_vars=True).items() if id(t) not in read]
    if left:
        more = f", and {len(left) - 1} more" if left[1:] else ""
        raise unfit(
            left[0],
            "no weights but those that transformers makes from the configuration",
            f"{left[0]}{more}",
            "Merge what was added into the others, as merge_and_unload of PEFT and "
            "remove_parametrizations of torch do; a bias has no place here.",
        )


class Reading:
    """A module that notes which tensors are read from it.

    Args:
        module: whose attributes this has.
        read: ids of tensors, added to.
    """

    def __init__(self, module: nn.Module, read: set[int]) -> None:
        self._module, self._read = module, read

    def __getattr__(self, name: str) -> Any:
        """That of the module, which notes as well if it is one."""
        found = getattr(self._module, name)
        if isinstance(found, Tensor):
            self._read.add(id(found))
        return Reading(found, self._read) if isinstance(found, nn.Module) else found

    def __iter__(self) -> Iterator[Reading]:
        """Of each module of a list."""
        return (Reading(module, self._read) for module in self._module.children())


def _modules(hf_model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in hf_model.named_modules():
        yield path or type(hf_model).__name__, module


def _of_class(module: nn.Module, name: str) -> object:
    return getattr(type(module), name, None)


def _numbers(c: DSV4Config) -> Mapping[str, Mapping[str, object]]:
    """By class of transformers, numbers that its objects keep."""
    router = {"top_k": c.num_experts_per_tok, "routed_scaling_factor": c.routed_scaling_factor}
    turned = {"rope_layer_type": "compress"}
    return {
        "Embedding": {"max_norm": None},
        "DeepseekV4RMSNorm": {"variance_epsilon": c.rms_norm_eps},
        "DeepseekV4UnweightedRMSNorm": {"eps": c.rms_norm_eps},
        "DeepseekV4Attention": {
            "num_heads": c.num_attention_heads,
            "head_dim": c.head_dim,
            "scaling": c.head_dim**-0.5,
        },
        "DeepseekV4GroupedLinear": {"n_groups": c.o_groups},
        "DeepseekV4CSACompressor": {**turned, "compress_rate": c.c4_ratio, "head_dim": c.head_dim},
        "DeepseekV4HCACompressor": {
            **turned,
            "compress_rate": c.c128_ratio,
            "head_dim": c.head_dim,
        },
        "DeepseekV4IndexerScorer": {
            "softmax_scale": c.index_head_dim**-0.5,
            "weights_scaling": c.index_n_heads**-0.5,
        },
        "DeepseekV4Indexer": {
            **turned,
            "compress_rate": c.c4_ratio,
            "num_heads": c.index_n_heads,
            "head_dim": c.index_head_dim,
            "index_topk": c.index_topk,
        },
        "DeepseekV4TopKRouter": router,
        "DeepseekV4HashRouter": router,
        "DeepseekV4Experts": {"num_experts": c.num_experts, "limit": c.swiglu_limit},
        "DeepseekV4MLP": {"limit": c.swiglu_limit},
        "DeepseekV4HyperConnection": {
            "hc_mult": c.hc_mult,
            "hc_sinkhorn_iters": c.hc_sinkhorn_iters,
            "hc_eps": c.hc_eps,
        },
        "DeepseekV4HyperHead": {"hc_mult": c.hc_mult, "eps": c.hc_eps},
    }


def _functions(c: DSV4Config) -> Mapping[str, Callable[[Tensor], Tensor]]:
    """Those that modules keep."""
    return {"act_fn": F.silu, "score_fn": lambda x: scored(x, c.scoring)}


def _alike(mine: Any, model: Any) -> bool:
    """Whether a compressor turns as the attention around it does."""
    same = mine.compress_attention_scaling == model.compress_attention_scaling
    same = same and mine.rope_type["compress"] == model.rope_type["compress"]
    return bool(same and torch.equal(mine.compress_inv_freq, model.compress_inv_freq))
