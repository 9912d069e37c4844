"""megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig for the options of a run."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.mapping.rules import Dims
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.parallel import groups, mcore_compat, platform
from dlm_bridge.parallel.batch import rank_positions
from dlm_bridge.parallel.config import ROTARY_ATTRIBUTES, model_config
from dlm_bridge.parallel.core import (
    AttnBackend,
    DistributedDataParallelConfig,
    OptimizerConfig,
    named_refusals,
    parallel_state,
)
from dlm_bridge.parallel.layer_spec import uses_transformer_engine
from dlm_bridge.parallel.mcore_patches.modules import BLOCK_ROUTING_CAPACITY
from dlm_bridge.parallel.train.settings import passed_on
from dlm_bridge.settings import check_choice
from dlm_bridge.train.config import (
    TrainConfig,
    check_instances_of_experts,
    check_sequence_of_experts,
    check_userbuffers,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused")
# Settings that megatron-core's all-gather dispatcher does not support.
ALLTOALL_ONLY = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "variable_seq_lengths",
)
# Modules whose recomputation queries Transformer Engine's FP8 state.
TRANSFORMER_ENGINE_RECOMPUTE = ("layernorm", "moe_act")
# Elements; Megatron-LM's default. Without a size Megatron FSDP puts all parameters outside its units into one bucket
# with unsharded fp32 gradients: with `optim_grads`, which has no units, all parameters of the model.
_FSDP_BUCKET = 40_000_000
UNTRAINED = "set `mtp_loss_scaling_factor=0`, with which those layers are not trained"
MASKED = "graphs do not support rows with an attention mask"


def transformer_overrides(config: TrainConfig, bridge: Bridge, objective: Objective) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig for a run's options.

    Raises MissingExtraError for a setting that needs Transformer Engine, and SettingError or LayoutError for settings
    that the model does not support.
    """
    parallel, precision, backend = config.parallel, config.precision, config.engine.attention_backend
    has_te = uses_transformer_engine()
    on_cpu = platform.current().name == "cpu"
    te_activation = has_te and not bridge.dims.experts  # faster than megatron-core's, but does not support experts
    fields: dict[str, Any] = {
        "sequence_parallel": parallel.sharded_sequence,
        "tp_comm_overlap": parallel.tp_overlap,
        "cuda_graph_impl": "local" if config.engine.cuda_graphs else "none",
        "tp_comm_bootstrap_backend": "gloo",
        # Gradients are sums; the objective's weights contain the global normaliser.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": has_te and parallel.fsdp is None,
        # gloo sends after the call has returned, from memory that megatron-core frees, relying on streams.
        "deallocate_pipeline_outputs": parallel.pp > 1 and not on_cpu,
        "masked_softmax_fusion": False,
        # Fused by torch.compile, which does not pay off on a CPU.
        "bias_activation_fusion": not on_cpu and not te_activation,
        "use_te_activation_func": te_activation,
        "bias_dropout_fusion": not on_cpu,
        "apply_rope_fusion": has_te and _supports_fused_rope(bridge, objective),
        **_recompute_fields(config, has_te),
        **prediction_fields(config, bridge.dims.mtp),
    }
    # Interleaved stages communicate one by one; two stages need the overlapped schedule.
    if parallel.vp > 1 and parallel.pp > 2 and not parallel.overlap_communication:
        fields |= {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    if backend is not None:
        fields["attention_backend"] = AttnBackend[backend]
    if precision.precision == "fp8":
        if not has_te:
            raise MissingExtraError(
                "precision", "fp8 needs Transformer Engine and a GPU: pip install 'dlm-bridge[te]'"
            )
        fields |= {
            "fp8": precision.fp8_format,
            "fp8_recipe": precision.fp8_recipe,
            "fp8_param": precision.fp8_params,
        }
        if precision.fp8_recipe == "delayed":
            fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    passed = passed_on(config, "transformer")
    described = bridge.mapping.settings(bridge.config)
    if passed.get("moe_apply_probs_on_input") and described.get("moe_router_topk") != 1:
        raise SettingError("megatron", "transformer.moe_apply_probs_on_input needs routers that choose one expert")
    if bridge.dims.experts:
        check_experts(config)
        tokens = config.data.global_batch_size * config.data.seq_length * objective.tokens_read
        fields |= _moe_fields(config, has_te, tokens, _dispatcher(config, described["moe_router_topk"], passed))
    check_overlap(config, bridge.dims.experts, bool(fields.get("mtp_num_layers")), described)
    return fields | passed


def prediction_fields(config: TrainConfig, layers: int) -> dict[str, Any]:
    """TransformerConfig's fields for a model's multi-token prediction layers; empty if they are not trained, as with
    an adapter. Raises SettingError if FSDP does not support them."""
    factor, fsdp = config.objective.mtp_loss_scaling_factor, config.parallel.fsdp
    if not layers or not factor or config.model.adapts:
        return {}
    if fsdp is not None:
        raise SettingError(
            "fsdp",
            f"{fsdp}: multi-token prediction reads embedding and head after Megatron FSDP may have freed them: "
            f"{UNTRAINED}",
        )
    return {"mtp_num_layers": layers, "mtp_loss_scaling_factor": factor}


def _supports_fused_rope(bridge: Bridge, objective: Objective) -> bool:
    """True if the fused rotary kernel is equivalent: it needs the same positions in all rows, and applies neither
    YaRN's scale nor that of queries."""
    described = bridge.mapping.settings(bridge.config)
    own_positions = objective.own_positions or bool(described.get("multi_latent_attention"))
    return not own_positions and not any(name.startswith(ROTARY_ATTRIBUTES) for name in described)


def _recompute_fields(config: TrainConfig, has_te: bool) -> dict[str, Any]:
    recompute, modules, layers = config.engine.recompute, config.engine.recomputed, config.engine.recompute_layers
    if recompute == "full":
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if layers is not None:  # the first layers of every stage
            method = {"recompute_method": "block", "recompute_num_layers": layers}
        return {"recompute_granularity": "full", **method}
    if recompute == "selective":
        needing = [name for name in modules if name in TRANSFORMER_ENGINE_RECOMPUTE]
        if needing and not has_te:
            raise MissingExtraError("recompute_modules", f"{needing[0]} needs Transformer Engine: unset it")
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _dispatcher(config: TrainConfig, top_k: int, passed: dict[str, Any]) -> str:
    """megatron-core's token dispatcher. "auto" is the one that sends the fewest copies of a token: an all-gather sends
    one to each rank of the expert group, an all-to-all one to each of the `top_k` experts."""
    parallel = config.parallel
    if parallel.moe_dispatcher != "auto":
        return parallel.moe_dispatcher
    if parallel.moe_shared_expert_overlap or parallel.ep_overlap or any(passed.get(name) for name in ALLTOALL_ONLY):
        return "alltoall"
    return "allgather" if 1 < parallel.ep * parallel.expert_tp < top_k else "alltoall"


def _moe_fields(config: TrainConfig, has_te: bool, tokens: int, dispatcher: str) -> dict[str, Any]:
    parallel, objective, grouped = config.parallel, config.objective, config.engine.moe_grouped_gemm
    ep, expert_tp = parallel.ep, parallel.expert_tp
    if dispatcher == "alltoall" and min(ep, expert_tp) > 1 and platform.current().backend == "gloo":
        raise LayoutError(
            "moe_dispatcher",
            f"alltoall with `ep={ep}` and experts sharded over {expert_tp} ranks: gloo cannot gather shards of "
            "different sizes: use allgather, or `etp=1`",
        )
    scale, rows = mcore_compat.moe_loss_scale(tokens, parallel.tp, parallel.cp), 1
    if objective.moe_aux_loss_coeff and objective.moe_aux_loss == "seq_aux_loss":
        micro, _ = config.data.accumulation(parallel_state.get_data_parallel_world_size())
        rows = mcore_compat.sequence_loss_scale(micro)
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": has_te if grouped is None else grouped,
        "moe_permute_fusion": has_te,
        "moe_shared_expert_overlap": parallel.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm": parallel.ep_overlap,
        "moe_router_bias_update_rate": objective.moe_expert_bias_update_rate,
        "moe_router_load_balancing_type": objective.moe_aux_loss if objective.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": objective.moe_aux_loss_coeff * scale * rows,
    }
    if objective.moe_z_loss_coeff:
        fields["moe_z_loss_coeff"] = objective.moe_z_loss_coeff * scale
    return fields


def check_mcore_config(config: TrainConfig) -> None:
    """Check the settings that do not depend on the model. Raises SettingError, LayoutError, or MissingExtraError for a
    package or a device that this machine lacks."""
    if (backend := config.engine.attention_backend) is not None:
        check_choice("attention_backend", backend, ATTENTION_BACKENDS)
    if config.checkpoint.local_folder is not None and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise MissingExtraError(
            "local_folder",
            "needs nvidia-resiliency-ext, for Python 3.11 and 3.12: pip install 'dlm-bridge[resiliency]'",
        )
    if config.parallel.tp_overlap:
        groups.check_userbuffers(config.parallel.tp)
    if config.engine.cuda_graphs and not platform.current().records_graphs():
        raise MissingExtraError("cuda_graphs", "needs an NVIDIA GPU: unset it")
    data_parallel_config(config)
    optimizer_config(config)


def data_parallel_config(config: TrainConfig) -> DistributedDataParallelConfig:
    """megatron-core's configuration of data parallelism. Raises SettingError, or MissingExtraError without NCCL."""
    parallel, sharded = config.parallel, _is_sharded(config)
    settings: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": parallel.overlap_communication
        and (parallel.fsdp != "optim" or mcore_compat.FSDP_OVERLAPS_WHOLE_GRADIENTS),
        "overlap_param_gather": parallel.overlap_communication and sharded,
        "use_distributed_optimizer": sharded,
        "fp8_param_gather": config.precision.fp8_params,
        "num_distributed_optimizer_instances": parallel.optimizer_instances,
        "use_megatron_fsdp": parallel.fsdp is not None,
        **({"data_parallel_sharding_strategy": parallel.fsdp, "bucket_size": _FSDP_BUCKET} if parallel.fsdp else {}),
        **passed_on(config, "ddp"),
    }
    if settings.get("nccl_ub") and (backend := platform.current().backend) != "nccl":
        raise MissingExtraError("megatron", f"ddp.nccl_ub needs NCCL, but the backend is {backend}: unset it")
    with named_refusals():
        return DistributedDataParallelConfig(**settings)


def _is_sharded(config: TrainConfig) -> bool:
    """True if the optimizer's state is sharded. megatron-core shards only Adam's; SGD has little state, and Muon's
    must not be sharded."""
    distributed = config.parallel.distributed_optimizer and config.optimizer.optimizer == "adamw"
    return distributed or config.parallel.fsdp is not None


def optimizer_config(config: TrainConfig) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer. Raises SettingError, or MissingExtraError without Transformer
    Engine or a GPU."""
    dtype, optimizer, precision = DTYPES[config.precision.precision], config.optimizer, config.precision
    settings: dict[str, Any] = {
        "optimizer": "sgd" if optimizer.optimizer == "sgd" else "adam",  # Muon wraps Adam
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad or math.inf,  # inf only measures the norm
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_distributed_optimizer": _is_sharded(config),
        "optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
        "optimizer_offload_fraction": float(optimizer.optimizer_cpu_offload),
        # Otherwise main params would stay on the device as well, and checkpoints could not be resumed from.
        "use_precision_aware_optimizer": optimizer.optimizer_cpu_offload,
        **({"fp8_recipe": precision.fp8_recipe} if precision.precision == "fp8" else {}),
        **passed_on(config, "optimizer"),
    }
    if optimizer.optimizer_cpu_offload:
        if not (settings["use_precision_aware_optimizer"] and config.parallel.distributed_optimizer):
            raise SettingError(
                "optimizer_cpu_offload",
                "needs `distributed_optimizer` and megatron-core's optimizer.use_precision_aware_optimizer",
            )
        if platform.current().name == "cpu":
            raise MissingExtraError("optimizer_cpu_offload", "needs a GPU: unset it")
    if settings["use_precision_aware_optimizer"] and optimizer.ema_decay:
        raise SettingError(
            "ema_decay", "needs main params, which optimizer.use_precision_aware_optimizer does not have"
        )
    if settings["use_precision_aware_optimizer"] and importlib.util.find_spec("transformer_engine") is None:
        asked = "optimizer_cpu_offload" if optimizer.optimizer_cpu_offload else "megatron"
        raise MissingExtraError(
            asked, "optimizer.use_precision_aware_optimizer needs Transformer Engine: pip install 'dlm-bridge[te]'"
        )
    with named_refusals():
        return OptimizerConfig(**settings)


def check_model(
    config: TrainConfig, family: FamilySpec, hub_config: dict[str, Any], dims: Dims, objective: Objective | None
) -> None:
    """Check that megatron-core and this engine support a model, its options and its layout. Raises SettingError or
    LayoutError; packages and devices that this machine lacks are not reported."""
    with contextlib.suppress(MissingExtraError):
        check_mcore_config(config)
    if dims.experts:
        check_experts(config)
    check_sequence(config)
    if objective is not None:
        check_cuda_graphs(config, objective, family.attention_pattern)
    own = {"sequence_parallel": config.parallel.sharded_sequence} | passed_on(config, "transformer")
    predicting = prediction_fields(config, 0 if config.model.from_scratch else dims.mtp)
    check_overlap(config, dims.experts, bool(predicting), family.mapping.settings(hub_config))
    layout, dtype = config.parallel.layout, DTYPES[config.precision.precision]
    with contextlib.suppress(MissingExtraError):
        model_config(family.mapping, hub_config, dims, layout, dtype, config.parallel.context, **own, **predicting)


def check_sizes(config: TrainConfig, objective: Objective) -> None:
    """Raise LayoutError for rows and batches that a run's layout does not divide."""
    streams, vp, pp = objective.streams, config.parallel.vp, config.parallel.pp
    check_sequence(config)
    rank_positions(streams * config.data.seq_length, config.parallel.cp, streams)
    processes = parallel_state.get_data_parallel_world_size()
    micro, _ = config.data.accumulation(processes)
    for size in config.data.batch_sizes if vp > 1 else ():
        if (batches := size // processes // micro) % pp:
            raise LayoutError(
                "vp",
                f"{vp} needs a multiple of {pp} (`pp`) micro-batches, but a step has {batches}: change "
                "`global_batch_size`, `batch_ramp_up` or `micro_batch_size`",
            )


def check_sequence(config: TrainConfig) -> None:
    """Raise LayoutError for rows that sequence parallelism does not divide, which megatron-core detects too late."""
    tp, cp, length = config.parallel.tp, config.parallel.cp, config.data.seq_length
    if config.parallel.sharded_sequence and length // cp % tp:  # in each stream
        parts = f"{length}, in `cp={cp}` parts," if cp > 1 else f"{length}"
        raise LayoutError(
            "seq_length",
            f"{parts} does not divide over the `tp={tp}` ranks of sequence parallelism: change one of them, or set "
            "`sequence_parallel=False`",
        )


def check_experts(config: TrainConfig) -> None:
    """Raise SettingError for settings with which megatron-core does not train experts."""
    parallel = config.parallel
    check_sequence_of_experts(parallel.tp, parallel.sharded_sequence)
    check_instances_of_experts(parallel.optimizer_instances, parallel.fsdp)
    if parallel.moe_dispatcher == "flex" and parallel.ep * parallel.expert_tp == 1:
        raise SettingError("moe_dispatcher", "flex needs `ep` above 1: use alltoall")


def check_overlap(config: TrainConfig, experts: int, predicts: bool, described: dict[str, Any]) -> None:
    """Raise SettingError if overlapped communication or CUDA graphs do not support a model.

    Args:
        experts: number of experts.
        predicts: multi-token prediction layers are trained.
        described: the model's `Mapping.settings`.
    """
    parallel = config.parallel
    if parallel.tp_overlap:
        check_userbuffers(bool(described.get("multi_latent_attention")))
    if config.engine.cuda_graphs and experts:
        raise SettingError("cuda_graphs", "experts get a different number of tokens in each step: unset it")
    if config.engine.cuda_graphs and predicts:
        raise SettingError("cuda_graphs", f"untested with multi-token prediction layers: {UNTRAINED}, or unset it")
    if not parallel.ep_overlap:
        return
    if experts == parallel.ep and parallel.expert_tp == 1:
        raise SettingError(
            "ep_overlap",
            "with one expert per rank megatron-core frees tokens that gradients need: use a smaller `ep`, or leave "
            "it out",
        )
    if predicts:
        raise SettingError(
            "ep_overlap",
            f"megatron-core's schedule passes wrong tokens to multi-token prediction layers: {UNTRAINED}, or unset it",
        )
    if BLOCK_ROUTING_CAPACITY in described:
        raise SettingError("ep_overlap", "this model's routers depend on their layer's attention mask: unset it")


def check_cuda_graphs(config: TrainConfig, objective: Objective, attention_pattern: str) -> None:
    """Raise SettingError for CUDA graphs with an objective whose rows have an attention mask."""
    if config.engine.cuda_graphs and (objective.streams > 1 or attention_pattern == "block_causal"):
        raise SettingError("cuda_graphs", f"{MASKED}: unset it")
