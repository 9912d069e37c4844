"""Choice of span lengths to fill (`span_lengths`).

A masked diffusion model is most confident in its first step where a span of masks has about the right length; CAL
(arXiv 2602.00476) chooses lengths by that. Here the score is the first-step confidence, the mean over the span of the
best token's probability, over the lengths that the caller names; CAL's search and its correction for the confidence's
bias towards some lengths are not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from dlm_bridge.errors import NonFiniteError
from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.kv_cache import KVCache
from dlm_bridge.generation.rows import PromptBatch, StopCondition
from dlm_bridge.generation.runtime.runner import ModelRunner
from dlm_bridge.generation.samplers import SamplerSpec
from dlm_bridge.generation.settings import GenerationSettings
from dlm_bridge.generation.token_sampling import without_token


def fit_spans(
    model: Any,
    rows: Sequence[Sequence[int]],
    spec: SamplerSpec,
    settings: GenerationSettings,
    make_prompt: Callable[[list[list[int]]], PromptBatch],
) -> tuple[list[list[int]], int, int]:
    """The rows with each span of masks at the best of `span_lengths`; the number of forward passes, and the sum over
    them of the rows that took part.

    Spans are decided from left to right, those to the right at their given length; of equal scores the shortest length
    wins. Each length costs a forward pass for the first span of all rows, one for the second, and so on. Raises
    NonFiniteError where scores are NaN.
    """
    mask_token_id = settings.limits.masked_token_id
    fitted = [list(row) for row in rows]
    forwards = row_forwards = 0
    for number in range(max((len(spans(row, mask_token_id)) for row in rows), default=0)):
        undecided = [row for row, tokens in enumerate(fitted) if len(spans(tokens, mask_token_id)) > number]
        scores, candidates = [], []
        for length in settings.span_lengths:
            tried = [resized_span(fitted[row], number, length, mask_token_id) for row in undecided]
            prompt = make_prompt(tried)
            stop = StopCondition((), prompt.tokens.device)
            canvas = Canvas(prompt, spec.layout, settings.limits, settings.pad_token_id, stop)
            begins = [
                origin + spans(row, mask_token_id)[number][0]
                for origin, row in zip(canvas.origins, tried, strict=True)
            ]
            columns = slice(min(begins), max(begins) + length)
            cache = KVCache()
            with ModelRunner.open(model, "eager", cache, rows=len(tried), width=canvas.width) as runner:
                predictor = spec.predictor(runner, canvas, cache, shift=settings.shift, **spec.predictor_options)
                predictor.open_block(columns, canvas.rows)
                logits_ANV = predictor(None, columns)
            if spec.logits_bias is not None:
                logits_ANV = spec.logits_bias(logits_ANV, canvas, None, columns)
            forwards += 1
            row_forwards += len(tried)
            places = [begin - columns.start for begin in begins]
            scores.append(_span_confidence(logits_ANV, places, length, mask_token_id))
            candidates.append(tried)
        highest, choices = torch.stack(scores).max(dim=0)  # of NaN, NaN
        bad = [row for row, score in zip(undecided, highest.tolist(), strict=True) if not math.isfinite(score)]
        if bad:
            raise NonFiniteError(rows=bad if len(bad) < len(rows) else ())
        for place, best in enumerate(choices.tolist()):
            fitted[undecided[place]] = candidates[best][place]
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


def resized_span(row: Sequence[int], number: int, length: int, mask_token_id: int) -> list[int]:
    """The row with so many masks in this span of it."""
    begin, end = spans(row, mask_token_id)[number]
    return [*row[:begin], *[mask_token_id] * length, *row[end:]]


def _span_confidence(logits_ANV: torch.Tensor, begins: list[int], length: int, mask_token_id: int) -> torch.Tensor:
    """[A], the mean over a row's span of the best token's probability."""
    rows = torch.arange(len(begins))[:, None]
    columns = torch.tensor(begins)[:, None] + torch.arange(length)
    probabilities = without_token(logits_ANV[rows, columns], mask_token_id, torch.float32).softmax(dim=-1)
    return probabilities.amax(dim=-1).mean(dim=1)
