"""megatron-core's own settings (`megatron`, GROUP.KEY=VALUE), checked before a process or a GPU is used.

Refused are fields that another setting or config.json determines, and fields that would make a run silently wrong,
because the engine computes the value itself or no export supports the operation. All others are passed to
megatron-core, untested.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.core import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig
from dlm_bridge.parallel.gpt import IGNORED_SETTINGS
from dlm_bridge.settings import nearest
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import DYNAMIC_CP, PASSED_THROUGH

CLASSES: dict[str, Any] = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}
# Fields that another setting determines, and that setting.
OURS: dict[str, dict[str, str]] = {
    "transformer": {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vp",
        "num_layers_in_first_pipeline_stage": "pipeline_split",
        "num_layers_in_last_pipeline_stage": "pipeline_split",
        "pipeline_model_parallel_layout": "pipeline_split",
        "account_for_embedding_in_pipeline_split": "pipeline_split",
        "account_for_loss_in_pipeline_split": "pipeline_split",
        "context_parallel_size": "cp",
        "cp_comm_type": "cp_comm_type",
        "hierarchical_context_parallel_sizes": "hierarchical_cp_sizes",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
        "moe_extended_tp": "etp",
        "sequence_parallel": "sequence_parallel",
        "tp_comm_overlap": "tp_overlap",
        "bf16": "precision",
        "fp16": "precision",
        "params_dtype": "precision",
        "pipeline_dtype": "precision",
        "enable_autocast": "precision",
        "autocast_dtype": "precision",
        "fp8": "precision",
        "fp8_recipe": "fp8_recipe",
        "fp8_param": "fp8_params",
        "fp4": "precision",
        "fp4_recipe": "precision",
        "fp4_param": "precision",
        "fp4_quantizer_factory": "precision",
        "recompute_granularity": "recompute",
        "recompute_method": "recompute_layers",
        "recompute_num_layers": "recompute_layers",
        "recompute_modules": "recompute_modules",
        "moe_layer_recompute": "recompute_modules",
        "overlap_p2p_comm": "overlap_communication",
        "batch_p2p_comm": "overlap_communication",
        "attention_backend": "attention_backend",
        **dict.fromkeys(
            ("cuda_graph_impl", "enable_cuda_graph", "cuda_graph_scope", "cuda_graph_modules"), "cuda_graphs"
        ),
        "moe_token_dispatcher_type": "moe_dispatcher",
        "moe_grouped_gemm": "moe_grouped_gemm",
        "moe_shared_expert_overlap": "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm": "ep_overlap",
        "moe_router_bias_update_rate": "moe_expert_bias_update_rate",
        "moe_router_load_balancing_type": "moe_aux_loss",
        "moe_aux_loss_coeff": "moe_aux_loss_coeff",
        "moe_z_loss_coeff": "moe_z_loss_coeff",
        "mtp_loss_scaling_factor": "mtp_loss_scaling_factor",
    },
    "ddp": {
        "use_distributed_optimizer": "distributed_optimizer",
        "overlap_grad_reduce": "overlap_communication",
        "overlap_param_gather": "overlap_communication",
        "use_megatron_fsdp": "fsdp",
        "use_custom_fsdp": "fsdp",
        "data_parallel_sharding_strategy": "fsdp",
        "fp8_param_gather": "fp8_params",
        "num_distributed_optimizer_instances": "optimizer_instances",
    },
    "optimizer": {
        "optimizer": "optimizer",
        "lr": "lr",
        "min_lr": "min_lr",
        "weight_decay": "weight_decay",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_eps": "adam_eps",
        "muon_momentum": "muon_momentum",
        "clip_grad": "clip_grad",
        "bf16": "precision",
        "fp16": "precision",
        "params_dtype": "precision",
        "fp8_recipe": "fp8_recipe",
        "use_distributed_optimizer": "distributed_optimizer",
        "overlap_param_gather": "overlap_communication",
        "optimizer_cpu_offload": "optimizer_cpu_offload",
    },
}
# Fields that the model's config.json determines.
OF_THE_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "activation_func", "gated_linear_unit", "normalization", "layernorm_epsilon",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "window_size", "rotary_interleaved",
    "multi_latent_attention", "softmax_scale", "softmax_type", "num_moe_experts", "moe_ffn_hidden_size",
    "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_topk",
    "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    "is_hybrid_model", "heterogeneous_block_specs", "experimental_attention_variant",
    "moe_latent_size", "moe_shared_expert_gate", "qk_l2_norm", "attention_output_gate",
    "layernorm_zero_centered_gamma", "use_fused_weighted_squared_relu",
    "apply_residual_connection_post_layernorm", "glu_linear_offset",
    "activation_func_clamp_value", "no_rope_freq", "linear_attention_freq", "window_attn_skip_freq",
    "mtp_num_layers", "mtp_use_repeated_layer", "mtp_hybrid_override_pattern", "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
)  # fmt: skip
# Functions that the engine passes to megatron-core.
CALLABLES = (
    "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
    "init_method", "output_layer_init_method", "embedding_init_method", "_cpu_offloading_context",
    "moe_grad_scale_func", "mtp_grad_scale_func", "experimental_attention_variant_loss_scale_func",
)  # fmt: skip
_LOADS = "the bridge loads every rank's weights, and the gradient norm needs the attributes that initialisation sets"
_DELAYED = "weight gradients would be missing without `ep_overlap`, and were never compared with it"
_MUON = "`optimizer=muon` is the engine's own, with torch.optim.Muon's settings"
_MUON_SETTINGS = (
    "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec", "muon_num_ns_steps",
    "muon_tp_mode", "muon_extra_scale_factor", "muon_nesterov", "muon_coefficient_type", "muon_scalar_optimizer",
    "adaptive_muon_moment2_method", "adaptive_muon_beta2", "adaptive_muon_eps",
)  # fmt: skip
_OTHER_OPTIMIZERS = (
    "lion_beta1", "lion_beta2", "soap_shampoo_beta", "soap_precondition_frequency", "soap_use_kl_shampoo",
)  # fmt: skip
_MUP = (
    "use_mup", "mup_width_mult", "mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim",
    "mup_attn_scale_power",
)  # fmt: skip
_REMATERIALISED = (
    "tensor_parallel_num_weight_shards", "gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size",
)  # fmt: skip
_OWN_STEP = "the engine's own optimizer step ignores it"
_SHARED_BUFFER = "the engine's steps do not fill a buffer shared by weights and gradients"
# Fields that would make a run silently wrong, and why.
REFUSED: dict[str, dict[str, str]] = {
    "transformer": {
        **IGNORED_SETTINGS,
        **dict.fromkeys(OF_THE_MODEL, "the model's config.json determines it"),
        **dict.fromkeys(CALLABLES, "the engine sets this function"),
        "external_cuda_graph": "`cuda_graphs` uses megatron-core's own, not Transformer Engine's",
        **dict.fromkeys(("perform_initialization", "init_model_with_meta_device", "use_cpu_initialization"), _LOADS),
        **dict.fromkeys(("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"), DYNAMIC_CP),
        "delay_wgrad_compute": _DELAYED,
        "mtp_standalone": "multi-token prediction layers are on the last stage, with the loss",
        "mtp_detach_heads": "the engine's multi-token prediction layers ignore it",
        "fp8_output_proj": "the engine's output layer computes the loss without logits",
        **dict.fromkeys(_MUP, "no public model's config.json has its multipliers, so an export would be wrong"),
        **dict.fromkeys(_REMATERIALISED, "the engine's process groups and checkpoints do not support it"),
        "moe_pad_experts_for_cuda_graph_inference": "it is for inference",
        "use_grouped_gemm_for_dense_mlp": "the engine's layer specs ignore it",
        **dict.fromkeys(
            ("moe_single_grouped_weight", "moe_single_grouped_bias"), "the mapping has a weight per expert"
        ),
        "moe_router_topk_limited_devices": "the routing would depend on `ep`, and no export supports it",
    },
    "ddp": {
        "fp4_param_gather": "`precision` has no fp4",
        "average_in_collective": "gradients are sums: the loss's weights contain the divisor",
        "delay_wgrad_compute": _DELAYED,
        "outer_dp_sharding_strategy": "each of the `optimizer_instances` has all shards",
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
    },
    "optimizer": {
        "overlap_param_gather_with_optimizer_step": "the engine gathers weights when the next step starts",
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
        "timers": "the engine sets this function",
        **dict.fromkeys(_MUON_SETTINGS, _MUON),
        **dict.fromkeys(_OTHER_OPTIMIZERS, "`optimizer` has neither Lion nor SOAP"),
        "use_layer_wise_distributed_optimizer": "the engine's checkpoints do not support it",
        **dict.fromkeys(("grad_norm_skip_threshold", "optimizer_cuda_graph"), _OWN_STEP),
    },
}
# Fields with a single supported value, and why.
ALWAYS: dict[str, dict[str, tuple[Any, str]]] = {
    "transformer": {"calculate_per_token_loss": (True, "`loss_normalisation` sets the loss's divisor")}
}
PROBABILITIES = ("hidden_dropout", "attention_dropout")  # in [0, 1); torch checks only when a layer is built
_SIMPLE = (bool, int, float, str)


def check_settings(config: TrainConfig) -> list[str]:
    """Return a line for each setting whose results are unverified: those passed to megatron-core, and CUDA graphs.
    Raises SettingError for an unknown or refused field."""
    for group in PASSED_THROUGH:
        passed_on(config, group)
    lines = [f"`megatron={setting}`: passed to megatron-core, untested" for setting in config.engine.megatron]
    if config.engine.cuda_graphs:
        lines.append("`cuda_graphs`: experimental, compared with eager runs only under `tp=2`")
    return lines


def passed_on(config: TrainConfig, group: str) -> dict[str, Any]:
    """Settings of one group that are passed to megatron-core, in their fields' types; torch's dtypes by name. Raises
    SettingError for an unknown or refused field, and for a value of the wrong type."""
    settings_class = CLASSES[group]
    hints = typing.get_type_hints(settings_class)
    known = [field.name for field in dataclasses.fields(settings_class)]
    found = {}
    for key, value in config.engine.passed_through(group).items():
        where = f"{group}.{key}"
        if key in OURS[group]:
            raise _refusal(where, f"use `{OURS[group][key]}`")
        if key in REFUSED[group]:
            raise _refusal(where, f"cannot be set: {REFUSED[group][key]}")
        if key not in known:
            hint = nearest(key, known, cutoff=0)
            raise _refusal(where, f"is unknown: {hint} of megatron-core's {settings_class.__name__}")
        found[key] = _typed(where, hints[key], value)
        fixed, reason = ALWAYS.get(group, {}).get(key, (found[key], ""))
        if found[key] != fixed:
            raise _refusal(where, f"cannot be {str(found[key]).lower()}: {reason}")
        if key in PROBABILITIES and not 0 <= found[key] < 1:
            raise _refusal(where, f"must be in [0, 1), not {found[key]}")
    return found


def _refusal(where: str, reason: str) -> SettingError:
    return SettingError("megatron", f"{where} {reason}")


def _typed(where: str, hint: Any, value: Any) -> Any:
    """Convert a value to a field's type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if value is None and type(None) in kinds:
        return None
    if torch.dtype in kinds:
        if isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
            return dtype
        raise _refusal(where, f"must be one of torch's dtypes, such as bfloat16, not {value!r}")
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    if choices and value not in choices:
        raise _refusal(where, f"must be one of {', '.join(map(str, choices))}, not {value!r}")
    if not all(kind in (*_SIMPLE, type(None)) for kind in kinds) or type(value) in kinds:
        return value  # megatron-core checks other types itself
    if float in kinds and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise _refusal(where, f"must be {wanted}, not {value!r}")
