"""d3LLM's multi-block decoding (arXiv 2601.07568): a block starts before the previous one is complete.

    canvas = prompt + [MASK] * gen_length, in blocks of block_length
    started = 1
    while there are masks:
        if at least block_add_threshold of the last started block is committed:
            started = started + 1
        logits = model(canvas)
        tokens = argmax(logits / temperature + Gumbel noise)
        commit, in the started blocks,
            every token whose entropy of softmax(logits) is at most entropy_threshold
            and the token of lowest entropy                       # commit_best
            and, if none of these is in the first block that has masks, that block's token of lowest entropy

With block_add_threshold 1, the blocks are denoised one after the other. Not implemented: `decoded_token_threshold`,
which has no effect without a cache; the delayed cache; and `early_stop`, which overwrites the tokens after an
end-of-sequence token (rows end at that token, as in every sampler).

Source: hao-ai-lab/d3LLM e5bfcac, `generate_multi_block` of d3llm_LLaDA/d3llm_llada_generate_util.py and
`_sample_multi_block` of d3llm_DREAM/d3llm_dream_generate_util.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import BlockLayout, to_device
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, OneOrMoreRule, Step, best
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter


@dataclass(frozen=True, kw_only=True)
class MultiBlockSampler(Sampler):
    """d3LLM's multi-block decoding."""

    name: ClassVar[str] = "multi_block"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    aliases: ClassVar[Mapping[str, str]] = {**Sampler.aliases, "threshold": "entropy_threshold"}
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    infills: ClassVar[bool] = False

    block_length: int = parameter(32)
    entropy_threshold: float = parameter(
        0.5, "Entropy in nats up to which a token is committed; published as `threshold`.", minimum=0
    )
    block_add_threshold: float = parameter(
        0.5, "Committed fraction of the last started block at which the next one starts.", minimum=0, maximum=1
    )
    commit_best: bool = parameter(
        True, "Each step also commits the token of lowest entropy of all started blocks (LLaDA's code, not Dream's)."
    )

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        return SamplerSpec(
            layout=BlockLayout(None),
            rule=MultiBlockRule(self.block_length, self.entropy_threshold, self.block_add_threshold, self.commit_best),
            sampling=self.sampling(),
        )


class MultiBlockRule(OneOrMoreRule):
    """Commits tokens of low entropy in all started blocks, and at least one in the first block with masks."""

    def __init__(self, block_length: int, threshold: float, block_add_threshold: float, commit_best: bool) -> None:
        self._block_length = block_length
        self._threshold = threshold
        self._block_add_threshold = block_add_threshold
        self._commit_best = commit_best

    def select(self, step: Step) -> torch.Tensor:
        block_N = torch.arange(step.masked.shape[1], device=step.masked.device) // self._block_length
        begun_A1 = self._begin_blocks(step)[:, None]
        masked_AN = step.masked & (block_N < begun_A1)
        log_p_ANV = step.logits.double().log_softmax(dim=-1)
        # As published, with a floor under the probabilities.
        certainty_AN = (log_p_ANV.exp() * (log_p_ANV.exp() + 1e-12).log()).sum(dim=-1)
        scores_AN = certainty_AN.masked_fill(~masked_AN, MINUS_INFINITY)
        picked_AN = (scores_AN >= -self._threshold) & masked_AN
        if self._commit_best:
            picked_AN |= best(scores_AN) & (scores_AN > MINUS_INFINITY)
        first_A1 = block_N.expand_as(masked_AN).masked_fill(~masked_AN, len(block_N)).amin(dim=1, keepdim=True)
        of_first_AN = block_N == first_A1
        needy_A1 = ~(picked_AN & of_first_AN).any(dim=1, keepdim=True)
        scores_AN = scores_AN.masked_fill(~of_first_AN, MINUS_INFINITY)
        return picked_AN | (needy_A1 & best(scores_AN) & (scores_AN > MINUS_INFINITY))

    def _begin_blocks(self, step: Step) -> torch.Tensor:
        """[A], number of started blocks, after starting the next one if enough of the last one is committed."""
        short = -step.masked.shape[1] % self._block_length  # of the last block
        masks_AK = F.pad(step.masked, (0, short)).unflatten(1, (-1, self._block_length)).sum(dim=-1)
        more_B = self.memory.tensor("blocks begun behind the first")
        rows_A = to_device(step.rows, masks_AK.device)
        begun_A = (more_B[rows_A] + 1).clamp(max=masks_AK.shape[1])  # a row may have fewer blocks than others
        masks_A = masks_AK.gather(1, begun_A[:, None] - 1)[:, 0]
        far_enough_A = 1 - masks_A.double() / self._block_length >= self._block_add_threshold
        begun_A = (begun_A + far_enough_A).clamp(max=masks_AK.shape[1])
        more_B[rows_A] = begun_A - 1
        return begun_A
