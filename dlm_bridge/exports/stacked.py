"""Experts whose Hub tensor has all of a layer: their matrices in a quantised folder.

A quantised folder has the matrices of each expert on their own, like the folders that llm-compressor writes and vLLM
reads: `experts.E.gate_proj.weight`, `experts.E.up_proj.weight` and `experts.E.down_proj.weight`, each [out, in], in
place of `experts.gate_up_proj` and `experts.down_proj`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from dlm_bridge.mapping.fused import StackedExperts
from dlm_bridge.mapping.rules import GatedMLP, ParamMapping


@dataclass(frozen=True)
class ExpertStack:
    """Hub tensor with a matrix of every expert of a layer, which may be transposed or have interleaved rows.

    Quantised it is one matrix [experts * out, in]: the rows of the experts in order, of each its gate before its up
    projection. That is Megatron's order of rows.
    """

    param: ParamMapping

    @property
    def name(self) -> str:
        """Hub name of the tensor."""
        return self.param.hub_names[0]

    @property
    def experts(self) -> int:
        return self.param.dims.experts

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix."""
        rows, columns = self.param.megatron_shape
        return rows, columns

    @property
    def shape_by_expert(self) -> tuple[int, int, int]:
        return self.experts, self.shape[0] // self.experts, self.shape[1]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the separate matrices, in the order of their rows. All have the same number of rows."""
        layer, _, leaf = self.name.rpartition(".")
        parts = ("gate_proj", "up_proj") if isinstance(self.param.rule.each, GatedMLP) else (leaf,)
        return tuple(f"{layer}.{expert}.{part}.weight" for expert in range(self.experts) for part in parts)

    @property
    def rows(self) -> int:
        """Rows of a separate matrix."""
        return self.shape[0] // len(self.names)

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix [experts * out, in] of the Hub tensor."""
        return self.param.to_megatron([tensor])

    def tensor(self, matrix: torch.Tensor) -> torch.Tensor:
        """The Hub tensor of a matrix."""
        (tensor,) = self.param.to_hub(matrix)
        return tensor


def expert_stacks(params: Iterable[ParamMapping]) -> dict[str, ExpertStack]:
    """Stacks of expert matrices among a model's parameters, by Hub name."""
    found = {}
    for param in params:
        if isinstance(param.rule, StackedExperts) and len(param.megatron_shape) == 2 and len(param.hub_names) == 1:
            found[param.hub_names[0]] = ExpertStack(param)
    return found
