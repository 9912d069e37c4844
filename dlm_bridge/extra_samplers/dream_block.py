"""Fast-dLLM v1's sampler for Dream, blocks with caches of its own (arXiv 2505.22618).

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:
        logits = model(canvas)                          # cache "prefix", "dual": fills the cache
        commit draw(softmax(logits / temperature), top_p, top_k) at the block's first column
        while the block has masks:
            logits = model(canvas)                      # "prefix": the block and what follows it; "dual": the block
            tokens = draw(softmax(logits / temperature), top_p, top_k)
            alg "confidence_threshold":
                commit the tokens with probability >= threshold, and the best one
            alg "entropy": with t, s the next neighbours of linspace(1, eps, steps / blocks + 1), from the second on,
                commit the int(masks * (1 - s / t)) tokens of lowest entropy, in the last step all

The block's first token is predicted by the column before it, so that later steps need not run that column: it is read
from the cache as it was in the block's first forward pass. (The caches of the sampler `llada` on Dream's models run it
in every step.) The original code keeps a cache always; without one (`cache="none"`) nothing is approximated.

Source: NVlabs/Fast-dLLM 24cc59e, dream/model/generation_utils_block.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Self

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import BlockLayout, Columns
from dlm_bridge.generation.commit_rules import CommitRule, ThresholdRule, TopScoresRule, probability
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.dream import negative_entropy, noise_level_schedule
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True, kw_only=True)
class DreamBlockSampler(Sampler):
    """Fast-dLLM v1's `diffusion_generate` for Dream, with `cache="prefix"` (its default) or `cache="dual"`.

    Args:
        block_length: tokens that are denoised together.
        alg: "confidence_threshold", or "entropy", which the code does for every other name.
        threshold: confidence from which on a token is committed; of alg "confidence_threshold" only.
        steps: denoising steps over all blocks, the first one of each included; of alg "entropy" only.
        eps: the last noise level; of alg "entropy" only.
        alg_temp: above 0, positions are drawn instead of ranked; of alg "entropy" only.
    """

    name: ClassVar[str] = "dream_block"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("dream",)
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    infills: ClassVar[bool] = False

    block_length: int = parameter(32, minimum=1)
    alg: str = parameter("confidence_threshold", choices=("confidence_threshold", "entropy"))
    threshold: float = parameter(0.9, minimum=0)
    steps: int = parameter(512, minimum=1)
    eps: float = parameter(1e-3, above=0, below=1)
    alg_temp: float | None = parameter(None, minimum=0)

    def fitted(self, explicit: Container[str]) -> Self:
        blocks = ceil(self.gen_length / self.block_length)
        fit: dict[str, Any] = {"steps": max(self.steps // blocks, 2) * blocks}
        if self.alg == "confidence_threshold":
            fit["alg_temp"] = None
        return replace(self, **{name: value for name, value in fit.items() if name not in explicit})

    def spec(self, tokens: SpecialTokens) -> SamplerSpec:
        blocks = ceil(self.gen_length / self.block_length)
        return SamplerSpec(
            layout=BlockLayout(self.block_length),
            rule=self._rule(blocks),
            sampling=TokenSampling(self.temperature, self.top_k, self.top_p, order=("temperature", "top_p", "top_k")),
            predictor=FirstTokenPredictor,
            first_token="sampled",
        )

    def _rule(self, blocks: int) -> CommitRule:
        if self.alg == "confidence_threshold":
            if self.alg_temp is not None:
                raise DlmBridgeError("alg 'confidence_threshold' draws no positions: leave alg_temp out")
            return BlockThresholdRule(self.threshold, probability)
        steps, rest = divmod(self.steps, blocks)
        if rest or (steps < 2 and self.block_length > 1):
            below = max(steps, 2) * blocks
            raise DlmBridgeError(
                f"steps {self.steps} is not two or more for each of the {blocks} blocks (gen_length {self.gen_length} "
                f"/ block_length {self.block_length}), the same number for all: use steps {below} or {below + blocks}"
            )
        schedule = partial(noise_level_schedule, steps=steps, eps=self.eps, first=1)
        return BlockTopScoresRule(negative_entropy, schedule, self.alg_temp)


class BlockThresholdRule(ThresholdRule):
    """`ThresholdRule` behind a first token that the token before it predicts."""

    needs_prompt: ClassVar[bool] = True


class BlockTopScoresRule(TopScoresRule):
    """`TopScoresRule` behind a first token that the token before it predicts."""

    needs_prompt: ClassVar[bool] = True


class FirstTokenPredictor(Predictor):
    """A block's first token comes from its first forward pass, over the whole canvas; with a cache the later ones
    begin with the block's first column, which predicts the second token."""

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        return slice(block.start + 1, block.stop)

    def columns_to_run(self, end: int, *, shift: bool) -> slice:
        return self.cache.read(self._block, end, shift=False)
