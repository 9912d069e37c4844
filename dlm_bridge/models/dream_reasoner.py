"""DreamReasoner, block diffusion on Qwen3 under Dream's model type: spec, mapping.

Source: arXiv 2606.19257, and public ports of the Hub's config and sampler; the Hub's code was not available.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({"num_key_value_heads": 32}, frozenset({"qk_norm"}))


SPEC = FamilySpec(
    name="dream_reasoner",
    title="DreamReasoner",
    hub_ids=("Dream-org/DreamReasoner-8B",),
    architectures=("DreamForCausalLM",),
    model_type="Dream",
    config_class="dlm_bridge.models.modeling_dream_reasoner:DreamReasonerConfig",
    model_class="dlm_bridge.models.modeling_dream_reasoner:DreamForCausalLM",
    mapping=MAPPING,
    auto_classes=("AutoModelForCausalLM",),
    attention_pattern="block_causal",
    mask_token_id=151669,
    objective="block",
    sampler={"algorithm": "sdar", "temperature": 0.0, "threshold": 0.9},
    checked_against="independent maths, and SDAR's public modeling_sdar.py, which has the same layers",
)
