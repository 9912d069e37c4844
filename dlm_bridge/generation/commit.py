"""Commit rules: which of a step's proposals are settled. A new rule is a small class here and a line in the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from dlm_bridge.generation.noise import Noise


@dataclass(frozen=True)
class Step:
    """What one forward proposes for the current block of N positions."""

    logits: torch.Tensor  # [B, N, V], without noise, guidance applied
    tokens: torch.Tensor  # [B, N], the proposed token of each position, never the mask token
    masked: torch.Tensor  # [B, N], True where a position is not settled yet
    quota: int  # how many positions of each row the schedule settles in this step
    block: slice  # the block's columns on the canvas
    width: int  # S, the canvas' columns: prompt and new tokens
    pads: tuple[int, ...]  # padding columns at the left of each row
    noise: Noise


class CommitRule(ABC):
    """Chooses the positions to settle."""

    @abstractmethod
    def select(self, step: Step) -> torch.Tensor:
        """A boolean [B, N] tensor, True only at masked positions."""


class QuotaRule(CommitRule):
    """Settles exactly `quota` positions of each row: those with the highest confidence."""

    @abstractmethod
    def confidence(self, step: Step) -> torch.Tensor:
        """[B, N] scores; those of settled positions are ignored."""

    def select(self, step: Step) -> torch.Tensor:
        confidence_BN = self.confidence(step)
        # torch.topk breaks ties by where a value stands in its row, so the row is the one that the published sampler
        # ranks: the whole canvas without padding, minus infinity outside the block.
        confidence_BS = confidence_BN.new_full((len(confidence_BN), step.width), -torch.inf)
        confidence_BS[:, step.block] = confidence_BN.masked_fill(~step.masked, -torch.inf)
        chosen_BS = torch.zeros_like(confidence_BS, dtype=torch.bool)
        if any(step.pads):
            for confidence_S, chosen_S, pad in zip(confidence_BS, chosen_BS, step.pads, strict=True):
                chosen_S[pad:].index_fill_(0, confidence_S[pad:].topk(step.quota).indices, True)
        else:
            chosen_BS.scatter_(1, confidence_BS.topk(step.quota, dim=1).indices, True)
        return chosen_BS[:, step.block]


class LowConfidence(QuotaRule):
    """LLaDA's low-confidence remasking (arXiv 2502.09992, algorithm 5): settle where the token is most probable."""

    def confidence(self, step: Step) -> torch.Tensor:
        # In the model's dtype, as published: in half precision the rounding decides between near ties.
        probabilities_BNV = torch.softmax(step.logits, dim=-1)
        return probabilities_BNV.gather(-1, step.tokens[..., None])[..., 0]


class RandomOrder(QuotaRule):
    """LLaDA's random remasking: settle positions in a random order (arXiv 2502.09992, algorithm 4)."""

    def confidence(self, step: Step) -> torch.Tensor:
        return step.noise.per_position(step.width, step.pads)[:, step.block]


COMMIT_RULES: dict[str, type[CommitRule]] = {"low_confidence": LowConfidence, "random": RandomOrder}
