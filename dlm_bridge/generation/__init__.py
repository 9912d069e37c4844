"""Sampling from diffusion language models: one denoising loop, its settings, and the rules that it is made of."""

from __future__ import annotations

from dlm_bridge.generation.api import DiffusionGenerateOutput, generate
from dlm_bridge.generation.callbacks import DenoisingStep
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import CommitRule, Step
from dlm_bridge.generation.config import DiffusionGenerationConfig, register_sampler
from dlm_bridge.generation.loop import SamplerSpec
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import release
from dlm_bridge.generation.samplers import SAMPLERS
from dlm_bridge.generation.samplers.base import Sampler, SpecialTokens

__all__ = [
    "SAMPLERS",
    "BlockLayout",
    "CommitRule",
    "DenoisingStep",
    "DiffusionGenerateOutput",
    "DiffusionGenerationConfig",
    "Predictor",
    "Sampler",
    "SamplerSpec",
    "SpecialTokens",
    "Step",
    "generate",
    "register_sampler",
    "release",
]
