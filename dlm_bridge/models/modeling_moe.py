"""Mixture-of-experts bodies of transformers: loading of per-expert Hub tensors into stacked parameters."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from dlm_bridge.errors import CheckpointError
from dlm_bridge.models.diffusion_lm import DiffusionLM

_EXPERT = re.compile(r"(.*\.experts\.)\d+\..*")


class ExpertStackConverter(WeightConverter):
    """Stacks the tensors of a layer's experts, and checks that every expert is present once and has the same shape.

    transformers' converter stacks the tensors that it finds, in order: a missing expert together with a superfluous
    one would go unnoticed.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, config: Any = None, **kwargs: Any) -> Any:
        """Stack the tensors. Raises CheckpointError for a missing, superfluous or mis-shaped one."""
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
        """Hub names, in the order of the experts."""
        found = {name for names in self.layer_targets.values() for name in names}
        layer = {match[1] for match in map(_EXPERT.fullmatch, found) if match is not None}.pop()
        parts = [pattern.split("*")[1] for pattern in self.source_patterns]
        expected = [f"{layer}{expert}{part}" for part in parts for expert in range(experts)]
        if missing := [name for name in expected if name not in found]:
            raise CheckpointError(where, f"the checkpoint lacks {missing[0]}")
        if extra := found.difference(expected):
            raise CheckpointError(where, f"the checkpoint has {min(extra)}, the config {experts} experts")
        return expected


def _check_shapes(where: str, names: list[str], stack: list[torch.Tensor]) -> None:
    shapes = Counter(tuple(tensor.shape) for tensor in stack)
    (usual, _), *others = shapes.most_common()
    if others:
        # With expert parallelism a rank has only some of the tensors, without their names.
        odd = next(place for place, tensor in enumerate(stack) if tuple(tensor.shape) != usual)
        name = names[odd] if len(stack) == len(names) else f"a tensor like {names[0]}"
        raise CheckpointError(where, f"{name} has shape {tuple(stack[odd].shape)}, the other experts' {usual}")


def expert_converters() -> list[WeightConverter]:
    """Converters for `register_hub_names`: Hub tensors of experts to the stacks of Qwen3-MoE and Glm4-MoE."""
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
    """Mixin that enables transformers' kernels for experts. transformers looks for them in the source file of the
    model class, and without them falls back to a loop over experts."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class DiffusionMoE(ExpertsMixin, DiffusionLM):
    """`DiffusionLM` for bodies with experts."""
