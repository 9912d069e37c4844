"""LLaDA2.0, LLaDA2.1 and LLaDA2.2, block diffusion models adapted from Bailing-MoE: spec, mapping.

Source: the public configs and modeling_llada2_moe.py, arXiv 2512.15745; for LLaDA2.2, FluxServe's development guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.fused import FusedQKV, stacked
from dlm_bridge.mapping.rules import Dims, Direct, GatedMLP, Mapping, Passthrough, Rule, Vocabulary
from dlm_bridge.models.decoder_mapping import (
    LAYER,
    decoder_dims,
    decoder_settings,
    dense_rules,
    expert_rules,
    expert_sizes,
    require_values,
    router_settings,
)
from dlm_bridge.models.families import FamilySpec

HUB = "model.layers.{layer}."
ATTENTION, MEGATRON = HUB + "attention.", LAYER + "self_attention."

# Values of the public checkpoints. With any other the body would be silently wrong.
REQUIRED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "rope_scaling": None,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
MERGED = "llada2_moe_veomni"  # model_type of dFactory's layout, which stacks a layer's experts
# Defaults for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def check_config(config: dict[str, Any]) -> None:
    """Raise CheckpointError for a LLaDA2 config that the body does not support."""
    require_values(config, REQUIRED)
    capacity, chosen = config.get("expert_capacity") or 0, config.get("num_experts_per_tok") or 1
    if capacity and not chosen <= capacity <= (config.get("num_experts") or capacity):
        raise CheckpointError(
            "config.json",
            f"expert_capacity {capacity} must hold num_experts_per_tok {chosen} of num_experts "
            f"{config.get('num_experts')}",
        )
    if capacity and (config.get("block_size") or 0) < 1:
        raise CheckpointError(
            "config.json", f"expert_capacity {capacity} needs block_size, the tokens that share experts"
        )
    if not capacity and config.get("rope_theta") == 3e6 and config.get("max_position_embeddings") == 131072:
        raise CheckpointError(
            "config.json",
            "RoPE base 3000000 over 131072 positions is LLaDA2.2's, whose router needs expert_capacity "
            "and block_size: add the published 48 and 32",
        )
    if not config.get("num_shared_experts", 1):
        raise CheckpointError("config.json", "num_shared_experts 0 is not supported (no public LLaDA2 has it)")


def dims(config: dict[str, Any]) -> Dims:
    """Sizes of LLaDA2."""
    config = _complete(config)
    facts = {"qk_norm", "router_bias", "shared_expert"} | ({"merged"} if config.get("model_type") == MERGED else set())
    return decoder_dims(config, frozenset(facts), **expert_sizes(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes."""
    config = _complete(config)
    sizes = dims(config)
    plain = decoder_settings(config, sizes.facts) | {"rotary_percent": float(config["partial_rotary_factor"])}
    if capacity := config.get("expert_capacity"):  # expert groups are ignored
        return plain | router_settings(config | {"n_group": 1}, sizes) | {"block_routing_capacity": int(capacity)}
    return plain | router_settings(config, sizes)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """Check the config; add defaults and Glm4-MoE's key for the shared experts."""
    check_config(config)
    config = {**DEFAULTS, **config}
    return config | {"n_shared_experts": config["num_shared_experts"]}


def _experts() -> Iterator[Rule]:
    """Rules of a layer with experts, for separate experts and for dFactory's stacked ones."""
    norm = HUB + "post_attention_layernorm.weight"
    for rule in expert_rules(HUB + "mlp.", norm, router_bias="gate.expert_bias", own_dtype=True):
        if "{expert}" not in rule.megatron:
            yield rule
            continue
        yield replace(rule, when=f"{rule.when} !merged")
        merged = replace(rule, when=f"{rule.when} merged")
        if isinstance(merged, GatedMLP):
            yield stacked(replace(merged, gate=_merged_name(merged.gate), up=_merged_name(merged.up)))
        elif isinstance(merged, Direct):
            yield stacked(replace(merged, name=_merged_name(merged.name)))


def _merged_name(name: str) -> str:
    """dFactory's name of the tensor that stacks all experts."""
    return name.replace("{expert}.", "").removesuffix(".weight")


MAPPING = Mapping(
    rules=(
        Vocabulary("embedding.word_embeddings.weight", name="model.word_embeddings.weight", shape="vocab hidden"),
        Direct("decoder.final_layernorm.weight", name="model.norm.weight", shape="hidden"),
        Vocabulary("output_layer.weight", when="!tied", name="lm_head.weight", shape="vocab hidden"),
        Direct(MEGATRON + "linear_qkv.layer_norm_weight", name=HUB + "input_layernorm.weight", shape="hidden"),
        FusedQKV(MEGATRON + "linear_qkv.weight", name=ATTENTION + "query_key_value.weight"),
        Direct(MEGATRON + "q_layernorm.weight", name=ATTENTION + "query_layernorm.weight", shape="head_dim"),
        Direct(MEGATRON + "k_layernorm.weight", name=ATTENTION + "key_layernorm.weight", shape="head_dim"),
        Direct(MEGATRON + "linear_proj.weight", name=ATTENTION + "dense.weight", shape="hidden q_rows", axis=1),
        *dense_rules(HUB),
        *_experts(),
    ),
    dims=dims,
    transformer=transformer,
    passthrough=(Passthrough("lm_head.weight", when="tied", copy_of="model.word_embeddings.weight"),),
)


SPEC = FamilySpec(
    name="llada2_moe",
    title="LLaDA2.0, LLaDA2.1, LLaDA2.2 (mini, flash)",
    hub_ids=(
        "inclusionAI/LLaDA2.0-mini",
        "inclusionAI/LLaDA2.0-mini-CAP",
        "inclusionAI/LLaDA2.0-mini-preview",
        "inclusionAI/LLaDA2.0-flash",
        "inclusionAI/LLaDA2.0-flash-CAP",
        "inclusionAI/LLaDA2.0-flash-preview",
        "inclusionAI/LLaDA2.1-mini",
        "inclusionAI/LLaDA2.1-flash",
        "inclusionAI/LLaDA2.2-mini",
        "inclusionAI/LLaDA2.2-flash",
    ),
    architectures=("LLaDA2MoeModelLM",),
    model_type="llada2_moe",
    config_class="dlm_bridge.models.modeling_llada2_moe:LLaDA2MoeConfig",
    model_class="dlm_bridge.models.modeling_llada2_moe:LLaDA2MoeModelLM",
    mapping=MAPPING,
    attention_pattern="block_causal",
    mask_token_id=156895,
    objective="block",
    sft={"eos_padding": "row"},  # dFactory
    # 2.1 has the architecture and config of 2.0: sample it with algorithm="llada2.1". 2.2 has its own default.
    sampler={"algorithm": "llada2"},
    lora_targets=("query_key_value", "o_proj"),
    checked_against="the public modeling of LLaDA2.0 and LLaDA2.1; 2.2: independent maths and FluxServe's decoder",
)
