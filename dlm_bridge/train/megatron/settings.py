"""`--megatron GROUP.KEY=VALUE`: megatron-core's own settings, checked before a process or a GPU is used."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig
from dlm_bridge.parallel.gpt import IGNORED
from dlm_bridge.train.megatron_options import PASSED_THROUGH, MegatronOptions

CLASSES: dict[str, Any] = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}
# What an option of ours sets, by the option.
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
        "bf16": "--precision",
        "fp16": "--precision",
        "params_dtype": "--precision",
        "pipeline_dtype": "--precision",
        "enable_autocast": "--precision",
        "autocast_dtype": "--precision",
        "fp8": "--precision fp8 with --fp8-format",
        "fp8_recipe": "--fp8-recipe",
        "fp8_param": "--fp8-params",
        "recompute_granularity": "--recompute",
        "recompute_method": "--recompute-layers",
        "recompute_num_layers": "--recompute-layers",
        "recompute_modules": "--recompute-modules",
        "moe_layer_recompute": "--recompute-modules",
        "overlap_p2p_comm": "--overlap-communication",
        "batch_p2p_comm": "--overlap-communication",
        "attention_backend": "--attention-backend",
        "moe_token_dispatcher_type": "--moe-dispatcher",
        "moe_grouped_gemm": "--moe-grouped-gemm",
        "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
        "moe_router_bias_update_rate": "--moe-expert-bias-update-rate",
        "moe_router_load_balancing_type": "--moe-aux-loss",
        "moe_aux_loss_coeff": "--moe-aux-loss-coeff",
        "moe_z_loss_coeff": "--moe-z-loss-coeff",
    },
    "ddp": {
        "use_distributed_optimizer": "--distributed-optimizer",
        "overlap_grad_reduce": "--overlap-communication",
        "overlap_param_gather": "--overlap-communication",
        "use_megatron_fsdp": "--fsdp",
        "use_custom_fsdp": "--fsdp",
        "data_parallel_sharding_strategy": "--fsdp",
        "fp8_param_gather": "--fp8-params",
    },
    "optimizer": {
        "optimizer": "--optimizer",
        "lr": "--lr",
        "min_lr": "--min-lr",
        "weight_decay": "--weight-decay",
        "adam_beta1": "--beta1",
        "adam_beta2": "--beta2",
        "adam_eps": "--adam-eps",
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
TP_OVERLAP = (
    "tp_comm_overlap",
    "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
    "tp_comm_bootstrap_backend",
    "tp_comm_overlap_disable_qkv",
    "tp_comm_overlap_disable_fc1",
)
_MODEL = "the model's config.json says it"
_DYNAMIC = "megatron-core 0.16.1 has no dynamic (hybrid) context parallelism in its training path: use --cp"
_CALLABLE = "the engine gives megatron-core this function itself"
# What nobody may set, and why.
REFUSED: dict[str, dict[str, str]] = {
    "transformer": {
        **IGNORED,
        **dict.fromkeys(TP_OVERLAP, "nothing sets up the user buffers that Transformer Engine wants for it"),
        "hybrid_context_parallel": _DYNAMIC,
        "max_seqlen_per_dp_cp_rank": _DYNAMIC,
        "calculate_per_token_loss": "it is always on: --loss-normalisation says what a loss is divided by",
        "cross_entropy_loss_fusion": "the engine's own loss, of the chosen positions only, is always used",
        "cross_entropy_fusion_impl": "the engine's own loss, of the chosen positions only, is always used",
        "perform_initialization": "every weight is loaded, and the gradient norm goes by what initialisation marks",
        "init_model_with_meta_device": "the bridge loads every rank's own part",
        "use_cpu_initialization": "the bridge loads every rank's own part",
        "transformer_impl": "Transformer Engine's layers are used where the platform has them",
        **dict.fromkeys(
            (
                "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
                "kv_channels", "activation_func", "gated_linear_unit", "normalization", "layernorm_epsilon",
                "add_bias_linear", "add_qkv_bias", "qk_layernorm", "window_size", "rotary_interleaved",
                "multi_latent_attention", "softmax_scale", "softmax_type", "num_moe_experts", "moe_ffn_hidden_size",
                "moe_layer_freq", "moe_shared_expert_intermediate_size", "moe_router_topk",
                "moe_router_pre_softmax", "moe_router_score_function", "moe_router_num_groups",
                "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
                "is_hybrid_model", "heterogeneous_block_specs", "experimental_attention_variant",
                "moe_latent_size", "moe_shared_expert_gate", "qk_l2_norm", "attention_output_gate",
                "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "glu_linear_offset",
                "activation_func_clamp_value", "no_rope_freq", "linear_attention_freq", "window_attn_skip_freq",
            ),
            _MODEL,
        ),
        **dict.fromkeys(
            (
                "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
                "param_sync_func", "init_method", "output_layer_init_method", "embedding_init_method",
            ),
            _CALLABLE,
        ),
    },
    "ddp": {
        "average_in_collective": "gradients are sums: the loss's weights carry what they are divided by",
        "num_distributed_optimizer_instances": "the process groups of several instances are not made",
        "outer_dp_sharding_strategy": "the device mesh of two-level FSDP is not made",
    },
    "optimizer": {
        **dict.fromkeys(
            (
                "muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec",
                "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor",
            ),
            "--optimizer has no Muon",
        ),
        "decoupled_lr": "all parameters have the learning rate of --lr",
        "decoupled_min_lr": "all parameters have the learning rate of --lr",
        "timers": _CALLABLE,
    },
}  # fmt: skip
_SIMPLE = (bool, int, float, str)


def check_settings(options: MegatronOptions) -> None:
    """Raise DlmBridgeError for a `--megatron` setting that megatron-core does not know or nobody may set."""
    for group in PASSED_THROUGH:
        passed_on(options, group)


def passed_on(options: MegatronOptions, group: str) -> dict[str, Any]:
    """What `--megatron GROUP.KEY=VALUE` says of one group, in its fields' types; torch's dtypes by name. Raises
    DlmBridgeError for an unknown field, one that an option of ours or the model sets, and a value of another type."""
    kind = CLASSES[group]
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    found = {}
    for key, value in options.passed_through(group).items():
        where = f"--megatron {group}.{key}"
        if key in OURS[group]:
            raise DlmBridgeError(f"{where}: use {OURS[group][key]}")
        if key in REFUSED[group]:
            raise DlmBridgeError(f"{where} cannot be set: {REFUSED[group][key]}")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise DlmBridgeError(f"{where}: megatron-core's {kind.__name__} has no such field, the nearest is {near}")
        found[key] = _typed(where, hints[key], value)
    return found


def _typed(where: str, hint: Any, value: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if value is None and type(None) in kinds:
        return None
    if torch.dtype in kinds:
        if isinstance(dtype := getattr(torch, str(value), None), torch.dtype):
            return dtype
        raise DlmBridgeError(f"{where}: write one of torch's dtypes, such as bfloat16, not {value!r}")
    choices = [
        choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)
    ]
    if choices and value not in choices:
        raise DlmBridgeError(f"{where}: {value!r} is unknown: known are {', '.join(map(str, choices))}")
    if not all(kind in (*_SIMPLE, type(None)) for kind in kinds) or type(value) in kinds:
        return value  # what is no number or word is megatron-core's to check
    if float in kinds and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except ValueError:
            pass
    wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise DlmBridgeError(f"{where}: {value!r} is not {wanted}")
