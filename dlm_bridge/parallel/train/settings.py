"""`--megatron GROUP.KEY=VALUE`: megatron-core's own settings, checked before a process or a GPU is used.

Refused are fields that an option of ours or config.json determines, and those that would make a run silently wrong:
what the engine computes itself, and maths that no export carries. All others are passed through, untested.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.parallel.core import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig
from dlm_bridge.parallel.gpt import IGNORED_SETTINGS
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.config.sections import DYNAMIC_CP, PASSED_THROUGH

CLASSES: dict[str, Any] = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}
# Fields that an option of ours determines, by the option.
OURS: dict[str, dict[str, str]] = {
    "transformer": {
        "tensor_model_parallel_size": "--tp",
        "pipeline_model_parallel_size": "--pp",
        "virtual_pipeline_model_parallel_size": "--vp",
        "num_layers_in_first_pipeline_stage": "--pipeline-split",
        "num_layers_in_last_pipeline_stage": "--pipeline-split",
        "pipeline_model_parallel_layout": "--pipeline-split",
        "account_for_embedding_in_pipeline_split": "--pipeline-split",
        "account_for_loss_in_pipeline_split": "--pipeline-split",
        "context_parallel_size": "--cp",
        "cp_comm_type": "--cp-comm-type",
        "hierarchical_context_parallel_sizes": "--hierarchical-cp-sizes",
        "expert_model_parallel_size": "--ep",
        "expert_tensor_parallel_size": "--etp",
        "moe_extended_tp": "--etp",
        "sequence_parallel": "--sequence-parallel",
        "tp_comm_overlap": "--tp-overlap",
        "bf16": "--precision",
        "fp16": "--precision",
        "params_dtype": "--precision",
        "pipeline_dtype": "--precision",
        "enable_autocast": "--precision",
        "autocast_dtype": "--precision",
        "fp8": "--precision fp8 with --fp8-format",
        "fp8_recipe": "--fp8-recipe",
        "fp8_param": "--fp8-params",
        "fp4": "--precision",
        "fp4_recipe": "--precision",
        "fp4_param": "--precision",
        "fp4_quantizer_factory": "--precision",
        "recompute_granularity": "--recompute",
        "recompute_method": "--recompute-layers",
        "recompute_num_layers": "--recompute-layers",
        "recompute_modules": "--recompute-modules",
        "moe_layer_recompute": "--recompute-modules",
        "overlap_p2p_comm": "--overlap-communication",
        "batch_p2p_comm": "--overlap-communication",
        "attention_backend": "--attention-backend",
        **dict.fromkeys(("cuda_graph_impl", "enable_cuda_graph", "cuda_graph_scope"), "--cuda-graphs"),
        "moe_token_dispatcher_type": "--moe-dispatcher",
        "moe_grouped_gemm": "--moe-grouped-gemm",
        "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
        "overlap_moe_expert_parallel_comm": "--ep-overlap",
        "moe_router_bias_update_rate": "--moe-expert-bias-update-rate",
        "moe_router_load_balancing_type": "--moe-aux-loss",
        "moe_aux_loss_coeff": "--moe-aux-loss-coeff",
        "moe_z_loss_coeff": "--moe-z-loss-coeff",
        "mtp_loss_scaling_factor": "--mtp-loss-scaling-factor",
    },
    "ddp": {
        "use_distributed_optimizer": "--distributed-optimizer",
        "overlap_grad_reduce": "--overlap-communication",
        "overlap_param_gather": "--overlap-communication",
        "use_megatron_fsdp": "--fsdp",
        "use_custom_fsdp": "--fsdp",
        "data_parallel_sharding_strategy": "--fsdp",
        "fp8_param_gather": "--fp8-params",
        "num_distributed_optimizer_instances": "--optimizer-instances",
    },
    "optimizer": {
        "optimizer": "--optimizer",
        "lr": "--lr",
        "min_lr": "--min-lr",
        "weight_decay": "--weight-decay",
        "adam_beta1": "--beta1",
        "adam_beta2": "--beta2",
        "adam_eps": "--adam-eps",
        "muon_momentum": "--muon-momentum",
        "clip_grad": "--clip-grad",
        "bf16": "--precision",
        "fp16": "--precision",
        "params_dtype": "--precision",
        "fp8_recipe": "--fp8-recipe",
        "use_distributed_optimizer": "--distributed-optimizer",
        "overlap_param_gather": "--overlap-communication",
        "optimizer_cpu_offload": "--optimizer-cpu-offload",
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
    "mtp_num_layers",
)  # fmt: skip
# Functions that the engine gives megatron-core.
CALLABLES = (
    "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func",
    "init_method", "output_layer_init_method", "embedding_init_method", "_cpu_offloading_context",
)  # fmt: skip
_LOADS = "the bridge loads every rank's weights, and the gradient norm needs the attributes that initialisation sets"
_DELAYED = "weight gradients would be missing without --ep-overlap, and were never compared with it"
_MUON = "--optimizer muon is the engine's own, with torch.optim.Muon's settings"
_MUON_SETTINGS = (
    "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec", "muon_num_ns_steps",
    "muon_tp_mode", "muon_extra_scale_factor",
)  # fmt: skip
_SHARED_BUFFER = "the engine's steps do not fill a buffer that weights and gradients share"
# Fields that would make a run silently wrong, and why.
REFUSED: dict[str, dict[str, str]] = {
    "transformer": {
        **IGNORED_SETTINGS,
        **dict.fromkeys(OF_THE_MODEL, "the model's config.json determines it"),
        **dict.fromkeys(CALLABLES, "the engine sets this function"),
        "external_cuda_graph": "--cuda-graphs are megatron-core's own, not Transformer Engine's",
        **dict.fromkeys(("perform_initialization", "init_model_with_meta_device", "use_cpu_initialization"), _LOADS),
        **dict.fromkeys(("hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"), DYNAMIC_CP),
        "delay_wgrad_compute": _DELAYED,
        "mtp_standalone": "multi-token prediction layers are on the last stage, with the loss",
        "moe_router_topk_limited_devices": "the routing would depend on --ep, and no export carries it",
    },
    "ddp": {
        "average_in_collective": "gradients are sums: the loss's weights carry the divisor",
        "delay_wgrad_compute": _DELAYED,
        "outer_dp_sharding_strategy": "each of --optimizer-instances holds all shards",
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
    },
    "optimizer": {
        "overlap_param_gather_with_optimizer_step": "the engine gathers weights when the next step begins",
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
        "timers": "the engine sets this function",
        **dict.fromkeys(_MUON_SETTINGS, _MUON),
    },
}
# Fields with one value only, and why.
ALWAYS: dict[str, dict[str, tuple[Any, str]]] = {
    "transformer": {"calculate_per_token_loss": (True, "--loss-normalisation sets the loss's divisor")}
}
PROBABILITIES = ("hidden_dropout", "attention_dropout")  # in [0, 1), which torch checks only when a layer is built
_SIMPLE = (bool, int, float, str)


def check_settings(config: TrainConfig) -> list[str]:
    """A line for each setting whose results were not shown to be right: those of `--megatron`, which are passed to
    megatron-core, and CUDA graphs. Raises SettingError for an unknown or refused one."""
    for group in PASSED_THROUGH:
        passed_on(config, group)
    lines = [f"--megatron {setting}: passed to megatron-core, untested here" for setting in config.engine.megatron]
    if config.engine.cuda_graphs:
        lines.append("--cuda-graphs: experimental, compared with a run without under --tp 2 alone")
    return lines


def passed_on(config: TrainConfig, group: str) -> dict[str, Any]:
    """The `--megatron GROUP.KEY=VALUE` settings of one group, in their fields' types; torch's dtypes by name. Raises
    SettingError for an unknown or refused field, and a value of another type."""
    settings_class = CLASSES[group]
    hints = typing.get_type_hints(settings_class)
    known = [field.name for field in dataclasses.fields(settings_class)]
    found = {}
    for key, value in config.engine.passed_through(group).items():
        where = f"--megatron {group}.{key}"
        if key in OURS[group]:
            raise SettingError(where, f"use {OURS[group][key]}")
        if key in REFUSED[group]:
            raise SettingError(where, f"cannot be set: {REFUSED[group][key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise SettingError(
                where, f"megatron-core's {settings_class.__name__} has no such field, the nearest is {near}"
            )
        found[key] = _typed(where, hints[key], value)
        fixed, reason = ALWAYS.get(group, {}).get(key, (found[key], ""))
        if found[key] != fixed:
            raise SettingError(where, f"cannot be {str(found[key]).lower()}: {reason}")
        if key in PROBABILITIES and not 0 <= found[key] < 1:
            raise SettingError(where, f"must be in [0, 1), not {found[key]}")
    return found


def _typed(where: str, hint: Any, value: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if value is None and type(None) in kinds:
        return None
    if torch.dtype in kinds:
        if isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
            return dtype
        raise SettingError(where, f"write one of torch's dtypes, such as bfloat16, not {value!r}")
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    if choices and value not in choices:
        raise SettingError(where, f"{value!r} is unknown: known are {', '.join(map(str, choices))}")
    if not all(kind in (*_SIMPLE, type(None)) for kind in kinds) or type(value) in kinds:
        return value  # megatron-core checks other types itself
    if float in kinds and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise SettingError(where, f"{value!r} is not {wanted}")
