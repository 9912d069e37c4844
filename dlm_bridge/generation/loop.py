"""The denoising loop: blocks from left to right, each denoised by the sampler's rule.

A sampler is one choice of independent parts: the block layout (`canvas`), the attention pattern (`predictors`), the
proposal of tokens (`token_sampling`) and the rule that commits them (`commit_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.callbacks import CallbackHandler
from dlm_bridge.generation.canvas import Canvas, read_flags
from dlm_bridge.generation.commit_rules import DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.kv_cache import CacheMode, KVCache
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.rows import PromptBatch, StopCondition
from dlm_bridge.generation.runtime.runner import ModelRunner, supports_kv_cache
from dlm_bridge.generation.samplers import SamplerSpec
from dlm_bridge.generation.settings import GenerationSettings
from dlm_bridge.generation.token_sampling import Noise


@dataclass(frozen=True)
class SamplingResult:
    """Result of the denoising loop.

    Args:
        sequences: [B, P + new].
        forwards: forward passes of the model.
        row_forwards: sum over the forward passes of the rows that took part.
        new_tokens: number of new tokens of all rows, each as far as its end.
        row_ends: [B], the column behind each row's last token.
        has_nan: whether the first forward pass gave NaN, a scalar on the device; None without a forward pass.
    """

    sequences: torch.Tensor
    forwards: int
    row_forwards: int
    new_tokens: torch.Tensor
    row_ends: torch.Tensor
    has_nan: torch.Tensor | None


def denoise(
    model: Any,
    prompt: PromptBatch,
    spec: SamplerSpec,
    settings: GenerationSettings,
    noise: Noise,
    stop_condition: StopCondition,
    constraints: Constraints | None,
    callbacks: CallbackHandler | None,
) -> SamplingResult:
    """Run the sampler. Rows that have ended leave the batch after their block.

    Raises:
        DlmBridgeError: a cache that the sampler does not have, or an execution that the model or its device does not.
    """
    canvas = Canvas(prompt, spec.layout, settings.limits, settings.pad_token_id, stop_condition)
    rule = spec.rule if constraints is None else spec.rule.constrained(constraints)
    kv_cache = choose_cache(spec.predictor, model, settings.cache)
    copies = 2 if spec.predictor_options.get("cfg_scale") else 1
    rows = copies * len(canvas.rows)
    with ModelRunner.open(model, settings.execution, kv_cache, rows=rows, width=canvas.width) as runner:
        predictor = spec.predictor(runner, canvas, kv_cache, shift=settings.shift, **spec.predictor_options)
        predictor.commits_first_token = spec.first_token is not None
        context = SamplerContext(
            canvas,
            predictor,
            spec.sampling,
            constraints,
            noise,
            callbacks,
            settings.limits.vocabulary_size,
            first_token=spec.first_token,
            window=spec.window,
            logits_bias=spec.logits_bias,
        )
        if callbacks is not None:
            callbacks.begin(canvas)
        for _ in denoise_rows(context, rule):
            pass
    sequences = canvas.output()
    if callbacks is not None:
        callbacks.end(sequences)
    return SamplingResult(
        sequences,
        predictor.forwards,
        context.row_forwards,
        canvas.new_tokens(),
        canvas.output_ends(),
        context.has_nan,
    )


def denoise_rows(
    context: SamplerContext,
    rule: DenoisingRule,
    enter: Callable[[], None] = lambda: None,
    may_launch: Callable[[], bool] = lambda: True,
) -> Iterator[bool]:
    """Denoise the rows of the canvas until none is left. Yields after each step: whether rows have completed a block.

    Args:
        enter: called between two steps, lets rows enter the canvas.
        may_launch: whether a forward pass of the rows that go on may be launched before they are known.
    """
    canvas, predictor = context.canvas, context.predictor

    def launch() -> None:
        if may_launch():
            predictor.launch_speculatively(done=True)

    def leave_block(rows: list[int]) -> bool:
        over = canvas.close_block(rows)
        if not over:
            return False
        if context.callbacks is not None:
            context.callbacks.block(canvas, canvas.block, over)
        stay = canvas.retire(over, partial(read_flags, overlap_with=launch))
        if stay is not None:
            context.noise.select_rows(stay)
            predictor.select_rows(stay)
        return True

    while canvas.names:
        opening = canvas.open_block()
        nothing_to_do: set[int] = set()
        if opening:
            predictor.open_block(canvas.block, opening)
            nothing_to_do = {*opening} - {*rule.begin_block(context, canvas.block, opening)}
        inside = [row for row in canvas.rows if canvas.inside[row]]
        active = [row for row in inside if row not in nothing_to_do]
        going = set(rule.denoise_step(context, canvas.block, active) if active else ())
        for row in active:
            canvas.steps[row] += 1
        yield leave_block([row for row in inside if row not in going])
        unwanted = canvas.unwanted()
        if unwanted:
            leave_block(unwanted)
        enter()


def choose_cache(predictor: type[Predictor], model: Any, wanted: CacheMode | None) -> KVCache:
    """The cache that is asked for; by default the exact one that stores, where the predictor has one."""
    kinds = {kind.mode: kind for kind in predictor.caches}
    if wanted is None:
        storing = [kind for kind in predictor.caches if kind.stores and kind.exact]
        return storing[0]() if storing and supports_kv_cache(model) else KVCache()
    if wanted not in kinds:
        raise DlmBridgeError(f"this sampler has no cache '{wanted}', its attention allows {' or '.join(kinds)}")
    return kinds[wanted]()
