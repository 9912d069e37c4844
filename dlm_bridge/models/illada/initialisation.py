"""How iLLaDA's weights start, as in the public modeling_illada.py."""

from __future__ import annotations

import math
from typing import Any

from dlm_bridge.models.illada.mapping import MAPPING
from dlm_bridge.models.initialisation import Constant, Distribution, Normal, Rule


def rule(config: dict[str, Any]) -> Rule:
    """N(0, `initializer_range`), smaller by sqrt(2 layers) where a matrix writes to the residual stream; the embedding
    has the deviation 1 / sqrt(2 hidden)."""
    sizes = MAPPING.dims(config)
    std = float(config.get("initializer_range", 0.02))

    def distribution(name: str) -> Distribution:
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith("embed_tokens.weight"):
            return Normal(math.sqrt(1 / (2 * sizes.hidden)))
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return Normal(std / math.sqrt(2 * sizes.layers) if residual else std)

    return distribution
