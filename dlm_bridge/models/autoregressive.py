"""Autoregressive families of transformers: specs, mappings of the dense and softmax-routed ones."""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims, Direct, GatedMLP, Mapping, Passthrough, Rule
from dlm_bridge.models.decoder_mapping import (
    HUB_LAYER,
    LAYER,
    TIED_HEAD,
    attention_rules,
    decoder_dims,
    decoder_rules,
    decoder_settings,
    outer_rules,
    require_values,
)
from dlm_bridge.models.family_spec import FamilySpec
from dlm_bridge.models.moe import moe_settings, routed_experts
from dlm_bridge.models.rope import window_settings

ACTIVATION: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def autoregressive_settings(config: dict[str, Any], dims: Dims, theta: float = 10000.0) -> dict[str, Any]:
    """For a pre-norm RMSNorm SwiGLU decoder with the config's RoPE and window. `config` must hold the family's
    defaults. Raises DlmBridgeError where megatron-core cannot compute the model."""
    config = {"rope_theta": theta, **config}
    return decoder_settings(config, dims.facts) | window_settings(config)


# The first Llama checkpoints store the rotary frequencies, which follow from the config.
FREQUENCIES = Passthrough("model.layers.{layer}.self_attn.rotary_emb.inv_freq", in_model=False)


def _dense(defaults: dict[str, Any], *facts: str) -> Mapping:
    def dims(config: dict[str, Any]) -> Dims:
        require_values(config, ACTIVATION)
        return decoder_dims({**defaults, **config}, frozenset(facts))

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        return autoregressive_settings({**defaults, **config}, dims(config))

    return Mapping(rules=decoder_rules(), dims=dims, transformer=transformer, carried=(*TIED_HEAD, FREQUENCIES))


# Where config.json leaves a key out, transformers' configuration classes say this.
LLAMA_MAPPING = _dense({"rms_norm_eps": 1e-6})
MISTRAL_MAPPING = _dense({"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096})
QWEN2_MAPPING = _dense({"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "use_sliding_window": False}, "qkv_bias")
QWEN3_MAPPING = _dense(
    {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False}, "qk_norm"
)


# Where config.json leaves a key out, transformers' configuration classes say this.
_QWEN3_MOE: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": None,
    "use_sliding_window": False,
    "max_window_layers": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_MIXTRAL: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2}
_OLMOE: dict[str, Any] = {"rms_norm_eps": 1e-5, "norm_topk_prob": False}
NO_OLMOE = (
    "OLMoE normalises whole query and key rows, megatron-core's QK norm is per head, so Megatron cannot hold it: "
    "use it on the Hub side"
)


def _qwen3_moe_dims(config: dict[str, Any]) -> Dims:
    config = {**_QWEN3_MOE, **config}
    require_values(config, ACTIVATION)
    every = int(config["decoder_sparse_step"])
    dense = {layer for layer in range(int(config["num_hidden_layers"])) if (layer + 1) % every}
    return decoder_dims(
        config,
        frozenset({"qk_norm"}),
        experts=routed_experts(config),
        moe_ffn=config["moe_intermediate_size"],
        dense_layers=frozenset(dense | set(config.get("mlp_only_layers") or ())),
    )


def _qwen3_moe_transformer(config: dict[str, Any]) -> dict[str, Any]:
    config = {**_QWEN3_MOE, **config, "max_window_layers": None}  # its window is every layer's
    dims = _qwen3_moe_dims(config)
    renormalised = bool(config["norm_topk_prob"])
    return autoregressive_settings(config, dims) | moe_settings(
        dims, config["num_experts_per_tok"], renormalised=renormalised
    )


QWEN3_MOE_MAPPING = Mapping(
    rules=decoder_rules(), dims=_qwen3_moe_dims, transformer=_qwen3_moe_transformer, carried=TIED_HEAD
)


def _mixtral_dims(config: dict[str, Any]) -> Dims:
    config = {**_MIXTRAL, **config}
    require_values(config, ACTIVATION)
    return decoder_dims(config, experts=routed_experts(config), moe_ffn=config["intermediate_size"])


def _mixtral_transformer(config: dict[str, Any]) -> dict[str, Any]:
    config = {**_MIXTRAL, **config}
    dims = _mixtral_dims(config)
    return autoregressive_settings(config, dims, theta=1e6) | moe_settings(dims, config["num_experts_per_tok"])


def _mixtral_experts(layer: str) -> tuple[Rule, ...]:
    """Experts under the names of the original release: w1 is the gate, w3 goes up, w2 down."""
    mlp = layer + "block_sparse_moe."
    expert, megatron = mlp + "experts.{expert}.", LAYER + "mlp."
    return (
        Direct(LAYER + "pre_mlp_layernorm.weight", name=layer + "post_attention_layernorm.weight", shape="hidden"),
        Direct(megatron + "router.weight", name=mlp + "gate.weight", shape="experts hidden"),
        GatedMLP(
            megatron + "experts.experts.{expert}.linear_fc1.weight",
            gate=expert + "w1.weight",
            up=expert + "w3.weight",
            width="moe_ffn",
        ),
        Direct(
            megatron + "experts.experts.{expert}.linear_fc2.weight",
            name=expert + "w2.weight",
            shape="hidden moe_ffn",
            axis=1,
        ),
    )


MIXTRAL_MAPPING = Mapping(
    rules=(
        *outer_rules(),
        *attention_rules("model." + HUB_LAYER),
        *_mixtral_experts("model." + HUB_LAYER),
    ),
    dims=_mixtral_dims,
    transformer=_mixtral_transformer,
    carried=TIED_HEAD,
)


def _olmoe_dims(config: dict[str, Any]) -> Dims:
    config = {**_OLMOE, **config}
    require_values(config, ACTIVATION)
    return decoder_dims(config, experts=routed_experts(config), moe_ffn=config["intermediate_size"])


def _olmoe_transformer(config: dict[str, Any]) -> dict[str, Any]:
    raise DlmBridgeError(NO_OLMOE)


OLMOE_MAPPING = Mapping(
    rules=(
        *decoder_rules(),
        Direct(
            LAYER + "self_attention.q_layernorm.weight",
            name="model." + HUB_LAYER + "self_attn.q_norm.weight",
            shape="q_rows",
        ),
        Direct(
            LAYER + "self_attention.k_layernorm.weight",
            name="model." + HUB_LAYER + "self_attn.k_norm.weight",
            shape="kv_rows",
        ),
    ),
    dims=_olmoe_dims,
    transformer=_olmoe_transformer,
    carried=TIED_HEAD,
    hub_only=NO_OLMOE,
)


def _spec(
    name: str, title: str, hub_ids: tuple[str, ...], prefix: str, model_type: str, mapping: str, **facts: Any
) -> FamilySpec:
    """`prefix` is that of transformers' classes: "Llama" for LlamaConfig and LlamaForCausalLM."""
    return FamilySpec(
        name=name,
        title=title,
        hub_ids=hub_ids,
        architectures=(f"{prefix}ForCausalLM",),
        model_type=model_type,
        config_class=f"transformers:{prefix}Config",
        model_class=f"transformers:{prefix}ForCausalLM",
        mapping=f"dlm_bridge.models.{mapping}",
        initialisation="dlm_bridge.models.initialisation:normal_rule",
        auto_classes=(),  # transformers' own entries stay as they are
        kind="autoregressive",
        attention_pattern="causal",
        shift=True,
        objective="causal",
        checked_against=f"transformers' own {prefix}ForCausalLM",
        **facts,
    )


SPECS: tuple[FamilySpec, ...] = (
    _spec(
        "llama",
        "Llama 2, 3, 3.1, 3.2, 3.3",
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
        "Llama",
        "llama",
        "autoregressive:LLAMA_MAPPING",
    ),
    _spec(
        "qwen2",
        "Qwen2, Qwen2.5",
        ("Qwen/Qwen2-7B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-7B"),
        "Qwen2",
        "qwen2",
        "autoregressive:QWEN2_MAPPING",
    ),
    _spec(
        "qwen3",
        "Qwen3",
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
        "Qwen3",
        "qwen3",
        "autoregressive:QWEN3_MAPPING",
    ),
    _spec(
        "mistral",
        "Mistral 7B, Mistral Nemo",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-Nemo-Base-2407"),
        "Mistral",
        "mistral",
        "autoregressive:MISTRAL_MAPPING",
    ),
    _spec(
        "qwen3_moe",
        "Qwen3-MoE",
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        "Qwen3Moe",
        "qwen3_moe",
        "autoregressive:QWEN3_MOE_MAPPING",
    ),
    _spec(
        "mixtral",
        "Mixtral",
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"),
        "Mixtral",
        "mixtral",
        "autoregressive:MIXTRAL_MAPPING",
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    _spec(
        "glm4_moe",
        "GLM-4.5, GLM-4.6",
        ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        "Glm4Moe",
        "glm4_moe",
        "glm4_moe:MAPPING",
    ),
    _spec(
        "olmoe",
        "OLMoE (Hub side only)",
        ("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125"),
        "Olmoe",
        "olmoe",
        "autoregressive:OLMOE_MAPPING",
        training=("accelerate",),  # whole rows are normalised
    ),
    _spec(
        "deepseek_v3",
        "DeepSeek-V3, DeepSeek-R1",
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1"),
        "DeepseekV3",
        "deepseek_v3",
        "deepseek_v3:MAPPING",
        lora_targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
)
