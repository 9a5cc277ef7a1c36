"""A DeepSeek-V4 with random weights: every shape of a real one, and nothing that it has learnt."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_bcg.dsv4.configuration import DSV4Config
from torch_bcg.dsv4.model import ROTARIES, DeepseekV4
from torch_bcg.dsv4.rotary import Rotary


def random_model(
    config: DSV4Config, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> DeepseekV4:
    """A model whose activations stay near 1 through all layers, made on the device.

    Weights of products are normal, of deviation ``fan_in ** -0.5``; embeddings have deviation 1.
    Norms are uniform from 0.5 to 1.5, tables of experts hold distinct ones. As in a converted
    model, norms, hyper-connections, sinks and biases are float32, whatever the dtype.

    Args:
        config: sizes.
        device: of all weights; numbers differ from one kind of device to another.
        dtype: of weights that are not float32.
        seed: the same one gives the same weights.
    """
    device = torch.device(device)
    thetas = config.rope_theta, config.compress_rope_theta
    rotaries = [Rotary.of(theta, config.rope_dim).to(device) for theta in thetas]
    with torch.device("meta"):
        model = DeepseekV4(config, *rotaries)
    draw = _Draw(config, dtype, torch.Generator(device).manual_seed(seed))
    weights = {n: x if n == ROTARIES else draw(n, x) for n, x in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()


class _Draw:
    """Tensors by name and shape, from one generator."""

    def __init__(self, config: DSV4Config, dtype: torch.dtype, source: torch.Generator) -> None:
        self.config, self.dtype, self.source = config, dtype, source
        # By the last part of a name; what is not here is the weight of a product.
        self.special: dict[str, Callable[[Tensor], Tensor]] = {
            "tokens": self.experts,
            "scale": lambda x: torch.ones(x.shape, device=source.device),
            "norm": self.norm,
            "base": lambda x: self.normal(x, 0.5, torch.float32),
            "fn": lambda x: self.normal(x, 0.5 * x.shape[-1] ** -0.5, torch.float32),
            "sinks": lambda x: self.normal(x, 1.0, torch.float32),
            "o_a": lambda x: self.normal(x, x.shape[1] ** -0.5, dtype),
        }

    def __call__(self, name: str, like: Tensor) -> Tensor:
        """One tensor of this shape."""
        *owners, last = name.split(".")
        owner = owners[-1] if owners else ""
        if last in self.special:
            return self.special[last](like)
        if owner.endswith("norm"):
            return self.norm(like)
        if last == "bias":
            own = owner.startswith("shared")  # of a linear, as no other bias is
            return self.normal(like, 0.1, self.dtype if own else torch.float32)
        one = owner == "embedding"  # a row is looked up, not summed over
        return self.normal(like, 1.0 if one else like.shape[-1] ** -0.5, self.dtype)

    def normal(self, like: Tensor, deviation: float, dtype: torch.dtype) -> Tensor:
        """Around 0."""
        made = torch.empty(like.shape, dtype=dtype, device=self.source.device)
        return made.normal_(0, deviation, generator=self.source)

    def norm(self, like: Tensor) -> Tensor:
        """From 0.5 to 1.5."""
        made = torch.empty(like.shape, device=self.source.device)
        return made.uniform_(0.5, 1.5, generator=self.source)

    def experts(self, like: Tensor) -> Tensor:
        """Distinct ones for each token."""
        tokens, device = len(like), self.source.device
        order = torch.rand(tokens, self.config.num_experts, device=device, generator=self.source)
        return order.argsort(dim=1)[:, : self.config.num_experts_per_tok].contiguous()
