"""What a DeepSeek-V4 model is: plain numbers, the published shapes, and the layout they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch_bcg.dsv4.layout import Layout, check_windows, page_unit

Branch = Literal["swa", "c4", "c128"]
"""What a layer attends to beside its window: nothing, picked entries, or all entries."""

Score = Literal["sqrtsoftplus", "sigmoid"]
"""How the logits of a router become scores of experts."""


@dataclass(frozen=True)
class DSV4Config:
    """Sizes of a model. Attributes without a remark are those of the published configuration.

    Attributes:
        branches: of each layer, `Branch`.
        hash_layers: whether each layer's experts are looked up by token id.
        rope_dim: trailing channels of a head that rotate.
        rope_theta: of layers without compression; the others use ``compress_rope_theta``.
        c4_ratio: tokens an entry of the sparse branch.
        c128_ratio: tokens an entry of the heavy branch.
        window: positions that every layer sees, its own included.
        hc_mult: parallel residual streams.
        intermediate_size: width of an expert, and of the shared one.
        mlp_bias: whether the shared expert has biases.

    Raises:
        ValueError: ``branches`` and ``hash_layers`` differ in length, or there cannot be so many
            experts, or tokens of a window or of an entry.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    branches: tuple[Branch, ...]
    hash_layers: tuple[bool, ...]
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_experts_per_tok: int
    window: int = 128
    c4_ratio: int = 4
    c128_ratio: int = 128
    scoring: Score = "sqrtsoftplus"
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if len(self.branches) != len(self.hash_layers):
            raise ValueError(
                f"DSV4Config: {len(self.branches)} branches, {len(self.hash_layers)} hash_layers; "
                "expected one of each per layer."
            )
        if self.num_experts >= 1 << 15:
            raise ValueError(
                f"DSV4Config: num_experts is {self.num_experts}; expected less than 32768."
            )
        check_windows("DSV4Config", self.window, self.c4_ratio, self.c128_ratio)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.branches)

    @property
    def page_size(self) -> int:
        """Tokens a page: the published 256, or as many more as the ratios ask for."""
        unit = page_unit(self.c4_ratio, self.c128_ratio)
        return -(-256 // unit) * unit

    def layout(self, context: int, requests: int, pages: int | None = None) -> Layout:
        """The layout of an engine.

        Args:
            context: most positions of a request, from 1 up; rounded up to whole pages.
            requests: most requests at a time, from 1 up; the reserved slot comes to them.
            pages: that requests can fill together; the reserved one comes to them. None: as many as
                all of these requests have at their longest.

        Raises:
            ValueError: ``context`` or ``requests`` is less than 1.
        """
        if context < 1 or requests < 1:
            raise ValueError(
                f"DSV4Config.layout: context is {context}, requests {requests}; expected 1 or more."
            )
        width = -(-context // self.page_size)
        return Layout(
            context=width * self.page_size,
            requests=requests + 1,
            pages=1 + (width * requests if pages is None else pages),
            page_size=self.page_size,
            window=self.window,
            c4_ratio=self.c4_ratio,
            c128_ratio=self.c128_ratio,
            index_topk=self.index_topk,
        )

    @classmethod
    def flash(cls, layers: int = 43, experts: int = 256, **changed: Any) -> DSV4Config:
        """DeepSeek-V4-Flash; fewer layers or experts keep its shape."""
        branches = _alternating(layers, ("swa", "swa"), ("c4", "c128"))
        config = cls(
            vocab_size=129_280,
            hidden_size=4096,
            intermediate_size=2048,
            branches=branches,
            hash_layers=_first(3, layers),
            num_attention_heads=64,
            head_dim=512,
            rope_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            index_n_heads=64,
            index_head_dim=128,
            index_topk=512,
            num_experts=experts,
            num_experts_per_tok=6,
        )
        return replace(config, **changed)

    @classmethod
    def pro(cls, layers: int = 61, experts: int = 384, **changed: Any) -> DSV4Config:
        """DeepSeek-V4-Pro; fewer layers or experts keep its shape."""
        branches = _alternating(layers, ("c128", "c128"), ("c128", "c4"))
        config = replace(
            cls.flash(layers, experts),
            hidden_size=7168,
            intermediate_size=3072,
            branches=branches,
            num_attention_heads=128,
            q_lora_rank=1536,
            o_groups=16,
            index_topk=1024,
        )
        return replace(config, **changed)

    @classmethod
    def tiny(cls, layers: int = 4, **changed: Any) -> DSV4Config:
        """Every kind of layer, at sizes for a laptop."""
        config = cls(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=32,
            branches=_alternating(layers, ("swa",), ("c4", "c128")),
            hash_layers=_first(1, layers),
            num_attention_heads=4,
            head_dim=32,
            rope_dim=8,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=8,
            num_experts=4,
            num_experts_per_tok=2,
            window=16,
            c128_ratio=16,
            hc_sinkhorn_iters=3,
        )
        return replace(config, **changed)


def _alternating(
    layers: int, first: tuple[Branch, ...], then: tuple[Branch, ...]
) -> tuple[Branch, ...]:
    turns = (then * layers)[: max(layers - len(first), 0)]
    return (*first[:layers], *turns)


def _first(n: int, layers: int) -> tuple[bool, ...]:
    return tuple(i < n for i in range(layers))
