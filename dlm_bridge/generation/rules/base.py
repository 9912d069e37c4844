"""What a commit rule is asked, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.vocabulary import probability_of

NEVER = -torch.inf


@dataclass(frozen=True)
class Step:
    """What one forward proposes for N columns of the A rows that are still at work on the block."""

    rows: list[int]  # [A], which rows of the canvas these are
    index: int  # how many steps the block has had before
    quotas: list[int]  # [A], what `CommitRule.begin` announced for this step
    logits: torch.Tensor  # [A, N, V], without noise, guidance applied
    shaped: torch.Tensor  # [A, N, V], after temperature, top-k and top-p
    tokens: torch.Tensor  # [A, N], the proposed tokens, none of them the mask token
    before: torch.Tensor  # [A, N], what stands there now
    masked: torch.Tensor  # [A, N], True where a position is not settled yet
    new: torch.Tensor  # [A, N], True behind the prompt
    columns: slice | torch.Tensor  # where the N columns are on the canvas
    width: int  # S, the columns of the canvas that the model saw
    origins: list[int]  # [A], the first column that is no padding
    noise: Noise

    def probabilities(self) -> torch.Tensor:
        """[A, N], each proposal's probability in the distribution that it was drawn from."""
        return probability_of(self.tokens, self.shaped)

    def raw_probabilities(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[A, N], each proposal's probability by the model's own logits, computed in `dtype`, by default theirs."""
        return probability_of(self.tokens, self.logits, dtype)


class CommitRule(ABC):
    """Chooses the positions to settle. One object serves one call of `generate` at a time.

    A rule of one's own is passed as `generate(..., commit_rule=EveryOther())`:

        class EveryOther(CommitRule):
            def begin(self, masks, noise):
                return [[1] * count for count in masks]  # a step settles at least one position

            def select(self, step):
                even = torch.arange(step.masked.shape[1], device=step.masked.device) % 2 == 0
                sure = step.probabilities() * (1 + even)  # those in even places first
                return best(sure.masked_fill(~step.masked, -torch.inf))
    """

    exact = False  # True: `select` settles just the quotas, so that the rows' progress need not be looked at
    edits = False  # True: what is settled may still change until its block is done

    @abstractmethod
    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        """A block is opened, in which each row has so many masked positions.

        Returns each row's steps, as how many positions a step settles at least. A row may need fewer steps than it
        announces unless the rule is exact.
        """

    @abstractmethod
    def select(self, step: Step) -> torch.Tensor:
        """A boolean [A, N] tensor."""

    def goes_on(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        """[A], True where a row needs another step; `unfinished_A` says where it has masks left."""
        return unfinished_A


def chosen(values_ANV: torch.Tensor, tokens_AN: torch.Tensor) -> torch.Tensor:
    return values_ANV.gather(-1, tokens_AN[..., None])[..., 0]


def best(scores_AN: torch.Tensor) -> torch.Tensor:
    """[A, N], True at each row's highest score, the left-most of equal ones."""
    return torch.zeros_like(scores_AN, dtype=torch.bool).scatter(1, scores_AN.argmax(dim=1, keepdim=True), True)


def highest(scores_AN: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[A, N], True at each row's so many highest scores, never at minus infinity."""
    picked_AN = torch.zeros_like(scores_AN, dtype=torch.bool)
    for count in set(counts):
        if len(set(counts)) == 1:
            picked_AN.scatter_(1, scores_AN.topk(count, dim=1).indices, True)
        else:
            rows = [row for row, own in enumerate(counts) if own == count]
            indices = scores_AN[rows].topk(count, dim=1).indices
            picked_AN[rows] = torch.zeros_like(picked_AN[rows]).scatter(1, indices, True)
    return picked_AN & (scores_AN > NEVER)


def highest_on_canvas(step: Step, scores_AN: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[A, N], True at each row's so many highest scores.

    torch.topk breaks ties by where a value stands in its row, so that the row is the one that LLaDA's and Dream's own
    code ranks: the whole canvas without padding, minus infinity outside the block.
    """
    scores_AS = scores_AN.new_full((len(scores_AN), step.width), NEVER)
    scores_AS[:, step.columns] = scores_AN
    if len(set(counts)) == 1 and not any(step.origins):
        return highest(scores_AS, counts)[:, step.columns]
    picked_AS = torch.zeros_like(scores_AS, dtype=torch.bool)
    for picked_S, scores_S, count, origin in zip(picked_AS, scores_AS, counts, step.origins, strict=True):
        picked_S[origin:].index_fill_(0, scores_S[origin:].topk(count).indices, True)
    return picked_AS[:, step.columns]
