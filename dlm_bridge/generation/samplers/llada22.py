"""LLaDA2.2's sampler, which also deletes and inserts tokens of the block (Levenshtein edits).

    for block in blocks of block_length, counted from the text's first token:
        original = the block's masks;  counts = their number, divided evenly over the steps
        until the block has no masks and a step changes no token, or after a final step:
            tokens = argmax(logits), or draws;  scores = their probabilities
            added = masks that are not original
            commit the masks with score > threshold, or the count + added best if these are more; after `steps` all
            replace committed new tokens of the block that differ and have score > editing_threshold
            if the block had this result before: its least certain change takes the second best token
            from left to right: DELETE is removed;  SPLIT becomes a mask and the previous token of the position
            cut the block, or fill it with masks, to its length
        final: the max_post_steps-th step without original masks, or the max_steps_per_block-th of all: it commits all
            masks, and no DELETE or SPLIT

Source: inclusionAI/LLaDA2.2-flash's `generate` as FLX-OSS/FluxServe documents and serves it (99b73a0, its
decoders/levenshtein.py and development guide), with that decoder's deterministic choice if a block repeats. The card
`llada2_moe` lists the differences from the checkpoint's own `generate`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, CommitRule, Step, top_scores
from dlm_bridge.generation.predictors import BlockCausalPredictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import Noise, probability_of, without_token

RETRIES = 5  # attempts to change the result of a step that repeats an earlier one


@dataclass(frozen=True, kw_only=True)
class LLaDA22Sampler(Sampler):
    """LLaDA2.2's `generate`."""

    name: ClassVar[str] = "llada2.2"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    model_blocks: ClassVar[bool] = True
    infills: ClassVar[bool] = False  # tokens between masks would move

    gen_length: int = parameter(2048)
    block_length: int = parameter(32)
    steps: int = parameter(32, "Denoising steps per block, over which its masks are divided.")
    threshold: float = parameter(0.5, "Probability above which a mask is committed.")
    editing_threshold: float = parameter(0.0, "Probability above which a committed token is replaced.", minimum=0)
    max_post_steps: int = parameter(
        16, "Maximum steps of a block without its original masks; 0: it ends with the last of them.", minimum=0
    )
    max_steps_per_block: int = parameter(1000, "Maximum steps of a block.", minimum=2)
    delete_token_id: int = parameter(156930, "Token that deletes its position.", minimum=0)
    split_token_id: int = parameter(156931, "Token that inserts a mask before its position.", minimum=0)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.block_length, aligned=True),
            # Rows of every gen_length follow one rule, so that they share a continuous batch.
            rule=LevenshteinRule(replace(self, gen_length=self.block_length)),
            sampling=self.sampling(),
            predictor=BlockCausalPredictor,
            predictor_options={"block_length": self.block_length},
        )


class LevenshteinRule(CommitRule):
    """Commits masks and replaces tokens by thresholds, then applies the DELETE and SPLIT tokens among them.

    The block keeps its length: a deletion adds a mask at its end, an insertion pushes its last token out.
    """

    edits = True
    keeps_text = False  # tokens move

    def __init__(self, sampler: LLaDA22Sampler) -> None:
        self._sampler = sampler
        self._more_A: torch.Tensor | None = None

    def begin(self, masks: list[int], noise: Noise) -> list[list[int]]:
        steps = self._sampler.steps
        schedule = [[count // steps + (step < count % steps) for step in range(steps)] for count in masks]
        later = self._sampler.max_steps_per_block - steps
        return [[*counts, *[0] * later][: self._sampler.max_steps_per_block] for counts in schedule]

    def select(self, step: Step) -> torch.Tensor:
        """[A, N], True at positions whose token changes, not always to the proposed one: `write` also moves tokens."""
        return self.write(step) != step.before

    def write(self, step: Step) -> torch.Tensor:
        sampler, width = self._sampler, step.before.shape[1]
        rows_A, index_A = (to_device(numbers, step.before.device) for numbers in (step.rows, step.index))
        # True at the current positions of the block's original masks.
        original_BN = self.memory.tensor("original", width, dtype=torch.bool)
        original_AN = torch.where(index_A[:, None] == 0, step.masked, original_BN[rows_A])
        open_AN = step.masked & original_AN
        post_B = self.memory.tensor("post steps")  # without original masks, so far
        post_A = torch.where(open_AN.any(dim=1), 0, post_B[rows_A] + 1)
        post_B[rows_A] = post_A

        dtype = torch.promote_types(step.logits.dtype, torch.float32)
        logits_ANV = without_token(step.logits, step.excluded_token_id, dtype)
        scores_AN = probability_of(step.tokens, logits_ANV)
        # Three contain at least one that is neither DELETE nor SPLIT.
        ranked_ANK = logits_ANV.topk(min(3, logits_ANV.shape[-1]), dim=-1).indices
        filled_AN = self._filled(step, index_A, scores_AN, (step.masked & ~original_AN).sum(dim=1))
        if sampler.max_post_steps:
            final_A = post_A >= sampler.max_post_steps
        else:
            final_A = open_AN.any(dim=1) & ~(open_AN & ~filled_AN).any(dim=1)
        final_A = final_A | (index_A + 1 >= sampler.max_steps_per_block)
        filled_AN = torch.where(final_A[:, None], step.masked, filled_AN)
        edits_AN = step.new & ~step.masked & (scores_AN > sampler.editing_threshold) & (step.tokens != step.before)
        plain_AN = _first(ranked_ANK, ~self._is_edit(ranked_ANK))
        tokens_AN = torch.where(final_A[:, None] & self._is_edit(step.tokens), plain_AN, step.tokens)
        written_AN = torch.where(filled_AN | edits_AN, tokens_AN, step.before)
        written_AN = self._without_repetition(step, written_AN, scores_AN, ranked_ANK, ~final_A)
        result_AN, original_AN = self._carried_out(step, written_AN, original_AN)
        original_BN[rows_A] = original_AN
        masks_A = ((result_AN == MASK) & step.new).any(dim=1)
        self._more_A = ~final_A & (masks_A | (result_AN != step.before).any(dim=1))
        return result_AN

    def continues(self, step: Step, unfinished_A: torch.Tensor) -> torch.Tensor:
        # An end-of-sequence token does not end a row's block early, because it may still be edited.
        assert self._more_A is not None
        return self._more_A

    def _filled(
        self, step: Step, index_A: torch.Tensor, scores_AN: torch.Tensor, added_A: torch.Tensor
    ) -> torch.Tensor:
        """[A, N], True at the masks to commit. `added_A`: number of masks that are not original."""
        late_A1 = (index_A >= self._sampler.steps)[:, None]
        masked_scores_AN = scores_AN.masked_fill(~step.masked, MINUS_INFINITY)
        confident_AN = masked_scores_AN > self._sampler.threshold
        least_A = to_device(step.num_transfer_tokens, scores_AN.device) + added_A
        best_AN = top_scores(masked_scores_AN, least_A)
        chosen_AN = torch.where((confident_AN.sum(dim=1) >= least_A)[:, None], confident_AN, best_AN)
        return torch.where(late_A1, step.masked, chosen_AN)

    def _is_edit(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens == self._sampler.delete_token_id) | (tokens == self._sampler.split_token_id)

    def _without_repetition(
        self,
        step: Step,
        written_AN: torch.Tensor,
        scores_AN: torch.Tensor,
        ranked_ANK: torch.Tensor,
        may_A: torch.Tensor,
    ) -> torch.Tensor:
        """Return the result of a step. If the block had it before, its least certain change takes another token, so
        that edits do not repeat forever."""
        rows_A, index_A = (to_device(numbers, written_AN.device) for numbers in (step.rows, step.index))
        latest = max(step.index)
        room = 1 << latest.bit_length()  # number of stored results, a power of two
        written_BKN = self.memory.tensor("written", room, written_AN.shape[1])
        written_AKN = written_BKN[rows_A]
        before_AK = torch.arange(room, device=rows_A.device) < index_A[:, None]
        for _ in range(RETRIES if latest else 0):
            changed_AN = written_AN != step.before
            seen_A = ((written_AKN == written_AN[:, None]).all(dim=2) & before_AK).any(dim=1)
            uncertain_A1 = scores_AN.masked_fill(~changed_AN, torch.inf).argmin(dim=1, keepdim=True)
            again_A = seen_A & may_A & changed_AN.any(dim=1)
            other_AN = _first(ranked_ANK, ranked_ANK != written_AN[..., None])
            other_A1 = torch.where(again_A[:, None], other_AN, written_AN).gather(1, uncertain_A1)
            written_AN = written_AN.scatter(1, uncertain_A1, other_A1)
        written_BKN[rows_A, index_A] = written_AN
        return written_AN

    def _carried_out(
        self, step: Step, written_AN: torch.Tensor, original_AN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply DELETE and SPLIT. Returns the block's tokens, and the positions that its original masks have moved
        to."""
        deleted_AN = (written_AN == self._sampler.delete_token_id) & step.new
        split_AN = (written_AN == self._sampler.split_token_id) & step.new
        counts_AN = 1 - deleted_AN.long() + split_AN.long()
        stops_AN = counts_AN.cumsum(dim=1)
        width = written_AN.shape[1]
        # An extra column receives tokens that are deleted or pushed out.
        last_AN = torch.where(deleted_AN, width, stops_AN - 1).clamp(max=width)  # new column of each token
        tokens_AN = written_AN.new_full((len(written_AN), width + 1), MASK)
        tokens_AN.scatter_(1, last_AN, torch.where(split_AN, step.before, written_AN))
        moved_AN = torch.zeros_like(tokens_AN, dtype=torch.bool).scatter(1, last_AN, original_AN)
        places_AN = torch.arange(width, device=last_AN.device).expand_as(last_AN)
        self.moved = torch.zeros_like(tokens_AN).scatter(1, last_AN, places_AN)[:, :width]
        return tokens_AN[:, :width], moved_AN[:, :width]


def _first(ranked_ANK: torch.Tensor, allowed_ANK: torch.Tensor) -> torch.Tensor:
    """[A, N], the first allowed one of each position's ranked tokens."""
    return ranked_ANK.gather(-1, allowed_ANK.int().argmax(dim=-1, keepdim=True))[..., 0]
