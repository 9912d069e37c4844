"""Plain layers for tensor-parallel sampling.

The parameters of a layer are this process's shards. A layer sharded by output features is a plain `nn.Linear`; others
end with one collective on the current stream. Both functions follow transformers' plan:

- `use_plain_shards` converts a loaded model. `from_pretrained(..., distributed_config=...)` loads shards as DTensors
  and wraps the forward of every sharded layer, which replaces the DTensors by local tensors in each call: the host
  takes longer than the GPU. This function keeps the weights and removes the wrappers.
- `cut_model` converts a model on the meta device, whose weights are written later (`Shard.write`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from dlm_bridge.errors import SettingError

# Supported styles of transformers' plans (transformers.distributed.tensor_parallel).
_LOCAL = ("colwise", "packed_colwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SUMMED = ("rowwise", "rowwise_split_input", "rowwise_rep")
_EXPERTS = "moe_tp_experts"
_EMBEDDING = "embedding_rowwise"
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", _EXPERTS)  # parameters are not sharded


class _CopiedTensorParallel(DistributedConfig):
    """Tensor parallelism for several independent copies of a model.

    transformers creates a device mesh over all processes; the processes of a copy are neighbours. The axis for copies
    is FSDP's, which `maybe_distribute_model` applies if `dp_size` is above 1.
    """

    @property
    def dp_size(self) -> int:
        return 1


def distributed_config(tp: int, copies: int) -> DistributedConfig:
    """transformers' configuration for the model's own plan, with `copies` copies of `tp` processes each."""
    return _CopiedTensorParallel(tp_plan="auto", tp_size=tp, dp_replicate_size=copies)


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


class SummedEmbedding(nn.Embedding):
    """Embedding whose `num_embeddings` rows are sharded over processes; outputs are summed."""

    group: Any
    start: int  # first row of this process

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Token ids [...] to [..., hidden], the same in every process."""
        rows = input - self.start
        here = (rows >= 0) & (rows < self.weight.shape[0])
        output = super().forward(rows.where(here, 0)).where(here[..., None], 0)
        dist.all_reduce(output, group=self.group)
        return output


class GatheredLinear(nn.Linear):
    """Linear layer whose output features are sharded over processes and gathered."""

    group: Any
    features: int  # number of output features of all processes
    width: int  # number of output features per process; the last one may have fewer

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
    """Linear layer whose input features are sharded over processes; products are summed before the bias is added."""

    group: Any
    start: int | None  # first input feature of this process; None: the input is sharded

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in of this process, or of all] to [..., out], the same in every process."""
        if self.start is not None:
            input = input.narrow(-1, self.start, self.weight.shape[1])
        output = nn.functional.linear(input, self.weight)
        dist.all_reduce(output, group=self.group)
        return output if self.bias is None else output + self.bias


def use_plain_shards(model: Any) -> bool:
    """Replace the layers that transformers has wrapped to shard `model` by plain ones.

    Returns False, without changes, if the model is not sharded, is quantised, or has an unsupported style. Afterwards,
    the model cannot be trained or saved, because its parameters are shards.
    """
    wrapped = {name: module for name, module in model.named_modules() if "forward" in vars(module)}
    holders = {name for name, module in model.named_modules() if any(map(_is_shard, module._parameters.values()))}
    if not holders or not holders <= set(wrapped) or getattr(model, "is_quantized", False):
        return False
    mesh = model._device_mesh["tp"]
    makers = []
    for name, module in wrapped.items():
        make = _plain_layer(module, _style(model, name), mesh.get_group(), mesh.get_local_rank())
        if make is None:
            return False
        makers.append(make)
    local: dict[DTensor, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if _is_shard(parameter):
                if parameter not in local:
                    local[parameter] = nn.Parameter(parameter.to_local(), requires_grad=False)
                module._parameters[name] = local[parameter]
    for module in wrapped.values():
        del module.forward
    for make in makers:
        make()
    _mark(model, mesh.get_group())
    return True


@dataclass(frozen=True)
class Shard:
    """Shard of a tensor of shape `whole`: the concatenation of `ranges` (begin, end) along `dim`; the whole tensor if
    `dim` is None."""

    whole: torch.Size
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of the shard."""
        sizes = list(self.whole)
        if self.dim is not None:
            sizes[self.dim] = sum(high - low for low, high in self.ranges)
        return torch.Size(sizes)

    def write(self, part: torch.Tensor, values: torch.Tensor, start: int = 0) -> None:
        """Copy values of the whole tensor, from element `start` on in row-major order, to the shard `part`, in its
        dtype. The values are whole slices along `dim`, or within one of them."""
        flat = values.reshape(-1)
        if self.dim is None:
            part.view(-1)[start : start + len(flat)].copy_(flat)
            return
        places, inner = self.whole[self.dim], prod(self.whole[self.dim + 1 :])
        slice_, first = divmod(start // inner, places)
        if first == 0 and len(flat) % (places * inner) == 0:
            slices = flat.view(-1, places, inner)
        else:
            slices = flat.view(1, -1, inner)
        assert first + slices.shape[1] <= places, "the values lie in several slices"
        target = part.view(-1, self.shape[self.dim], inner)[slice_ : slice_ + len(slices)]
        offset = 0
        for low, high in self.ranges:
            begin, end = max(low, first), min(high, first + slices.shape[1])
            if begin < end:
                target[:, offset + begin - low : offset + end - low].copy_(slices[:, begin - first : end - first])
            offset += high - low


def cut_model(model: Any, group: Any) -> dict[str, Shard]:
    """Convert the layers of a model on the meta device to plain ones, with parameters for this process's shards.

    Tied weights of layers with different styles stay whole in every process. The model cannot be trained or saved.

    Args:
        group: processes that share the model.

    Returns:
        The shards by parameter name.

    Raises:
        SettingError: the model's plan has an unsupported style.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shards: dict[int, set[Shard]] = {}  # by parameter, from all modules that have it
    for name, module in model.named_modules():
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                full_name = f"{name}.{own_name}".lstrip(".")
                style = _style(model, full_name) or _style(model, name)
                shards.setdefault(id(parameter), set()).add(_shard(parameter, own_name, style, rank, size, full_name))
    chosen = {
        id(parameter): next(iter(found)) if len(found := shards[id(parameter)]) == 1 else Shard(parameter.shape)
        for parameter in model.parameters()
    }
    named = {name: chosen[id(parameter)] for name, parameter in model.named_parameters()}
    makers = []
    for name, module in model.named_modules():
        style = _style(model, name)
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if style is None or any(len(shards[id(parameter)]) > 1 for parameter in own):
            continue
        if (make := _plain_layer(module, style, group, rank)) is None:
            raise SettingError(
                "tp", f"{type(model).__name__}.{name}: the style '{style}' of transformers' plan is not supported"
            )
        makers.append(make)
    parts = {
        id(parameter): nn.Parameter(parameter.new_empty(chosen[id(parameter)].shape), requires_grad=False)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own_name] = parts[id(parameter)]
    for make in makers:
        make()
    model._tp_size = size
    _mark(model, group)
    return named


def _mark(model: Any, group: Any) -> None:
    """Set the attributes by which the package recognises a model with plain layers."""
    model.plain_shards = True
    model.shard_group = group


def _style(model: Any, name: str) -> str | None:
    """Style of a module or parameter in transformers' plan."""
    style: str | None = model.tp_plan.get(re.sub(r"\b\d+\b", "*", name))
    return style


def _shard(parameter: torch.Tensor, name: str, style: str | None, rank: int, size: int, where: str) -> Shard:
    """This process's shard of a parameter, as by torch's `Shard` placements: all but the last have one width."""
    last = parameter.dim() - 1
    if style in (None, *_WHOLE) or (style in _SUMMED and name == "bias"):
        return Shard(parameter.shape)
    if style in ("colwise", "packed_colwise", *_GATHERED):
        dim = max(0, last - 1)
    elif style in _SUMMED:
        dim = last
    elif style == _EMBEDDING:
        dim = 0
    else:
        raise SettingError("tp", f"{where}: the style '{style}' of transformers' plan is not supported")
    pieces = 2 if style == "packed_colwise" else 1
    length = parameter.shape[dim] // pieces
    width = -(-length // size)
    low, high = min(rank * width, length), min((rank + 1) * width, length)
    return Shard(parameter.shape, dim, tuple((n * length + low, n * length + high) for n in range(pieces)))


def _is_shard(parameter: object) -> TypeGuard[DTensor]:
    return isinstance(parameter, DTensor)


def _plain_layer(module: nn.Module, style: str | None, group: Any, rank: int) -> Callable[[], None] | None:
    """Function that converts a module to a plain layer, once its parameters are local; None for unsupported styles."""
    if style in _LOCAL:
        return partial(_unwrap, module)
    if style == _EXPERTS:
        return partial(_sum_experts, module, group)
    if style == _EMBEDDING and isinstance(module, nn.Embedding):
        return partial(_sum_rows, module, group, rank)
    if type(module) is not nn.Linear:
        return None
    if style in _GATHERED:
        return partial(_gather, module, group)
    if style in _SUMMED:
        return partial(_sum, module, group, None if style == "rowwise" else rank)
    return None


def _unwrap(module: nn.Module) -> None:
    if type(module) is nn.Linear:
        module.out_features = module.weight.shape[0]


def _sum_experts(module: nn.Module, group: Any) -> None:
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = forward(*args, **kwargs)
        dist.all_reduce(output, group=group)
        return output

    module.forward = summed


def _sum_rows(module: nn.Embedding, group: Any, rank: int) -> None:
    width = -(-module.num_embeddings // dist.get_world_size(group))
    kind = type(module)
    if kind is nn.Embedding:
        module.__class__ = SummedEmbedding
    else:  # Gemma's, which scales the rows
        module.__class__ = type(f"Summed{kind.__name__}", (SummedEmbedding, kind), {})
    module.padding_idx = None  # used by gradients only
    module.group, module.start = group, rank * width  # type: ignore[assignment]


def _gather(module: nn.Linear, group: Any) -> None:
    features, processes = module.out_features, dist.get_world_size(group)
    module.__class__ = GatheredLinear
    module.group, module.features, module.width = group, features, -(-features // processes)  # type: ignore[assignment]
    module.out_features = module.weight.shape[0]


def _sum(module: nn.Linear, group: Any, rank: int | None) -> None:
    width = -(-module.in_features // dist.get_world_size(group))
    module.__class__ = SummedLinear
    module.group, module.start = group, None if rank is None else rank * width  # type: ignore[assignment]
    module.in_features = module.weight.shape[1]
