"""iLLaDA, masked diffusion on the Llama body with tied embeddings: spec, mapping, initialisation rule.

Source: a public copy of modeling_illada.py, arXiv 2606.25331.
"""

from __future__ import annotations

import math
from typing import Any

from dlm_bridge.models.decoder_mapping import SUPPORTED_VALUES, dense_mapping
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.initialisation import Constant, Distribution, InitialisationRule, Normal, initializer_range

REQUIRED = {"layer_norm_eps": None, "resid_pdrop": 0.0}
MAPPING = dense_mapping({}, required={**SUPPORTED_VALUES, **REQUIRED})


def initialisation_rule(config: dict[str, Any]) -> InitialisationRule:
    """N(0, `initializer_range`), divided by sqrt(2 layers) for outputs to the residual stream; the embedding's
    standard deviation is 1 / sqrt(2 hidden)."""
    sizes = MAPPING.dims(config)
    std = initializer_range(config)

    def distribution(name: str) -> Distribution:
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith("embed_tokens.weight"):
            return Normal(math.sqrt(1 / (2 * sizes.hidden)))
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return Normal(std / math.sqrt(2 * sizes.layers) if residual else std)

    return distribution


SPEC = FamilySpec(
    name="illada",
    title="iLLaDA-8B",
    hub_ids=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"),
    architectures=("ILLaDAForCausalLM",),
    model_type="illada",
    config_class="dlm_bridge.models.modeling_illada:ILLaDAConfig",
    model_class="dlm_bridge.models.modeling_illada:ILLaDAForCausalLM",
    mapping=MAPPING,
    initialisation=initialisation_rule,
    mask_token_id=5,
    sft={"train_on_prompt": True},
    sampler={"algorithm": "illada"},
    checked_against="a public copy of modeling_illada.py",
)
