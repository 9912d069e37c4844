"""LLaDA-MoE's facts. Source: the public modeling_lladamoe.py and configs, arXiv 2509.24389."""

from __future__ import annotations

from dlm_bridge.models.llada.spec import SPEC as LLADA
from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="llada_moe",
    title="LLaDA-MoE-7B-A1B",
    hub_ids=(
        "inclusionAI/LLaDA-MoE-7B-A1B-Base",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct-TD",
    ),
    architectures=("LLaDAMoEModelLM", "LLaDAMoEModel"),
    model_type=LLADA.model_type,  # shared: AutoConfig tells them apart by `architectures`
    config_class="dlm_bridge.models.llada_moe.configuration:LLaDAMoEConfig",
    model_class="dlm_bridge.models.llada_moe.modeling:LLaDAMoEModelLM",
    mapping="dlm_bridge.models.llada_moe.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    mask_token_id=156895,
    sft=LLADA.sft,
    sampler=LLADA.sampler,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    checked_against="the public modeling_lladamoe.py",
)
