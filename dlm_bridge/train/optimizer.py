"""Learning rate schedule, weight decay groups and AdamW, the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of `step`, which counts from 1: linear warm-up to `lr`, then the schedule down to `min_lr` at the last
    step. A pure function, so that a resume needs no scheduler state."""
    if step <= config.schedule.warmup_steps:
        return config.optimizer.lr * step / config.schedule.warmup_steps
    if config.schedule.name == "constant":
        return config.optimizer.lr
    progress = min(1.0, (step - config.schedule.warmup_steps) / (config.schedule.steps - config.schedule.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule.name == "cosine" else 1 - progress
    return config.schedule.min_lr + (config.optimizer.lr - config.schedule.min_lr) * share


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to biases and 1-D parameters (norms)."""
    return parameter.dim() > 1 and not name.endswith(".bias")


def adamw(config: TrainConfig, model: nn.Module, *, fused: bool | None = None) -> torch.optim.AdamW:
    """The optimizer of a Hub-side model's trained parameters; without `fused` torch chooses how it is computed."""
    return torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay),
        lr=config.optimizer.lr,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.adam_eps,
        fused=fused,
    )


def check_finite(step: int, parameters: Iterable[torch.Tensor]) -> None:
    """Raise DlmBridgeError where a weight is not finite after `step`, before a checkpoint would keep it: finite
    gradients can lead there too, as with an epsilon of zero."""
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(local.detach().isfinite().all()):
            raise DlmBridgeError(
                f"step {step}: weights are not finite, no checkpoint is written: resume from before with another --lr "
                "or --adam-eps"
            )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """AdamW's parameter groups: the parameters that decay, then those that do not; without an empty one."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for name, p in trained if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
