"""Nemotron-Labs-Diffusion: spec, mapping. The Ministral-3 body, trained on block diffusion and next tokens at once.

Source: copies of its modeling and config files, NVIDIA's Megatron-Bridge.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Dims, Mapping, Passthrough
from dlm_bridge.models.decoder_mapping import decoder_dims, decoder_rules, decoder_settings, require_values
from dlm_bridge.models.families import FamilySpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}


def dims(config: dict[str, Any]) -> Dims:
    require_values(config, REQUIRED)
    return decoder_dims({**DEFAULTS, **config})


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    """megatron-core's settings beyond the sizes, and the query scaling that our attention applies."""
    settings = decoder_settings({**DEFAULTS, **config})
    rope = config.get("rope_parameters") or {}
    if beta := rope.get("llama_4_scaling_beta"):
        length = int(rope["original_max_position_embeddings"])
        settings |= {"query_scaling_beta": float(beta), "query_scaling_length": length}
    return settings


MAPPING = Mapping(
    rules=decoder_rules(root="encoder.", head="diffusion_head.weight"),
    dims=dims,
    transformer=transformer,
    passthrough=(Passthrough("diffusion_head.weight", when="tied", copy_of="encoder.embed_tokens.weight"),),
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
    checked_against="the attention of NVIDIA's Megatron-Bridge, the rest our own maths",
)
