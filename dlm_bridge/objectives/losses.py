"""What a position costs before its weight: cross-entropy, certainty-forcing, the divergences of random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.objectives.random_tokens import NoisePositions, divergence


@dataclass(frozen=True)
class Certainty:
    """Certainty-forcing (dParallel, arXiv 2509.26488; LLaDA2's confidence-aware parallel training, arXiv 2512.15745):
    a position whose clean token has the largest logit costs `weight` times the entropy of the prediction as well.

    Samplers that commit every token above a confidence then commit more of them a step.
    """

    weight: float
    temperature: float = 1.0  # of the softmax whose entropy it is


def balanced_weights(
    weights_M: torch.Tensor,
    losses_M: torch.Tensor,
    terms_M: torch.Tensor,
    rows_M: torch.Tensor,
    rows: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """[M] the weights of an objective with two sums after its automatic balance: those of the second are scaled so
    that in each row it is as large as the first, without a gradient of the factor. A second sum of zero stays as it
    is.

    Args:
        losses_M: of each position before its weight.
        rows_M: the row of each position, below `rows`.
        group: processes that hold parts of the same rows.
    """
    row_RM = rows_M == torch.arange(rows, device=rows_M.device)[:, None]
    weighted_RM = torch.where(row_RM, losses_M.detach() * weights_M, 0.0)
    sums_2R = torch.stack([(weighted_RM * (terms_M == term)).sum(dim=1) for term in (0, 1)])
    if group is not None and group.size() > 1:
        dist.all_reduce(sums_2R, group=group)
    scale_R = torch.where(sums_2R[1] > 0, sums_2R[0] / sums_2R[1], 1.0)
    return torch.where(terms_M == 1, weights_M * scale_R[rows_M], weights_M)


def position_losses(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, noise: NoisePositions | None, certainty: Certainty | None = None
) -> torch.Tensor:
    """[M] the loss of each position before its weight: cross-entropy, with `certainty` its entropy as well; under
    `noise` of random tokens the divergences of `random_tokens`."""
    if noise is None:
        losses_M = F.cross_entropy(logits_MV, targets_M, reduction="none")
        return losses_M if certainty is None else losses_M + certain_entropies(logits_MV, targets_M, certainty)
    if noise.mask_token_id >= 0:
        tokens_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        logits_MV = logits_MV.masked_fill(tokens_V == noise.mask_token_id, -torch.inf)
    x_MV = logits_MV.softmax(dim=-1)
    clean_M, observed_M = (x_MV.gather(1, tokens[:, None])[:, 0] for tokens in (targets_M, noise.tokens))
    logs_M = (noise.ratio[:, None] * x_MV).log1p().sum(dim=-1)
    return divergence(clean_M, observed_M, logs_M, noise.tokens == targets_M, noise.ratio, noise.spread)


def log_sum_exps(logits_MV: torch.Tensor, noise: NoisePositions | None) -> torch.Tensor:
    """[M] the logarithm of the softmax's denominator, whose square the z-loss is (PaLM, arXiv 2204.02311, section 5):
    under noise of random tokens without the mask token, which is never predicted."""
    if noise is not None and noise.mask_token_id >= 0:
        tokens_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        logits_MV = logits_MV.masked_fill(tokens_V == noise.mask_token_id, -torch.inf)
    return logits_MV.logsumexp(dim=-1)


def certain_entropies(logits_MV: torch.Tensor, targets_M: torch.Tensor, certainty: Certainty) -> torch.Tensor:
    """[M] `certainty.weight` times the entropy where the target has the largest logit, zero elsewhere."""
    right_M = logits_MV.detach().gather(1, targets_M[:, None])[:, 0] >= logits_MV.detach().amax(dim=-1)
    entropies_M = torch.special.entr((logits_MV / certainty.temperature).softmax(dim=-1)).sum(dim=-1)
    return torch.where(right_M, certainty.weight * entropies_M, 0.0)
