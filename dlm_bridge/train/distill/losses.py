"""Divergence of a diffusion model from its parent, and the parent's input beside a noisy batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from dlm_bridge.data.blocks import LabelledTokens
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import NextTokenPrediction


@dataclass(frozen=True)
class DistillBatch(NoisyBatch):
    """Noisy batch with the input of its parent: the same texts without noise."""

    parent: NoisyBatch | None = None  # its logits are those of the N positions of the texts that have a loss
    index: torch.Tensor | None = None  # [M] int64: row of the parent's logits for each position with a loss


def distill_batch(
    objective: Objective, uniforms: Uniforms, rows: LabelledTokens, causal_mask: bool = False
) -> DistillBatch:
    """Corrupt a clean batch as `objective` does, except that the first token of a text, for which the parent has no
    distribution, is never masked.

    The parent's distribution of a token comes from the position before it, whatever the objective's own shift.

    Args:
        causal_mask: the parent's input has an explicit causal mask, for a model class with another attention pattern.
    """
    tokens = rows.input_ids
    # Labels are positions in the flattened batch, so that the targets of any objective are positions too.
    positions = torch.arange(tokens.numel(), device=tokens.device).reshape(tokens.shape)
    labels = positions if rows.labels is None else positions.where(rows.labels != IGNORE_INDEX, IGNORE_INDEX)
    documents = torch.zeros_like(tokens) if causal_mask and rows.documents is None else rows.documents
    parent = NextTokenPrediction().noise(tokens, uniforms, labels, rows.attention_mask, documents)
    labels = torch.full_like(tokens, IGNORE_INDEX).flatten()
    labels[parent.targets] = parent.targets
    noisy = objective.noise(
        tokens, uniforms, labels.reshape(tokens.shape), rows.attention_mask, rows.documents, rows.commit_steps
    )
    needed_N, index_M = noisy.targets.unique(return_inverse=True)
    used = torch.isin(parent.targets, needed_N)
    parent = replace(
        parent,
        mask=parent.mask.masked_scatter(parent.mask, used),
        targets=needed_N,
        weights=parent.weights[used],
    )
    values = {**vars(noisy), "targets": tokens.flatten()[noisy.targets]}
    return DistillBatch(**values, parent=parent, index=index_M)


def divergences(
    logits_MV: torch.Tensor, parent_MV: torch.Tensor, divergence: str, mask_token_id: int = -1
) -> torch.Tensor:
    """[M] divergence of the model's distribution q from the parent's p, in nats, over the tokens of both vocabularies
    without the mask token, which samplers never propose. Computed in fp32, or in fp64 if the logits are.

    Args:
        divergence: "forward", KL(p || q), as in OPDLM (arXiv 2606.06712); "reverse", KL(q || p); "js", the
            Jensen-Shannon divergence, the mean of the KL divergences of p and q from (p + q) / 2.
    """
    count = min(logits_MV.shape[1], parent_MV.shape[1])
    never_V = torch.arange(count, device=logits_MV.device) == mask_token_id
    log_q, log_p = (
        each[:, :count]
        .to(torch.promote_types(each.dtype, torch.float32))
        .masked_fill(never_V, torch.finfo(torch.float32).min)  # finite: 0 x -inf is NaN
        .log_softmax(dim=-1)
        for each in (logits_MV, parent_MV)
    )
    if divergence == "js":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        return (kl_divergences(log_p, log_m) + kl_divergences(log_q, log_m)) / 2
    return kl_divergences(log_p, log_q) if divergence == "forward" else kl_divergences(log_q, log_p)


def kl_divergences(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[M] KL(p || q) of log-probabilities [M, V]."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
