"""Transforms of a Hub model before training: FP8 layers, bf16 params, compiled layers, fused linear cross-entropy."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlm_bridge.errors import MissingExtraError
from dlm_bridge.loading.pretrained import decoder_layers
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.objectives.linear_cross_entropy import (
    ALIGNED,
    LossPositions,
    VocabShard,
    linear_cross_entropy,
    loss_bucket,
)
from dlm_bridge.objectives.losses import log_sum_exps, position_losses

FP8_CAPABILITY = (8, 9)  # lowest compute capability with FP8 matrix products


def check_float8() -> None:
    """Raise MissingExtraError if the GPU or the package for `precision=fp8` is missing."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise MissingExtraError("precision", "fp8 needs an NVIDIA GPU of compute capability 8.9 or later: use bf16")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("precision", "fp8 needs torchao: pip install 'dlm-bridge[fp8]'") from error


def convert_to_float8(model: nn.Module) -> int:
    """Convert linear layers of the decoder layers to FP8 matrix products: all except routers whose sizes are multiples
    of 16, which the kernels need. The weights are unchanged. Call it before `compile_layers`. Returns the number of
    converted layers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        linear: Any = module
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0 and name.split(".")[-1] != "gate"

    for layer in decoder_layers(model):
        convert_to_float8_training(layer, module_filter_fn=fits, config=Float8LinearConfig())
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


class HalfPrecisionParams:
    """fp32 main params, and `model`, a copy with params in `dtype`, which computes.

    Under autocast, activations between layers stay in fp32; a model in half precision moves half of the bytes, as with
    Megatron and FSDP. Each complete gradient is added to the gradient of its main param, so micro-batches accumulate
    in fp32. `refresh` updates the copies after the optimizer step. Buffers are copied. The configuration is shared, as
    are params that are not fp32 or that the model's class keeps in fp32 (routers)."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        memo: dict[int, Any] = {id(model.config): model.config}
        self._main_params: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        kept = tuple(model._get_dtype_plan(dtype))
        for name, weight in model.named_parameters():
            if weight.dtype != torch.float32 or any(re.search(part, name) for part in kept):
                memo[id(weight)] = weight
                continue
            half = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            if weight.requires_grad:
                half.register_post_accumulate_grad_hook(functools.partial(_accumulate_in_fp32, weight))
            self._main_params.append(weight)
            self._copies.append(half)
            memo[id(weight)] = half
        self.model = copy.deepcopy(model, memo)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained main params to the params of the model."""
        pairs = [pair for pair in zip(self._copies, self._main_params, strict=True) if pair[1].requires_grad]
        if pairs:
            copies, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, weights)


def _accumulate_in_fp32(main_param: torch.Tensor, param: torch.Tensor) -> None:
    assert param.grad is not None
    if main_param.grad is None:
        main_param.grad = param.grad.float()
    else:
        main_param.grad += param.grad
    param.grad = None


def compile_layers(model: nn.Module) -> int:
    """Compile the forward of each decoder layer, and of the norms outside of them. Returns the number of layers.

    Wrappers of a layer (activation checkpointing, FSDP's hooks) stay outside of the graph. The weights are inputs of
    the graph, so all layers run the code compiled for the first one. Call it before `fully_shard`."""
    layers = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    norms = [
        module for module in model.modules() if module not in inside and type(module).__name__.endswith("RMSNorm")
    ]
    for module in [*layers, *norms]:
        compiled: Any = torch.compile(module.forward)
        module.forward = compiled
    return len(layers)


def loss_positions(noisy: NoisyBatch) -> LossPositions:
    """Loss positions of a batch on the CPU, padded with position 0 and weight 0 to one of a few sizes. Weights are not
    normalised yet; see `normalised_positions`."""
    positions = noisy.mask.flatten().nonzero()[:, 0]
    more = loss_bucket(len(positions), noisy.mask.numel()) - len(positions)
    unpadded = LossPositions(
        positions,
        noisy.targets,
        noisy.weights,
        noisy.terms,
        len(noisy.normaliser),
        noisy.noise,
        noisy.certainty,
        rows=noisy.rows,
        num_rows=len(noisy.input_ids),
    )
    return _map_tensors(unpadded, lambda tensor: F.pad(tensor, (0, more)))


def pin_positions(positions: LossPositions) -> LossPositions:
    """Copy loss positions to pinned memory."""
    return _map_tensors(positions, lambda tensor: tensor.pin_memory())


def normalised_positions(
    positions: LossPositions, divisors_K: torch.Tensor, device: torch.device, z_loss_coeff: float = 0.0
) -> LossPositions:
    """Divide the weights of loss positions by the normalisers of their terms, and copy them to `device`.

    Args:
        divisors_K: normalisers of the global batch on the CPU; with z-loss the last one is its number of loss
            positions.
    """
    weights = positions.weights / (divisors_K[0] if positions.terms is None else divisors_K[positions.terms])
    z_weights = (weights != 0) * (z_loss_coeff / divisors_K[-1]) if z_loss_coeff else None
    if positions.weights.is_pinned():
        weights, z_weights = weights.pin_memory(), None if z_weights is None else z_weights.pin_memory()
    normalised = replace(positions, weights=weights, z_weights=z_weights)
    return _map_tensors(normalised, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(positions: LossPositions, change: Callable[[torch.Tensor], torch.Tensor]) -> LossPositions:
    changed: dict[str, Any] = {
        name: change(value) for name, value in vars(positions).items() if isinstance(value, torch.Tensor)
    }
    if positions.noise is not None:
        changed["noise"] = positions.noise.each(change)
    return replace(positions, **changed)


# Config entries of classes that scale or cap the logits of the output layer: Granite, Cohere, Gemma.
_LOGIT_CHANGES = ("logits_scaling", "logit_scale", "final_logit_softcapping")


class LossHead:
    """Cross-entropy in a model's output layer: `loss` computes logits of loss positions only.

    Only the forward of that layer is replaced. Weights and modules stay in place for data parallelism, FSDP and
    autocast, and the rest of the model's forward is unchanged. A plain linear layer is fused with the cross-entropy if
    the model class returns its logits unchanged. Calls outside of `loss` return logits.
    """

    def __init__(self, model: Any) -> None:
        self.layer = model.get_output_embeddings()
        self.logits = self.layer.forward
        # False for a layer with an adapter.
        plain = isinstance(self.layer, nn.Linear) and type(self.layer).forward is nn.Linear.forward
        text = model.config.get_text_config()
        changed = any(getattr(text, name, None) not in (None, 1.0) for name in _LOGIT_CHANGES)
        self.is_fused = plain and self.layer.bias is None and not changed
        self._positions: LossPositions | None = None
        self._sums: torch.Tensor | None = None
        self.layer.forward = self._forward

    def loss(self, model: Any, positions: LossPositions, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the weighted loss at `positions`.

        Args:
            model: the (wrapped) model with this output layer.
            inputs: arguments of its forward.

        Returns:
            The loss, a scalar, and its sums, detached: [K], with z-loss [K + 1].
        """
        self._positions = positions
        try:
            output = model(**inputs).logits
        finally:
            self._positions = None
        if self.is_fused:
            assert self._sums is not None
            return output, self._sums
        logits_MV = output[0].float()
        losses_M = position_losses(logits_MV, positions.targets, positions.noise, positions.certainty)
        sums = positions.sums(losses_M, log_sum_exps(logits_MV, positions.noise))
        return sums.sum(), sums.detach()

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._positions is None:
            return self.logits(hidden)
        positions = self._positions
        hidden_MH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions.positions)
        if not self.is_fused:
            return self.logits(hidden_MH[None])
        weight_VH = self.layer.weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden_MH, weight_VH = hidden_MH.to(dtype), weight_VH.to(dtype)
        shard = VocabShard(0, weight_VH.shape[0])
        if weight_VH.is_cuda and (padding := -shard.tokens % ALIGNED):
            weight_VH = F.pad(weight_VH, (0, 0, 0, padding))
        loss, self._sums = linear_cross_entropy(hidden_MH, weight_VH, positions, shard)
        return loss
