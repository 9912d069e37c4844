"""Fast-dLLM v1's sampler for Dream: blocks with approximate KV caches (arXiv 2505.22618).

    canvas = prompt + [MASK] * gen_length
    for block in blocks of block_length, from left to right:
        logits = model(canvas)                          # cache "prefix", "dual": fills the cache
        commit draw(softmax(logits / temperature), top_p, top_k) at the block's first column
        while the block has masks:
            logits = model(canvas)                      # "prefix": from the block on; "dual": the block
            tokens = draw(softmax(logits / temperature), top_p, top_k)
            alg "confidence_threshold":
                commit the tokens with probability >= threshold, and the best one
            alg "entropy": with t, s the next neighbours of linspace(1, eps, steps / blocks + 1), from the second on,
                commit the int(masks * (1 - s / t)) tokens of lowest entropy; the last step commits all

The block's first token is predicted by the column before it. Later steps do not run that column, but read it from the
cache of the block's first forward pass. (With the sampler `llada` on Dream's models, every step runs it.) The
published code always uses a cache; `cache="none"` is exact.

Source: NVlabs/Fast-dLLM 24cc59e, dream/model/generation_utils_block.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Self

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import BlockLayout, Columns
from dlm_bridge.generation.commit_rules import CommitRule, ThresholdRule, TopScoresRule, probability
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.samplers import Sampler, SamplerSpec, SpecialTokens, parameter
from dlm_bridge.generation.samplers.dream import negative_entropy, noise_level_schedule
from dlm_bridge.generation.token_sampling import TokenSampling


@dataclass(frozen=True, kw_only=True)
class DreamBlockSampler(Sampler):
    """Fast-dLLM v1's `diffusion_generate` for Dream, with `cache="prefix"` (its default) or `cache="dual"`."""

    name: ClassVar[str] = "dream_block"
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("dream",)
    shortens_block: ClassVar[bool] = True
    whole_blocks: ClassVar[bool] = True
    infills: ClassVar[bool] = False

    block_length: int = parameter(32)
    alg: str = parameter(
        "confidence_threshold",
        "confidence_threshold, or entropy, which the published code uses for every other name.",
        choices=("confidence_threshold", "entropy"),
    )
    threshold: float = parameter(0.9, "Confidence from which alg confidence_threshold commits a token.")
    steps: int = parameter(
        512, "Denoising steps in total, over all blocks, including the first one of each; for alg entropy."
    )
    eps: float = parameter(1e-3, "Last noise level; for alg entropy.", above=0, below=1)
    alg_temp: float | None = parameter(
        None, "Above 0: draw positions at this temperature; for alg entropy.", minimum=0
    )

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
                raise SettingError("alg_temp", "`alg=confidence_threshold` does not rank positions: remove it")
            return BlockThresholdRule(self.threshold, probability)
        steps, rest = divmod(self.steps, blocks)
        if rest or (steps < 2 and self.block_length > 1):
            below = max(steps, 2) * blocks
            raise SettingError(
                "steps",
                f"{self.steps} is not a multiple of the {blocks} blocks (`gen_length={self.gen_length}` / "
                f"`block_length={self.block_length}`) with two or more steps per block: use {below} or "
                f"{below + blocks}",
            )
        schedule = partial(noise_level_schedule, steps=steps, eps=self.eps, first=1)
        return BlockTopScoresRule(negative_entropy, schedule, self.alg_temp)


class BlockThresholdRule(ThresholdRule):
    """`ThresholdRule` for blocks whose first token is predicted by the token before them."""

    needs_prompt: ClassVar[bool] = True


class BlockTopScoresRule(TopScoresRule):
    """`TopScoresRule` for blocks whose first token is predicted by the token before them."""

    needs_prompt: ClassVar[bool] = True


class FirstTokenPredictor(Predictor):
    """Predictor that commits a block's first token in its first forward pass, over the whole canvas. With a cache,
    later passes begin at the block's first column, which predicts the second token."""

    def columns(self, rows: list[int] | None, block: slice) -> Columns:
        return slice(block.start + 1, block.stop)

    def columns_to_run(self, end: int, *, shift: bool) -> slice:
        return self.cache.read(self._block, end, shift=False)
