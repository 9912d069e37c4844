"""Muon in the Megatron engine (`optimizer=muon`), with the same step as one process and the Accelerate engine. Run on
two GPUs at TP2 (November 2026).

The optimizer inside each of megatron-core's optimizers is replaced; main params, the order of the state and
checkpoints are megatron-core's. Matrices are orthogonalised as on the Hub (query, key and value separately, gate and
up separately, each expert): the momentum is gathered over tensor parallel ranks in bf16, the iteration's dtype, and
each rank applies its shard of the update. Data parallel ranks have whole momenta, and compute the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.in_memory import hub_tensors
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.parallel.core import (
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
    unwrap_model,
)
from dlm_bridge.parallel.mcore_patches.optimizers import parts_of
from dlm_bridge.parallel.weights import gather_shards, live_tensors, shard_of
from dlm_bridge.train import muon
from dlm_bridge.train.muon import ADAMW_RMS, muon_parameters, muon_update, takes_muon

MOMENTUM, BUFFER = "momentum", "momentum_buffer"  # keys of Muon's param groups, and of a parameter's state


def muon_optimizer(settings: Any, chunks: Sequence[Any], source: MegatronSource, momentum: float) -> Any:
    """megatron-core's optimizer for wrapped chunks, with Muon for the matrices and Adam (`settings`) for the rest."""
    matrices = _matrices(chunks, source)
    # megatron-core identifies the param groups of a checkpoint by lr_mult, which nothing else sets.
    overrides = {
        **get_standard_config_overrides(settings),
        ParamKey(predicate=ParamPredicate("muon", lambda parameter: parameter in matrices)): {
            "lr_mult": ADAMW_RMS,
            MOMENTUM: momentum,
        },
    }
    optimizer = get_megatron_optimizer(settings, list(chunks), overrides)
    mains = {getattr(parameter, "main_param", parameter): param for parameter, param in matrices.items()}
    for part in parts_of(optimizer):
        if part.optimizer is not None:  # None on a rank without parameters
            part.optimizer = MuonAndAdam(part.optimizer, mains)
            part.init_state_fn = _init_state
    return optimizer


def _matrices(chunks: Sequence[Any], source: MegatronSource) -> dict[torch.Tensor, ParamMapping]:
    """Parameters on this rank that Muon updates: the same Hub tensors as in the Accelerate engine, and the
    corresponding ones of multi-token prediction layers."""
    names = {
        hub_name
        for name in muon_parameters(source.model)
        for hub_name in hub_tensors(source.model, {name: source.model.get_parameter(name).detach()})
    }
    live = live_tensors(unwrap_model(list(chunks)))
    found = {}
    for param in source.bridge.checkpoint.params:
        tensor = live.get(param.megatron_name)
        if tensor is None or not tensor.requires_grad:
            continue
        if names.issuperset(param.hub_names) or (param.is_mtp and _is_layers_matrix(param)):
            found[tensor] = param
    return found


def _is_layers_matrix(param: ParamMapping) -> bool:
    """True if Muon updates a parameter of a prediction layer. As in other layers, AdamW updates experts."""
    in_layer = ".transformer_layer." in param.megatron_name and param.expert is None
    return in_layer and all(map(takes_muon, param.hub_names, param.hub_shapes))


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for the param groups with a momentum and Adam for the others, as one optimizer with one state.

    Args:
        adam: has all param groups.
        matrices: mapping of each parameter that Muon updates.
    """

    def __init__(self, adam: torch.optim.Optimizer, matrices: dict[torch.Tensor, ParamMapping]) -> None:
        self._adam, self._matrices = adam, matrices
        super().__init__(adam.param_groups, {})
        self._share()

    def _share(self) -> None:
        """Share the state, and the groups without momentum, with Adam."""
        self._adam.param_groups = [group for group in self.param_groups if MOMENTUM not in group]
        self._adam.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.muon_groups:
            for parameter in group["params"]:
                self.state[parameter].pop("step", None)  # megatron-core gives Adam's to every parameter it loads
        self._share()

    @property
    def muon_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if MOMENTUM in group]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters. Collective over tensor parallel ranks."""
        loss = None if closure is None else closure()
        for group in self.muon_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._muon_step(parameter, group)
        if any(group["params"] for group in self._adam.param_groups):
            self._adam.step()
        return loss

    def _muon_step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, momentum = parameter.grad, group[MOMENTUM]
        assert gradient is not None
        buffer = self.state[parameter].setdefault(BUFFER, torch.zeros_like(parameter))
        buffer.lerp_(gradient, 1 - momentum)
        nesterov = gradient.lerp(buffer, momentum)
        update = sharded_update(self._matrices[parameter], nesterov.to(muon.PRECISION))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * group["lr_mult"])


def sharded_update(param: ParamMapping, momentum: torch.Tensor) -> torch.Tensor:
    """Shard of a parameter's update, from this rank's shard of the momentum. Each Hub tensor in it is orthogonalised
    separately. Collective over the ranks that hold shards of the parameter."""
    whole = torch.empty(param.megatron_shape, dtype=momentum.dtype, device=momentum.device)
    gather_shards(param, momentum, whole)
    updates = [muon_update(matrix) for matrix in param.to_hub(whole)]
    return shard_of(param, param.to_megatron(updates), momentum)


def _init_state(optimizer: MuonAndAdam, settings: Any = None) -> None:
    """Initialise the state with zeros before a checkpoint is loaded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names = (BUFFER,) if MOMENTUM in group else ("exp_avg", "exp_avg_sq")
            for name in names:
                optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter.data))
