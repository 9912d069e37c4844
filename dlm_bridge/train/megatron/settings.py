"""`--megatron GROUP.KEY=VALUE`: megatron-core's own settings, checked before a process or a GPU is used."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import DistributedDataParallelConfig, OptimizerConfig, TransformerConfig
from dlm_bridge.parallel.gpt import IGNORED_SETTINGS
from dlm_bridge.train.config import PASSED_THROUGH, MegatronOptions, TrainConfig

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
    "tp_comm_split_ag",
    "tp_comm_split_rs",
    "tp_comm_atomic_ag",
    "tp_comm_atomic_rs",
)
CUDA_GRAPHS = (
    "enable_cuda_graph",
    "external_cuda_graph",
    "cuda_graph_impl",
    "cuda_graph_scope",
    "cuda_graph_warmup_steps",
    "cuda_graph_use_single_mempool",
    "cuda_graph_retain_backward_graph",
    "use_te_rng_tracker",
)
INFERENCE = (
    "flash_decode",
    "inference_rng_tracker",
    "inference_sampling_seed",
    "inference_fuse_tp_communication",
    "use_inference_optimized_layers",
    "mlp_chunks_for_prefill",
)
OTHER_LAYERS = (
    "mrope_section",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "use_mamba_mem_eff_path",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_use_sparse_loss",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "hetereogenous_dist_checkpoint",
)
_MODEL = "the model's config.json says it"
_DYNAMIC = "megatron-core 0.16.1 has no dynamic (hybrid) context parallelism in its training path: use --cp"
_CALLABLE = "the engine gives megatron-core this function itself"
_NOTHING = "megatron-core 0.16.1 does nothing with it"
_NO_LOG = "the engine's steps neither ask for nor write this figure"
_NO_TIMERS = "it synchronises megatron-core's timers, which the engine does not use"
_OVERLAPPED = "only the schedule of overlap_moe_expert_parallel_comm does it"
_OTHER_NORMS = "the engine's norms are Transformer Engine's or torch's, which do not look at it"
_OTHER_ATTENTION = (
    "the engine's attention is Transformer Engine's, FlashAttention's or torch's, and does not look at it"
)
_SHARED_BUFFER = "the engine's steps do not fill a buffer that weights and gradients share"
_ALL_LOADED = "every weight is loaded, or initialised by the family's own rule"
# What nobody may set, and why.
REFUSED: dict[str, dict[str, str]] = {
    "transformer": {
        **IGNORED_SETTINGS,
        **dict.fromkeys(TP_OVERLAP, "nothing sets up the user buffers that Transformer Engine wants for it"),
        "hybrid_context_parallel": _DYNAMIC,
        "max_seqlen_per_dp_cp_rank": _DYNAMIC,
        "cross_entropy_loss_fusion": "the engine's own loss, of the chosen positions only, is always used",
        "cross_entropy_fusion_impl": "the engine's own loss, of the chosen positions only, is always used",
        **dict.fromkeys(
            CUDA_GRAPHS, "the engine records no CUDA graphs: the number of masked positions changes from step to step"
        ),
        **dict.fromkeys(INFERENCE, "it is a setting of inference"),
        **dict.fromkeys(OTHER_LAYERS, "the engine builds no layers of this kind"),
        **dict.fromkeys(("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"), _OVERLAPPED),
        **dict.fromkeys(("async_tensor_model_parallel_allreduce", "moe_token_dropping"), _NOTHING),
        **dict.fromkeys(("init_method_std", "embedding_init_method_std"), _ALL_LOADED),
        **dict.fromkeys(("qk_clip", "qk_clip_alpha", "qk_clip_threshold"), "the engine's steps do not clip logits"),
        **dict.fromkeys(("log_max_attention_logit", "moe_per_layer_logging"), _NO_LOG),
        **dict.fromkeys(("mtp_standalone", "mtp_loss_scaling_factor"), "it is a part of multi-token prediction"),
        **dict.fromkeys(("persist_layer_norm", "memory_efficient_layer_norm"), _OTHER_NORMS),
        **dict.fromkeys(("masked_softmax_fusion", "attention_softmax_in_fp32"), _OTHER_ATTENTION),
        "batch_invariant_mode": "its kernels are put in place by Megatron-LM's own training script",
        "fp8_quantizer_factory": "it is of a custom recipe, which --fp8-recipe does not have",
        "barrier_with_L1_time": _NO_TIMERS,
        "wgrad_deferral_limit": "it belongs to defer_embedding_wgrad_compute, which cannot be set",
        "num_microbatches_with_partial_activation_checkpoints": (
            "megatron-core 0.16.1's layers recompute alike in every micro-batch"
        ),
        "pipeline_model_parallel_comm_backend": "process groups are made with the platform's backend",
        "use_ring_exchange_p2p": "it needs a torch with ring_exchange, which no release has",
        "moe_enable_routing_replay": "nothing records a routing or replays one",
        "moe_use_legacy_grouped_gemm": "experts are Transformer Engine's grouped layers, or one by one",
        "moe_router_topk_limited_devices": "it would make the routing depend on --ep; config.json says the groups",
        **dict.fromkeys(
            ("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
            "the engine's layers are Transformer Engine's or its own, none of nvidia-kitchen's",
        ),
        "test_mode": "it is of megatron-core's own tests",
        "quant_recipe": "it is no value that can be written here: use --precision fp8 with --fp8-recipe",
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
                "layernorm_zero_centered_gamma", "use_fused_weighted_squared_relu",
                "apply_residual_connection_post_layernorm", "glu_linear_offset",
                "activation_func_clamp_value", "no_rope_freq", "linear_attention_freq", "window_attn_skip_freq",
            ),
            _MODEL,
        ),
        **dict.fromkeys(
            (
                "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
                "param_sync_func", "init_method", "output_layer_init_method", "embedding_init_method",
                "_cpu_offloading_context",
            ),
            _CALLABLE,
        ),
    },
    "ddp": {
        "average_in_collective": "gradients are sums: the loss's weights carry what they are divided by",
        "num_distributed_optimizer_instances": "the process groups of several instances are not made",
        "align_param_gather": "stages gather when they are ready",
        "delay_wgrad_compute": _OVERLAPPED,
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
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
        "overlap_param_gather_with_optimizer_step": "the gather of weights begins with the next step",
        "reuse_grad_buf_for_mxfp8_param_ag": _SHARED_BUFFER,
        "log_num_zeros_in_grad": _NO_LOG,
        "barrier_with_L1_time": _NO_TIMERS,
        "timers": _CALLABLE,
    },
}  # fmt: skip
# What has one value only, and why.
ALWAYS: dict[str, dict[str, tuple[Any, str]]] = {
    "transformer": {
        "calculate_per_token_loss": (True, "it is always on: --loss-normalisation says what a loss is divided by")
    }
}
SHARES = ("hidden_dropout", "attention_dropout")  # from 0 to below 1, which is not checked before a layer is built
_SIMPLE = (bool, int, float, str)


def check_settings(config: TrainConfig) -> None:
    """Raise DlmBridgeError for a `--megatron` setting that megatron-core does not know, that nobody may set, or that
    does nothing beside the rest of `config`."""
    for group in PASSED_THROUGH:
        passed = passed_on(config, group)
        defaults = default_values(group)
        for key, value in passed.items():
            if value != defaults[key] and (words := missing_setting(group, key, config, passed)):
                raise DlmBridgeError(
                    f"--megatron {group}.{key} does nothing without {words}: add that, or leave this out"
                )


def default_values(group: str) -> dict[str, Any]:
    """megatron-core's own values of one group's fields."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(CLASSES[group])
    }


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
        fixed, reason = ALWAYS.get(group, {}).get(key, (found[key], ""))
        if found[key] != fixed:
            raise DlmBridgeError(f"{where} cannot be {str(found[key]).lower()}: {reason}")
        if key in SHARES and not 0 <= found[key] < 1:
            raise DlmBridgeError(f"{where} must be in [0, 1), not {found[key]}")
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


Passed = dict[str, Any]  # what `--megatron` says of the same group


class Need(NamedTuple):
    """What has to be there, in words, and whether it is."""

    words: str
    met: Callable[[TrainConfig, Passed], bool]


def _needs(words: str, met: Callable[[TrainConfig, Passed], bool], *keys: str) -> dict[str, Need]:
    return dict.fromkeys(keys, Need(words, met))


def _setting(name: str) -> Callable[[TrainConfig, Passed], bool]:
    key = name.partition("=")[0].partition(".")[2]
    return lambda config, passed: bool(passed.get(key))


def _low(config: TrainConfig, passed: Passed) -> bool:
    return config.precision == "fp8" or bool(passed.get("fp4"))


NEEDS: dict[str, dict[str, Need]] = {
    "transformer": {
        **_needs(
            "--precision fp8 and --fp8-recipe delayed",
            lambda config, _: config.precision == "fp8" and config.fp8_recipe == "delayed",
            "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
        ),
        **_needs(
            "--precision fp8",
            lambda config, _: config.precision == "fp8",
            "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red",
        ),
        **_needs("--precision fp8", _low, "first_last_layers_bf16", "disable_parameter_transpose_cache"),
        **_needs(
            "transformer.first_last_layers_bf16=true",
            _setting("transformer.first_last_layers_bf16"),
            "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        ),
        **_needs("transformer.fp4", _setting("transformer.fp4"), "fp4_recipe", "fp4_param", "fp4_quantizer_factory"),
        **_needs(
            "transformer.cpu_offloading=true",
            _setting("transformer.cpu_offloading"),
            "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights",
            "cpu_offloading_double_buffering",
        ),
        **_needs(
            "transformer.fine_grained_activation_offloading=true",
            _setting("transformer.fine_grained_activation_offloading"),
            "offload_modules", "min_offloaded_tensor_size",
        ),
        **_needs(
            "--vp",
            lambda config, _: config.vp > 1,
            "microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush",
        ),
        **_needs(
            "--pp",
            lambda config, _: config.pp > 1,
            "batch_p2p_sync", "deallocate_pipeline_outputs", "variable_seq_lengths",
        ),
        **_needs(
            "--recompute full and --tp",
            lambda config, _: config.recompute == "full" and config.tp > 1,
            "distribute_saved_activations",
        ),
        **_needs(
            "--moe-dispatcher flex",
            lambda config, _: config.moe_dispatcher == "flex",
            "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms",
        ),
        **_needs(
            "transformer.moe_expert_capacity_factor",
            _setting("transformer.moe_expert_capacity_factor"),
            "moe_pad_expert_input_to_capacity", "moe_token_drop_policy",
        ),
    },
    "ddp": {
        **_needs(
            "--fsdp",
            lambda config, _: config.fsdp is not None,
            "fsdp_double_buffer", "fsdp_manual_registration", "suggested_communication_unit_size",
            "keep_fp8_transpose_cache", "gradient_reduce_div_fusion", "preserve_fp32_weights",
        ),
        **_needs("ddp.nccl_ub=true", _setting("ddp.nccl_ub"), "disable_symmetric_registration"),
        **_needs(
            "the sharded optimizer, which is AdamW's without --fsdp and --no-distributed-optimizer",
            lambda config, _: config.distributed_optimizer and config.optimizer == "adamw" and config.fsdp is None,
            "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation",
        ),
    },
    "optimizer": {
        **_needs("--optimizer sgd", lambda config, _: config.optimizer == "sgd", "sgd_momentum"),
        **_needs("--optimizer adamw", lambda config, _: config.optimizer == "adamw", "decoupled_weight_decay"),
        **_needs(
            "--optimizer-cpu-offload",
            lambda config, _: config.optimizer_cpu_offload,
            "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads", "pin_cpu_params",
        ),
        **_needs(
            "optimizer.use_precision_aware_optimizer=true",
            lambda config, passed: config.optimizer_cpu_offload or bool(passed.get("use_precision_aware_optimizer")),
            "store_param_remainders",
        ),
        **_needs(
            "--precision fp16, whose loss scale is not given",
            lambda config, passed: config.precision == "fp16" and passed.get("loss_scale") is None,
            "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
        ),
    },
}  # fmt: skip


def missing_setting(group: str, key: str, config: TrainConfig, passed: Passed) -> str | None:
    """What a setting of one group would need besides, where `config` and what is `passed` do not have it."""
    need = NEEDS[group].get(key)
    return None if need is None or need.met(config, passed) else need.words
