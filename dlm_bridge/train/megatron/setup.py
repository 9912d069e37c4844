"""From a run's options to megatron-core's own: transformer configuration, data parallel wrapper, optimizer."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from dlm_bridge.bridge import Bridge
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform, refusals
from dlm_bridge.parallel.config import ATTRIBUTES
from dlm_bridge.parallel.core import (
    AttnBackend,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    finalize_model_grads,
    get_megatron_optimizer,
    parallel_state,
)
from dlm_bridge.parallel.fsdp import leave_unshared_gradients
from dlm_bridge.parallel.inner_masters import mend_offloading
from dlm_bridge.parallel.layer_spec import uses_transformer_engine
from dlm_bridge.parallel.refusals import NotInstalledError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.megatron.checks import check_experts
from dlm_bridge.train.megatron.optimizer_state import mend_descent, mend_order
from dlm_bridge.train.megatron.settings import passed_on
from dlm_bridge.train.objectives import Objective, WeDLMDiffusion

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
ATTENTION = ("auto", "flash", "fused", "unfused")
# Settings of megatron-core's that only Transformer Engine's layers follow.
OF_TRANSFORMER_ENGINE = (
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
OF_ALL_TO_ALL = (
    "moe_expert_capacity_factor",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "variable_seq_lengths",
)
# Modules whose recomputation asks Transformer Engine whether its precision is FP8.
RECOMPUTED_BY_TRANSFORMER_ENGINE = ("layernorm", "moe_act")


def transformer_overrides(config: TrainConfig, bridge: Bridge, objective: Objective) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig that a run's options set.

    Raises DlmBridgeError for what needs Transformer Engine where it is not there.
    """
    engine = uses_transformer_engine()
    on_cpu = platform.current().name == "cpu"
    te_activation = engine and not bridge.dims.experts  # faster than megatron-core's, which only experts need
    fields: dict[str, Any] = {
        "sequence_parallel": config.sharded_sequence,
        # Gradients are sums; the objective's weights carry the global normaliser.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": engine and config.fsdp is None,
        # gloo sends after the call has returned, from memory that megatron-core frees in the belief that streams wait.
        "deallocate_pipeline_outputs": config.pp > 1 and not on_cpu,
        "masked_softmax_fusion": False,
        # Fused by torch.compile, which takes longer on a CPU than it ever saves.
        "bias_activation_fusion": not on_cpu and not te_activation,
        "use_te_activation_func": te_activation,
        "bias_dropout_fusion": not on_cpu,
        "apply_rope_fusion": engine and _plain_rotary(bridge, objective),
        **_recompute(config, engine),
    }
    if config.vp > 1 and config.pp > 2 and not config.overlap_communication:  # two stages cannot do without
        fields |= {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    if config.attention_backend is not None:
        fields["attention_backend"] = AttnBackend[config.attention_backend]
    if config.precision == "fp8":
        if not engine:
            raise DlmBridgeError("--precision fp8 needs Transformer Engine and a GPU: pip install 'dlm-bridge[te]'")
        fields |= {"fp8": config.fp8_format, "fp8_recipe": config.fp8_recipe, "fp8_param": config.fp8_params}
        if config.fp8_recipe == "delayed":
            fields |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    passed = passed_on(config, "transformer")
    for name in () if engine else OF_TRANSFORMER_ENGINE:
        if passed.get(name):
            raise DlmBridgeError(f"--megatron transformer.{name} needs Transformer Engine: leave it out")
    described = bridge.mapping.transformer(bridge.config)
    if passed.get("moe_apply_probs_on_input") and described.get("moe_router_topk") != 1:
        raise DlmBridgeError(
            "--megatron transformer.moe_apply_probs_on_input is for routers that choose one expert: leave it out"
        )
    check_experts(config, bridge.dims, described)
    if bridge.dims.experts:
        tokens = config.global_batch_size * config.seq_length * objective.tokens_read
        fields |= _experts(config, engine, tokens, _dispatcher(config, described["moe_router_topk"], passed))
    return fields | passed


def _plain_rotary(bridge: Bridge, objective: Objective) -> bool:
    """Whether the fused rotary kernel is right: it takes one row of positions, and leaves YaRN's scale and
    that of queries out."""
    described = bridge.mapping.transformer(bridge.config)
    own_positions = isinstance(objective, WeDLMDiffusion) or bool(described.get("multi_latent_attention"))
    return not own_positions and not any(name.startswith(ATTRIBUTES) for name in described)


def _recompute(config: TrainConfig, engine: bool) -> dict[str, Any]:
    if config.recompute == "full":
        layers = config.recompute_layers
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if layers is not None:  # the first so many of every stage
            method = {"recompute_method": "block", "recompute_num_layers": layers}
        return {"recompute_granularity": "full", **method}
    if config.recompute == "selective":
        needing = [name for name in config.recomputed if name in RECOMPUTED_BY_TRANSFORMER_ENGINE]
        if needing and not engine:
            raise DlmBridgeError(f"--recompute-modules {needing[0]} needs Transformer Engine: leave it out")
        return {"recompute_granularity": "selective", "recompute_modules": config.recomputed}
    return {}


def _dispatcher(config: TrainConfig, top_k: int, passed: dict[str, Any]) -> str:
    """The one that is asked for; for "auto" that which moves the fewest copies of a token, see
    `parallel.expert_dispatch`."""
    if config.moe_dispatcher != "auto":
        return config.moe_dispatcher
    expert_tp = config.tp if config.etp is None else config.etp
    if config.moe_shared_expert_overlap or any(passed.get(name) for name in OF_ALL_TO_ALL):
        return "alltoall"
    return "allgather" if 1 < config.ep * expert_tp < top_k else "alltoall"


def _experts(config: TrainConfig, engine: bool, tokens: int, dispatcher: str) -> dict[str, Any]:
    expert_tp = config.tp if config.etp is None else config.etp
    if dispatcher == "alltoall" and min(config.ep, expert_tp) > 1 and platform.current().backend == "gloo":
        raise DlmBridgeError(
            f"--ep {config.ep} with experts cut over {expert_tp} ranks: gloo cannot gather the uneven shares that "
            "--moe-dispatcher alltoall leaves: use allgather, or --etp 1"
        )
    if dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise DlmBridgeError("--moe-dispatcher flex needs the package deep_ep (DeepEP): install it, or use alltoall")
    grouped = engine if config.moe_grouped_gemm is None else config.moe_grouped_gemm
    # megatron-core multiplies these losses with the local tokens of each rank, which sequence and context parallelism
    # cut (or, without, repeats the tokens and divides): summed over ranks that is a 1 / (tp cp) of the tokens' number.
    share = config.tp * config.cp / tokens
    rows, _ = config.accumulation(parallel_state.get_data_parallel_world_size())
    of_sequences = config.moe_aux_loss == "seq_aux_loss"  # ... but this one with the tokens of one row
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": engine,
        "moe_shared_expert_overlap": config.moe_shared_expert_overlap,
        "moe_router_bias_update_rate": config.moe_expert_bias_update_rate,
        "moe_router_load_balancing_type": config.moe_aux_loss if config.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": config.moe_aux_loss_coeff * share * (rows if of_sequences else 1),
    }
    if config.moe_z_loss_coeff:
        fields["moe_z_loss_coeff"] = config.moe_z_loss_coeff * share
    return fields


def check_engine(config: TrainConfig) -> None:
    """Raise DlmBridgeError for what the engine and megatron-core's optimizer refuse of any model, before one is built;
    of it NotInstalledError for what only this machine lacks."""
    if config.attention_backend not in (None, *ATTENTION):
        raise DlmBridgeError(
            f"--attention-backend {config.attention_backend!r} is unknown: with --engine megatron known are "
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
        "overlap_grad_reduce": config.overlap_communication and config.fsdp != "optim",
        "overlap_param_gather": config.overlap_communication and sharded,
        "use_distributed_optimizer": sharded,
        "fp8_param_gather": config.fp8_params,
        "use_megatron_fsdp": config.fsdp is not None,
        **({} if config.fsdp is None else {"data_parallel_sharding_strategy": config.fsdp}),
        **passed_on(config, "ddp"),
    }
    if settings.get("nccl_ub") and (backend := platform.current().backend) != "nccl":
        raise NotInstalledError(
            f"--megatron ddp.nccl_ub: its buffers are NCCL's, and messages are {backend}'s here: leave it out"
        )
    with refusals.named():
        return DistributedDataParallelConfig(**settings)


def wrap(chunks: Sequence[Any], config: TrainConfig) -> list[Any]:
    """The model's chunks in megatron-core's data parallelism, DDP or FSDP, in training mode."""
    wrapper, wrapped = _wrapper(config), []
    for number, chunk in enumerate(chunks):
        # Only the first chunk's communication is on the critical path of an interleaved pipeline.
        ddp_config = data_parallel_config(config)
        wrapped.append(wrapper(chunk.config, ddp_config, chunk, disable_bucketing=number > 0).train())
        if config.fsdp is not None:
            leave_unshared_gradients(wrapped[-1].module)
    return wrapped


def _is_sharded(config: TrainConfig) -> bool:
    """Whether the optimizer's state is: megatron-core shards that of Adam only; plain gradient descent has next to
    none."""
    return (config.distributed_optimizer and config.optimizer == "adamw") or config.fsdp is not None


def _wrapper(config: TrainConfig) -> Any:
    if config.fsdp is None:
        return DistributedDataParallel
    if platform.current().name == "cpu":
        raise DlmBridgeError(f"--fsdp {config.fsdp}: megatron-core's FSDP needs a GPU: leave it out")
    if importlib.util.find_spec("einops") is None:
        raise DlmBridgeError(f"--fsdp {config.fsdp}: megatron-core's FSDP needs einops: pip install einops")
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    return FullyShardedDataParallel


def optimizer_config(config: TrainConfig) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer. Raises DlmBridgeError."""
    dtype = DTYPES[config.precision]
    settings: dict[str, Any] = {
        "optimizer": "adam" if config.optimizer == "adamw" else "sgd",
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.beta1,
        "adam_beta2": config.beta2,
        "adam_eps": config.adam_eps,
        "clip_grad": config.clip_grad or math.inf,  # which only measures the norm
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_distributed_optimizer": _is_sharded(config),
        "optimizer_cpu_offload": config.optimizer_cpu_offload,
        "optimizer_offload_fraction": float(config.optimizer_cpu_offload),
        # Without it masters would stay on the device besides, and no checkpoint could be resumed from.
        "use_precision_aware_optimizer": config.optimizer_cpu_offload,
        **({"fp8_recipe": config.fp8_recipe} if config.precision == "fp8" else {}),
        **passed_on(config, "optimizer"),
    }
    if config.optimizer_cpu_offload and not settings["use_precision_aware_optimizer"]:
        raise DlmBridgeError(
            "--megatron optimizer.use_precision_aware_optimizer=false: --optimizer-cpu-offload is part of that "
            "optimizer: leave one of them out"
        )
    if config.optimizer_cpu_offload and not config.distributed_optimizer:
        raise DlmBridgeError(
            "--optimizer-cpu-offload with --no-distributed-optimizer: megatron-core offloads the optimizer that is "
            "sharded only: leave out one of them"
        )
    if config.optimizer_cpu_offload and platform.current().name == "cpu":
        raise NotInstalledError("--optimizer-cpu-offload: everything is on the CPU already: leave it out")
    if settings["use_precision_aware_optimizer"] and importlib.util.find_spec("transformer_engine") is None:
        asked = "--megatron optimizer.use_precision_aware_optimizer"
        raise NotInstalledError(
            f"{'--optimizer-cpu-offload' if config.optimizer_cpu_offload else asked} needs Transformer Engine: "
            "pip install 'dlm-bridge[te]'"
        )
    with refusals.named():
        return OptimizerConfig(**settings)


def takes_all(config: TrainConfig) -> bool:
    """Whether a resume sets every weight, and every master of one, from the checkpoint alone: where neither FSDP's
    buffers nor the optimizer inside megatron-core's nor weights in FP8 begin with what the model was built with."""
    inside = optimizer_config(config).use_precision_aware_optimizer
    return config.fsdp is None and not config.fp8_params and not inside


def build_optimizer(chunks: Sequence[Any], config: TrainConfig) -> Any:
    """megatron-core's optimizer over wrapped chunks, and what its schedules need of both. The learning rate is set
    before every step. Raises DlmBridgeError."""
    if config.optimizer_cpu_offload:
        for name, parameter in itertools.chain(*(chunk.named_parameters() for chunk in chunks)):
            if parameter.dtype == torch.float32:  # as routers may be
                raise DlmBridgeError(
                    f"--optimizer-cpu-offload: megatron-core offloads no weights in fp32, and {name} is kept so: "
                    "leave it out"
                )
    # Its own rule is ours: biases and 1-D parameters do not decay.
    optimizer = get_megatron_optimizer(optimizer_config(config), list(chunks))
    mend_offloading(optimizer)
    mend_order(optimizer)
    mend_descent(optimizer)
    transformer = chunks[0].config
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = _finalize
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return optimizer


def _finalize(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum the gradients over ranks without dividing by a number of tokens: the loss's weights did that."""
    finalize_model_grads(model, None, **kwargs)
