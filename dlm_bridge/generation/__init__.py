"""Generation with diffusion language models: `generate`, its settings, and the parts that samplers consist of."""

from __future__ import annotations

from dlm_bridge.generation.api import DiffusionGenerateOutput, generate
from dlm_bridge.generation.callbacks import DenoisingStep, StepCallback
from dlm_bridge.generation.canvas import BlockLayout
from dlm_bridge.generation.commit_rules import CommitRule, Step
from dlm_bridge.generation.config import DiffusionGenerationConfig
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.runtime.runner import release
from dlm_bridge.generation.samplers import SAMPLERS, Sampler, SamplerSpec, SpecialTokens, parameter, register_sampler

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
    "StepCallback",
    "generate",
    "parameter",
    "register_sampler",
    "release",
]
