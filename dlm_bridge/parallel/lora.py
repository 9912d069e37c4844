"""LoRA and DoRA adapters of a live megatron-core model's linear layers, in any layout.

Each Hub weight has its own adapter, as in PEFT, also if Megatron fuses several weights in one linear layer (query, key
and value; gate and up): the canonical style of Megatron Bridge, under whose names they are stored.

    layer               its input            A                    B                    between A and B
    sharded by rows     all columns          replicated           sharded by rows      gathered along the sequence
    sharded by columns  a rank's columns     sharded by columns   replicated           summed over ranks
    replicated          all columns          replicated           replicated           nothing

Tensor parallel ranks therefore exchange tensors of the adapter's rank, never of the layer's width. With sequence
parallelism the sum is scattered along the sequence, like the layer's own. Replicated layers are the projections to
latent vectors of multi-head latent attention, whose input is the tokens of their own rank.

DoRA's magnitudes are sharded like B. They replace norms over whole rows: for a layer sharded by columns, ranks sum
their squares. As in PEFT, no gradient passes through the norms.

Routed experts have an adapter each, without magnitudes. Their dispatcher sends the same tokens to all tensor parallel
ranks of an expert, and sums their outputs: the ranks exchange only the gradient of the replicated factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.lora.peft import LORA_FACTORS, LoraFactor, check_all_layers
from dlm_bridge.convert.lora.tensors import AdapterTensor, adapter_tensors
from dlm_bridge.errors import SettingError
from dlm_bridge.mapping.fused import FusedQKV
from dlm_bridge.mapping.rules import QKV, GatedMLP, ParamMapping
from dlm_bridge.parallel.core import (
    apply_swiglu_sharded_factory,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
    parallel_state,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

_AXES: dict[LoraFactor, int] = {"A": 1, "B": 0, "magnitude": 0}  # tensor parallel axis
ADAPTER = ".adapter."  # in the names of its parameters
# Function from a Hub weight and a factor to initial values; None for a magnitude: the norms of the weight's rows.
InitialValues = Callable[[str, LoraFactor], torch.Tensor | None]


@dataclass(frozen=True)
class LiveFactor:
    """Factor on this rank: a shard along `axis`, or the whole factor if `axis` is None."""

    tensor: AdapterTensor
    name: str  # of the parameter in its chunk
    parameter: nn.Parameter
    axis: int | None

    def sharded(self, dp_cp_group: Any) -> Any:
        """megatron-core's ShardedTensor of the factor."""
        param = self.tensor.param
        offsets = tuple((place, index, size) for place, (index, size) in enumerate(param.stack))
        groups = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "dp_cp_group": dp_cp_group}
        if param.expert is not None:
            groups = {
                "tp_group": parallel_state.get_expert_tensor_parallel_group(),
                "dp_cp_group": parallel_state.get_expert_data_parallel_group(),
            }
        if self.axis is None:
            return make_sharded_tensor_for_checkpoint(
                self.parameter, param.megatron_key, prepend_offsets=offsets, **groups
            )
        sharded = make_tp_sharded_tensor_for_checkpoint(
            self.parameter, param.megatron_key, self.axis, prepend_offsets=offsets, **groups
        )
        # Gate and up projections share A; a rank's rows of the two are not adjacent in the whole tensor.
        return apply_swiglu_sharded_factory(sharded, offsets) if isinstance(param.rule, GatedMLP) else sharded


def add_adapters(
    chunks: Sequence[Any],
    base: Checkpoint,
    weights: Sequence[str],
    rank: int,
    scale: float,
    initial: InitialValues,
    dora: bool = False,
) -> list[list[LiveFactor]]:
    """Freeze the parameters of this rank's chunks, and add an adapter for each of the Hub `weights` to their linear
    layers. Returns the factors of each chunk.

    Args:
        weights: names of Hub weights.
        rank: of the adapters.
        scale: factor of B A.
        initial: initial values of the factors.
        dora: add magnitudes.

    Raises SettingError for a weight that is not in a linear layer.
    """
    check_all_layers(base, weights, base.where)
    tensors = live_adapter_tensors(base, weights, rank, dora)
    factors = {(tensor.weights[0], tensor.part): tensor for tensor in tensors}
    by_layer: dict[int | None, list[ParamMapping]] = {}
    for param in dict.fromkeys(base.param_of[weight] for weight in weights):
        if not _module(param).rpartition(".")[2].startswith("linear_"):
            raise SettingError("lora_targets", f"{param.hub_names[0]} is not a linear layer in Megatron: unset it")
        by_layer.setdefault(param.layer, []).append(param)
    found = []
    for chunk in chunks:
        chunk.requires_grad_(False)
        live: list[LiveFactor] = []
        for number, layer in enumerate(chunk.decoder.layers):
            for place, params in _linear_layers(layer, by_layer.get(layer.layer_number - 1, ())).items():
                linear = layer.get_submodule(place)
                adapter: LinearAdapter | ExpertAdapter
                if params[0].expert is None:
                    adapter = LinearAdapter(params[0], factors, rank, scale, initial, linear)
                else:
                    adapter = ExpertAdapter(params, factors, scale, initial, linear)
                prefix = f"decoder.layers.{number}.{place}"
                live += [
                    LiveFactor(tensor, f"{prefix}{ADAPTER}{name}", parameter, axis)
                    for name, tensor, parameter, axis in adapter.members
                ]
        found.append(live)
    return found


def live_adapter_tensors(
    base: Checkpoint, weights: Sequence[str], rank: int, dora: bool = False
) -> list[AdapterTensor]:
    """All factors of an adapter of these Hub weights, over all ranks. Raises DlmBridgeError."""
    fused = {weight for weight in weights if isinstance(base.param_of[weight].rule, FusedQKV)}  # on the Hub already
    separate = [weight for weight in weights if weight not in fused]
    tensors = adapter_tensors(base, separate, rank, "canonical", base.where, dora)
    return tensors + adapter_tensors(base, sorted(fused), rank, "fused", base.where, dora)


@contextlib.contextmanager
def adapters_disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager that disables the adapters."""
    found = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, (LinearAdapter, ExpertAdapter))
    ]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


class LinearAdapter(nn.Module):
    """Adapters of one linear layer: for each Hub weight in it A [rank, columns], B [rows, rank] and with DoRA a
    magnitude [rows], or shards of these.

    A forward hook of the layer adds `scale * B A x` to its output. With DoRA each row of the sum is multiplied by its
    magnitude over the norm of W + scale * B A.
    """

    def __init__(
        self,
        param: ParamMapping,
        factors: Mapping[tuple[str, LoraFactor], AdapterTensor],
        rank: int,
        scale: float,
        initial: InitialValues,
        linear: Any,
    ) -> None:
        """Register the adapter as a submodule of `linear`, the layer that holds `param`."""
        super().__init__()
        self.enabled = True
        self.rank, self.scale = rank, scale
        self.tp_axis = param.rule.tp_axis  # 0: by rows, 1: by columns, None: replicated
        self.sequence_parallel = linear.config.sequence_parallel
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp = parallel_state.get_tensor_model_parallel_world_size()
        # In the rows of a fused layer query, key and value alternate, once per query group.
        self.groups = linear.config.num_query_groups // tp if isinstance(param.rule, QKV) else 1
        self.norm_eps = linear.config.layernorm_epsilon
        self.rows: list[int] = []  # number of rows of each Hub weight on this rank
        self.factors: list[tuple[_Factor, _Factor] | None] = []
        self.magnitudes: list[_Factor | None] = []
        self.members: list[tuple[str, AdapterTensor, nn.Parameter, int | None]] = []
        like = linear.weight
        for weight, (rows, _) in zip(param.hub_names, param.hub_shapes, strict=True):
            self.rows.append(rows // tp if self.tp_axis == 0 else rows)
            if (weight, "A") not in factors:
                self.factors.append(None)
                self.magnitudes.append(None)
                continue
            own: dict[LoraFactor, _Factor] = {}
            for part, axis in _AXES.items():
                if (tensor := factors.get((weight, part))) is None:
                    continue
                sharded = self.tp_axis is not None and (axis == 0) == (self.tp_axis == 0)
                given = initial(weight, part)
                if given is None:
                    values = torch.zeros(self.rows[-1])  # set below, when the rows of all parts are known
                else:
                    values = tensor.param.to_megatron([given])
                    values = tensor.param.shard(values, tp_rank, tp) if sharded else values
                # Magnitudes multiply the whole output, and stay in fp32.
                dtype = torch.float32 if part == "magnitude" else like.dtype
                factor: Any = nn.Parameter(values.to(like.device, dtype, copy=True).contiguous())
                # megatron-core's attributes of a shard, and of a replicated parameter under sequence parallelism
                factor.tensor_model_parallel = sharded
                factor.partition_dim, factor.partition_stride = (axis if sharded else -1), 1
                factor.sequence_parallel = self.sequence_parallel and not sharded
                name = tensor.param.megatron_name.partition(ADAPTER)[2].removesuffix(".weight") + ".weight"
                own[part] = _register(self, name, factor)
                self.members.append((name, tensor, factor, axis if sharded else None))
            self.factors.append((own["A"], own["B"]))
            self.magnitudes.append(own.get("magnitude"))
        self.dora = any(magnitude is not None for magnitude in self.magnitudes)
        if self.dora:
            # Squared norms of the base's rows, which are frozen.
            squares = torch.linalg.vector_norm(like.detach(), dim=1, dtype=torch.float32).square()
            self.squares = self._over_whole_rows(torch.cat(self._split_rows(squares)))
            for weight, magnitude, own_squares in zip(
                param.hub_names, self.magnitudes, self.squares.split(self.rows), strict=True
            ):
                if magnitude is not None and initial(weight, "magnitude") is None:
                    magnitude.weight.data.copy_(own_squares.sqrt())
        linear.add_module(ADAPTER.strip("."), self)
        linear.register_forward_hook(_add_to_output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Term [S, B, rows] that is added to the layer's output, from its input `x`."""
        present = [pair for pair in self.factors if pair is not None]
        each = iter(self._exchanged(F.linear(x, torch.cat([a() for a, _ in present]))).split(self.rank, dim=-1))
        added = [None if pair is None else F.linear(next(each), pair[1]()) for pair in self.factors]
        first = next(part for part in added if part is not None)
        parts = [
            first.new_zeros(*first.shape[:-1], rows) if part is None else part
            for part, rows in zip(added, self.rows, strict=True)
        ]
        return self.scale * self._fused(parts)

    def _exchanged(self, inner: torch.Tensor) -> torch.Tensor:
        """Input of B, from the output of this rank's A."""
        if self.tp_axis is None:
            return inner
        if self.tp_axis == 0:
            whole, sharded = copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
        else:
            whole, sharded = reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
        found: torch.Tensor = (sharded if self.sequence_parallel else whole)(inner)
        return found

    def ratio(self, weight: torch.Tensor) -> torch.Tensor:
        """DoRA's magnitudes over the norms of the rows of W + scale * B A, [rows] in fp32; 1 in rows without a
        magnitude. `weight` is W, or a shard."""
        norms = self._norms(weight).split(self.rows)
        parts = [
            torch.ones_like(norm) if magnitude is None else magnitude() / norm
            for magnitude, norm in zip(self.magnitudes, norms, strict=True)
        ]
        return self._fused(parts)

    @torch.no_grad()
    def _norms(self, weight: torch.Tensor) -> torch.Tensor:
        """Norms of the rows of W + scale * B A, Hub weight by Hub weight, without materialising that matrix: the
        squares of W's rows plus their change by B A."""
        present = [pair for pair in self.factors if pair is not None]
        products = iter(F.linear(weight, torch.cat([a() for a, _ in present])).split(self.rank, dim=-1))  # W A^T
        changes = []
        for number, pair in enumerate(self.factors):
            if pair is None:
                changes.append(self.squares.new_zeros(self.rows[number]))
                continue
            a, b = pair[0]().float(), pair[1]().float()
            product = self._split_rows(next(products))[number].float()
            changes.append((b * (2 * self.scale * product + self.scale**2 * (b @ (a @ a.T)))).sum(dim=1))
        squares = self.squares + self._over_whole_rows(torch.cat(changes))
        return squares.clamp_min(torch.finfo(squares.dtype).tiny).sqrt()

    def _over_whole_rows(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all columns, from sums over this rank's columns."""
        if self.tp_axis == 1:
            dist.all_reduce(sums, group=parallel_state.get_tensor_model_parallel_group())
        return sums

    def _fused(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenate each Hub weight's rows on the last axis, in the order of the layer's rows."""
        if self.groups > 1 and len(parts) > 1:
            return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], dim=-1).flatten(-2)
        return torch.cat(list(parts), dim=-1)

    def _split_rows(self, fused: torch.Tensor) -> list[torch.Tensor]:
        """Inverse of `_fused`, on the first axis."""
        if self.groups > 1 and len(self.rows) > 1:
            sizes = [rows // self.groups for rows in self.rows]
            return [part.flatten(0, 1) for part in fused.unflatten(0, (self.groups, -1)).split(sizes, dim=1)]
        return list(fused.split(self.rows))


class ExpertAdapter(nn.Module):
    """Adapters of a linear layer of routed experts, for one expert or grouped: for each expert A [rank, columns] and
    B [rows, rank], or shards. A forward hook of the layer adds `scale * B A x` to the output rows of each expert's
    tokens, with one grouped product for A and one for B if PyTorch supports them."""

    def __init__(
        self,
        params: Sequence[ParamMapping],
        factors: Mapping[tuple[str, LoraFactor], AdapterTensor],
        scale: float,
        initial: InitialValues,
        linear: Any,
    ) -> None:
        """Register the adapters as a submodule of `linear`, the layer that holds `params`, one per expert."""
        super().__init__()
        self.enabled = True
        self.scale = scale
        self.factors: list[tuple[_Factor, _Factor]] = []
        self.members: list[tuple[str, AdapterTensor, nn.Parameter, int | None]] = []
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
        self.group = parallel_state.get_expert_tensor_parallel_group() if size > 1 else None
        like = linear.weight if hasattr(linear, "weight") else linear.weight0
        for number, param in enumerate(params):
            pair = []
            for part, axis in zip(LORA_FACTORS, (1, 0), strict=True):
                sharded = (axis == 0) == (param.rule.tp_axis == 0)
                tensor = factors[param.hub_names[0], part]
                weights = tensor.weights[:1] if tensor.shared else tensor.weights
                given = [initial(weight, part) for weight in weights]
                values = tensor.param.to_megatron([factor for factor in given if factor is not None])
                if sharded:
                    values = tensor.param.shard(values, rank, size)
                factor: Any = nn.Parameter(values.to(like.device, like.dtype, copy=True).contiguous())
                # megatron-core's attributes. Its norm detects duplicates by the tensor parallel ranks of dense layers,
                # which may differ: duplicates of experts are marked as shared parameters.
                factor.allreduce = getattr(like, "allreduce", True)
                factor.tensor_model_parallel = True
                factor.partition_dim, factor.partition_stride = (axis if sharded else -1), 1
                factor.shared = not sharded and rank > 0
                name = tensor.param.megatron_name.partition(ADAPTER)[2]
                name = name if len(params) == 1 else f"{number}.{name}"
                pair.append(_register(self, name, factor, None if sharded else self.group))
                self.members.append((name, tensor, factor, axis if sharded else None))
            self.factors.append((pair[0], pair[1]))
        linear.add_module(ADAPTER.strip("."), self)
        linear.register_forward_hook(_add_to_experts)

    def forward(self, x: torch.Tensor, tokens: Sequence[int] | None = None) -> torch.Tensor:
        """Term [T, rows] that is added to the layer's output, from its input `x`; `tokens` are the numbers of tokens
        of each expert."""
        if tokens is None:
            ((a, b),) = self.factors
            return self.scale * F.linear(F.linear(x, a()), b())
        inner = grouped_linear(x, [a() for a, _ in self.factors], tokens)
        return self.scale * grouped_linear(inner, [b() for _, b in self.factors], tokens)


def grouped_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Products [T, rows] of x [T, columns] with each expert's weight [rows, columns]; the rows of x are sorted by
    expert, with `tokens` rows for each.

    Uses one grouped product if PyTorch supports it (CPU; NVIDIA GPUs from compute capability 8.0; not fp64), otherwise
    one product per expert. Grouped products need rows of a multiple of 16 bytes, so an adapter's rank is padded with
    zeros.
    """
    if not len(x) or not _has_grouped_product(x):
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(list(tokens)), weights, strict=True)])
    weight = torch.stack(list(weights))
    rows, columns = weight.shape[1:]
    unit = 16 // x.element_size()
    x, weight = F.pad(x, (0, -columns % unit)), F.pad(weight, (0, -columns % unit, 0, -rows % unit))
    ends = torch.tensor(tokens, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)[:, :rows]


def _has_grouped_product(x: torch.Tensor) -> bool:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if x.device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return x.device.type == "cpu"


def adapter_state(factors: Sequence[LiveFactor], dp_cp_group: Any) -> dict[str, Any]:
    """Sharded state dict of a chunk's factors, for megatron-core's checkpoints."""
    return {factor.name: factor.sharded(dp_cp_group) for factor in factors}


def _add_to_output(linear: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    if not linear.adapter.enabled:
        return output
    x = inputs[0]
    if (weight := getattr(linear, "layer_norm_weight", None)) is not None:  # Transformer Engine's layer has the norm
        scale = 1 + weight if linear.zero_centered_gamma else weight
        x = F.rms_norm(x, (x.shape[-1],), scale.to(x.dtype), linear.adapter.norm_eps)
    base, added = output[0], linear.adapter(x)
    if not linear.adapter.dora:
        return (base + added, *output[1:])
    # A bias in the output is not multiplied by the ratio.
    bias = getattr(linear, "bias", None) if output[1] is None else None
    product = base if bias is None or not bias.numel() else base - bias
    ratio = linear.adapter.ratio(linear.weight)
    return (base + (ratio - 1).to(base.dtype) * product + ratio.to(base.dtype) * added, *output[1:])


def _add_to_experts(linear: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    if not linear.adapter.enabled:
        return output
    grouped = not hasattr(linear, "weight")  # Transformer Engine's; its second input is the numbers of tokens
    return (output[0] + linear.adapter(inputs[0], inputs[1] if grouped else None), *output[1:])


def _linear_layers(layer: Any, params: Sequence[ParamMapping]) -> dict[str, list[ParamMapping]]:
    """Path of each linear layer in a transformer layer -> its parameters on this rank: one, or one per expert."""
    found: dict[str, list[ParamMapping]] = {}
    for param in params:
        if param.expert is None:
            found[_module(param)] = [param]
            continue
        local = list(layer.mlp.local_expert_indices)
        if param.expert not in local:
            continue
        name = _module(param).rpartition(".")[2]
        apart = hasattr(layer.mlp.experts, "local_experts")
        place = f"mlp.experts.local_experts.{local.index(param.expert)}.{name}" if apart else f"mlp.experts.{name}"
        found.setdefault(place, []).append(param)
    return found


def _module(param: ParamMapping) -> str:
    """Path of a parameter's linear layer in its transformer layer."""
    return param.megatron_name.split(".", 3)[3].removesuffix(".weight")


class _Factor(nn.Module):
    """Module whose call returns its weight, so that the hook runs in which megatron-core waits for its all-gather. The
    weight's gradient is summed over the ranks of `group`."""

    def __init__(self, weight: nn.Parameter, group: Any = None) -> None:
        super().__init__()
        self.weight, self.group = weight, group

    def forward(self) -> torch.Tensor:
        if self.group is None:
            return self.weight
        copied: torch.Tensor = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return copied


def _register(module: nn.Module, name: str, parameter: nn.Parameter, group: Any = None) -> _Factor:
    """Add a `_Factor` for the parameter as a submodule; `name` ends with `.weight`."""
    *path, last, _ = name.split(".")
    for step in path:
        if step not in dict(module.named_children()):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    factor = _Factor(parameter, group)
    module.add_module(last, factor)
    return factor
