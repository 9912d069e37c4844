"""Mixture-of-experts bodies of transformers: loading of per-expert Hub tensors into stacked parameters."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.diffusion_lm import DiffusionLM

_EXPERT = re.compile(r"(.*\.experts\.)\d+\..*")


class ExpertStackConverter(WeightConverter):
    """Stacks the experts' tensors of one layer; every expert must be there, once, and as large as the others.

    transformers' own converter stacks what it finds in the order of the numbers, so that a missing expert beside a
    superfluous one would go unnoticed.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, config: Any = None, **kwargs: Any) -> Any:
        """As in transformers. Raises DlmBridgeError with the tensor that is missing, left over or mis-shaped."""
        if kwargs.get("loading_info") is not None:
            where = config.name_or_path or "the state dict"
            named = ("num_experts", "num_local_experts", "n_routed_experts")
            experts = next(getattr(config, name) for name in named if getattr(config, name, None) is not None)
            names = self._check_names(where, experts)
            tensors: dict[str, Any] = self.materialize_tensors()
            for pattern, stack in tensors.items():
                _check_shapes(where, [name for name in names if name.endswith(pattern.split("*")[1])], stack)
            self.collected_tensors.update(tensors)
        return super().convert(layer_name, model=model, config=config, **kwargs)

    def _check_names(self, where: str, experts: int) -> list[str]:
        """The Hub names, in the order of the experts."""
        found = {name for names in self.layer_targets.values() for name in names}
        layer = {match[1] for match in map(_EXPERT.fullmatch, found) if match is not None}.pop()
        parts = [pattern.split("*")[1] for pattern in self.source_patterns]
        expected = [f"{layer}{expert}{part}" for part in parts for expert in range(experts)]
        if missing := [name for name in expected if name not in found]:
            raise DlmBridgeError(f"{where}: the checkpoint lacks {missing[0]}")
        if extra := found.difference(expected):
            raise DlmBridgeError(f"{where}: the checkpoint has {min(extra)}, but by the config {experts} experts")
        return expected


def _check_shapes(where: str, names: list[str], stack: list[torch.Tensor]) -> None:
    shapes = Counter(tuple(tensor.shape) for tensor in stack)
    (usual, _), *others = shapes.most_common()
    if others:
        # Under expert parallelism a rank has only some of the tensors, and not their names.
        odd = next(place for place, tensor in enumerate(stack) if tuple(tensor.shape) != usual)
        name = names[odd] if len(stack) == len(names) else f"one of {names[0]} and its like"
        raise DlmBridgeError(f"{where}: {name} has shape {tuple(stack[odd].shape)}, others {usual}")


def expert_converters() -> list[WeightConverter]:
    """For `register_renames`: Hub names of experts to the stacks of Qwen3-MoE's and Glm4-MoE's bodies."""
    expert = "mlp.experts.*."
    return [
        ExpertStackConverter(
            [expert + "gate_proj.weight", expert + "up_proj.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        ExpertStackConverter(expert + "down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]


class ExpertsMixin:
    """Mixin for every model class around such a body: transformers finds out by a model class's own source file
    whether it has kernels for experts, and falls back to a loop over experts where it sees none."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class DiffusionMoE(ExpertsMixin, DiffusionLM):
    """`DiffusionLM` for bodies with experts."""
