"""Losses of single positions before weighting: cross-entropy, certainty-forcing, divergences of random tokens.

For noise of random tokens q_t(z | x) (`noise.NoiseProcess`), replacing x by a model's prediction x' gives another
distribution over z. The negative evidence lower bound is the expectation over t ~ U(0, 1) and z ~ q_t of

    w_t(z, x) * (KL(q_t(. | x) || q_t(. | x')) + r - log r - 1),   r = q_t(z | x) / q_t(z | x')

(GIDD's bound, arXiv 2503.04482; for uniform noise it equals UDLM's in continuous time, arXiv 2412.10193). The weight
w_t(z, x) is the rate at which noise produces z, divided by q_t(z | x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlm_bridge.lazy_import import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F  # noqa: N812
else:
    torch = LazyModule("torch", globals())
    F = LazyModule("torch.nn.functional", globals(), "F")


@dataclass(frozen=True)
class Certainty:
    """Certainty-forcing (dParallel, arXiv 2509.26488; LLaDA2's confidence-aware parallel training, arXiv 2512.15745):
    adds `weight` times the entropy of the prediction at positions whose clean token has the largest logit.

    Samplers that commit every token above a confidence then commit more tokens per step.
    """

    weight: float
    temperature: float = 1.0  # temperature of the softmax for the entropy


@dataclass(frozen=True)
class NoisePositions:
    """Noise at the M positions with a loss, for the loss of random tokens. All-zero entries are padding, with a loss
    of zero."""

    tokens: torch.Tensor  # [M] int64, the noisy token z
    ratio: torch.Tensor  # [M] fp32, keep / spread
    spread: torch.Tensor  # [M] fp32, replaced / N
    mask_token_id: int  # never predicted; -1: none

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> NoisePositions:
        """Apply a function to every tensor."""
        return NoisePositions(change(self.tokens), change(self.ratio), change(self.spread), self.mask_token_id)


def balanced_weights(
    weights_M: torch.Tensor,
    losses_M: torch.Tensor,
    terms_M: torch.Tensor,
    rows_M: torch.Tensor,
    rows: int,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """[M] weights of an objective with two sums after automatic balancing: the weights of the second sum are scaled so
    that it equals the first in each row, without a gradient of the factor. A second sum of zero is not scaled.

    Args:
        losses_M: losses before weighting.
        rows_M: row of each position, below `rows`.
        group: processes with parts of the same rows.
    """
    row_RM = rows_M == torch.arange(rows, device=rows_M.device)[:, None]
    weighted_RM = torch.where(row_RM, losses_M.detach() * weights_M, 0.0)
    sums_2R = torch.stack([(weighted_RM * (terms_M == term)).sum(dim=1) for term in (0, 1)])
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(sums_2R, group=group)
    scale_R = torch.where(sums_2R[1] > 0, sums_2R[0] / sums_2R[1], 1.0)
    return torch.where(terms_M == 1, weights_M * scale_R[rows_M], weights_M)


def position_losses(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, noise: NoisePositions | None, certainty: Certainty | None = None
) -> torch.Tensor:
    """[M] loss of each position before weighting: cross-entropy, plus the entropy with `certainty`; the `divergence`
    for `noise` of random tokens."""
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
    """[M] logarithm of the softmax's denominator, whose square is the z-loss (PaLM, arXiv 2204.02311, section 5); for
    noise of random tokens without the mask token, which is never predicted."""
    if noise is not None and noise.mask_token_id >= 0:
        tokens_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        logits_MV = logits_MV.masked_fill(tokens_V == noise.mask_token_id, -torch.inf)
    return logits_MV.logsumexp(dim=-1)


def certain_entropies(logits_MV: torch.Tensor, targets_M: torch.Tensor, certainty: Certainty) -> torch.Tensor:
    """[M] `certainty.weight` times the entropy if the target has the largest logit, else zero."""
    right_M = logits_MV.detach().gather(1, targets_M[:, None])[:, 0] >= logits_MV.detach().amax(dim=-1)
    entropies_M = torch.special.entr((logits_MV / certainty.temperature).softmax(dim=-1)).sum(dim=-1)
    return torch.where(right_M, certainty.weight * entropies_M, 0.0)


def divergence(
    clean_M: torch.Tensor,
    observed_M: torch.Tensor,
    logs_M: torch.Tensor,
    same_M: torch.Tensor,
    ratio_M: torch.Tensor,
    spread_M: torch.Tensor,
) -> torch.Tensor:
    """[M] KL(q_t(. | x) || q_t(. | x')) + r - log r - 1, from statistics of the prediction x'.

    q_t(j | x') is spread (1 + ratio x'_j), and both distributions have the same probability of the mask, so that every
    sum over the vocabulary is a sum of log(1 + ratio x'_j), without cancellation at high noise levels.

    Args:
        clean_M: x' of the clean token.
        observed_M: x' of the noisy token; 0 if that is the mask.
        logs_M: sum of log(1 + ratio x'_j) over the vocabulary.
        same_M: bool, True if the noisy token is the clean token.
        ratio_M, spread_M: see `NoisePositions`.
    """
    kl_M = spread_M * ((1 + ratio_M) * ratio_M.log1p() - ratio_M * (ratio_M * clean_M).log1p() - logs_M)
    log_r_M = torch.where(same_M, ratio_M, 0.0).log1p() - (ratio_M * observed_M).log1p()
    return kl_M + log_r_M.expm1() - log_r_M
