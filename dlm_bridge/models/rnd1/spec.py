"""RND1's facts. Source: the public configuration_rnd.py, modeling_rnd.py and sampling.py of RadicalNumerics/RND1."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="rnd1",
    title="RND1",
    hub_ids=("radicalnumerics/RND1-Base-0910",),
    architectures=("RND1LM", "RND1"),
    model_type="rnd1",
    config_class="dlm_bridge.models.rnd1.configuration:RND1Config",
    model_class="dlm_bridge.models.rnd1.modeling:RND1LM",
    mapping="dlm_bridge.models.rnd1.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=("AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"),
    shift=True,
    mask_token_id=151669,
    objective="shifted",
    sampler={"algorithm": "rnd1"},
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    checked_against="the public modeling_rnd.py",
)
