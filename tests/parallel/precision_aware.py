"""A stand-in for Transformer Engine's Adam as megatron-core's precision-aware optimizer uses it, on a CPU: the state's
names and dtypes and what its methods assert, with plain torch for the kernels."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch


class FusedAdam(torch.optim.Optimizer):
    """Its main params are in `state`: fp32, or of bf16 weights the int16 that they lack."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        assert adam_w_mode
        assert master_weights
        assert use_decoupled_grad
        assert not capturable
        self.dtypes = {"master_param": master_weight_dtype, "exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name, dtype in self.dtypes.items():
            lacks = store_param_remainders and name == "master_param"
            self.state[param][name] = torch.zeros_like(param, dtype=torch.int16 if lacks else dtype)
        if not store_param_remainders:
            self.state[param]["master_param"].copy_(param.detach())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        kept: torch.Tensor = self.state[param][name]
        return kept

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        lacks = name == "master_param" and self.store_param_remainders and param.dtype == torch.bfloat16
        assert unscaled.dtype == (torch.int16 if lacks else torch.float32)
        if name not in self.state[param]:
            self.state[param][name] = torch.zeros_like(unscaled, dtype=torch.int16 if lacks else self.dtypes[name])
        self.state[param][name].copy_(unscaled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            for name, tensor in state.items():
                whole = tensor if parameters[number].dtype == torch.bfloat16 else tensor.float()
                self.set_scaled_state(parameters[number], name, whole)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = step = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                lacks = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, lacks)
                state, gradient = self.state[param], param.decoupled_grad.float()
                main_param = state["master_param"]
                if param.dtype == torch.float32:
                    main_param = param
                elif lacks:
                    words = torch.stack([main_param, param.view(torch.int16) - (main_param < 0).short()], dim=-1)
                    main_param = words.view(torch.float32).squeeze(-1)
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
                mean, square = state["exp_avg"] / (1 - beta1**step), state["exp_avg_sq"] / (1 - beta2**step)
                new = main_param * (1 - group["lr"] * group["weight_decay"])
                new -= group["lr"] * mean / (square.sqrt() + group["eps"])
                if lacks:
                    lower, upper = new.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
                    state["master_param"].copy_(lower)
                    param.view(torch.int16).copy_(upper + (lower < 0).short())
                else:
                    state["master_param"].copy_(new) if param is not main_param else None
                    param.copy_(new)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.decoupled_grad = None


def install(patch: pytest.MonkeyPatch) -> None:
    """Where megatron-core looks for Transformer Engine's Adam, and for its version, it finds the stand-in."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    patch.setattr(sys.modules["transformer_engine.pytorch.optimizers"], "FusedAdam", FusedAdam, raising=False)
    patch.setattr(optimizer, "Adam", FusedAdam)
    patch.setattr(distrib_optimizer, "Adam", FusedAdam)
    patch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    for module in (optimizer, optimizer_config):
        patch.setattr(module, "is_te_min_version", lambda *_, **__: True)
    patch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    patch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
