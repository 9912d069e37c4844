"""LLaDA2's facts. Source: the public configs and modeling_llada2_moe.py, arXiv 2512.15745."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="llada2_moe",
    title="LLaDA2.0, LLaDA2.1 (mini, flash)",
    hub_ids=(
        "inclusionAI/LLaDA2.0-mini",
        "inclusionAI/LLaDA2.0-mini-CAP",
        "inclusionAI/LLaDA2.0-mini-preview",
        "inclusionAI/LLaDA2.0-flash",
        "inclusionAI/LLaDA2.0-flash-CAP",
        "inclusionAI/LLaDA2.0-flash-preview",
        "inclusionAI/LLaDA2.1-mini",
        "inclusionAI/LLaDA2.1-flash",
    ),
    architectures=("LLaDA2MoeModelLM",),
    model_type="llada2_moe",
    config_class="dlm_bridge.models.llada2_moe.configuration:LLaDA2MoeConfig",
    model_class="dlm_bridge.models.llada2_moe.modeling:LLaDA2MoeModelLM",
    mapping="dlm_bridge.models.llada2_moe.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    topology="block_causal",
    mask_token_id=156895,
    objective="block",
    sft={"eos_padding": "row"},  # dFactory
    sampler={"algorithm": "llada2"},  # 2.1 has the same architecture and config: algorithm="llada2.1" samples it
    lora_targets=("query_key_value", "o_proj"),
    checked_against="the public modeling of LLaDA2.0 and LLaDA2.1",
)
