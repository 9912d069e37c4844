"""Noise of random tokens: uniform noise, its hybrid with masks, and what a position costs under them.

A clean token x becomes z with probability q_t(z | x) = keep [z = x] + masked [z = mask] + replaced / N [z != mask],
where N counts the tokens without the mask token and the three probabilities of noise level t add up to one. With x' in
place of x, a model's prediction, q_t is a distribution over z as well. The negative evidence lower bound is the
expectation over t ~ U(0, 1) and z ~ q_t of

    w_t(z, x) * (KL(q_t(. | x) || q_t(. | x')) + r - log r - 1),   r = q_t(z | x) / q_t(z | x')

(GIDD's bound, arXiv 2503.04482; for uniform noise the same number as UDLM's in continuous time, arXiv 2412.10193). The
weight w_t(z, x) is the rate at which noise arrives at z over q_t(z | x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def random_tokens(uniform: torch.Tensor, vocabulary_size: int, mask_token_id: int) -> torch.Tensor:
    """Tokens in the shape of `uniform` [0, 1), all but the mask token equally likely; -1: there is no mask token."""
    has_mask = 0 <= mask_token_id < vocabulary_size
    count = vocabulary_size - has_mask
    tokens = (uniform.double() * count).long().clamp(max=count - 1)
    return tokens + (tokens >= mask_token_id) if has_mask else tokens


@dataclass(frozen=True)
class NoiseProcess:
    """Noise of random tokens, with `p_uniform` None, or GIDD's hybrid of masks and random tokens, in which `p_uniform`
    is the fraction of random tokens at t = 1/2 (gamma is 1). Everything is float64."""

    p_uniform: float | None = None

    def probabilities(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """That a token is kept, masked, or replaced by one of the N tokens, itself among them, at noise level `t`."""
        t = t.double()
        if self.p_uniform is None:
            return 1 - t, torch.zeros_like(t), t
        random = self._bend * (t * (1 - t)).sqrt()  # GIDD's c_t
        total = 1 + random
        return (1 - t) / total, t / total, random / total

    def weights(
        self, t: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int, mask_token_id: int
    ) -> torch.Tensor:
        """The weights w_t(z, x) of the bound; `count` is N. At noise levels 0 and 1 they are infinite."""
        t = t.double()
        keep, masked, replaced = self.probabilities(t)
        if self.p_uniform is None:
            token_rate, mask_rate = 1 / (1 - t), torch.zeros_like(t)
        else:
            root = (t * (1 - t)).sqrt()
            total = 1 + self._bend * root
            token_rate, mask_rate = self._bend / (2 * root * total), 1 / ((1 - t) * total)
        reached = replaced / count + torch.where(noisy == clean, keep, 0.0)
        weights = token_rate / count / reached
        return torch.where(noisy == mask_token_id, mask_rate / masked, weights)

    def dynamic_weights(
        self, t: torch.Tensor, clean: torch.Tensor, noisy: torch.Tensor, count: int, mask_token_id: int
    ) -> torch.Tensor:
        """GIDD's dynamic weights: 2 for a mask, 1 for a random token and B / N exp(-lambda / 2), lambda the logarithm
        of the signal-to-noise ratio (1 - t) / t, for the clean token: about the bound's without their factor of t."""
        t = t.double()
        unchanged = self._bend / count * (t / (1 - t)).sqrt()
        weights = torch.where(noisy == clean, unchanged, torch.ones_like(t))
        return torch.where(noisy == mask_token_id, 2.0, weights)

    @property
    def _bend(self) -> float:
        """GIDD's B, so that c_t / (1 + c_t) is `p_uniform` at t = 1/2."""
        assert self.p_uniform is not None
        return 2 * self.p_uniform / (1 - self.p_uniform)


@dataclass(frozen=True)
class NoisePositions:
    """What the loss needs of the noise at the M positions with a loss, besides the clean tokens. All zeros is padding,
    whose loss is zero."""

    tokens: torch.Tensor  # [M] int64, the noisy token z
    ratio: torch.Tensor  # [M] fp32, keep / spread
    spread: torch.Tensor  # [M] fp32, replaced / N
    mask_token_id: int  # which is never predicted; -1 for none

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> NoisePositions:
        """The same with every tensor changed."""
        return NoisePositions(change(self.tokens), change(self.ratio), change(self.spread), self.mask_token_id)


def divergence(
    clean_M: torch.Tensor,
    observed_M: torch.Tensor,
    logs_M: torch.Tensor,
    same_M: torch.Tensor,
    ratio_M: torch.Tensor,
    spread_M: torch.Tensor,
) -> torch.Tensor:
    """[M] KL(q_t(. | x) || q_t(. | x')) + r - log r - 1, by what it needs of the prediction x'.

    q_t(j | x') is spread (1 + ratio x'_j), and masks are as likely under both, so that every sum over the vocabulary
    is one of log(1 + ratio x'_j): nothing is lost to cancellation where there is almost no signal left.

    Args:
        clean_M: x' of the clean token.
        observed_M: x' of the noisy token; 0 where that is the mask.
        logs_M: the sum of log(1 + ratio x'_j) over the vocabulary.
        same_M: bool, the noisy token is the clean one.
        ratio_M, spread_M: of `NoisePositions`.
    """
    kl_M = spread_M * ((1 + ratio_M) * ratio_M.log1p() - ratio_M * (ratio_M * clean_M).log1p() - logs_M)
    log_r_M = torch.where(same_M, ratio_M, 0.0).log1p() - (ratio_M * observed_M).log1p()
    return kl_M + log_r_M.expm1() - log_r_M
