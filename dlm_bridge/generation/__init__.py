"""Sampling from diffusion language models: one denoising loop, its settings, and the rules that it is made of."""

from __future__ import annotations

from dlm_bridge.generation.algorithms import ALGORITHMS
from dlm_bridge.generation.api import DiffusionGenerateOutput, generate
from dlm_bridge.generation.config import DiffusionGenerationConfig
from dlm_bridge.generation.observe import DenoisingStep

__all__ = ["ALGORITHMS", "DenoisingStep", "DiffusionGenerateOutput", "DiffusionGenerationConfig", "generate"]
