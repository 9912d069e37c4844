"""Mixture-of-experts bodies in transformers: experts are one stack in memory and many tensors on the Hub."""

from __future__ import annotations

import re
from typing import Any

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.diffusion import DiffusionLM

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


class ExpertStack(WeightConverter):
    """Stacks the experts' tensors of one layer; every expert must be there, once.

    transformers' own converter stacks what it finds in the order of the numbers, so that a missing expert beside a
    superfluous one would go unnoticed.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, config: Any = None, **kwargs: Any) -> Any:
        """As in transformers. Raises DlmBridgeError that names the tensor which is missing or left over."""
        if kwargs.get("loading_info") is not None:
            self._check(model, config)
        return super().convert(layer_name, model=model, config=config, **kwargs)

    def _check(self, model: Any, config: Any) -> None:
        found = {name for names in self.layer_targets.values() for name in names}
        parts = {match[1] + "{}" + match[3] for match in map(_EXPERT.fullmatch, found) if match is not None}
        if len(parts) < len(self.source_patterns):
            parts |= {self._other(part) for part in parts}
        expected = {part.format(expert) for part in parts for expert in range(config.num_experts)}
        where = config.name_or_path or "the state dict"
        if missing := expected - found:
            raise DlmBridgeError(f"{where}: the checkpoint lacks {min(missing)}")
        if extra := found - expected:
            raise DlmBridgeError(
                f"{where}: the checkpoint has {min(extra)}, but the config {config.num_experts} experts"
            )

    def _other(self, part: str) -> str:
        """gate_proj's template for up_proj's and the other way round."""
        ours, theirs = ("gate_proj", "up_proj") if "gate_proj" in part else ("up_proj", "gate_proj")
        return part.replace(ours, theirs)


def expert_stacks() -> list[WeightConverter]:
    """For `register_renames`: Hub names of experts to the stacks of Qwen3-MoE's and Glm4-MoE's bodies."""
    expert = "mlp.experts.*."
    return [
        ExpertStack(
            [expert + "gate_proj.weight", expert + "up_proj.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        ExpertStack(expert + "down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]


class WithExperts:
    """Mixin for every model class around such a body: transformers finds out by a model class's own source file
    whether it has kernels for experts, and falls back to a loop over experts where it sees none."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class DiffusionMoE(WithExperts, DiffusionLM):
    """`DiffusionLM` for bodies with experts."""
