"""megatron-core layer specs: the modules of each layer, dense or with experts, and its attention pattern."""

from __future__ import annotations

from typing import Any

from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.parallel import mcore_compat, platform
from dlm_bridge.parallel.attention import MASK_TYPES, check_attention_pattern
from dlm_bridge.parallel.core import (
    ColumnParallelLinear,
    IdentityOp,
    MLASelfAttentionSubmodules,
    ModuleSpec,
    MultiTokenPredictionBlockSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from dlm_bridge.parallel.core_attention import LocalAttention, has_sinks, transformer_engine_attention
from dlm_bridge.parallel.mcore_patches.modules import (
    BLOCK_ROUTING_CAPACITY,
    BlockRouter,
    LocalHeadNorm,
    LocalRMSNorm,
    LocalRouter,
    PredictionLayer,
    ReplicatedLinear,
    TransformerEngineActivation,
)
from dlm_bridge.parallel.self_attention import (
    FusedSelfAttention,
    HeadNorm,
    LatentAttention,
    ScaledQueryAttention,
    fuses_heads,
    scales_queries,
)
from dlm_bridge.registration import warn_if_untested

PRE_MLP_NORM = "pre_mlp_layernorm."
# Names of latent attention's norms when Transformer Engine fuses them with the linear layers that follow.
LATENT_NAMES = {
    PRE_MLP_NORM: "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def block_spec(config: TransformerConfig, attention_pattern: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layer specs of this rank's pipeline stage (virtual stage `vp_stage`) and the final norm.

    The modules are Transformer Engine's if it is installed and the platform is CUDA, otherwise megatron-core's local
    ones. Raises SettingError, LayoutError or MissingExtraError for an attention pattern, a normalisation or a
    combination that the engine does not support.
    """
    _check(config, attention_pattern)
    engine = uses_transformer_engine()
    if engine:
        warn_if_untested("transformer-engine")
    dense = _layer(config, attention_pattern, engine, experts=None)
    sparse = (
        _layer(config, attention_pattern, engine, experts=config.num_moe_experts) if config.num_moe_experts else dense
    )
    first = get_transformer_layer_offset(config, vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage))
    layers = [sparse if _has_experts(config, layer) else dense for layer in mine]
    return TransformerBlockSubmodules(layers, layer_norm=_transformer_engine_norm() if engine else LocalRMSNorm)


def prediction_spec(config: TransformerConfig, attention_pattern: str) -> MultiTokenPredictionBlockSubmodules:
    """Specs of the multi-token prediction layers on the last pipeline stage; each contains a layer like the model's
    last."""
    engine = uses_transformer_engine()
    layer = _layer(config, attention_pattern, engine, experts=config.num_moe_experts)
    norm = _transformer_engine_norm() if engine else LocalRMSNorm
    linear = _transformer_engine_linear() if engine else ColumnParallelLinear
    modules = mcore_compat.prediction_submodules(norm, linear, layer)
    return MultiTokenPredictionBlockSubmodules(
        [ModuleSpec(PredictionLayer, submodules=modules)] * config.mtp_num_layers
    )


def uses_transformer_engine() -> bool:
    """True if layers are built from Transformer Engine's modules."""
    return platform.current().uses_transformer_engine()


def _check(config: TransformerConfig, attention_pattern: str) -> None:
    check_attention_pattern(attention_pattern)
    if (attention_pattern == "block_causal" or has_sinks(config)) and config.cp_comm_type in ("a2a", "a2a+p2p"):
        raise LayoutError(
            "cp_comm_type", f"{config.cp_comm_type} with attention that gathers keys and values: use allgather"
        )
    if (has_sinks(config) or config.window_size is not None) and attention_pattern != "causal":
        feature = "attention sinks" if has_sinks(config) else "a sliding window"
        raise SettingError("engine", f"megatron supports {feature} with causal attention, not {attention_pattern}")
    if config.normalization != "RMSNorm":
        raise SettingError("normalization", f"must be RMSNorm, not {config.normalization}")
    if config.moe_grouped_gemm and not uses_transformer_engine():
        raise MissingExtraError("moe_grouped_gemm", "needs Transformer Engine: unset it, or install it on a GPU")


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    frequency = config.moe_layer_freq
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0


def _layer(config: TransformerConfig, attention_pattern: str, engine: bool, experts: int | None) -> ModuleSpec:
    """Spec of one kind of layer, dense if `experts` is None."""
    kind = {
        "num_experts": experts,
        "moe_grouped_gemm": config.moe_grouped_gemm and experts is not None,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            **kind, use_te_activation_func=config.use_te_activation_func
        )
    else:
        layer = get_gpt_layer_local_spec(**kind, normalization="RMSNorm")
        _make_local(layer.submodules, experts is not None)
    if config.use_te_activation_func and experts is None:
        mcore_compat.mlp_submodules(layer.submodules).activation_func = TransformerEngineActivation
    if experts is not None and getattr(config, BLOCK_ROUTING_CAPACITY, None):
        mcore_compat.mlp_submodules(layer.submodules).router = BlockRouter
    attention = layer.submodules.self_attention
    if scales_queries(config):
        attention.module = ScaledQueryAttention
    elif fuses_heads(config):
        attention.module = FusedSelfAttention
        _set_head_norms(attention.submodules, HeadNorm)
    if config.multi_latent_attention:
        attention.module = LatentAttention
    attention.params["attn_mask_type"] = MASK_TYPES[attention_pattern]
    local = not engine or has_sinks(config)
    attention.submodules.core_attention = LocalAttention if local else transformer_engine_attention()
    return layer


def _make_local(layer: Any, has_experts: bool) -> None:
    """Replace megatron-core's local modules that do not fit, and use the parameter names of Transformer Engine's
    layers."""
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalRMSNorm
    attention = layer.self_attention.submodules
    if isinstance(attention, MLASelfAttentionSubmodules):
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ReplicatedLinear
        attention.q_layernorm = attention.kv_layernorm = LocalRMSNorm  # over a rank's own tokens
        layer.sharded_state_dict_keys_map = dict(LATENT_NAMES)
    else:
        _set_head_norms(attention, LocalHeadNorm)
    if has_experts:
        mcore_compat.mlp_submodules(layer).router = LocalRouter
        del layer.sharded_state_dict_keys_map[PRE_MLP_NORM]


def _set_head_norms(attention: Any, norm: type) -> None:
    """Set the norm class of query and key heads, if the model has such norms."""
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, norm)


def _transformer_engine_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _transformer_engine_linear() -> Any:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear
