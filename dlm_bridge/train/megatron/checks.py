"""What a model, its rows and a layout refuse of a run's options, before anything is built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from dlm_bridge.convert.mapping import Dims
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.parallel.batch import rank_positions
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.megatron_options import MegatronOptions, flag
from dlm_bridge.train.objectives import Objective

# Options that change what experts learn or when, and say nothing of a dense model.
OF_EXPERTS = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_bias_update_rate",
    "moe_shared_expert_overlap",
)
MODULES_OF_EXPERTS = ("moe", "moe_act", "shared_experts")  # that are recomputed


@contextlib.contextmanager
def gradient_checks(step: int) -> Iterator[None]:
    """What megatron-core finds wrong of a step's gradients, with `--megatron ddp.check_for_nan_in_grad=true` and
    `ddp.check_for_large_grads=true`, as one line."""
    try:
        yield
    except RuntimeError as error:
        if "Unexpected result" not in str(error):
            raise
        raise DlmBridgeError(
            f"step {step}: {one_line(error)}: lower --lr, or resume from before with another"
        ) from error


def check_sizes(config: TrainConfig, objective: Objective) -> None:
    """Raise DlmBridgeError for rows and batches that a run's layout cannot deal out."""
    streams = min(objective.tokens_read, 2)
    rank_positions(streams * config.seq_length, config.cp, streams)
    _, batches = config.accumulation(parallel_state.get_data_parallel_world_size())
    if config.vp > 1 and batches % config.pp:
        raise DlmBridgeError(
            f"--vp {config.vp} takes micro-batches in groups of --pp {config.pp}, and a step has {batches} of them: "
            "change --global-batch-size or --micro-batch-size"
        )


def check_sequence(config: TrainConfig) -> None:
    """Raise DlmBridgeError where sequence parallelism cannot cut the rows, which megatron-core finds out too late."""
    local = config.seq_length // config.cp  # of each stream
    if config.sharded_sequence and local % config.tp:
        context = f" / --cp {config.cp}" if config.cp > 1 else ""
        raise DlmBridgeError(
            f"--seq-length {config.seq_length}{context} is not a multiple of --tp {config.tp}, over which sequence "
            "parallelism cuts the rows: change one of them, or add --no-sequence-parallel"
        )


def check_experts(config: TrainConfig, dims: Dims, described: dict[str, Any]) -> None:
    """Raise DlmBridgeError for a layout in which megatron-core trains no experts, and for an option that would say
    nothing of a model with these `dims` and TransformerConfig fields."""
    if not dims.experts:
        given = [flag(name) for name in OF_EXPERTS if getattr(config, name)]
        if config.moe_dispatcher != MegatronOptions.moe_dispatcher:
            given.append(flag("moe_dispatcher"))
        if config.recompute == "selective":
            given += [f"--recompute-modules {name}" for name in config.recomputed if name in MODULES_OF_EXPERTS]
        given += [f"--megatron transformer.{name}" for name in config.passed_through("transformer") if "moe_" in name]
        if given:
            raise DlmBridgeError(f"{given[0]}: the model is dense (it has no experts): leave it out")
        return
    if config.moe_expert_bias_update_rate and not described.get("moe_router_enable_expert_bias"):
        raise DlmBridgeError("--moe-expert-bias-update-rate: this model's router has no expert bias: leave it out")
    if config.moe_shared_expert_overlap and not dims.shared_ffn:
        raise DlmBridgeError("--moe-shared-expert-overlap: this model has no shared experts: leave it out")
    if config.tp > 1 and not config.sharded_sequence:
        raise DlmBridgeError(
            f"--tp {config.tp} without sequence parallelism: megatron-core trains no experts so: leave out "
            "--no-sequence-parallel"
        )
    expert_tp = config.tp if config.etp is None else config.etp
    if config.moe_dispatcher == "flex" and config.ep * expert_tp == 1:
        raise DlmBridgeError("--moe-dispatcher flex needs --ep above 1: use alltoall")
