"""The denoising loop: blocks from left to right; in each step the model proposes tokens and a rule settles some.

Its parts are independent: `predict` (what the model sees, and which logits are a position's), `propose` (a token for
each position), `rules` (which proposals are settled), `canvas` (where blocks are), `noise` (where randomness comes
from). A published sampler is one choice of each (`algorithms`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.canvas import Canvas, Columns, Layout
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.denoising import Denoising, propose
from dlm_bridge.generation.ending import Ending
from dlm_bridge.generation.execution.runner import Execution, Runner, can_keep
from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.observe import Observer
from dlm_bridge.generation.predict import Cache, Predictor
from dlm_bridge.generation.prompt import Prompt
from dlm_bridge.generation.propose import Sampling
from dlm_bridge.generation.rules.base import CommitRule, Step
from dlm_bridge.generation.rules.threshold import Leftmost
from dlm_bridge.generation.speculation import Speculation, speculate_block
from dlm_bridge.generation.transfers import read
from dlm_bridge.generation.uniform import Resampling, resample_block


@dataclass(frozen=True)
class Recipe:
    """What a sampler is made of. A rule holds state: a recipe serves one call."""

    layout: Layout
    rule: CommitRule | Resampling | Speculation
    sampling: Sampling
    predictor: type[Predictor]
    predictor_options: dict[str, Any]
    # A block's first token is settled alone, by the prediction of the position before it: the best one, or sampled.
    seed: Literal["greedy", "sampled"] | None = None
    window: int | None = None  # so many columns from a row's first mask are looked at, instead of the whole block
    suppress: tuple[int, ...] = ()  # tokens that are never proposed


@dataclass(frozen=True)
class Outcome:
    """What a call's sampling came to."""

    sequences: torch.Tensor  # [B, P + new]
    forwards: int
    row_forwards: int  # the sum over the forwards of how many rows took part
    new_tokens: torch.Tensor  # of all rows together, each as far as its end


def denoise(
    model: Any,
    prompt: Prompt,
    recipe: Recipe,
    noise: Noise,
    *,
    gen_length: int,
    mask_token_id: int,
    pad_token_id: int,
    vocabulary: int,
    ending: Ending,
    constraints: Constraints,
    shift: bool,
    observer: Observer,
    cache: Cache | None = None,
    execution: Execution | None = None,
) -> Outcome:
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
    if isinstance(recipe.rule, Resampling):
        constraints.refuse_text("a canvas of noise has no text that is settled")
    if constraints.ordered and isinstance(recipe.rule, CommitRule):
        recipe = replace(recipe, rule=Leftmost())
    cache = _cache(recipe.predictor, model, cache)
    copies = 2 if recipe.predictor_options.get("cfg_scale") else 1
    with Runner.open(
        model, execution, keeps=cache != "none", rows=copies * len(canvas.rows), width=canvas.width
    ) as runner:
        predictor = recipe.predictor(runner, canvas, shift=shift, cache=cache, **recipe.predictor_options)
        predictor.seeded = recipe.seed is not None
        work = Denoising(canvas, predictor, recipe, constraints, noise, observer, vocabulary)
        observer.begin(canvas)
        for block in canvas.blocks:
            predictor.open(block)
            if isinstance(recipe.rule, Resampling):
                resample_block(work, block)
            elif isinstance(recipe.rule, Speculation):
                speculate_block(work, block)
            else:
                settle_block(work, block)
            observer.block(canvas, block)
            stay = canvas.retire(block, partial(read, meanwhile=partial(predictor.run_ahead, done=True)))
            if stay is not None:
                noise.keep(stay)
                predictor.keep(stay)
                if not stay:
                    break
    sequences = canvas.output()
    observer.end(sequences)
    return Outcome(sequences, predictor.forwards, observer.row_forwards, canvas.new_tokens())


def _cache(predictor: type[Predictor], model: Any, wanted: Cache | None) -> Cache:
    """The cache that is asked for; by default the one that is exact, where there is such a one."""
    if wanted is None:
        return "block" if "block" in predictor.caches and can_keep(model) else "none"
    if wanted not in predictor.caches:
        raise DlmBridgeError(
            f"this sampler has no cache '{wanted}', what it looks at allows {' or '.join(predictor.caches)}"
        )
    return wanted


def settle_block(work: Denoising, block: slice) -> None:
    """Denoise a block. A row takes part until its own steps are over, so that it is what it would be alone."""
    canvas, predictor, recipe, noise = work.canvas, work.predictor, work.recipe, work.noise
    assert isinstance(recipe.rule, CommitRule)
    masks = canvas.masks(block)
    for row in seed_block(work, block):
        masks[row] -= 1
    if not any(masks):  # a block that was given as a whole
        return
    quotas = recipe.rule.begin(masks, noise)
    active = [row for row in canvas.rows if masks[row] and quotas[row]]
    index = 0
    while active:
        rows = None if len(active) == len(canvas.rows) else active
        columns = predictor.columns(rows, block)
        if recipe.window is not None:
            columns = window(canvas, rows, block, recipe.window)
        logits = work.constraints(predictor(rows, columns), canvas, active, columns)
        shaped, tokens = propose(logits, canvas, active, columns, recipe.sampling, noise)
        before = canvas.take(rows, columns)
        new = canvas.behind_prompt(rows, columns)
        step = Step(
            rows=active,
            index=index,
            quotas=[quotas[row][index] for row in active],
            logits=logits,
            shaped=shaped,
            tokens=tokens,
            before=before,
            masked=(before == canvas.mask_token_id) & new,
            new=new,
            columns=columns,
            width=predictor.end(block),
            origins=[canvas.origins[row] for row in active],
            noise=noise,
        )
        canvas.put(rows, columns, torch.where(recipe.rule.select(step), tokens, before))
        work.observer.step(canvas, active, columns, logits, predictor.forwards, final=not recipe.rule.edits)
        index += 1
        more = [index < len(quotas[row]) for row in active]
        if not recipe.rule.exact and any(more):
            unfinished_A = recipe.rule.goes_on(step, canvas.unfinished(rows, block))
            more = [a and b for a, b in zip(more, read(unfinished_A, predictor.run_ahead), strict=True)]
        active = [row for row, on in zip(active, more, strict=True) if on]


def seed_block(work: Denoising, block: slice) -> list[int]:
    """Settle the block's first token where it is new and has something before it, as an autoregressive model would.

    Returns the rows in which it did.
    """
    canvas, predictor, recipe = work.canvas, work.predictor, work.recipe
    if recipe.seed is None:
        return []
    active = [row for row in canvas.rows if canvas.opens(row, block.start)]
    if active:
        rows = None if len(active) == len(canvas.rows) else active
        first = slice(block.start, block.start + 1)
        sampling = recipe.sampling if recipe.seed == "sampled" else Sampling()
        logits = work.constraints(predictor(rows, first, shift=True), canvas, active, first)
        canvas.put(rows, first, propose(logits, canvas, active, first, sampling, work.noise)[1])
        work.observer.step(canvas, active, first, logits, predictor.forwards, final=not recipe.rule.edits)
    return active


def window(canvas: Canvas, rows: list[int] | None, block: slice, size: int) -> Columns:
    """[A, size] columns of the block from each row's first mask on; the canvas has `size` to spare at its end."""
    first = block.start + canvas.masked(rows, block).int().argmax(dim=1)
    return first[:, None] + torch.arange(size, device=first.device)
