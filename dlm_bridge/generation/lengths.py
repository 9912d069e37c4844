"""How long the spans to fill should be: each of several lengths is tried, the model's own confidence decides.

A masked diffusion model is surest of its first step where a span of masks has about the right length; "Diffusion LMs
Can Approximate Optimal Infilling Lengths Implicitly" (CAL, arXiv 2602.00476) chooses lengths by that. The score here
is that first-step confidence, the mean over the span of the best token's probability, over the lengths that the caller
names. CAL's search and its correction for the confidence's bias towards some lengths are not part of it: name lengths
that are plausible. Models trained to change lengths themselves (DreamOn, arXiv 2602.01326; FlexMDM, arXiv 2509.01025)
do it with tokens of their own, which is another sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.ending import Ending
from dlm_bridge.generation.execution.runner import Runner
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.prompt import Prompt
from dlm_bridge.generation.propose import without


def fit_spans(
    model: Any,
    rows: Sequence[Sequence[int]],
    lengths: Sequence[int],
    recipe: Recipe,
    make_prompt: Callable[[list[list[int]]], Prompt],
    *,
    gen_length: int,
    mask_token_id: int,
    shift: bool,
) -> tuple[list[list[int]], int, int]:
    """The rows with each span of masks as long as the best of `lengths` for it; the number of forwards, and the sum
    over them of how many rows took part.

    Spans are decided from left to right, those to the right as long as they are given; of equal scores the shortest
    length wins. Each length costs a forward for the first span of all rows, for the second, and so on.
    """
    fitted = [list(row) for row in rows]
    forwards = row_forwards = 0
    for number in range(max((len(spans(row, mask_token_id)) for row in rows), default=0)):
        chosen = [row for row, tokens in enumerate(fitted) if len(spans(tokens, mask_token_id)) > number]
        scores, candidates = [], []
        for length in lengths:
            tried = [resized(fitted[row], number, length, mask_token_id) for row in chosen]
            prompt = make_prompt(tried)
            canvas = Canvas(
                prompt,
                recipe.layout,
                gen_length=gen_length,
                mask_token_id=mask_token_id,
                pad_token_id=0,
                ending=Ending((), prompt.tokens.device),
            )
            begins = [
                origin + spans(row, mask_token_id)[number][0]
                for origin, row in zip(canvas.origins, tried, strict=True)
            ]
            with Runner.open(model, "eager", keeps=False, rows=len(tried), width=canvas.width) as runner:
                predictor = recipe.predictor(runner, canvas, shift=shift, **recipe.predictor_options)
                columns = slice(min(begins), max(begins) + length)
                predictor.open(columns)
                logits_ANV = predictor(None, columns)
            forwards += 1
            row_forwards += len(tried)
            scores.append(_confidence(logits_ANV, [begin - columns.start for begin in begins], length, mask_token_id))
            candidates.append(tried)
        for place, best in enumerate(torch.stack(scores).argmax(dim=0).tolist()):
            fitted[chosen[place]] = candidates[best][place]
    return fitted, forwards, row_forwards


def spans(row: Sequence[int], mask_token_id: int) -> list[tuple[int, int]]:
    """Begin and end of each run of masks."""
    found, place = [], 0
    for is_mask, run in groupby(row, lambda token: token == mask_token_id):
        length = len(list(run))
        if is_mask:
            found.append((place, place + length))
        place += length
    return found


def resized(row: Sequence[int], number: int, length: int, mask_token_id: int) -> list[int]:
    """The row with so many masks in this span of it."""
    begin, end = spans(row, mask_token_id)[number]
    return [*row[:begin], *[mask_token_id] * length, *row[end:]]


def _confidence(logits_ANV: torch.Tensor, begins: list[int], length: int, mask_token_id: int) -> torch.Tensor:
    """[A], the mean over a row's span of the best token's probability."""
    rows = torch.arange(len(begins))[:, None]
    columns = torch.tensor(begins)[:, None] + torch.arange(length)
    probabilities = without(logits_ANV[rows, columns], mask_token_id, torch.float32).softmax(dim=-1)
    return probabilities.amax(dim=-1).mean(dim=1)
