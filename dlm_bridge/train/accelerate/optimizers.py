"""Optimizers of the Accelerate engine: AdamW, and Muon for the matrices of the decoder layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.muon import muon_parameters, trained_parameters


def build_optimizer(config: TrainConfig, model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """Construct the optimizer of a Hub model's trained parameters. `fused` None: torch selects AdamW's kernels."""
    return (
        MuonAndAdamW(config, model, fused)
        if config.optimizer.optimizer == "muon"
        else adamw(config, model, fused=fused)
    )


def adamw(config: TrainConfig, model: nn.Module, *, fused: bool | None = None) -> torch.optim.AdamW:
    """AdamW for a model's trained parameters."""
    groups = parameter_groups(trained_parameters(model), config.optimizer.weight_decay)
    return torch.optim.AdamW(groups, **_adamw_settings(config), fused=fused)


def clip_gradients(config: TrainConfig, accelerator: Any, model: nn.Module) -> float:
    """Clip the gradients of a model, sharded or in Accelerate's wrapper. Returns their norm over all processes."""
    max_norm = config.optimizer.clip_grad or math.inf  # infinity only measures
    if config.parallel.shards:
        return float(fsdp.clip_grad_norm(list(model.parameters()), max_norm, accelerator.device))
    return float(accelerator.clip_grad_norm_(model.parameters(), max_norm))


def parameter_groups(trained: dict[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's parameter groups: the parameters that decay, then those that do not; without an empty one."""
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in trained.items() if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in trained.items() if not decays(name, p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def decays(name: str, parameter: nn.Parameter) -> bool:
    """True if weight decay applies: not to biases, including stacked ones of experts, and 1-D parameters (norms)."""
    return parameter.dim() > 1 and not name.endswith("bias")


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers and AdamW for the other parameters, as one optimizer with one state."""

    def __init__(self, config: TrainConfig, model: nn.Module, fused: bool | None = None) -> None:
        options = config.optimizer
        trained, names = trained_parameters(model), muon_parameters(model)
        muon = [parameter for name, parameter in trained.items() if name in names]
        others = {name: parameter for name, parameter in trained.items() if name not in names}
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                muon,
                lr=options.lr,
                weight_decay=options.weight_decay,
                momentum=options.muon_momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(parameter_groups(others, options.weight_decay), **_adamw_settings(config), fused=fused),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Share this optimizer's groups and state with both parts."""
        self._parts[0].param_groups, self._parts[1].param_groups = self.param_groups[:1], self.param_groups[1:]
        for part in self._parts:
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def _adamw_settings(config: TrainConfig) -> dict[str, Any]:
    options = config.optimizer
    return {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.adam_eps}
