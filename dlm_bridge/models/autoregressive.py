"""Autoregressive families of transformers: specs and mappings of Llama, Qwen, Mistral, Qwen3-MoE, Mixtral and OLMoE.

The mappings' defaults are those of transformers' config classes, for keys that config.json omits.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Direct, GatedMLP, Mapping, Passthrough, Rule
from dlm_bridge.models.decoder_mapping import (
    ATTENTION_TARGETS,
    HUB_LAYER,
    LAYER,
    TIED_HEAD,
    attention_rules,
    decoder_rules,
    dense_mapping,
    outer_rules,
    qwen3_moe_mapping,
)
from dlm_bridge.models.families import FamilySpec

SUPPORTED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def autoregressive_spec(
    name: str,
    title: str,
    hub_ids: tuple[str, ...],
    prefix: str,
    mapping: Mapping,
    config_class: str | None = None,
    **fields: Any,
) -> FamilySpec:
    """Spec of transformers' `{prefix}ForCausalLM`.

    Args:
        name: name of the family, and its model type.
        title: name for people.
        hub_ids: public checkpoints.
        prefix: prefix of the class name.
        mapping: between Hub and Megatron tensors.
        config_class: name of the config class; default: `{prefix}Config`.
        fields: further fields of FamilySpec.
    """
    return FamilySpec(
        name=name,
        title=title,
        hub_ids=hub_ids,
        architectures=(f"{prefix}ForCausalLM",),
        model_type=name,
        config_class=f"transformers:{config_class or prefix + 'Config'}",
        model_class=f"transformers:{prefix}ForCausalLM",
        mapping=mapping,
        auto_classes=(),  # transformers registers its own
        kind="autoregressive",
        attention_pattern="causal",
        shift=True,
        objective="causal",
        checked_against=f"transformers' own {prefix}ForCausalLM",
        **fields,
    )


def _dense(defaults: dict[str, Any], *facts: str) -> Mapping:
    # The first Llama checkpoints store the rotary frequencies, which the config determines.
    frequencies = Passthrough("model.layers.{layer}.self_attn.rotary_emb.inv_freq", in_model=False)
    return dense_mapping(
        {"rms_norm_eps": 1e-6, **defaults},
        frozenset(facts),
        required=SUPPORTED,
        sliding_window=True,
        passthrough=(*TIED_HEAD, frequencies),
    )


LLAMA = autoregressive_spec(
    "llama",
    "Llama 2, 3, 3.1, 3.2, 3.3",
    ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
    "Llama",
    _dense({}),
)
QWEN2 = autoregressive_spec(
    "qwen2",
    "Qwen2, Qwen2.5",
    ("Qwen/Qwen2-7B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-7B"),
    "Qwen2",
    _dense({"num_key_value_heads": 32, "use_sliding_window": False}, "qkv_bias"),
)
QWEN3 = autoregressive_spec(
    "qwen3",
    "Qwen3",
    ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    "Qwen3",
    _dense({"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False}, "qk_norm"),
)
MISTRAL = autoregressive_spec(
    "mistral",
    "Mistral 7B, Mistral Nemo",
    ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-Nemo-Base-2407"),
    "Mistral",
    _dense({"num_key_value_heads": 8, "sliding_window": 4096}),
)
QWEN3_MOE = autoregressive_spec(
    "qwen3_moe",
    "Qwen3-MoE",
    ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    "Qwen3Moe",
    qwen3_moe_mapping(
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": None, "use_sliding_window": False},
        required=SUPPORTED,
        sliding_window=True,
    ),
    lora_targets=ATTENTION_TARGETS,
)

# ------------------------------------------------------------------------------------------------ Mixtral


def _mixtral_experts(layer: str) -> tuple[Rule, ...]:
    """Rules of experts under the original names: w1 is the gate, w3 the up and w2 the down projection."""
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


MIXTRAL = autoregressive_spec(
    "mixtral",
    "Mixtral",
    ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"),
    "Mixtral",
    dense_mapping(
        {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        required=SUPPORTED,
        sliding_window=True,
        rules=(*outer_rules(), *attention_rules("model." + HUB_LAYER), *_mixtral_experts("model." + HUB_LAYER)),
        experts=True,
    ),
    lora_targets=ATTENTION_TARGETS,
)

# ------------------------------------------------------------------------------------------------ OLMoE

NO_OLMOE = (
    "OLMoE normalises whole query and key rows, but megatron-core's QK norm is per head: Megatron's formats are not "
    "supported, only the Hub's"
)


OLMOE = autoregressive_spec(
    "olmoe",
    "OLMoE (Hub side only)",
    ("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125"),
    "Olmoe",
    dense_mapping(
        {},
        required=SUPPORTED,
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
        experts=True,
        hub_only=NO_OLMOE,
    ),
    lora_targets=ATTENTION_TARGETS,
    training=("accelerate",),
)
