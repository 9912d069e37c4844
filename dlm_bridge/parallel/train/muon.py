"""Muon in the Megatron engine: the step that one process, and the Accelerate engine, would take. For runs with
`--optimizer muon`; run on two GPUs at TP2 (November 2026).

megatron-core's optimizers keep the main params, the order of the state and the checkpoints; the one inside each is
replaced. A matrix is orthogonalised as the Hub has it (query, key and value apart, gate and up apart, each expert):
its momentum is gathered over tensor parallel ranks, in bf16 as the iteration has it, and each rank keeps its own part
of the update. Data parallel ranks hold whole momenta, and all compute the same.
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
from dlm_bridge.train.muon import ADAMW_RMS, muon_parameters, muon_update, takes_muon

MOMENTUM, BUFFER = "momentum", "momentum_buffer"  # of a param group of Muon's, and of a parameter's state


def muon_optimizer(settings: Any, chunks: Sequence[Any], source: MegatronSource, momentum: float) -> Any:
    """megatron-core's optimizer with these `settings` (of Adam) over wrapped chunks, with Muon for the matrices."""
    matrices = _matrices(chunks, source)
    # megatron-core tells the param groups of a checkpoint apart by lr_mult, which nothing else here sets.
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
        if part.optimizer is not None:  # of a rank without parameters
            part.optimizer = MuonAndAdam(part.optimizer, mains)
            part.init_state_fn = _init_state
    return optimizer


def _matrices(chunks: Sequence[Any], source: MegatronSource) -> dict[torch.Tensor, ParamMapping]:
    """What Muon updates of a rank's parameters: those of the same Hub tensors as in the Accelerate engine, and the
    like of multi-token prediction layers, which it does not have."""
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
    """Whether Muon takes a parameter of a prediction layer, whose experts it leaves to AdamW as in other layers."""
    in_layer = ".transformer_layer." in param.megatron_name and param.expert is None
    return in_layer and all(map(takes_muon, param.hub_names, param.hub_shapes))


class MuonAndAdam(torch.optim.Optimizer):
    """Muon for the param groups with a momentum, `adam` for the others, as one optimizer with one state."""

    def __init__(self, adam: torch.optim.Optimizer, matrices: dict[torch.Tensor, ParamMapping]) -> None:
        """`adam` has all param groups; `matrices` are by the parameters in them."""
        self._adam, self._matrices = adam, matrices
        super().__init__(adam.param_groups, {})
        self._share()

    def _share(self) -> None:
        """Let AdamW work on its groups of this optimizer, and on its state."""
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
        update = sharded_update(self._matrices[parameter], nesterov.to(torch.bfloat16))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * group["lr_mult"])


def sharded_update(param: ParamMapping, momentum: torch.Tensor) -> torch.Tensor:
    """A rank's shard of a parameter's update, of its shard of the momentum. Each Hub tensor in it is a matrix of
    its own. Collective over the ranks that hold shards of it."""
    whole = torch.empty(param.megatron_shape, dtype=momentum.dtype, device=momentum.device)
    gather_shards(param, momentum, whole)
    updates = [muon_update(matrix) for matrix in param.to_hub(whole)]
    return shard_of(param, param.to_megatron(updates), momentum)


def _init_state(optimizer: MuonAndAdam, settings: Any = None) -> None:
    """Zeros for what a checkpoint has, before it is loaded."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names = (BUFFER,) if MOMENTUM in group else ("exp_avg", "exp_avg_sq")
            for name in names:
                optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter.data))
