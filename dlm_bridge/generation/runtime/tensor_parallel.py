"""Plain layers for tensor-parallel sampling.

`from_pretrained(..., distributed_config=...)` gives each process its shards as DTensors and wraps the forward of every
sharded layer: each call takes the local tensors out, calls the layer, and puts the DTensors back, which keeps the host
busier than the GPU. `use_plain_shards` keeps the weights that were loaded and replaces the wrappers: a layer's
parameters are this process's shard, a layer cut by output features is an ordinary `nn.Linear`, and the others end with
one collective on the current stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

# Styles of transformers' plans (transformers.distributed.tensor_parallel) that have a plain layer here.
_LOCAL = ("colwise", "packed_colwise", "replicated_with_grad_allreduce")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SUMMED = ("rowwise", "rowwise_split_input", "rowwise_rep")
_EXPERTS = "moe_tp_experts"
_EMBEDDING = "embedding_rowwise"


class _CopiedTensorParallel(DistributedConfig):
    """Tensor parallelism of several copies of a model, which exchange nothing.

    transformers makes a device mesh over all processes, of which those of a copy are neighbours. Its axis for copies
    is FSDP's, which `maybe_distribute_model` applies where this size is above 1.
    """

    @property
    def dp_size(self) -> int:
        return 1


def distributed_config(tp: int, copies: int) -> DistributedConfig:
    """transformers' configuration of the model's own plan, for so many copies of it on `tp` processes each."""
    return _CopiedTensorParallel(tp_plan="auto", tp_size=tp, dp_replicate_size=copies)


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


class SummedEmbedding(nn.Embedding):
    """An embedding whose rows (`num_embeddings` in all) are cut over processes, each of which adds those it has."""

    group: Any
    start: int  # the first row of this process

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids [...] to [..., hidden], the same in every process."""
        rows = input - self.start
        here = (rows >= 0) & (rows < self.weight.shape[0])
        output = nn.functional.embedding(rows.where(here, 0), self.weight).where(here[..., None], 0)
        dist.all_reduce(output, group=self.group)
        return output


class GatheredLinear(nn.Linear):
    """A linear layer whose output features are cut over processes, and gathered."""

    group: Any
    features: int  # of all processes
    width: int  # of each; the last one's may be shorter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., features], the same in every process."""
        output = super().forward(input)
        leading = output.shape[:-1]
        own = nn.functional.pad(output, (0, self.width - output.shape[-1])).flatten(0, -2)
        parts = own.new_empty((dist.get_world_size(self.group) * own.shape[0], self.width))
        _all_gather(parts, own.contiguous(), group=self.group)
        whole = parts.view(-1, own.shape[0], self.width).transpose(0, 1).flatten(1)
        return whole[:, : self.features].view(*leading, self.features)


class SummedLinear(nn.Linear):
    """A linear layer whose input features are cut over processes, whose products are summed before the bias."""

    group: Any
    start: int | None  # of its features in an input that has those of all processes; None: the input is cut already

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in of this process, or of all] to [..., out], the same in every process."""
        if self.start is not None:
            input = input.narrow(-1, self.start, self.weight.shape[1])
        output = nn.functional.linear(input, self.weight)
        dist.all_reduce(output, group=self.group)
        return output if self.bias is None else output + self.bias


def use_plain_shards(model: Any) -> bool:
    """Replace the layers that transformers wrapped to shard `model` by plain ones. Returns whether that was done.

    Not done, with the model as it was: where it is not sharded, is quantised, or has a style of sharding that is not
    known here. The model cannot be trained or saved afterwards: its parameters are shards.
    """
    wrapped = {name: module for name, module in model.named_modules() if "forward" in vars(module)}
    holders = {name for name, module in model.named_modules() if any(map(_is_shard, module._parameters.values()))}
    if not holders or not holders <= set(wrapped) or getattr(model, "is_quantized", False):
        return False
    mesh = model._device_mesh["tp"]
    makers = []
    for name, module in wrapped.items():
        style = model.tp_plan.get(re.sub(r"\b\d+\b", "*", name))
        make = _plain_layer(module, style, mesh.get_group(), mesh.get_local_rank())
        if make is None:
            return False
        makers.append(make)
    local: dict[DTensor, nn.Parameter] = {}  # tied weights stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if _is_shard(parameter):
                if parameter not in local:
                    local[parameter] = nn.Parameter(parameter.to_local(), requires_grad=False)
                module._parameters[name] = local[parameter]
    for make in makers:
        make()
    model.plain_shards = True
    return True


def _is_shard(parameter: object) -> TypeGuard[DTensor]:
    return isinstance(parameter, DTensor)


def _plain_layer(module: nn.Module, style: str | None, group: Any, rank: int) -> Callable[[], None] | None:
    """What makes a wrapped module a plain layer, once its parameters are local; None where nothing does."""
    if style in _LOCAL:
        return partial(_unwrap, module)
    if style == _EXPERTS:
        return partial(_sum_experts, module, group)
    if style == _EMBEDDING and type(module) is nn.Embedding:
        return partial(_sum_rows, module, group, rank)
    if type(module) is not nn.Linear:
        return None
    if style in _GATHERED:
        return partial(_gather, module, group)
    if style in _SUMMED:
        return partial(_sum, module, group, None if style == "rowwise" else rank)
    return None


def _unwrap(module: nn.Module) -> None:
    del module.forward
    if type(module) is nn.Linear:
        module.out_features = module.weight.shape[0]


def _sum_experts(module: nn.Module, group: Any) -> None:
    del module.forward
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = forward(*args, **kwargs)
        dist.all_reduce(output, group=group)
        return output

    module.forward = summed


def _sum_rows(module: nn.Embedding, group: Any, rank: int) -> None:
    del module.forward
    width = -(-module.num_embeddings // dist.get_world_size(group))
    module.__class__ = SummedEmbedding
    module.group, module.start = group, rank * width  # type: ignore[assignment]


def _gather(module: nn.Linear, group: Any) -> None:
    del module.forward
    features, processes = module.out_features, dist.get_world_size(group)
    module.__class__ = GatheredLinear
    module.group, module.features, module.width = group, features, -(-features // processes)  # type: ignore[assignment]
    module.out_features = module.weight.shape[0]


def _sum(module: nn.Linear, group: Any, rank: int | None) -> None:
    del module.forward
    width = -(-module.in_features // dist.get_world_size(group))
    module.__class__ = SummedLinear
    module.group, module.start = group, None if rank is None else rank * width  # type: ignore[assignment]
    module.in_features = module.weight.shape[1]
