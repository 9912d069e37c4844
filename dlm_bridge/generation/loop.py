"""The denoising loop: blocks from left to right, each denoised by the sampler's commit rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.callbacks import CallbackHandler
from dlm_bridge.generation.canvas import BlockLayout, Canvas, PromptBatch, StopCondition, read_flags
from dlm_bridge.generation.commit_rules import (
    CommitRule,
    LeftToRightRule,
    SamplerContext,
    denoise_block,
)
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.kv_cache import CacheMode
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import Execution, ModelRunner, supports_kv_cache
from dlm_bridge.generation.speculation import SpeculativeRule, speculate_block
from dlm_bridge.generation.token_sampling import Noise, TokenSampling
from dlm_bridge.generation.uniform import ResamplingRule, resample_block


@dataclass(frozen=True)
class SamplerSpec:
    """What a sampler is made of. A rule holds state: a recipe serves one call."""

    layout: BlockLayout
    rule: CommitRule | ResamplingRule | SpeculativeRule
    sampling: TokenSampling
    predictor: type[Predictor]
    predictor_options: dict[str, Any]
    # A block's first token is settled alone, by the prediction of the position before it: the best one, or sampled.
    seed: Literal["greedy", "sampled"] | None = None
    window: int | None = None  # so many columns from a row's first mask are looked at, instead of the whole block
    suppress: tuple[int, ...] = ()  # tokens that are never proposed


@dataclass(frozen=True)
class SamplingResult:
    """What a call's sampling came to."""

    sequences: torch.Tensor  # [B, P + new]
    forwards: int
    row_forwards: int  # the sum over the forwards of how many rows took part
    new_tokens: torch.Tensor  # of all rows together, each as far as its end


def denoise(
    model: Any,
    prompt: PromptBatch,
    recipe: SamplerSpec,
    noise: Noise,
    *,
    gen_length: int,
    mask_token_id: int,
    pad_token_id: int,
    vocabulary: int,
    ending: StopCondition,
    constraints: Constraints,
    shift: bool,
    observer: CallbackHandler,
    cache: CacheMode | None = None,
    execution: Execution | None = None,
) -> SamplingResult:
    """Run the sampler. Rows that have ended leave the batch after their block.

    Raises DlmBridgeError for a cache that the sampler, or an execution that the model or its device does not have.
    """
    canvas = Canvas(
        prompt,
        recipe.layout,
        gen_length=gen_length,
        mask_token_id=mask_token_id,
        pad_token_id=pad_token_id,
        ending=ending,
    )
    if isinstance(recipe.rule, ResamplingRule):
        constraints.refuse_text("a canvas of noise has no text that is settled")
    if constraints.ordered and isinstance(recipe.rule, CommitRule):
        recipe = replace(recipe, rule=LeftToRightRule())
    cache = _cache(recipe.predictor, model, cache)
    copies = 2 if recipe.predictor_options.get("cfg_scale") else 1
    with ModelRunner.open(
        model, execution, keeps=cache != "none", rows=copies * len(canvas.rows), width=canvas.width
    ) as runner:
        predictor = recipe.predictor(runner, canvas, shift=shift, cache=cache, **recipe.predictor_options)
        predictor.seeded = recipe.seed is not None
        work = SamplerContext(canvas, predictor, recipe, constraints, noise, observer, vocabulary)
        observer.begin(canvas)
        for block in canvas.blocks:
            predictor.open(block)
            if isinstance(recipe.rule, ResamplingRule):
                resample_block(work, block)
            elif isinstance(recipe.rule, SpeculativeRule):
                speculate_block(work, block)
            else:
                denoise_block(work, block)
            observer.block(canvas, block)
            stay = canvas.retire(
                block, partial(read_flags, meanwhile=partial(predictor.launch_speculatively, done=True))
            )
            if stay is not None:
                noise.keep(stay)
                predictor.keep(stay)
                if not stay:
                    break
    sequences = canvas.output()
    observer.end(sequences)
    return SamplingResult(sequences, predictor.forwards, observer.row_forwards, canvas.new_tokens())


def _cache(predictor: type[Predictor], model: Any, wanted: CacheMode | None) -> CacheMode:
    """The cache that is asked for; by default the one that is exact, where there is such a one."""
    if wanted is None:
        return "block" if "block" in predictor.caches and supports_kv_cache(model) else "none"
    if wanted not in predictor.caches:
        raise DlmBridgeError(
            f"this sampler has no cache '{wanted}', what it looks at allows {' or '.join(predictor.caches)}"
        )
    return wanted
