"""dInfer's credit decoding (arXiv 2510.06133): tokens that were predicted before gain credit, and commit earlier.

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:    # of a block-causal model counted from the first token
        credit = zeros(block_length, vocabulary)
        while the block has masks:
            logits = model(canvas)
            p, token = max(softmax(logits))                     # at each position
            credit = decay_beta * credit
            credit[token] += p ** boost_gamma at masks
            logits = logits + credit_alpha * log(1 + credit)
            tokens = argmax(logits / temperature + Gumbel noise)
            scores = softmax(logits)[tokens]
            commit the tokens with score >= min(threshold, best score - 1e-5)

Where dInfer's code proposes the mask token, it leaves the mask to a later step; here the mask token is never proposed.

Source: inclusionAI/dInfer fce4e32, `CreditThresholdParallelDecoder`, called as by `BlockWiseDiffusionLLM` and
`BlockDiffusionLLM`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.commit_rules import MINUS_INFINITY, OneOrMoreRule, Step
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.predictors import BlockCausalPredictor, Predictor
from dlm_bridge.generation.runtime.runner import ModelRunner
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, block_parts, parameter

# How much less than the best score is committed with it.
NEARLY_BEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class CreditSampler(Sampler):
    """dInfer's credit decoding.

    Args:
        block_length: tokens that are denoised together.
        threshold: confidence, credit included, from which on a token is committed.
        credit_alpha: weight of the credit in the logits; with 0 this is dInfer's threshold decoding.
        boost_gamma: exponent of the probability that a token gains as credit.
        decay_beta: factor of the credit from step to step.
    """

    name: ClassVar[str] = "credit"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional", "block_causal")
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True

    block_length: int = parameter(128, minimum=1)
    threshold: float = parameter(0.9, minimum=0)
    credit_alpha: float = parameter(0.7, minimum=0)
    boost_gamma: float = parameter(0.2, minimum=0)
    decay_beta: float = parameter(0.8, minimum=0, maximum=1)

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        parts = block_parts(self.block_length, tokens)
        credit = {"alpha": self.credit_alpha, "gamma": self.boost_gamma, "decay": self.decay_beta}
        return SamplerSpec(
            layout=parts["layout"],
            rule=NearThresholdRule(self.threshold),
            sampling=self.sampling(),
            predictor=BlockCreditPredictor if "predictor" in parts else CreditPredictor,
            predictor_options={**parts.get("predictor_options", {}), **credit},
        )


class NearThresholdRule(OneOrMoreRule):
    """Commits the tokens with confidence >= threshold, or those that are best to within 1e-5."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = step.raw_probabilities(torch.float32).masked_fill(~step.masked, MINUS_INFINITY)
        bound_A1 = (scores_AN.amax(dim=1, keepdim=True) - NEARLY_BEST).clamp(max=self._threshold)
        return (scores_AN >= bound_A1) & step.masked


class CreditPredictor(Predictor):
    """Adds the logarithm of a token's credit to its logit: the decayed sum, over the block's forward passes, of the
    boosted probabilities that it had as a mask's best token."""

    def __init__(
        self, runner: ModelRunner, canvas: Canvas, cache: KVCache, *, alpha: float, gamma: float, decay: float,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(runner, canvas, cache, **options)
        self._alpha = alpha
        self._gamma = gamma
        self._decay = decay

    def __call__(self, rows: list[int] | None, columns: Columns, shift: bool | None = None) -> torch.Tensor:
        logits_ANV = super().__call__(rows, columns, shift)
        index: Any = slice(None) if rows is None else self.canvas.index(rows)
        credit_BNV = self.canvas.memory.tensor("credit", *logits_ANV.shape[1:], dtype=torch.float32)
        best_AN, token_AN = logits_ANV.softmax(dim=-1, dtype=torch.float32).max(dim=-1)
        gain_AN = best_AN**self._gamma * self.canvas.masked(rows, columns)
        credit_ANV = credit_BNV[index] * self._decay
        credit_ANV = credit_ANV.scatter_add(-1, token_AN[..., None], gain_AN[..., None])
        credit_BNV[index] = credit_ANV
        return logits_ANV + self._alpha * (credit_ANV + 1).log()


class BlockCreditPredictor(CreditPredictor, BlockCausalPredictor):
    """The same of a block-causal model."""
