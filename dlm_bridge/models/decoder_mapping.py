"""Mapping of decoders whose Hub names are Llama-like, dense or with experts: rules, sizes, megatron-core settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import QKV, Dims, Direct, GatedMLP, Mapping, Passthrough, Rule, Vocabulary
from dlm_bridge.models.rope import rope_settings, window_settings

LAYER = "decoder.layers.{layer}."
HUB_LAYER = "layers.{layer}."
MTP = "mtp.layers.{mtp}."
# Config values that the rules and settings here assume; a config with another one is refused.
SUPPORTED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
NO_WINDOW = {"use_sliding_window": False}
TIED_HEAD = (Passthrough("lm_head.weight", when="tied", copy_of="model.embed_tokens.weight"),)


def decoder_rules(root: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """All rules of a decoder. Some apply by `Dims.facts`: "qkv_bias", "qk_norm"; in layers with experts also
    "router_bias" (a selection bias `e_score_correction_bias`) and "shared_expert"."""
    layer = root + HUB_LAYER
    return (
        *outer_rules(root, head),
        *attention_rules(layer),
        *dense_rules(layer),
        *expert_rules(layer + "mlp.", layer + "post_attention_layernorm.weight"),
    )


def outer_rules(root: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """Tensors outside the layers: embedding, final norm and, where it is not tied, the output layer."""
    return (
        Vocabulary("embedding.word_embeddings.weight", name=root + "embed_tokens.weight", shape="vocab hidden"),
        Direct("decoder.final_layernorm.weight", name=root + "norm.weight", shape="hidden"),
        Vocabulary("output_layer.weight", when="!tied", name=head, shape="vocab hidden"),
    )


def attention_rules(layer: str) -> tuple[Rule, ...]:
    """Norm, fused QKV (with bias by "qkv_bias"), per-head QK norm (by "qk_norm") and output projection."""
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
    """Norm, router, routed and shared experts of a mixture-of-experts layer; `mlp` is the Hub prefix. `own_dtype` says
    that the router is kept in the dtype that it is stored in."""
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
    """Sizes from transformers' key names; `config` must already hold the family's defaults. `more` are Dims fields."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        ffn = int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise DlmBridgeError(f"config.json: a size is missing or not a number ({error})") from None
    groups = config.get("num_key_value_heads") or heads
    if min(hidden, heads, groups, layers, vocab) < 1 or heads % groups:
        raise DlmBridgeError(f"config.json: num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    head_dim = config.get("head_dim")
    if not head_dim and hidden % heads:
        raise DlmBridgeError(f"config.json: num_attention_heads {heads} does not divide hidden_size {hidden}")
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

    `sliding_window`: whether the model applies the config's window. Raises DlmBridgeError for a RoPE scaling that
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
    """Raise DlmBridgeError for a config key that is there and says something else."""
    for key, value in values.items():
        if (found := config.get(key)) not in (None, value):
            raise DlmBridgeError(f"config.json: {key} = {found!r} is not supported for this family, only {value!r}")


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
    """The mapping of a model without experts, or with `experts` in every layer, which have the config's
    `intermediate_size`.

    `defaults` are those of its config class, for keys that config.json leaves out; `required` the config values that
    the rules depend on; `sliding_window` as in `decoder_settings`. `rules` take the place of `decoder_rules`;
    `more_settings` are added to megatron-core's; `hub_only` says why megatron-core cannot hold the model.
    """

    def dims(config: dict[str, Any]) -> Dims:
        config = {**defaults, **config}
        require_values(config, required)
        sizes = {"experts": routed_experts(config), "moe_ffn": config["intermediate_size"]} if experts else {}
        return decoder_dims(config, facts, **sizes)

    def transformer(config: dict[str, Any]) -> dict[str, Any]:
        if hub_only:
            raise DlmBridgeError(hub_only)
        config = {**defaults, **config}
        more = more_settings(config)
        if experts:
            more |= moe_settings(dims(config), config["num_experts_per_tok"])
        return decoder_settings(config, facts, sliding_window) | more

    return Mapping(rules or decoder_rules(), dims, transformer, passthrough=passthrough, hub_only=hub_only)


# ------------------------------------------------------------------------------------ multi-token prediction


def mtp_rules(layer: str, rules: Iterable[Rule], final: str = "shared_head.norm.weight") -> tuple[Rule, ...]:
    """Rules of multi-token prediction layers, which on the Hub follow the model's layers.

    Each is one more transformer layer; its input is made of the normed embedding of the next token and the normed
    hidden state. `rules` are those of a transformer layer of the model; `layer` is the Hub prefix, `final` the name of
    the last norm.
    """
    return (
        Direct(MTP + "enorm.weight", name=layer + "enorm.weight", shape="hidden"),
        Direct(MTP + "hnorm.weight", name=layer + "hnorm.weight", shape="hidden"),
        Direct(MTP + "eh_proj.weight", name=layer + "eh_proj.weight", shape="hidden mtp_input", axis=0),
        *(replace(rule, megatron=rule.megatron.replace(LAYER, MTP + "transformer_layer.")) for rule in rules),
        Direct(MTP + "final_layernorm.weight", name=layer + final, shape="hidden"),
    )


def mtp_passthrough(layer: str) -> tuple[Passthrough, ...]:
    """The Hub's own copies of embedding and head in each MTP layer, which Megatron shares with the model."""
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return tuple(
        Passthrough(layer + name, in_model=False, mtp=True, shared_with=other) for name, other in shared.items()
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Number of multi-token prediction layers. Raises DlmBridgeError for anything but a number."""
    found = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0)) or 0
    if type(found) is not int or found < 0:
        raise DlmBridgeError(f"config.json: num_nextn_predict_layers {found!r} is not a number of layers")
    return found


# -- mixture of experts

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")  # LoRA's targets: the experts' weights are stacks


def moe_settings(dims: Dims, chosen: int, score: str = "softmax", renormalised: bool = True) -> dict[str, Any]:
    """megatron-core's settings of experts and their router, which gives a token `chosen` of them.

    A softmax over all experts whose best are renormalised is a softmax over the best alone, which is megatron-core's
    default; without renormalisation its softmax has to come first (`moe_router_pre_softmax`).
    """
    return {
        "num_moe_experts": dims.experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": dims.moe_ffn,
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
        "moe_router_score_function": score,
        "moe_router_pre_softmax": score == "softmax" and not renormalised,
        "moe_layer_freq": [int(dims.is_moe(layer)) for layer in range(dims.layers)] if dims.dense_layers else 1,
        "moe_router_load_balancing_type": "none",  # the objectives have no balancing term
    }


# Defaults of config classes of the models that were made of Qwen3-30B-A3B, for keys that a config.json leaves out.
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
    """The mapping of a family with Qwen3-MoE's tensors; arguments as in `decoder_mapping.dense_mapping`."""
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
        config = {**defaults, **config, "max_window_layers": None}  # a window is every layer's
        renormalised = bool(config.get("norm_topk_prob"))
        settings = moe_settings(dims(config), config["num_experts_per_tok"], renormalised=renormalised)
        return decoder_settings(config, facts, sliding_window) | settings

    return Mapping(rules=decoder_rules(), dims=dims, transformer=transformer, passthrough=TIED_HEAD)


def routed_experts(config: dict[str, Any]) -> int:
    """Number of experts that the router selects from, by any of the names that families and transformers give it.

    Raises DlmBridgeError unless a token can be routed to `num_experts_per_tok` of them.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name) is not None), None)
    top_k = config.get("num_experts_per_tok")
    if type(experts) is not int or type(top_k) is not int or not 1 <= top_k <= experts:
        raise DlmBridgeError(f"config.json: num_experts_per_tok {top_k!r} cannot be chosen of num_experts {experts!r}")
    return experts


def expert_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of Dims that describe the experts. Raises DlmBridgeError for impossible numbers."""
    experts = routed_experts(config)
    groups, chosen = config["n_group"], config["topk_group"]
    if experts % groups or experts // groups < 2 or not 1 <= chosen <= groups:
        raise DlmBridgeError(f"config.json: topk_group {chosen} of n_group {groups} of {experts} experts is unsound")
    return {
        "experts": experts,
        "moe_ffn": config["moe_intermediate_size"],
        "shared_ffn": config["moe_intermediate_size"] * config["n_shared_experts"],
        "dense_layers": frozenset(range(config["first_k_dense_replace"])),
    }


def router_settings(config: dict[str, Any], dims: Dims) -> dict[str, Any]:
    """megatron-core's settings. Raises DlmBridgeError where its router is another one: it scores a group by its best
    `num_experts_per_tok / topk_group` experts, these models by the best two, and it always renormalises."""
    chosen, groups = config["num_experts_per_tok"], config["n_group"]
    if not config["norm_topk_prob"] or chosen == 1:
        raise DlmBridgeError(
            "config.json: megatron-core's sigmoid router needs norm_topk_prob and two experts a token"
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
        raise DlmBridgeError(
            f"config.json: megatron-core scores expert groups as this model does only where num_experts_per_tok "
            f"{chosen} is twice topk_group {config['topk_group']}"
        )
    return settings | {"moe_router_num_groups": groups, "moe_router_group_topk": config["topk_group"]}
