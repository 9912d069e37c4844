"""Transforms of a Hub model before training: FP8 linear layers, bf16 params, compiled layers, fused linear cross-entropy."""

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

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import NoisyBatch
from dlm_bridge.parallel.batch import loss_bucket
from dlm_bridge.parallel.output_layer import LossPositions, VocabShard, linear_cross_entropy
from dlm_bridge.train.loading import decoder_layers

FP8_CAPABILITY = (8, 9)  # compute capability of the first GPUs with FP8 products


def check_float8() -> None:
    """Raise DlmBridgeError where `--precision fp8` cannot run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise DlmBridgeError("--precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later: use bf16")
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise DlmBridgeError(
            "--precision fp8 of --engine accelerate needs torchao: pip install 'dlm-bridge[fp8]'"
        ) from error


def convert_to_float8(model: nn.Module, emulate: bool = False) -> int:
    """Let the linear layers of every decoder layer multiply in FP8, and return how many do: all whose sizes are
    multiples of 16, as the products want, but for routers. Weights stay what they are. With `emulate` the products
    are of rounded numbers in half precision, on any device. Call it before `compile_layers`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        linear: Any = module
        return linear.in_features % 16 == 0 and linear.out_features % 16 == 0 and name.split(".")[-1] != "gate"

    config = Float8LinearConfig(emulate=emulate)
    for layer in decoder_layers(model):
        convert_to_float8_training(layer, module_filter_fn=fits, config=config)
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


class HalfPrecisionParams:
    """A model whose weights stay in fp32, and `model`, the same one with copies of them in `dtype`.

    Autocast keeps what runs between the layers in fp32; a model in half precision moves half of the bytes there, as
    Megatron and FSDP do. Gradients go to the fp32 weights as soon as the copies' are whole, and are summed there over
    micro-batches; `refresh` brings the copies up to date after the optimizer has changed the weights. Buffers are
    copied as they are, the configuration is shared, and so are weights that are not in fp32 or that the model's
    class keeps as they are (routers).
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        memo: dict[int, Any] = {id(model.config): model.config}
        self._weights: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        kept = tuple(model._get_dtype_plan(dtype))
        for name, weight in model.named_parameters():
            if weight.dtype != torch.float32 or any(re.search(part, name) for part in kept):
                memo[id(weight)] = weight
                continue
            half = nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad)
            if weight.requires_grad:
                half.register_post_accumulate_grad_hook(functools.partial(_accumulate_in_fp32, weight))
            self._weights.append(weight)
            self._copies.append(half)
            memo[id(weight)] = half
        self.model = copy.deepcopy(model, memo)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights that are trained."""
        pairs = [pair for pair in zip(self._copies, self._weights, strict=True) if pair[1].requires_grad]
        if pairs:
            copies, weights = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, weights)


def _accumulate_in_fp32(weight: torch.Tensor, half: torch.Tensor) -> None:
    assert half.grad is not None
    if weight.grad is None:
        weight.grad = half.grad.float()
    else:
        weight.grad += half.grad
    half.grad = None


def compile_layers(model: nn.Module) -> int:
    """Compile the forward of every decoder layer and of the norms outside of them; return how many layers there are.

    Only the forward itself: what others put around a layer, activation checkpointing and FSDP's hooks, stays outside
    and finds the module as it was. Layers have their weights as inputs of one graph, so that all of them run the code
    that the first one compiled. Call it before `fully_shard`.
    """
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
    """What a batch on the CPU asks for, padded (position 0, weight 0) so that there are few shapes. The weights are
    not divided by the normaliser yet: `shared` does it."""
    positions = noisy.mask.flatten().nonzero()[:, 0]
    more = loss_bucket(len(positions), noisy.mask.numel()) - len(positions)
    chosen = LossPositions(positions, noisy.targets, noisy.weights, noisy.terms, len(noisy.normaliser))
    return _map_tensors(chosen, lambda tensor: F.pad(tensor, (0, more)))


def pin_positions(chosen: LossPositions) -> LossPositions:
    """The same in pinned memory."""
    return _map_tensors(chosen, lambda tensor: tensor.pin_memory())


def normalised_positions(chosen: LossPositions, divisors_K: torch.Tensor, device: torch.device) -> LossPositions:
    """The same on `device`, its weights divided by the global normalisers of their terms (on the CPU)."""
    weights = chosen.weights / (divisors_K[0] if chosen.terms is None else divisors_K[chosen.terms])
    if chosen.weights.is_pinned():
        weights = weights.pin_memory()
    return _map_tensors(replace(chosen, weights=weights), lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(chosen: LossPositions, change: Callable[[torch.Tensor], torch.Tensor]) -> LossPositions:
    terms = None if chosen.terms is None else change(chosen.terms)
    return LossPositions(
        change(chosen.positions), change(chosen.targets), change(chosen.weights), terms, num_terms=chosen.num_terms
    )


class LossHead:
    """A model's output layer, which gives logits as before, or, through `loss`, the loss of chosen positions.

    It is the layer's forward that is replaced, so that data parallelism, FSDP and autocast find their weights and
    modules where they were, and so that every model class takes it, whatever its own forward does before.
    """

    def __init__(self, model: Any) -> None:
        self.layer = model.get_output_embeddings()
        self.logits = self.layer.forward
        # An adapter's layer is more than one product with a weight.
        self.plain = isinstance(self.layer, nn.Linear) and type(self.layer).forward is nn.Linear.forward
        self._chosen: LossPositions | None = None
        self._sums: torch.Tensor | None = None
        self.layer.forward = self._forward

    def loss(self, model: Any, chosen: LossPositions, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted cross-entropy at the chosen positions, a scalar, and its terms [K] without a graph.

        `model` is the one with this output layer, as it is wrapped; `inputs` are its forward's."""
        self._chosen = chosen
        try:
            loss = model(**inputs).logits
        finally:
            self._chosen = None
        assert self._sums is not None
        return loss, self._sums

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._chosen is None:
            return self.logits(hidden)
        chosen = self._chosen
        hidden_MH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, chosen.positions)
        if self.plain and self.layer.bias is None:
            weight_VH = self.layer.weight
            if torch.is_autocast_enabled(hidden.device.type):
                dtype = torch.get_autocast_dtype(hidden.device.type)
                hidden_MH, weight_VH = hidden_MH.to(dtype), weight_VH.to(dtype)
            loss, self._sums = linear_cross_entropy(hidden_MH, weight_VH, chosen, VocabShard(0, weight_VH.shape[0]))
            return loss
        losses_M = F.cross_entropy(self.logits(hidden_MH).float(), chosen.targets, reduction="none") * chosen.weights
        terms = torch.zeros_like(chosen.targets) if chosen.terms is None else chosen.terms
        sums = torch.stack([(losses_M * (terms == term)).sum() for term in range(chosen.num_terms)])
        self._sums = sums.detach()
        return sums.sum()
