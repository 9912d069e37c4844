"""megatron-core's optimizers with torch's own Adam, which it takes where neither Transformer Engine nor apex is
installed: their checkpoints do not save and load until a few places are put right."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from dlm_bridge.parallel.overrides import Overrides

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_MIXED = "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer"  # the base of the distributed one
_PLAIN = (
    "megatron.core.optimizer.optimizer.FP32Optimizer",
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
)


def in_use() -> bool:
    """Whether megatron-core would take torch's Adam."""
    return all(importlib.util.find_spec(name) is None for name in ("transformer_engine", "apex"))


def _for_adam(override: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """An override of a method only where the wrapped optimizer is torch's Adam, and not under Megatron FSDP, which has
    its own way of saving."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        replacement = override(original)

        @functools.wraps(original)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            fsdp = getattr(getattr(self, "ddp_config", None), "use_megatron_fsdp", False)
            ours = isinstance(self.optimizer, torch.optim.Adam) and not fsdp  # AdamW is one
            return (replacement if ours else original)(self, *arguments, **options)

        return method

    return make


@_for_adam
def _step_with_ready_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adam counts steps parameter by parameter, so not at all on a rank without any, such as the experts' optimizer on
    a pipeline stage without experts. But what one rank saves of an optimizer, all ranks load."""

    def step_with_ready_grads(self: Any) -> bool:
        done = original(self)
        if done and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = group.get("step", 0.0) + 1.0
        return done

    return step_with_ready_grads


def _counted(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The steps of an optimizer without parameters."""
    return torch.tensor(float(optimizer.param_groups[0].get("step", 0.0)))


@_for_adam
def _sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is saved before the first step (fp16 may skip some) has no state of Adam, and cannot be loaded."""

    def sharded_state_dict(self: Any, *arguments: Any, **options: Any) -> Any:
        _allocate(self.optimizer)
        result = original(self, *arguments, **options)
        if not self.optimizer.state:
            result.get("optimizer", result)["state"]["common_step"] = _counted(self.optimizer)
        return result

    return sharded_state_dict


@_for_adam
def _load_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step count of zero is not saved, and Adam wants one all the same."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        step = state_dict.get("optimizer", state_dict)["state"].setdefault("common_step", torch.tensor(0.0))
        original(self, state_dict)
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = float(step)

    return load_state_dict


@_for_adam
def _state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Saving asserts that there is exactly one step count, but before the first step there is none."""

    def state_dict(self: Any) -> Any:
        _allocate(self.optimizer)
        if self.optimizer.state:
            return original(self)
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            | {"step": _counted(self.optimizer).item()}
            for group in self.optimizer.param_groups
        ]
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": {"param_groups": groups}, **scaler}

    return state_dict


@_for_adam
def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loading makes one tensor the step count of every parameter, which Adam then advances once for each of them."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        _allocate(self.optimizer)
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


@_for_adam
def _set_main_param_and_optimizer_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loading looks for a step count among the tensors that are stored, where it is not, and copies into parameters
    while autograd watches."""

    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        main_param.copy_(tensors["param"])
        for name, value in self.optimizer.state[main_param].items():
            if name != "step":  # is in the parameter groups
                value.copy_(tensors[name])

    return set_states


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """The state that Adam itself makes at its first step, for each parameter that has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


OVERRIDES = Overrides(
    owner="the CUDA platform without Transformer Engine and apex",
    made_for="0.16.1",
    table={
        f"{_DISTRIBUTED}.state_dict": _state_dict,
        f"{_DISTRIBUTED}.load_state_dict": _load_state_dict,
        f"{_DISTRIBUTED}._set_main_param_and_optimizer_states": _set_main_param_and_optimizer_states,
        f"{_MIXED}.step_with_ready_grads": _step_with_ready_grads,
        f"{_PLAIN[0]}.step_with_ready_grads": _step_with_ready_grads,
        **{f"{name}.sharded_state_dict": _sharded_state_dict for name in _PLAIN},
        **{f"{name}.load_state_dict": _load_plain for name in _PLAIN},
    },
)
