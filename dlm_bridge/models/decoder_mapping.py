"""Mapping of decoders with Llama-like Hub names, dense or with experts: rules, sizes, megatron-core settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import QKV, Dims, Direct, GatedMLP, Mapping, Passthrough, Rule, Vocabulary
from dlm_bridge.models.rope import rope_settings, window_settings

LAYER = "decoder.layers.{layer}."
HUB_LAYER = "layers.{layer}."
MTP = "mtp.layers.{mtp}."
# Config values that the rules and settings here assume; others are refused.
SUPPORTED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
NO_WINDOW = {"use_sliding_window": False}
TIED_HEAD = (Passthrough("lm_head.weight", when="tied", copy_of="model.embed_tokens.weight"),)


def decoder_rules(root: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """All rules of a decoder. Some need a fact of `Dims.facts`: "qkv_bias", "qk_norm"; in layers with experts also
    "router_bias" (a selection bias `e_score_correction_bias`) and "shared_expert"."""
    layer = root + HUB_LAYER
    return (
        *outer_rules(root, head),
        *attention_rules(layer),
        *dense_rules(layer),
        *expert_rules(layer + "mlp.", layer + "post_attention_layernorm.weight"),
    )


def outer_rules(root: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """Tensors outside the layers: embedding, final norm and, if not tied, the output layer."""
    return (
        Vocabulary("embedding.word_embeddings.weight", name=root + "embed_tokens.weight", shape="vocab hidden"),
        Direct("decoder.final_layernorm.weight", name=root + "norm.weight", shape="hidden"),
        Vocabulary("output_layer.weight", when="!tied", name=head, shape="vocab hidden"),
    )


def attention_rules(layer: str) -> tuple[Rule, ...]:
    """Norm, fused QKV (bias with "qkv_bias"), per-head QK norm (with "qk_norm") and output projection."""
    attention = layer + "self_attn."
    megatron = LAYER + "self_attention."
    return (
        Direct(megatron + "linear_qkv.layer_norm_weight", name=layer + "input_layernorm.weight", shape="hidden"),
        QKV(
            megatron + "linear_qkv.weight",
            q=attention + "q_proj.weight",
            k=attention + "k_proj.weight",
            v=attention + "v_proj.weight",
        ),
        QKV(
            megatron + "linear_qkv.bias",
            when="qkv_bias",
            q=attention + "q_proj.bias",
            k=attention + "k_proj.bias",
            v=attention + "v_proj.bias",
            bias=True,
        ),
        Direct(megatron + "q_layernorm.weight", when="qk_norm", name=attention + "q_norm.weight", shape="head_dim"),
        Direct(megatron + "k_layernorm.weight", when="qk_norm", name=attention + "k_norm.weight", shape="head_dim"),
        Direct(megatron + "linear_proj.weight", name=attention + "o_proj.weight", shape="hidden q_rows", axis=1),
    )


def dense_rules(layer: str) -> tuple[Rule, ...]:
    """Norm and SwiGLU of a layer without experts."""
    mlp = layer + "mlp."
    return (
        Direct(
            LAYER + "mlp.linear_fc1.layer_norm_weight",
            when="dense",
            name=layer + "post_attention_layernorm.weight",
            shape="hidden",
        ),
        GatedMLP(
            LAYER + "mlp.linear_fc1.weight", when="dense", gate=mlp + "gate_proj.weight", up=mlp + "up_proj.weight"
        ),
        Direct(
            LAYER + "mlp.linear_fc2.weight", when="dense", name=mlp + "down_proj.weight", shape="hidden ffn", axis=1
        ),
    )


def expert_rules(
    mlp: str,
    norm: str,
    router_bias: str = "gate.e_score_correction_bias",
    own_dtype: bool = False,
) -> tuple[Rule, ...]:
    """Norm, router, routed and shared experts of a mixture-of-experts layer.

    Args:
        mlp: Hub prefix of the layer's MLP.
        norm: Hub name of the norm before it.
        router_bias: Hub name of the router's bias, after `mlp`.
        own_dtype: keep the router's stored dtype.
    """
    expert = mlp + "experts.{expert}."
    megatron = LAYER + "mlp."
    return (
        Direct(LAYER + "pre_mlp_layernorm.weight", when="moe", name=norm, shape="hidden"),
        Direct(
            megatron + "router.weight",
            when="moe",
            own_dtype=own_dtype,
            name=mlp + "gate.weight",
            shape="experts hidden",
        ),
        Direct(
            megatron + "router.expert_bias",
            when="moe router_bias",
            own_dtype=own_dtype,
            name=mlp + router_bias,
            shape="experts",
        ),
        GatedMLP(
            megatron + "experts.experts.{expert}.linear_fc1.weight",
            when="moe",
            gate=expert + "gate_proj.weight",
            up=expert + "up_proj.weight",
            width="moe_ffn",
        ),
        Direct(
            megatron + "experts.experts.{expert}.linear_fc2.weight",
            when="moe",
            name=expert + "down_proj.weight",
            shape="hidden moe_ffn",
            axis=1,
        ),
        GatedMLP(
            megatron + "shared_experts.linear_fc1.weight",
            when="moe shared_expert",
            gate=mlp + "shared_experts.gate_proj.weight",
            up=mlp + "shared_experts.up_proj.weight",
            width="shared_ffn",
        ),
        Direct(
            megatron + "shared_experts.linear_fc2.weight",
            when="moe shared_expert",
            name=mlp + "shared_experts.down_proj.weight",
            shape="hidden shared_ffn",
            axis=1,
        ),
    )


def decoder_dims(config: dict[str, Any], facts: frozenset[str] = frozenset(), **more: Any) -> Dims:
    """Sizes from transformers' key names in `config`, which includes the family's defaults. `more`: fields of Dims.

    Raises CheckpointError for missing, invalid or contradictory sizes.
    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        ffn = int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("config.json", f"a size is missing or not a number ({error})") from None
    groups = config.get("num_key_value_heads") or heads
    if min(hidden, heads, groups, layers, vocab) < 1 or heads % groups:
        raise CheckpointError(
            "config.json", f"num_key_value_heads {groups} does not divide num_attention_heads {heads}"
        )
    head_dim = config.get("head_dim")
    if not head_dim and hidden % heads:
        raise CheckpointError("config.json", f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    return Dims(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=head_dim or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", False)),
        facts=facts,
        **more,
    )


def decoder_settings(
    config: dict[str, Any], facts: frozenset[str] = frozenset(), sliding_window: bool = False
) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes, for a pre-norm RMSNorm SwiGLU decoder.

    `sliding_window`: the model applies the config's window. Raises CheckpointError for a RoPE scaling that
    megatron-core cannot compute.
    """
    return {
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": "qkv_bias" in facts,
        "qk_layernorm": "qk_norm" in facts,
        **rope_settings(config),
        "max_sequence_length": config.get("max_position_embeddings", 4096),
        **(window_settings(config) if sliding_window else {}),
    }


def require_values(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise CheckpointError for a config key with another value; missing keys and nulls pass."""
    for key, value in values.items():
        if (found := config.get(key)) not in (None, value):
            raise CheckpointError("config.json", f"{key} = {found!r} is not supported for this family, only {value!r}")


def dense_mapping(
    defaults: dict[str, Any],
    facts: frozenset[str] = frozenset(),
    required: dict[str, Any] = SUPPORTED_VALUES,
    sliding_window: bool = False,
    passthrough: tuple[Passthrough, ...] = TIED_HEAD,
    rules: tuple[Rule, ...] | None = None,
    more_settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {},
    experts: bool = False,
    hub_only: str = "",
) -> Mapping:
    """Mapping of a dense model, or of one with experts of the config's `intermediate_size` in every layer.

    Args:
        defaults: defaults of the config class, for keys that config.json omits.
        facts: conditions that hold, for `Dims.facts`.
        required: config values that the rules depend on.
        sliding_window: as in `decoder_settings`.
        passthrough: tensors without a Megatron counterpart.
        rules: replace `decoder_rules`.
        more_settings: computes further megatron-core settings from the config.
        experts: every layer has experts.
        hub_only: as in `Mapping`.
    """

    def dims(config: dict[str, Any]) -> Dims:
        config = {**defaults, **config}
        require_values(config, required)
        sizes = {"experts": routed_experts(config), "moe_ffn": config["intermediate_size"]} if experts else {}
        return decoder_dims(config, facts, **sizes)

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        config = {**defaults, **config}
        more = more_settings(config)
        if experts:
            more |= moe_settings(dims(config), config["num_experts_per_tok"])
        return decoder_settings(config, facts, sliding_window) | more

    return Mapping(rules or decoder_rules(), dims, transformer, passthrough=passthrough, hub_only=hub_only)


# ------------------------------------------------------------------------------------ multi-token prediction


def mtp_rules(layer: str, rules: Iterable[Rule], final: str = "shared_head.norm.weight") -> tuple[Rule, ...]:
    """Rules of multi-token prediction layers, which on the Hub follow the model's layers.

    Each is one more transformer layer, whose input combines the normed embedding of the next token and the normed
    hidden state.

    Args:
        layer: Hub prefix of the layer.
        rules: rules of the model's transformer layers.
        final: Hub name of the last norm, after `layer`.
    """
    return (
        Direct(MTP + "enorm.weight", name=layer + "enorm.weight", shape="hidden"),
        Direct(MTP + "hnorm.weight", name=layer + "hnorm.weight", shape="hidden"),
        Direct(MTP + "eh_proj.weight", name=layer + "eh_proj.weight", shape="hidden mtp_input", axis=0),
        *(replace(rule, megatron=rule.megatron.replace(LAYER, MTP + "transformer_layer.")) for rule in rules),
        Direct(MTP + "final_layernorm.weight", name=layer + final, shape="hidden"),
    )


def mtp_passthrough(layer: str) -> tuple[Passthrough, ...]:
    """The Hub's copies of embedding and head in each MTP layer, which in Megatron share the model's tensors."""
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return tuple(
        Passthrough(layer + name, in_model=False, mtp=True, shared_with=other) for name, other in shared.items()
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Number of multi-token prediction layers. Raises CheckpointError for any other value."""
    found = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or 0
    if type(found) is not int or found < 0:
        raise CheckpointError("config.json", f"num_nextn_predict_layers {found!r} is not a number of layers")
    return found


# -- mixture of experts

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # LoRA's targets beside stacked experts


def moe_settings(dims: Dims, top_k: int, score: str = "softmax", renormalised: bool = True) -> dict[str, Any]:
    """megatron-core's settings of experts and a router that selects `top_k` of them.

    A softmax over all experts, renormalised over the selected ones, equals a softmax over the selected ones, which is
    megatron-core's default. Without renormalisation the softmax precedes the selection (`moe_router_pre_softmax`).
    """
    return {
        "num_moe_experts": dims.experts,
        "moe_router_topk": top_k,
        "moe_ffn_hidden_size": dims.moe_ffn,
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
        "moe_router_score_function": score,
        "moe_router_pre_softmax": score == "softmax" and not renormalised,
        "moe_layer_freq": [int(dims.is_moe(layer)) for layer in range(dims.layers)] if dims.dense_layers else 1,
        "moe_router_load_balancing_type": "none",  # the objectives add no balancing loss
    }


# Defaults of the config classes of models adapted from Qwen3-30B-A3B, for keys that config.json omits.
QWEN3_30B_A3B: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rope_theta": 1000000.0,
}


def qwen3_moe_mapping(
    defaults: dict[str, Any], required: dict[str, Any] = SUPPORTED_VALUES, sliding_window: bool = False
) -> Mapping:
    """Mapping of a family with Qwen3-MoE's tensors; see `dense_mapping` for the arguments."""
    facts = frozenset({"qk_norm"})

    def dims(config: dict[str, Any]) -> Dims:
        config = {**defaults, **config}
        require_values(config, required)
        experts = routed_experts(config)
        step = config.get("decoder_sparse_step") or 1
        dense = {layer for layer in range(int(config["num_hidden_layers"])) if (layer + 1) % step}
        return decoder_dims(
            config,
            facts,
            experts=experts,
            moe_ffn=config["moe_intermediate_size"],
            dense_layers=frozenset(dense | set(config.get("mlp_only_layers") or ())),
        )

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        config = {**defaults, **config, "max_window_layers": None}  # a window applies to every layer
        renormalised = bool(config.get("norm_topk_prob"))
        settings = moe_settings(dims(config), config["num_experts_per_tok"], renormalised=renormalised)
        return decoder_settings(config, facts, sliding_window) | settings

    return Mapping(rules=decoder_rules(), dims=dims, transformer=transformer, passthrough=TIED_HEAD)


def routed_experts(config: dict[str, Any]) -> int:
    """Number of routed experts, under any of the config keys that families and transformers use.

    Raises CheckpointError unless a token can be routed to `num_experts_per_tok` of them.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name) is not None), None)
    top_k = config.get("num_experts_per_tok")
    if type(experts) is not int or type(top_k) is not int or not 1 <= top_k <= experts:
        raise CheckpointError(
            "config.json", f"num_experts_per_tok {top_k!r} cannot be chosen of num_experts {experts!r}"
        )
    return experts


def expert_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of Dims that describe the experts. Raises CheckpointError for contradictory numbers."""
    experts = routed_experts(config)
    groups, chosen = config["n_group"], config["topk_group"]
    if experts % groups or experts // groups < 2 or not 1 <= chosen <= groups:
        raise CheckpointError(
            "config.json", f"topk_group {chosen}, n_group {groups} and {experts} experts are contradictory"
        )
    return {
        "experts": experts,
        "moe_ffn": config["moe_intermediate_size"],
        "shared_ffn": config["moe_intermediate_size"] * config["n_shared_experts"],
        "dense_layers": frozenset(range(config["first_k_dense_replace"])),
    }


def router_settings(config: dict[str, Any], dims: Dims) -> dict[str, Any]:
    """megatron-core's settings of a sigmoid router over expert groups.

    Raises CheckpointError if its router computes something else: it scores a group by its best
    `num_experts_per_tok / topk_group` experts, these models by the best two, and it always renormalises.
    """
    chosen, groups = config["num_experts_per_tok"], config["n_group"]
    if not config["norm_topk_prob"] or chosen == 1:
        raise CheckpointError(
            "config.json", "megatron-core's sigmoid router needs norm_topk_prob and num_experts_per_tok of at least 2"
        )
    settings = moe_settings(dims, chosen, score="sigmoid") | {
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_dtype": "fp32",
    }
    if groups == 1:
        return settings
    if chosen != 2 * config["topk_group"]:
        raise CheckpointError(
            "config.json",
            f"num_experts_per_tok {chosen} must be twice topk_group {config['topk_group']}: otherwise megatron-core "
            "scores expert groups differently",
        )
    return settings | {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]}
