"""Training options as megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import Dims
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.two_streams import WeDLMDiffusion
from dlm_bridge.parallel import platform, refusals
from dlm_bridge.parallel.config import ATTRIBUTES
from dlm_bridge.parallel.context_parallel import rank_positions
from dlm_bridge.parallel.core import (
    AttnBackend,
    DistributedDataParallelConfig,
    OptimizerConfig,
    parallel_state,
)
from dlm_bridge.parallel.layer_spec import uses_transformer_engine
from dlm_bridge.parallel.refusals import NotInstalledError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.megatron.settings import passed_on

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
ATTENTION = ("auto", "flash", "fused", "unfused")
# Settings of megatron-core's that only Transformer Engine's layers follow.
TRANSFORMER_ENGINE_ONLY = (
    "apply_query_key_layer_scaling",
    "apply_rope_fusion",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "fp4",
    "fp32_residual_connection",
    "moe_permute_fusion",
    "moe_router_fusion",
    "symmetric_ar_type",
    "use_te_activation_func",
)
# What megatron-core's all-gather of tokens does not know.
ALLTOALL_ONLY = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "variable_seq_lengths",
)
# Modules whose recomputation asks Transformer Engine whether its precision is FP8.
TRANSFORMER_ENGINE_RECOMPUTE = ("layernorm", "moe_act")


def transformer_overrides(config: TrainConfig, bridge: Bridge, objective: Objective) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that a run's options set.

    Raises DlmBridgeError for what needs Transformer Engine where it is not there.
    """
    engine = uses_transformer_engine()
    on_cpu = platform.current().name == "cpu"
    te_activation = engine and not bridge.dims.experts  # faster than megatron-core's, which only experts need
    fields: dict[str, Any] = {
        "sequence_parallel": config.parallel.sharded_sequence,
        # Gradients are sums; the objective's weights carry the global normaliser.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": engine and config.parallel.fsdp is None,
        # gloo sends after the call has returned, from memory that megatron-core frees in the belief that streams wait.
        "deallocate_pipeline_outputs": config.parallel.pp > 1 and not on_cpu,
        "masked_softmax_fusion": False,
        # Fused by torch.compile, which takes longer on a CPU than it ever saves.
        "bias_activation_fusion": not on_cpu and not te_activation,
        "use_te_activation_func": te_activation,
        "bias_dropout_fusion": not on_cpu,
        "apply_rope_fusion": engine and _supports_fused_rope(bridge, objective),
        **_recompute_fields(config, engine),
    }
    if (
        config.parallel.vp > 1 and config.parallel.pp > 2 and not config.parallel.overlap_communication
    ):  # two stages cannot do without
        fields |= {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    if config.engine.attention_backend is not None:
        fields["attention_backend"] = AttnBackend[config.engine.attention_backend]
    if config.precision.name == "fp8":
        if not engine:
            raise DlmBridgeError("--precision fp8 needs Transformer Engine and a GPU: pip install 'dlm-bridge[te]'")
        fields |= {
            "fp8": config.precision.fp8_format,
            "fp8_recipe": config.precision.fp8_recipe,
            "fp8_param": config.precision.fp8_params,
        }
        if config.precision.fp8_recipe == "delayed":
            fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    passed = passed_on(config, "transformer")
    for name in () if engine else TRANSFORMER_ENGINE_ONLY:
        if passed.get(name):
            raise DlmBridgeError(f"--megatron transformer.{name} needs Transformer Engine: leave it out")
    described = bridge.mapping.transformer(bridge.config)
    if passed.get("moe_apply_probs_on_input") and described.get("moe_router_topk") != 1:
        raise DlmBridgeError(
            "--megatron transformer.moe_apply_probs_on_input is for routers that choose one expert: leave it out"
        )
    check_experts(config, bridge.dims, described)
    if bridge.dims.experts:
        tokens = config.data.global_batch_size * config.data.seq_length * objective.tokens_read
        fields |= _moe_fields(config, engine, tokens, _dispatcher(config, described["moe_router_topk"], passed))
    return fields | passed


def _supports_fused_rope(bridge: Bridge, objective: Objective) -> bool:
    """Whether the fused rotary kernel is right: it takes one row of positions, and leaves YaRN's scale and
    that of queries out."""
    described = bridge.mapping.transformer(bridge.config)
    own_positions = isinstance(objective, WeDLMDiffusion) or bool(described.get("multi_latent_attention"))
    return not own_positions and not any(name.startswith(ATTRIBUTES) for name in described)


def _recompute_fields(config: TrainConfig, engine: bool) -> dict[str, Any]:
    if config.engine.recompute == "full":
        layers = config.engine.recompute_layers
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if layers is not None:  # the first so many of every stage
            method = {"recompute_method": "block", "recompute_num_layers": layers}
        return {"recompute_granularity": "full", **method}
    if config.engine.recompute == "selective":
        needing = [name for name in config.engine.recomputed if name in TRANSFORMER_ENGINE_RECOMPUTE]
        if needing and not engine:
            raise DlmBridgeError(f"--recompute-modules {needing[0]} needs Transformer Engine: leave it out")
        return {"recompute_granularity": "selective", "recompute_modules": config.engine.recomputed}
    return {}


def _dispatcher(config: TrainConfig, top_k: int, passed: dict[str, Any]) -> str:
    """The one that is asked for; for "auto" that which moves the fewest copies of a token, see
    `parallel.expert_dispatch`."""
    if config.parallel.moe_dispatcher != "auto":
        return config.parallel.moe_dispatcher
    expert_tp = config.parallel.tp if config.parallel.etp is None else config.parallel.etp
    if config.parallel.moe_shared_expert_overlap or any(passed.get(name) for name in ALLTOALL_ONLY):
        return "alltoall"
    return "allgather" if 1 < config.parallel.ep * expert_tp < top_k else "alltoall"


def _moe_fields(config: TrainConfig, engine: bool, tokens: int, dispatcher: str) -> dict[str, Any]:
    expert_tp = config.parallel.tp if config.parallel.etp is None else config.parallel.etp
    if dispatcher == "alltoall" and min(config.parallel.ep, expert_tp) > 1 and platform.current().backend == "gloo":
        raise DlmBridgeError(
            f"--ep {config.parallel.ep} with experts cut over {expert_tp} ranks: gloo cannot gather the uneven shares that "
            "--moe-dispatcher alltoall leaves: use allgather, or --etp 1"
        )
    if dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise DlmBridgeError("--moe-dispatcher flex needs the package deep_ep (DeepEP): install it, or use alltoall")
    grouped = engine if config.engine.moe_grouped_gemm is None else config.engine.moe_grouped_gemm
    # megatron-core multiplies these losses with the local tokens of each rank, which sequence and context parallelism
    # cut (or, without, repeats the tokens and divides): summed over ranks that is a 1 / (tp cp) of the tokens' number.
    share = config.parallel.tp * config.parallel.cp / tokens
    rows, _ = config.data.accumulation(parallel_state.get_data_parallel_world_size())
    of_sequences = config.objective.moe_aux_loss == "seq_aux_loss"  # ... but this one with the tokens of one row
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": engine,
        "moe_shared_expert_overlap": config.parallel.moe_shared_expert_overlap,
        "moe_router_bias_update_rate": config.objective.moe_expert_bias_update_rate,
        "moe_router_load_balancing_type": config.objective.moe_aux_loss
        if config.objective.moe_aux_loss_coeff
        else "none",
        "moe_aux_loss_coeff": config.objective.moe_aux_loss_coeff * share * (rows if of_sequences else 1),
    }
    if config.objective.moe_z_loss_coeff:
        fields["moe_z_loss_coeff"] = config.objective.moe_z_loss_coeff * share
    return fields


def check_mcore_config(config: TrainConfig) -> None:
    """Raise DlmBridgeError for what the engine and megatron-core's optimizer refuse of any model, before one is built;
    of it NotInstalledError for what only this machine lacks."""
    if config.engine.attention_backend not in (None, *ATTENTION):
        raise DlmBridgeError(
            f"--attention-backend {config.engine.attention_backend!r} is unknown: with --engine megatron known are "
            f"{', '.join(ATTENTION)}"
        )
    data_parallel_config(config)
    optimizer_config(config)


def data_parallel_config(config: TrainConfig) -> DistributedDataParallelConfig:
    """megatron-core's configuration of data parallelism. Raises DlmBridgeError."""
    sharded = _is_sharded(config)
    settings: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        # FSDP with whole gradients on each rank: megatron-core 0.16.1 adds what it has summed in the meantime to the
        # rank's own (`GradReducePipeline._bucket_group_gradient_reduce`), whereas the sum at the end replaces it.
        "overlap_grad_reduce": config.parallel.overlap_communication and config.parallel.fsdp != "optim",
        "overlap_param_gather": config.parallel.overlap_communication and sharded,
        "use_distributed_optimizer": sharded,
        "fp8_param_gather": config.precision.fp8_params,
        "use_megatron_fsdp": config.parallel.fsdp is not None,
        **({} if config.parallel.fsdp is None else {"data_parallel_sharding_strategy": config.parallel.fsdp}),
        **passed_on(config, "ddp"),
    }
    if settings.get("nccl_ub") and (backend := platform.current().backend) != "nccl":
        raise NotInstalledError(
            f"--megatron ddp.nccl_ub: its buffers are NCCL's, and messages are {backend}'s here: leave it out"
        )
    with refusals.named():
        return DistributedDataParallelConfig(**settings)


def _is_sharded(config: TrainConfig) -> bool:
    """Whether the optimizer's state is: megatron-core shards that of Adam only; plain gradient descent has next to
    none."""
    return (
        config.parallel.distributed_optimizer and config.optimizer.name == "adamw"
    ) or config.parallel.fsdp is not None


def optimizer_config(config: TrainConfig) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer. Raises DlmBridgeError."""
    dtype = DTYPES[config.precision.name]
    settings: dict[str, Any] = {
        "optimizer": "adam" if config.optimizer.name == "adamw" else "sgd",
        "lr": config.optimizer.lr,
        "weight_decay": config.optimizer.weight_decay,
        "adam_beta1": config.optimizer.beta1,
        "adam_beta2": config.optimizer.beta2,
        "adam_eps": config.optimizer.adam_eps,
        "clip_grad": config.optimizer.clip_grad or math.inf,  # which only measures the norm
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_distributed_optimizer": _is_sharded(config),
        "optimizer_cpu_offload": config.optimizer.cpu_offload,
        "optimizer_offload_fraction": float(config.optimizer.cpu_offload),
        # Without it masters would stay on the device besides, and no checkpoint could be resumed from.
        "use_precision_aware_optimizer": config.optimizer.cpu_offload,
        **({"fp8_recipe": config.precision.fp8_recipe} if config.precision.name == "fp8" else {}),
        **passed_on(config, "optimizer"),
    }
    if config.optimizer.cpu_offload and not settings["use_precision_aware_optimizer"]:
        raise DlmBridgeError(
            "--megatron optimizer.use_precision_aware_optimizer=false: --optimizer-cpu-offload is part of that "
            "optimizer: leave one of them out"
        )
    if config.optimizer.cpu_offload and not config.parallel.distributed_optimizer:
        raise DlmBridgeError(
            "--optimizer-cpu-offload with --no-distributed-optimizer: megatron-core offloads the optimizer that is "
            "sharded only: leave out one of them"
        )
    if config.optimizer.cpu_offload and platform.current().name == "cpu":
        raise NotInstalledError("--optimizer-cpu-offload: everything is on the CPU already: leave it out")
    if settings["use_precision_aware_optimizer"] and importlib.util.find_spec("transformer_engine") is None:
        asked = "--megatron optimizer.use_precision_aware_optimizer"
        raise NotInstalledError(
            f"{'--optimizer-cpu-offload' if config.optimizer.cpu_offload else asked} needs Transformer Engine: "
            "pip install 'dlm-bridge[te]'"
        )
    with refusals.named():
        return OptimizerConfig(**settings)


def check_sizes(config: TrainConfig, objective: Objective) -> None:
    """Raise DlmBridgeError for rows and batches that a run's layout cannot deal out."""
    streams = min(objective.tokens_read, 2)
    rank_positions(streams * config.data.seq_length, config.parallel.cp, streams)
    _, batches = config.data.accumulation(parallel_state.get_data_parallel_world_size())
    if config.parallel.vp > 1 and batches % config.parallel.pp:
        raise DlmBridgeError(
            f"--vp {config.parallel.vp} takes micro-batches in groups of --pp {config.parallel.pp}, and a step has {batches} of them: "
            "change --global-batch-size or --micro-batch-size"
        )


def check_sequence(config: TrainConfig) -> None:
    """Raise DlmBridgeError where sequence parallelism cannot cut the rows, which megatron-core finds out too late."""
    local = config.data.seq_length // config.parallel.cp  # of each stream
    if config.parallel.sharded_sequence and local % config.parallel.tp:
        context = f" / --cp {config.parallel.cp}" if config.parallel.cp > 1 else ""
        raise DlmBridgeError(
            f"--seq-length {config.data.seq_length}{context} is not a multiple of --tp {config.parallel.tp}, over which sequence "
            "parallelism cuts the rows: change one of them, or add --no-sequence-parallel"
        )


def check_experts(config: TrainConfig, dims: Dims, described: dict[str, Any]) -> None:
    """Raise DlmBridgeError for a layout in which megatron-core trains no experts, and for an expert option that a
    model with these `dims` and TransformerConfig fields cannot follow. A dense model has none of it."""
    if not dims.experts:
        return
    if config.objective.moe_expert_bias_update_rate and not described.get("moe_router_enable_expert_bias"):
        raise DlmBridgeError("--moe-expert-bias-update-rate: this model's router has no expert bias: leave it out")
    if config.parallel.moe_shared_expert_overlap and not dims.shared_ffn:
        raise DlmBridgeError("--moe-shared-expert-overlap: this model has no shared experts: leave it out")
    if config.parallel.tp > 1 and not config.parallel.sharded_sequence:
        raise DlmBridgeError(
            f"--tp {config.parallel.tp} without sequence parallelism: megatron-core trains no experts so: leave out "
            "--no-sequence-parallel"
        )
    expert_tp = config.parallel.tp if config.parallel.etp is None else config.parallel.etp
    if config.parallel.moe_dispatcher == "flex" and config.parallel.ep * expert_tp == 1:
        raise DlmBridgeError("--moe-dispatcher flex needs --ep above 1: use alltoall")
