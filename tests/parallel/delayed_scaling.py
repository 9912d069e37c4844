"""Stand-ins for Transformer Engine 2.20's delayed scaling on a CPU: its recipe, and a module whose extra state is
written, refused and read as `TransformerEngineBaseModule` does it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

STEPS, TENSORS = 4, 3  # of a history; fp8 tensors of a matrix product, forward (backward one less)


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


class DelayedScaling:
    def __init__(self, amax_history_len: int = STEPS) -> None:
        self.margin = 0
        self.fp8_format = Format.HYBRID
        self.amax_history_len = amax_history_len
        self.amax_compute_algo = "max"
        self.scaling_factor_compute_algo = None
        self.reduce_amax = True

    @classmethod
    def delayed(cls) -> bool:
        return True


class TEDelayedScaling(DelayedScaling):
    """megatron-core's own subclass, which runs of the engine pickle."""


class Scaled:
    """A module's `fp8_meta`: what a checkpoint has to bring back."""

    def __init__(self, gemms: int = 1, recipe: Any = None) -> None:
        self.recipe = recipe or TEDelayedScaling()
        self.variables: dict[str, Any] = {"fp8_checkpoint": True, "num_gemms": gemms, "fp8_max_fwd": 448}
        self.tensors = {}
        for way, count in (("fwd", TENSORS * gemms), ("bwd", (TENSORS - 1) * gemms)):
            self.tensors[f"scale_{way}"] = torch.ones(count)
            self.tensors[f"amax_history_{way}"] = torch.zeros(self.recipe.amax_history_len, count)

    def get_extra_state(self) -> torch.Tensor:
        state = {"recipe": self.recipe, **self.tensors, "extra_fp8_variables": self.variables}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is None or state.numel() == 0:
            return
        if os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") != "1":
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")
        found = pickle.loads(state.numpy().tobytes())
        self.variables |= found["extra_fp8_variables"]
        self.recipe = found["recipe"]
        for name, tensor in self.tensors.items():
            tensor.copy_(found[name])


def install(patch: pytest.MonkeyPatch) -> None:
    """The recipe's classes are found under their own names."""
    from megatron.core.extensions import transformer_engine

    import dlm_bridge.parallel.train.assembly  # noqa: F401 (megatron-core looks for Transformer Engine as it is imported)

    recipes = "transformer_engine.common.recipe"
    for name in ("transformer_engine", "transformer_engine.common", recipes):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        patch.setitem(sys.modules, name, module)
    for kind in (_FormatHelper, Format, DelayedScaling):
        patch.setattr(kind, "__module__", recipes)
        setattr(sys.modules[recipes], kind.__name__, kind)
    patch.setattr(TEDelayedScaling, "__module__", transformer_engine.__name__)
    patch.setattr(transformer_engine, "TEDelayedScaling", TEDelayedScaling, raising=False)


def scale_outputs(patch: pytest.MonkeyPatch, kind: Any, made: list[Scaled]) -> None:
    """Let what a layer of megatron-core gives be scaled by a state that every call changes."""
    forward: Callable[..., Any] = kind.forward

    def of(layer: Any) -> Scaled:
        if "scaled" not in vars(layer):
            vars(layer)["scaled"] = Scaled()
            made.append(layer.scaled)
        scaled: Scaled = layer.scaled
        return scaled

    def scaled_forward(layer: Any, *arguments: Any, **options: Any) -> Any:
        tensors = of(layer).tensors
        output, bias = forward(layer, *arguments, **options)
        output = output * (1 + 0.1 * torch.sin(tensors["scale_fwd"][0]) + tensors["amax_history_fwd"][0, 0])
        tensors["scale_fwd"] += 1
        tensors["amax_history_fwd"][0, 0] = 0.1 * output.detach().abs().max().clamp(max=1)
        return output, bias

    patch.setattr(kind, "forward", scaled_forward)
    patch.setattr(kind, "get_extra_state", lambda layer: of(layer).get_extra_state())
    patch.setattr(kind, "set_extra_state", lambda layer, state: of(layer).set_extra_state(state))
