"""DreamReasoner's facts. Source: arXiv 2606.19257 and what public ports say of the Hub's config and sampler; the Hub's
own code was not at hand."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="dream_reasoner",
    title="DreamReasoner",
    hub_ids=("Dream-org/DreamReasoner-8B",),
    architectures=("DreamForCausalLM",),
    model_type="Dream",
    config_class="dlm_bridge.models.dream_reasoner.configuration:DreamReasonerConfig",
    model_class="dlm_bridge.models.dream_reasoner.modeling:DreamForCausalLM",
    mapping="dlm_bridge.models.dream_reasoner.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=("AutoModelForCausalLM",),
    topology="block_causal",
    mask_token_id=151669,
    objective="block",
    sampler={"algorithm": "sdar", "temperature": 0.0, "confidence_threshold": 0.9},
    checked_against="own maths, and SDAR's public modeling_sdar.py, which has the same layers",
)
