"""WeDLM's facts. Source: Tencent/WeDLM (hf_compat, the engine, the trainer), arXiv 2512.22737."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="wedlm",
    title="WeDLM",
    hub_ids=(
        "tencent/WeDLM-7B-Base",
        "tencent/WeDLM-7B-Instruct",
        "tencent/WeDLM-8B-Base",
        "tencent/WeDLM-8B-Instruct",
    ),
    architectures=("WeDLMForCausalLM",),
    model_type="wedlm",
    config_class="dlm_bridge.models.wedlm.configuration:WeDLMConfig",
    model_class="dlm_bridge.models.wedlm.modeling:WeDLMForCausalLM",
    mapping="dlm_bridge.models.wedlm.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=("AutoModelForCausalLM",),
    topology="causal",  # known tokens come first in the input and masks last, each with its own position id
    mask_token_id=151665,
    objective="wedlm",
    sampler={"algorithm": "wedlm"},
    checked_against="the public hf_compat/modeling_wedlm.py",
)
