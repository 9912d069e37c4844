"""LLaDA's config as a checkpoint's own code would define it; of our own making, from the model card's facts."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

# What a config.json may leave out.
DEFAULTS: dict[str, Any] = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False}


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**DEFAULTS, **kwargs})
