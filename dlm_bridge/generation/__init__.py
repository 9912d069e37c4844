"""Generation with diffusion language models: `generate`, its settings, and the parts of samplers.

Names are imported at their first access, so that the command line can read `options` without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_bridge.generation.api import DiffusionGenerateOutput, generate
    from dlm_bridge.generation.callbacks import DenoisingStep, StepCallback
    from dlm_bridge.generation.canvas import BlockLayout
    from dlm_bridge.generation.commit_rules import CommitRule, Step
    from dlm_bridge.generation.config import DiffusionGenerationConfig
    from dlm_bridge.generation.options import parameter
    from dlm_bridge.generation.predictors import Predictor
    from dlm_bridge.generation.runtime.runner import release
    from dlm_bridge.generation.samplers import SAMPLERS, Sampler, SamplerSpec, SpecialTokens, register_sampler

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

_MODULES = {
    **dict.fromkeys(("DiffusionGenerateOutput", "generate"), "api"),
    **dict.fromkeys(("DenoisingStep", "StepCallback"), "callbacks"),
    **dict.fromkeys(("CommitRule", "Step"), "commit_rules"),
    **dict.fromkeys(("SAMPLERS", "Sampler", "SamplerSpec", "SpecialTokens", "register_sampler"), "samplers"),
    "BlockLayout": "canvas",
    "DiffusionGenerationConfig": "config",
    "parameter": "options",
    "Predictor": "predictors",
    "release": "runtime.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
