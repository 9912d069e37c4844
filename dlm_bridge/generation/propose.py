"""A token for every position: the best one or a draw, after temperature, top-k and top-p. Never the mask token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlm_bridge.generation.vocabulary import best_token

# A smaller temperature would divide logits beyond what float32 holds; both are greedy.
LEAST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How tokens are proposed. The order of the filters differs between the published samplers."""

    temperature: float = 0.0
    top_k: int | None = None  # None or 0: off
    top_p: float | None = None  # None or 1: off
    order: tuple[str, ...] = ("temperature", "top_k", "top_p")
    greedy: bool = False  # the best token, although the temperature shapes the distribution

    @property
    def draws(self) -> bool:
        return self.temperature > 0 and not self.greedy

    def shape(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V] logits of the distribution that tokens are drawn from, minus infinity where filtered out."""
        if self.temperature > 0:
            logits = logits.float()
        for name in self.order:
            if name == "temperature" and self.temperature > 0:
                logits = logits / max(self.temperature, LEAST)
            elif name == "top_k" and self.top_k:
                logits = keep_top_k(logits, self.top_k)
            elif name == "top_p" and self.top_p is not None and self.top_p < 1:
                logits = keep_top_p(logits, self.top_p)
        return logits

    def propose(
        self,
        logits: torch.Tensor,
        shaped: torch.Tensor,
        mask_token_id: int,
        uniform: torch.Tensor | None,
    ) -> torch.Tensor:
        """[A, N] tokens out of `shaped` [A, N, V], never the mask token. `uniform` [A, N, V] is needed to draw.

        Where the filters leave nothing but the mask token, the unfiltered `logits` decide. Drawn by the Gumbel-max
        trick in float64, as lower precision cuts the noise's tail off and so skews the draws (arXiv 2409.02908).
        """
        filtered = bool(self.top_k or self.top_p is not None)
        if uniform is None and not filtered:
            return best_token(shaped, mask_token_id)
        dtype = shaped.dtype if uniform is None else torch.float64
        scores = without(shaped, mask_token_id, dtype)
        if filtered:
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            scores = torch.where(nothing, without(logits, mask_token_id, dtype), scores)
        if uniform is not None:
            scores = scores - uniform.log_().neg_().log_()
        return scores.argmax(dim=-1)


def without(logits: torch.Tensor, token: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy in which the token has no probability."""
    copy = logits.to(dtype, copy=True)
    copy[..., token] = -torch.inf
    return copy


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest logits and their ties; minus infinity elsewhere."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    """The most probable tokens up to the first that brings their sum above p; minus infinity elsewhere."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    above = ordered.softmax(dim=-1).cumsum(dim=-1) > p
    drop = torch.zeros_like(above)
    drop[..., 1:] = above[..., :-1]
    return logits.masked_fill(drop.scatter(-1, indices, drop), -torch.inf)
