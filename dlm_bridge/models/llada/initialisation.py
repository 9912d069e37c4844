"""How LLaDA's weights start: `init_fn` of the config, as in the public modeling_llada.py (OLMo's initialisations)."""

from __future__ import annotations

import math
import re
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.initialisation import Constant, Distribution, Normal, Rule
from dlm_bridge.models.llada.mapping import dims

RESIDUAL = re.compile(r"blocks\.(\d+)\.(attn_out|ff_out)\.weight$")  # they write to the residual stream


def rule(config: dict[str, Any]) -> Rule:
    """The distribution of every tensor of a model with this config. Raises DlmBridgeError for another `init_fn`."""
    init_fn = config.get("init_fn", "mitchell")
    if init_fn not in ("mitchell", "normal"):
        raise DlmBridgeError(f"LLaDA config: init_fn {init_fn!r} is not supported, only 'mitchell' and 'normal'")
    sizes = dims(config)

    def mitchell(name: str) -> Normal:
        """1 / sqrt(inputs), within 3 standard deviations; what writes to the residual stream shrinks with depth."""
        residual = RESIDUAL.search(name)
        if residual is None:
            return Normal(sizes.hidden**-0.5, cutoff=3)
        layer, matrix = int(residual[1]), residual[2]
        inputs = sizes.ffn if matrix == "ff_out" else sizes.hidden
        return Normal(inputs**-0.5 / math.sqrt(2 * (layer + 1)), cutoff=3)

    def normal(name: str) -> Normal:
        """`init_std`; the public code marks only the MLP's output as residual, and divides it by sqrt(2 layers)."""
        residual = RESIDUAL.search(name)
        std, cutoff = float(config.get("init_std", 0.02)), config.get("init_cutoff_factor")
        if residual is not None and residual[2] == "ff_out":
            std /= math.sqrt(2 * sizes.layers)
        return Normal(std, cutoff=None if cutoff is None else float(cutoff))

    def distribution(name: str) -> Distribution:
        if name.endswith("norm.weight") or name.endswith("ln_f.weight"):
            return Constant(1.0)
        return mitchell(name) if init_fn == "mitchell" else normal(name)

    return distribution
