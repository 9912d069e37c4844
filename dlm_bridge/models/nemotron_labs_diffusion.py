"""Nemotron-Labs-Diffusion, Ministral-3 trained on block diffusion and next-token prediction: spec, mapping.

Source: copies of its modeling and config files, NVIDIA's Megatron-Bridge.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Passthrough
from dlm_bridge.models.decoder_mapping import decoder_rules, dense_mapping
from dlm_bridge.models.families import FamilySpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}


def _query_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of the query scaling in `dlm_bridge.parallel`'s attention."""
    rope = config.get("rope_parameters") or {}
    if not (beta := rope.get("llama_4_scaling_beta")):
        return {}
    return {
        "query_scaling_beta": float(beta),
        "query_scaling_length": int(rope["original_max_position_embeddings"]),
    }


MAPPING = dense_mapping(
    DEFAULTS,
    required=REQUIRED,
    passthrough=(Passthrough("diffusion_head.weight", when="tied", copy_of="encoder.embed_tokens.weight"),),
    rules=decoder_rules(root="encoder.", head="diffusion_head.weight"),
    more_settings=_query_scaling,
)


SPEC = FamilySpec(
    name="nemotron_labs_diffusion",
    title="Nemotron-Labs-Diffusion",
    hub_ids=tuple(
        f"nvidia/Nemotron-Labs-Diffusion-{size}{kind}" for size in ("3B", "8B", "14B") for kind in ("-Base", "")
    ),
    architectures=("NemotronLabsDiffusionModel",),
    model_type="nemotron_labs_diffusion",
    config_class="dlm_bridge.models.modeling_nemotron_labs_diffusion:NemotronLabsDiffusionConfig",
    model_class="dlm_bridge.models.modeling_nemotron_labs_diffusion:NemotronLabsDiffusionModel",
    mapping=MAPPING,
    auto_classes=("AutoModel", "AutoModelForCausalLM"),  # the Hub's auto_map has the first; both have the output layer
    attention_pattern="bidirectional",  # `dlm_paradigm` of every public config
    mask_token_id=100,
    objective="nemotron",
    sampler={"algorithm": "nemotron"},
    checked_against="NVIDIA's Megatron-Bridge (attention), independent maths (the rest)",
)
