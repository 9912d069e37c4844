"""iLLaDA's facts. Source: a public copy of modeling_illada.py, arXiv 2606.25331."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="illada",
    title="iLLaDA-8B",
    hub_ids=("GSAI-ML/iLLaDA-8B-Base", "GSAI-ML/iLLaDA-8B-Instruct"),
    architectures=("ILLaDAForCausalLM",),
    model_type="illada",
    config_class="dlm_bridge.models.illada.configuration:ILLaDAConfig",
    model_class="dlm_bridge.models.illada.modeling:ILLaDAForCausalLM",
    mapping="dlm_bridge.models.illada.mapping:MAPPING",
    initialisation="dlm_bridge.models.illada.initialisation:rule",
    mask_token_id=5,
    sft={"train_on_prompt": True},
    sampler={"algorithm": "illada"},
    checked_against="a public copy of modeling_illada.py",
)
