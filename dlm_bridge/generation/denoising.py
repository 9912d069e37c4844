"""What the steps of one call of `generate` work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlm_bridge.generation.canvas import Canvas
from dlm_bridge.generation.constraints import Constraints
from dlm_bridge.generation.noise import Noise
from dlm_bridge.generation.observe import Observer
from dlm_bridge.generation.predict import Predictor

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
