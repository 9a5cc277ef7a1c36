"""Models of transformers that were changed: what would be lost in silence is refused by name."""

import copy

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4 import hf_models
from torch_bcg.dsv4 import convert_from_transformers, random_model, run_requests
from torch_bcg.errors import BCGError

LAYER = "model.layers.1"
INDEXER = f"{LAYER}.self_attn.compressor.indexer"
PROMPTS = hf_models.prompts((5, 40))


@pytest.fixture
def hf():
    return copy.deepcopy(hf_models.model("short windows"))


class Adapted(torch.nn.Module):
    """As adapters are: the layer, its weight as their own, and a product beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(2, base.in_features))
        self.b = torch.nn.Parameter(torch.randn(base.out_features, 2))

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Wrapped(torch.nn.Module):
    """As PEFT wraps a whole model: what it has not is looked up in the model."""

    def __init__(self, base):
        super().__init__()
        self.base_model = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args):
        return self.base_model(*args)


def adapted(hf):
    attention = hf.get_submodule(f"{LAYER}.self_attn")
    attention.q_a_proj = Adapted(attention.q_a_proj)


def adapted_by_a_parametrization(hf):
    torch.nn.utils.parametrizations.weight_norm(hf.get_submodule(f"{LAYER}.self_attn.q_a_proj"))


def bias(hf):
    hf.get_submodule(f"{LAYER}.self_attn.kv_proj").bias = torch.nn.Parameter(torch.ones(32))


def bias_of_half_the_experts(hf):
    hf.get_submodule(f"{LAYER}.mlp.shared_experts.up_proj").bias = torch.nn.Parameter(
        torch.ones(32)
    )


def bias_of_the_head(hf):
    hf.lm_head = torch.nn.Linear(64, hf_models.VOCABULARY)


def a_saved_buffer(hf):
    hf.get_submodule(LAYER).register_buffer("shift", torch.ones(3))


def a_hook(hf):
    hf.get_submodule(LAYER).register_forward_hook(lambda module, args, out: 1.5 * out)


def a_hook_before(hf):
    hf.get_submodule(f"{LAYER}.mlp").register_forward_pre_hook(lambda module, args: None)


def another_forward(hf):
    head = hf.lm_head
    head.forward = lambda x: torch.nn.functional.linear(x, 2 * head.weight)


def another_norm(hf):
    hf.model.norm = torch.nn.RMSNorm(64)


def no_norm(hf):
    hf.get_submodule(LAYER).input_layernorm = torch.nn.Identity()


def another_linear(hf):
    class Doubled(torch.nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    hf.lm_head.__class__ = Doubled


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (adapted, f"{LAYER}.self_attn.q_a_proj"),
        (adapted_by_a_parametrization, f"{LAYER}.self_attn.q_a_proj"),
        (bias, f"{LAYER}.self_attn.kv_proj.bias"),
        (bias_of_half_the_experts, f"{LAYER}.mlp.shared_experts.up_proj.bias"),
        (bias_of_the_head, "lm_head.bias"),
        (a_saved_buffer, f"{LAYER}.shift"),
        (a_hook, LAYER),
        (a_hook_before, f"{LAYER}.mlp"),
        (another_forward, "lm_head"),
        (another_norm, "model.norm"),
        (no_norm, f"{LAYER}.input_layernorm"),
        (another_linear, "lm_head"),
    ],
)
def test_what_has_no_place_here(hf, change, name):
    change(hf)
    with pytest.raises(BCGError, match="cannot be converted: " + name.replace(".", r"\.")):
        convert_from_transformers(hf)


def test_a_wrapped_model(hf):
    with pytest.raises(BCGError, match="cannot be converted: Wrapped") as e:
        convert_from_transformers(Wrapped(hf))
    assert "merge_and_unload" in str(e.value)


def set_in(path, **numbers):
    def change(hf):
        for name, x in numbers.items():
            setattr(hf.get_submodule(path) if path else hf.config, name, x)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_in("", num_experts_per_tok=1), r"layers\.0\.mlp\.gate\.top_k"),
        (set_in("", routed_scaling_factor=9.0), r"layers\.0\.mlp\.gate\.routed_scaling_factor"),
        (set_in("", rms_norm_eps=0.1), r"layers\.0\.self_attn\.q_a_norm\.variance_epsilon"),
        (set_in("", swiglu_limit=3.0), r"layers\.0\.mlp\.experts\.limit"),
        (set_in("", index_topk=3), r"layers\.1\.self_attn\.compressor\.indexer\.index_topk"),
        (set_in("", hc_sinkhorn_iters=5), r"layers\.0\.attn_hc\.hc_sinkhorn_iters"),
        (set_in("", scoring_func="sigmoid"), r"layers\.0\.mlp\.gate\.score_fn"),
        (
            set_in("", compress_rates={hf_models.CSA: 4, hf_models.HCA: 8}),
            r"layers\.2\.self_attn\.compressor\.compress_rate",
        ),
        (
            set_in(f"{LAYER}.mlp.experts", act_fn=torch.nn.GELU()),
            r"layers\.1\.mlp\.experts\.act_fn",
        ),
        (set_in("", vocab_size=90), r"becomes embedding\.weight"),
        (set_in("", hidden_size=32), r"becomes embedding\.weight"),
        (set_in(f"{LAYER}.self_attn", scaling=1.0), r"layers\.1\.self_attn\.scaling"),
        (set_in(f"{LAYER}.self_attn", rope_layer_type="main"), r"self_attn\.rope_layer_type"),
        (set_in(f"{INDEXER}", rope_layer_type="main"), r"indexer\.rope_layer_type"),
        (set_in(f"{INDEXER}.scorer", softmax_scale=-1.0), r"scorer\.softmax_scale"),
        (set_in(f"{INDEXER}.scorer", weights_scaling=2.0), r"scorer\.weights_scaling"),
        (set_in("model.embed_tokens", max_norm=0.1), r"embed_tokens\.max_norm"),
        (set_in(f"{LAYER}.mlp.experts", _apply_gate=torch.relu), r"layers\.1\.mlp\.experts"),
        (
            set_in(f"{LAYER}.self_attn.compressor.rotary_emb", compress_inv_freq=torch.ones(4)),
            r"layers\.1\.self_attn\.compressor\.rotary_emb",
        ),
    ],
)
def test_numbers_that_are_not_those_of_the_configuration(hf, change, said):
    change(hf)
    with pytest.raises(BCGError, match=said):
        convert_from_transformers(hf)


def test_kinds_of_layers_are_those_that_were_made(hf):
    """Modules say what they are: changing the configuration changes none."""
    hf.config.layer_types = [hf_models.SWA] * 3
    hf.config.mlp_layer_types = ["moe"] * 3
    config = convert_from_transformers(hf).config
    assert config.branches == ("swa", "c4", "c128")
    assert config.hash_layers == (True, False, False)


def one_of(dtype, path):
    def change(hf):
        linear = hf.get_submodule(path)
        linear.weight = torch.nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_of(torch.float16, f"{LAYER}.self_attn.compressor.kv_proj"), r"compressor\.kv_proj"),
        (one_of(torch.float64, "lm_head"), r"lm_head\.weight"),
        (one_of(torch.float8_e4m3fn, f"{LAYER}.self_attn.kv_proj"), r"self_attn\.kv_proj\.weight"),
        (one_of(torch.uint8, f"{LAYER}.self_attn.kv_proj"), r"self_attn\.kv_proj\.weight"),
        (lambda hf: hf.to(torch.float8_e5m2), r"embed_tokens\.weight"),
        (lambda hf: hf.lm_head.to("meta"), r"lm_head\.weight"),
    ],
)
def test_weights_of_several_dtypes(hf, change, said):
    change(hf)
    with pytest.raises(BCGError, match=said) as e:
        convert_from_transformers(hf)
    assert "hf_model.to(torch.bfloat16)" in str(e.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kept", [False, True])
def test_what_transformers_keeps_in_float32_may_be_so(hf, dtype, kept):
    hf.to(dtype)
    if kept:
        hf.model.norm.float(), hf.model.hc_head.float(), hf.model.layers[0].attn_hc.float()
    model = convert_from_transformers(hf)
    assert model.embedding.weight.dtype is model.head.weight.dtype is dtype
    assert model.norm.weight.dtype is model.layers[0].attention_mix.fn.dtype is torch.float32


def test_a_table_of_experts_without_rows_for_new_tokens(hf):
    gate = hf.model.layers[0].mlp.gate
    hf.resize_token_embeddings(hf_models.VOCABULARY + 3, mean_resizing=False)
    with pytest.raises(BCGError, match=r"layers\.0\.mlp\.gate\.tid2eid") as e:
        convert_from_transformers(hf)
    assert (e.value.found, "100 token ids" in e.value.expected) == ("97 rows", True)
    gate.tid2eid = torch.cat([gate.tid2eid, gate.tid2eid[:13]])  # more rows than tokens do no harm
    check(hf)


def check(hf):
    with torch.no_grad():
        want = [hf(torch.tensor([p])).logits[0] for p in PROMPTS]
    got = run_requests(convert_from_transformers(hf), PROMPTS, chunk_size=7)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_what_changes_no_logit(hf):
    """Hooks of transformers that watch, and numbers that only training and generation read."""
    hf.train()
    hf(torch.tensor([[1, 2, 3]]), output_hidden_states=True, output_router_logits=True)
    hf.config.pad_token_id, hf.config.router_aux_loss_coef = 5, 0.5
    check(hf.eval())


def test_compiled_and_tied_models(hf):
    convert_from_transformers(torch.compile(hf, backend="eager"))
    given = {**hf_models.SIZES, **hf_models.RATIOS, "tie_word_embeddings": True}
    hf = DeepseekV4ForCausalLM(DeepseekV4Config(**given))
    model = convert_from_transformers(hf)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize(("main", "compress"), [(0.5, 0.25), (0.25, 0.5)])
def test_branches_that_turn_other_shares_of_a_head(main, compress):
    plain = {"rope_type": "default", "rope_theta": 1e4}
    turns = {"main": {**plain, "partial_rotary_factor": main}}
    turns["compress"] = {**plain, "partial_rotary_factor": compress}
    given = {**hf_models.SIZES, **hf_models.RATIOS, "rope_parameters": turns}
    check(DeepseekV4ForCausalLM(DeepseekV4Config(**given)).eval())


def test_frequencies_come_with_the_weights():
    """As `load_state_dict` brings them: YaRN's are not those that a theta gives."""
    yarn = convert_from_transformers(hf_models.model("yarn"))
    yarn.compress.scaling = 1.1  # in float64 alone
    saved = yarn.state_dict()
    other = random_model(yarn.config, "cpu", torch.float32)
    other.load_state_dict(saved)
    want, got = (run_requests(m, PROMPTS, chunk_size=7) for m in (yarn, other))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    del saved["_extra_state"]
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        other.load_state_dict(saved)
