"""The loss where the output layer is: of the positions that have one, without the logits of the others or of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from dlm_bridge.parallel.batch import loss_bucket
from dlm_bridge.parallel.output import Chosen, Shard, chosen_loss
from dlm_bridge.train.objectives import NoisyBatch


def chosen_positions(noisy: NoisyBatch) -> Chosen:
    """What a batch on the CPU asks for, padded (position 0, weight 0) so that there are few shapes. The weights are
    not divided by the normaliser yet: `shared` does it."""
    positions = noisy.mask.flatten().nonzero()[:, 0]
    more = loss_bucket(len(positions), noisy.mask.numel()) - len(positions)
    chosen = Chosen(positions, noisy.targets, noisy.weights, noisy.terms, len(noisy.normaliser))
    return _each(chosen, lambda tensor: F.pad(tensor, (0, more)))


def pinned(chosen: Chosen) -> Chosen:
    """The same in pinned memory."""
    return _each(chosen, lambda tensor: tensor.pin_memory())


def shared(chosen: Chosen, divisors_K: torch.Tensor, device: torch.device) -> Chosen:
    """The same on `device`, its weights divided by the global normalisers of their terms (on the CPU)."""
    weights = chosen.weights / (divisors_K[0] if chosen.terms is None else divisors_K[chosen.terms])
    if chosen.weights.is_pinned():
        weights = weights.pin_memory()
    return _each(replace(chosen, weights=weights), lambda tensor: tensor.to(device, non_blocking=True))


def _each(chosen: Chosen, change: Callable[[torch.Tensor], torch.Tensor]) -> Chosen:
    terms = None if chosen.terms is None else change(chosen.terms)
    return Chosen(
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
        self._chosen: Chosen | None = None
        self._sums: torch.Tensor | None = None
        self.layer.forward = self._forward

    def loss(self, model: Any, chosen: Chosen, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
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
            loss, self._sums = chosen_loss(hidden_MH, weight_VH, chosen, Shard(0, weight_VH.shape[0]))
            return loss
        losses_M = F.cross_entropy(self.logits(hidden_MH).float(), chosen.targets, reduction="none") * chosen.weights
        terms = torch.zeros_like(chosen.targets) if chosen.terms is None else chosen.terms
        sums = torch.stack([(losses_M * (terms == term)).sum() for term in range(chosen.num_terms)])
        self._sums = sums.detach()
        return sums.sum()
