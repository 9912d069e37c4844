"""SDAR-MoE's facts. Source: the public configs and the serving code of JetAstra/SDAR and Gen-Verse/dLLM-RL."""

from __future__ import annotations

from dlm_bridge.models.sdar.spec import SPEC as SDAR
from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="sdar_moe",
    title="SDAR-30B-A3B",
    hub_ids=("JetLM/SDAR-30B-A3B-Chat", "JetLM/SDAR-30B-A3B-Sci"),
    architectures=("SDARMoeForCausalLM",),
    model_type="sdar_moe",
    config_class="dlm_bridge.models.sdar_moe.configuration:SDARMoeConfig",
    model_class="dlm_bridge.models.sdar_moe.modeling:SDARMoeForCausalLM",
    mapping="dlm_bridge.models.sdar_moe.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    topology="block_causal",
    mask_token_id=SDAR.mask_token_id,
    objective=SDAR.objective,
    sft=SDAR.sft,
    sampler=SDAR.sampler,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    checked_against="the public modeling_rnd.py (the same body) under a block-causal mask",
)
