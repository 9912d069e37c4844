"""Fused linear layers: QKV and gate/up projections as one matrix product each.

A GPU runs one wide product faster than several narrow ones. The weights are made contiguous in memory, and the layers'
parameters become views of that memory: the same parameters with the same values.

Layers with an adapter that acts at mask tokens only (`convert.lora.mask_only`) are fused too: the adapter's own layers
launch five kernels for each linear layer, a dense matrix of what it adds to the fused product launches two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

# Names of layers with the same input in their parent module.
FUSED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedLinear:
    """Several linear layers of one input as one matrix product, computed at the first access to an output.

    Args:
        layers: the layers, without adapters.
        delta: what their adapters add.
    """

    def __init__(self, layers: list[nn.Linear], delta: MaskedDelta | None = None) -> None:
        self.delta = delta
        self.weight = _contiguous([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _contiguous(biases) if biases else None
        self.sizes = [layer.out_features for layer in layers]
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Output [..., out] of the layer with this index. The last layer must be accessed last."""
        if self._input is not x:
            self._input = x
            self._outputs = self.whole(x).split(self.sizes, dim=-1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenated outputs of all layers, [..., sum of out]."""
        output = nn.functional.linear(x, self.weight, self.bias)
        return output if self.delta is None else self.delta.add(x, output)


class MaskedDelta:
    """What adapters at mask tokens add to the outputs of linear layers with one input.

    Args:
        layers: PEFT's LoRA layers, for which `_masked_base` is not None.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._gate = layers[0].mask_gate
        weights = [layer.base_layer.weight for layer in layers]
        self._matrix = weights[0].new_empty(weights[0].shape[1], sum(map(len, weights)), requires_grad=False)
        self._versions: list[int] = []

    def refresh(self) -> None:
        """Compute the matrix, in the same memory, if the adapters have been trained since."""
        factors = [(layer.scaling[name], layer.lora_B[name].weight, layer.lora_A[name].weight)
                   for layer in self._layers for name in layer.active_adapters]  # fmt: skip
        versions = [factor._version for _, b, a in factors for factor in (a, b)]
        if versions != self._versions:
            parts = [scale * (b.float() @ a.float()) for scale, b, a in factors]
            self._matrix.copy_(torch.cat(parts).T)
            self._versions = versions

    def add(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """[..., out], the output with what the adapters add. At other tokens it is the same, bit for bit."""
        masked = x * self._gate.masks[..., None]
        return torch.addmm(output.flatten(0, -2), masked.flatten(0, -2), self._matrix).view_as(output)


class FusedLinearOutput(nn.Module):
    """Replacement of one of the fused layers in the model."""

    def __init__(self, product: FusedLinear, index: int) -> None:
        super().__init__()
        self.product = product
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.output(self.index, x)


@dataclass(frozen=True)
class FusedGroup:
    """The fused layers of one module: the module, the names of the layers in it, and their replacements."""

    holder: nn.Module
    names: tuple[str, ...]
    outputs: tuple[FusedLinearOutput, ...]


def fuse_linear_layers(model: nn.Module) -> list[FusedGroup]:
    """Make the weights of each set of fusable layers contiguous in memory.

    Layers of another class (quantised, sharded, with an adapter at all tokens), with hooks, with a shared weight, or
    with a bias that the others lack are not fused. A layer with an adapter at mask tokens may be alone in its set.
    """
    parameters = (one for _, one in model.named_parameters(remove_duplicate=False))
    owners = Counter(_storage(one) for one in parameters if type(one) is nn.Parameter)
    groups = []
    # Avoid inference tensors, which cannot be trained.
    with torch.inference_mode(False), torch.no_grad():
        for holder in model.modules():
            for names in FUSED_LAYERS:
                layers = [getattr(holder, name, None) for name in names]
                linears = [layer for layer in layers if _is_plain(layer)]
                if len(linears) == len(names) and _compatible(linears) and _unshared(linears, owners):
                    groups.append(_group(holder, names, FusedLinear(linears)))
            masked = {
                name: base for name, layer in holder.named_children() if (base := _masked_base(layer)) is not None
            }
            for names in (*FUSED_LAYERS, *((name,) for name in masked if name not in sum(FUSED_LAYERS, ()))):
                linears = [masked[name] for name in names if name in masked]
                if len(linears) == len(names) and _compatible(linears) and _unshared(linears, owners):
                    delta = MaskedDelta([getattr(holder, name) for name in names])
                    groups.append(_group(holder, names, FusedLinear(linears, delta)))
    if groups and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the old weights' memory is fragmented
    return groups


def _group(holder: nn.Module, names: tuple[str, ...], product: FusedLinear) -> FusedGroup:
    return FusedGroup(holder, names, tuple(FusedLinearOutput(product, at) for at in range(len(names))))


def separate_weights(groups: Iterable[FusedGroup]) -> None:
    """Copy every parameter that is a view of a fused weight into separate memory."""
    with torch.inference_mode(False), torch.no_grad():
        for group in groups:
            for parameter in (one for name in group.names for one in getattr(group.holder, name).parameters()):
                if parameter.untyped_storage().nbytes() > parameter.nbytes:
                    parameter.data = parameter.data.clone()


@contextmanager
def fused_layers_installed(groups: Iterable[FusedGroup]) -> Iterator[None]:
    """Replace the layers by the outputs of fused products, and restore them afterwards."""
    for delta in (group.outputs[0].product.delta for group in groups):
        if delta is not None:
            delta.refresh()
    # Bypasses nn.Module.__setattr__, which takes as long as a forward pass of a deep model.
    before = [
        (group.holder._modules, name, part)
        for group in groups
        for name, part in zip(group.names, group.outputs, strict=True)
    ]
    layers = [modules[name] for modules, name, _ in before]
    try:
        for modules, name, part in before:
            modules[name] = part
        yield
    finally:
        for (modules, name, _), layer in zip(before, layers, strict=True):
            modules[name] = layer


def _is_plain(layer: object) -> TypeGuard[nn.Linear]:
    """True if a layer is an unmodified nn.Linear whose weight is on a device."""
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or not is_unmodified(layer):
        return False
    return not (layer.weight.is_meta or layer.weight.is_inference())


def _masked_base(layer: Any) -> nn.Linear | None:
    """The linear layer under one adapter that acts at mask tokens only; None for other layers."""
    if getattr(layer, "mask_gate", None) is None or layer.disable_adapters or layer.merged:
        return None
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A or layer.lora_bias[names[0]]:
        return None
    plain = isinstance(layer.lora_dropout[names[0]], nn.Identity) and not layer.use_dora[names[0]]
    base: nn.Linear = layer.base_layer
    return base if plain and _is_plain(base) else None


def is_unmodified(module: nn.Module) -> bool:
    """True if the module runs its class's forward pass and has no hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def _compatible(layers: list[nn.Linear]) -> bool:
    def kind(layer: nn.Linear) -> tuple[object, ...]:
        weight = layer.weight
        return weight.device, weight.dtype, layer.in_features, layer.bias is None

    return len({kind(layer) for layer in layers}) == 1 and all(
        layer.weight.is_contiguous() and layer.weight.shape == (layer.out_features, layer.in_features)
        for layer in layers
    )


def _unshared(layers: list[nn.Linear], owners: Counter[int]) -> bool:
    """True if the layers' weights share memory with no parameter of another layer."""
    for kind in ("weight", "bias"):
        storages = [_storage(one) for layer in layers if (one := getattr(layer, kind)) is not None]
        for storage, count in Counter(storages).items():
            if owners[storage] != count or count not in (1, len(layers)):
                return False
    return True


def _contiguous(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensor [sum of rows, ...] of which the parameters become views."""
    first = parameters[0].data
    rows = [len(one) for one in parameters]
    shape = (sum(rows), *first.shape[1:])
    end = first.data_ptr()
    for one in parameters:
        adjacent = one.data_ptr() == end and _storage(one) == _storage(first)
        end += one.nbytes
        if not adjacent:
            break
    else:
        return first.as_strided(shape, first.stride(), first.storage_offset())
    whole = torch.cat([one.data for one in parameters])
    for one, view in zip(parameters, whole.split(rows), strict=True):
        one.data = view
    return whole


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
