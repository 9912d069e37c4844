"""Mapping rules for fused Hub tensors: QKV, gate and up projections, shared keys and values, stacked experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import QKV, Dims, GatedMLP, Rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FusedQKV(QKV):
    """One Hub tensor [all q rows; all k rows; all v rows], interleaved per query group on the Megatron side."""

    name: str = ""

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.name,)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (self.megatron_shape(dims),)

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        (fused,) = tensors
        return super().to_megatron(fused.split(self.rows(dims)), dims)

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        import torch

        return (torch.cat(super().to_hub(tensor, dims)),)

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return None


@dataclass(frozen=True)
class SharedKV(QKV):
    """Query and key projections of attention that uses the keys as values; Megatron's has the key rows twice."""

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.q, self.k)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return super().hub_shapes(dims)[:2]

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        q, k = tensors
        return super().to_megatron((q, k, k), dims)

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        import torch

        q, k, v = super().to_hub(tensor, dims)
        if not torch.equal(k.view(torch.uint8), v.view(torch.uint8)):
            raise CheckpointError(self.megatron, "its value rows differ from its key rows, which this model shares")
        return q, k

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return None


@dataclass(frozen=True)
class FusedGatedMLP(GatedMLP):
    """One Hub tensor [all gate rows; all up rows], equal to Megatron's."""

    name: str = ""

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.name,)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (self.megatron_shape(dims),)

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        (fused,) = tensors
        return fused

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        return (tensor,)


@dataclass(frozen=True)
class StackedExperts(Rule):
    """Hub tensors with all experts of a layer stacked on the first axis; `each` maps one expert.

    The slice concatenates the rows of the experts. Megatron stores each expert separately (`ParamMapping.pieces`).
    """

    each: Rule | None = None  # type: ignore[misc]
    tp_axis: ClassVar[int | None] = None  # the rule of one expert has it

    @property
    def _each(self) -> Rule:
        assert self.each is not None
        return self.each

    @property
    def hub(self) -> tuple[str, ...]:
        return self._each.hub

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple((dims.experts, *shape) for shape in self._each.hub_shapes(dims))

    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        rows, *columns = self._each.megatron_shape(dims)
        return (dims.experts * rows, *columns)

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        import torch

        return torch.cat([self._each.to_megatron(expert, dims) for expert in zip(*tensors, strict=True)])

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        import torch

        experts = [self._each.to_hub(expert, dims) for expert in tensor.chunk(dims.experts)]
        return tuple(torch.stack(parts) for parts in zip(*experts, strict=True))

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        """Views, if the Hub tensor of one expert equals Megatron's."""
        first = tensor[: self._each.megatron_shape(dims)[0]]
        views = self._each.hub_views(first, dims)
        if views is None or len(views) != 1 or views[0] is not first:
            return None
        return (tensor.view(dims.experts, -1, *tensor.shape[1:]),)

    def check_tp(self, tp: int, dims: Dims) -> None:
        self._each.check_tp(tp, dims)


def stacked(each: Rule) -> StackedExperts:
    """Make `StackedExperts` from a rule whose Megatron name contains `{expert}`."""
    return StackedExperts(each.megatron, when=each.when, own_dtype=each.own_dtype, each=each)
