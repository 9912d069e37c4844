"""Settings of megatron-core's that something else has to turn on: without it nothing would follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dlm_bridge.train.config import TrainConfig

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


def missing(group: str, key: str, config: TrainConfig, passed: Passed) -> str | None:
    """What a setting of one group would need besides, where `config` and what is `passed` do not have it."""
    need = NEEDS[group].get(key)
    return None if need is None or need.met(config, passed) else need.words
