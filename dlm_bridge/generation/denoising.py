"""What the steps of one call of `generate` work with, and the tokens that each of them proposes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlm_bridge.generation.canvas import Canvas, Columns
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.observe import Observer
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.propose import Sampling

if TYPE_CHECKING:
    from dlm_bridge.generation.loop import Recipe


@dataclass(frozen=True)
class Denoising:
    """The parts of one call: where tokens stand, who predicts them, by which recipe, and who is told."""

    canvas: Canvas
    predictor: Predictor
    recipe: Recipe
    constraints: Constraints
    noise: Noise
    observer: Observer
    vocabulary: int


def propose(
    logits: torch.Tensor, canvas: Canvas, rows: list[int], columns: Columns, sampling: Sampling, noise: Noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution [A, N, V] of these columns and the tokens [A, N] proposed from it."""
    shaped = sampling.shape(logits)
    uniform = None
    if sampling.draws:
        first = columns.start if isinstance(columns, slice) else canvas.width
        pads = [max(0, canvas.origins[row] - first) for row in rows]
        uniform = noise.per_token(rows, logits.shape[1], logits.shape[2], pads)
    return shaped, sampling.propose(logits, shaped, canvas.mask_token_id, uniform)
