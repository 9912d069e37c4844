"""The memory plan of a training configuration, as its dry run shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.plan.memory import MemoryPlan, memory_plan
from dlm_bridge.plan.model import model_of
from dlm_bridge.plan.run import Run

if TYPE_CHECKING:
    from dlm_bridge.train.config import TrainConfig


def training_plan(config: TrainConfig, hub_config: dict[str, Any], gpus: int) -> MemoryPlan:
    """What each of `gpus` ranks of this run on the Megatron engine will hold. `hub_config` is the model's config.json.

    Raises DlmBridgeError for a layout that the model or the number of GPUs cannot have.
    """
    model = model_of(hub_config, config.model, config.family)
    return memory_plan(model, run_of(config, config.objective or model.family.objective, gpus))


def run_of(config: TrainConfig, objective: str, gpus: int) -> Run:
    """The configuration's settings as planning knows them. Raises DlmBridgeError."""
    replicas = max(1, gpus // (config.tp * config.pp * config.cp))
    return Run(
        layout=config.layout,
        gpus=gpus,
        seq_length=config.seq_length,
        cp=config.cp,
        micro_batch_size=config.micro_batch_size or max(1, config.global_batch_size // replicas),
        global_batch_size=config.global_batch_size,
        precision=config.precision,
        optimizer=config.optimizer,
        distributed_optimizer=config.distributed_optimizer,
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        fsdp=config.fsdp,
        sequence_parallel=config.sequence_parallel,
        recompute=config.recompute,
        recompute_modules=tuple(config.recomputed),
        recompute_layers=config.recompute_layers,
        moe_dispatcher=config.moe_dispatcher,
        **objective_settings(objective),
    )


def objective_settings(name: str) -> dict[str, Any]:
    """How often a sequence stands in the model's input, and the mean share of its positions that have a loss.

    Raises DlmBridgeError for an unknown objective.
    """
    from dlm_bridge.train.objectives.registry import OBJECTIVES

    if name not in OBJECTIVES:
        raise DlmBridgeError(f"--objective {name}: choose one of {', '.join(OBJECTIVES)}")
    kind = OBJECTIVES[name].kind
    next_token = name == "causal" or getattr(kind, "clean_stream", None) == "causal"
    masks = 0.0 if name == "causal" else 0.5  # of levels that are drawn evenly
    return {"streams": kind.tokens_read, "loss_share": masks + next_token}
