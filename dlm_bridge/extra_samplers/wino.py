"""WINO: wide-in, narrow-out decoding, which masks uncertain tokens again (arXiv 2507.18578).

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:
        accepted = 30
        while the block has masks:
            # The masks after the canvas have the positions of the block. Each attends to the canvas except its own
            # position of the block, and to the other added masks; nothing else attends to them.
            logits, checks = model(canvas + [MASK] * block_length), at the block and at the added masks
            tokens = argmax(logits / temperature + Gumbel noise)
            scores = softmax(logits)[tokens] at masks
            doubts = softmax(checks)[the block's tokens] elsewhere
            most = 0.7 * masks of the block, between 5 and 20
            commit the tokens with score > threshold: at least the best one, at most the best `most` of them
            if more than one is committed:
                mask the tokens with doubt < threshold_back again: at most the least probable `accepted` - 1 of them
            accepted = number of committed tokens

A step masks fewer tokens than the previous step has committed, so a block takes at most as many steps as it has
tokens.

Source: Feng-Hong/WINO-DLLM 9549a1d, LLaDA/decoding.py, `decoding_wino`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, Columns
from dlm_bridge.generation.commit_rules import (
    MINUS_INFINITY,
    DenoisingRule,
    LeftToRightRule,
    SamplerContext,
    best,
)
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime.runner import CanvasView
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.token_sampling import probability_of

FEWEST, MOST = 5, 20  # bounds of the maximum number of tokens that a step commits
ACCEPTED_BEFORE = 30  # value of `accepted` before the first step


@dataclass(frozen=True, kw_only=True)
class WINOSampler(Sampler):
    """WINO, for models without a logit shift."""

    name: ClassVar[str] = "wino"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    shifted: ClassVar[bool | None] = False
    shortens_block: ClassVar[bool] = True
    takes_commit_rule: ClassVar[bool] = False

    block_length: int = parameter(128)
    threshold: float = parameter(0.6, "Confidence above which a token is committed.")
    threshold_back: float = parameter(
        0.9, "Probability below which a committed token of the block is masked again; 0: never.", minimum=0
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=WINORule(self.threshold, self.threshold_back),
            sampling=self.sampling(),
            predictor=CheckingPredictor,
        )


class CheckingPredictor(Predictor):
    """Predictor whose forward passes also predict each of the block's tokens from all others, at added masks.

    Attributes:
        checks: [A, N, V] logits of these predictions in the last forward pass.
    """

    caches: ClassVar[tuple[type[KVCache], ...]] = (KVCache,)
    checks: torch.Tensor

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        assert isinstance(columns, slice)
        canvas, count = self.canvas, columns.stop - columns.start
        view, first_A1 = self._compact_view(rows, columns, slice(0, canvas.width))
        assert view.attention_mask is not None
        assert view.position_ids is not None
        width, place_AN = view.tokens.shape[1], canvas.columns(rows, columns) - first_A1
        tokens_AQ = F.pad(view.tokens, (0, count), value=MASK)
        column_Q = torch.arange(width + count, device=tokens_AQ.device)
        real_AQ = torch.cat([view.attention_mask, canvas.real(rows)[:, columns]], dim=1)
        mask_AQK = ((column_Q < width) | (column_Q[:, None] >= width)) & real_AQ[:, None]
        mask_AQK[:, width:] &= column_Q != place_AN[..., None]
        mask_AQK |= column_Q == column_Q[:, None]  # padding attends to itself
        checked = CanvasView(tokens_AQ, mask_AQK[:, None], torch.cat([view.position_ids, place_AN], dim=1))
        places_A2N = torch.cat([place_AN.clamp(max=width - 1), column_Q[width:].expand_as(place_AN)], dim=1)
        logits, self.checks = self._runner.logits_at(checked, places_A2N).split(count, dim=1)
        return logits


class WINORule(DenoisingRule):
    """Commits tokens above one threshold, and masks committed tokens below another one again."""

    edits = True
    keeps_text = True

    def __init__(self, threshold: float, threshold_back: float) -> None:
        self._threshold = threshold
        self._threshold_back = threshold_back

    def constrained(self, constraints: Constraints) -> DenoisingRule:
        return LeftToRightRule() if constraints.ordered else self

    def begin_block(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        canvas = context.canvas
        masks = canvas.masks(block)
        canvas.memory.tensor("accepted")[canvas.index(rows)] = ACCEPTED_BEFORE
        return [row for row in rows if masks[row]]

    def denoise_step(self, context: SamplerContext, block: slice, rows: list[int]) -> list[int]:
        canvas, predictor = context.canvas, context.predictor
        assert isinstance(predictor, CheckingPredictor)
        accepted_B = canvas.memory.tensor("accepted")
        selected, index = context.selected(rows), canvas.index(rows)
        logits = context.predict(rows, block)
        allowed, _, tokens = context.propose_tokens(rows, block, logits)
        before, masked, new = (
            canvas.take(selected, block),
            canvas.masked(selected, block),
            canvas.behind_prompt(selected, block),
        )
        committed = self._committed(probability_of(tokens, allowed, torch.float64), masked)
        if context.text is not None:  # before tokens are masked again, which any text allows
            tokens = context.text.commit(rows, block, torch.where(committed, tokens, before), allowed, [1] * len(rows))
            committed = masked & (tokens != MASK)
        doubts = probability_of(before.clamp(min=0), predictor.checks, torch.float64)  # not read at masks
        doubted = self._doubted(doubts, new & ~masked, committed.sum(dim=1), accepted_B[index])
        accepted_B[index] = committed.sum(dim=1)
        after = torch.where(committed, tokens, before.masked_fill(doubted, MASK))
        canvas.put(selected, block, after)
        context.report(rows, block, logits, final=False)
        left = context.read(canvas.masked(selected, block).any(dim=1))
        return [row for row, more in zip(rows, left, strict=True) if more]

    def _committed(self, scores_AN: torch.Tensor, masked_AN: torch.Tensor) -> torch.Tensor:
        """[A, N], True at the masks to commit."""
        scores_AN = scores_AN.masked_fill(~masked_AN, MINUS_INFINITY)
        confident_AN = scores_AN > self._threshold
        most_A1 = (masked_AN.sum(dim=1, keepdim=True) * 7 // 10).clamp(FEWEST, MOST)
        best_AN = best(scores_AN) & masked_AN
        return (confident_AN & (_ranks(scores_AN, descending=True) < most_A1)) | best_AN

    def _doubted(
        self, doubts_AN: torch.Tensor, written_AN: torch.Tensor, committed_A: torch.Tensor, accepted_A: torch.Tensor
    ) -> torch.Tensor:
        """[A, N], True at the written tokens to mask again."""
        doubts_AN = doubts_AN.masked_fill(~written_AN, torch.inf)
        fewer_AN = _ranks(doubts_AN, descending=False) < accepted_A[:, None] - 1
        return (doubts_AN < self._threshold_back) & fewer_AN & (committed_A > 1)[:, None]


def _ranks(scores_AN: torch.Tensor, *, descending: bool) -> torch.Tensor:
    """[A, N], rank of each position in this order; of equal scores, the leftmost comes first."""
    order_AN = scores_AN.sort(dim=1, descending=descending, stable=True).indices
    return order_AN.argsort(dim=1)
