"""Sampling from diffusion language models: one denoising loop, its settings, and the rules that it is made of."""

from __future__ import annotations

from dlm_bridge.generation.algorithms import ALGORITHMS, Algorithm
from dlm_bridge.generation.algorithms.base import Tokens
from dlm_bridge.generation.api import DiffusionGenerateOutput, generate
from dlm_bridge.generation.canvas import Layout
from dlm_bridge.generation.config import DiffusionGenerationConfig
from dlm_bridge.generation.execution.runner import release
from dlm_bridge.generation.loop import Recipe
from dlm_bridge.generation.observe import DenoisingStep
from dlm_bridge.generation.predict import Predictor
from dlm_bridge.generation.registry import register_algorithm
from dlm_bridge.generation.rules.base import CommitRule, Step

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CommitRule",
    "DenoisingStep",
    "DiffusionGenerateOutput",
    "DiffusionGenerationConfig",
    "Layout",
    "Predictor",
    "Recipe",
    "Step",
    "Tokens",
    "generate",
    "register_algorithm",
    "release",
]
