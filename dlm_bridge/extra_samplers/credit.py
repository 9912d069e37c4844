"""dInfer's credit decoding (arXiv 2510.06133): repeatedly predicted tokens gain credit and are committed earlier.

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:    # block-causal: counted from the first token
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

If dInfer's code proposes the mask token, the mask remains for a later step; here the mask token is never proposed.

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

# Scores within this distance of the best one are committed with it.
NEARLY_BEST = 1e-5


@dataclass(frozen=True, kw_only=True)
class CreditSampler(Sampler):
    """dInfer's credit decoding."""

    name: ClassVar[str] = "credit"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional", "block_causal")
    model_blocks: ClassVar[bool] = True
    shortens_block: ClassVar[bool] = True

    block_length: int = parameter(128)
    threshold: float = parameter(0.9, "Confidence, including credit, from which a token is committed.")
    credit_alpha: float = parameter(
        0.7, "Weight of the credit in the logits; 0: dInfer's threshold decoding.", minimum=0
    )
    boost_gamma: float = parameter(0.2, "Exponent of the probability that a token gains as credit.", minimum=0)
    decay_beta: float = parameter(0.8, "Decay factor of the credit per step.", minimum=0, maximum=1)

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
    """Commits the tokens with confidence >= threshold, and those within 1e-5 of the best one."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def select(self, step: Step) -> torch.Tensor:
        scores_AN = step.raw_probabilities(torch.float32).masked_fill(~step.masked, MINUS_INFINITY)
        bound_A1 = (scores_AN.amax(dim=1, keepdim=True) - NEARLY_BEST).clamp(max=self._threshold)
        return (scores_AN >= bound_A1) & step.masked


class CreditPredictor(Predictor):
    """Adds the logarithm of a token's credit to its logit. The credit is the decayed sum, over the block's forward
    passes, of the token's boosted probabilities when it was the best token of the mask."""

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
    """`CreditPredictor` for block-causal models."""
