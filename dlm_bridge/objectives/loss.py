"""The loss of one batch in one call: of clean tokens, and of a batch that a collator has noised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms


def diffusion_loss(
    forward: Callable[..., torch.Tensor],
    objective: Objective,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of one clean batch, a scalar: what `model(input_ids, labels=..., generator=...)` returns.

    Args:
        forward: called as forward(input_ids=..., attention_mask=..., position_ids=..., logits_to_keep=mask, **kwargs),
            gives the logits [M, V] of the positions in `mask`.
        labels: [B, L] clean tokens, -100 where a position is never masked and not counted.
        generator: where the noise comes from.
        attention_mask: [B, L], zero at padding; or 4-D, which says nothing about padding: then `labels` must.

    Raises:
        DlmBridgeError: an own 4-D mask or own positions, where the objective makes its own.
    """
    own_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    if objective.streams == 2 and (own_mask is not None or position_ids is not None):
        raise DlmBridgeError(
            f"{type(objective).__name__} makes the mask and the positions of its two streams itself: pass a 2-D "
            "attention_mask and no position_ids"
        )
    uniforms = Uniforms.drawn(generator, *input_ids.shape)
    noisy = objective.noise(input_ids, uniforms, labels, None if own_mask is not None else attention_mask)
    logits_MV = forward(
        input_ids=noisy.input_ids,
        attention_mask=noisy.model_mask() if own_mask is None else own_mask,
        position_ids=noisy.position_ids if position_ids is None else position_ids,
        logits_to_keep=noisy.mask,
        **kwargs,
    )
    return mean_loss(objective.loss_sum(logits_MV, noisy), noisy)


def mean_loss(sums_K: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
    """The loss of one batch alone, from its sums; zero where there is nothing to predict."""
    return (sums_K / divisors(noisy.normaliser)).sum()


def divisors(normaliser_K: torch.Tensor) -> torch.Tensor:
    """What sums are divided by, in fp32: a sum over nothing stays zero."""
    return torch.where(normaliser_K > 0, normaliser_K, 1.0).float()


def weighted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    logits_to_keep: int | torch.Tensor = 0,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of a batch that `DiffusionCollator` has noised, a scalar.

    Args:
        logits: [B, S, V], or [M, V] of the positions in a boolean `logits_to_keep`.
        labels: [B, S] the token that each position's logits predict, -100 where a position does not count. A label
            whose weight is zero only counts.
        loss_weights: [B, S] fp32.
        num_items: the divisor; the number of labels where None.
    """
    if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool:
        kept_BS = logits_to_keep
    elif logits.shape[:2] == labels.shape:
        kept_BS = loss_weights != 0
        logits = logits[kept_BS]
    else:
        raise DlmBridgeError("loss_weights need the logits of every position, or a boolean logits_to_keep [B, S]")
    losses = F.cross_entropy(logits.float(), labels[kept_BS], reduction="none", ignore_index=IGNORE_INDEX)
    divisor = labels.ne(IGNORE_INDEX).sum().clamp(min=1) if num_items is None else num_items
    return (losses * loss_weights[kept_BS]).sum() / divisor
