"""SDAR-30B-A3B, Qwen3-MoE adapted to block diffusion: spec, mapping.

Source: the public configs and the serving code of JetAstra/SDAR and Gen-Verse/dLLM-RL.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import ATTENTION_TARGETS, QWEN3_30B_A3B, qwen3_moe_mapping
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.sdar import SPEC as SDAR

MAPPING = qwen3_moe_mapping({**QWEN3_30B_A3B, "max_position_embeddings": 32768})


SPEC = FamilySpec(
    name="sdar_moe",
    title="SDAR-30B-A3B",
    hub_ids=("JetLM/SDAR-30B-A3B-Chat", "JetLM/SDAR-30B-A3B-Sci"),
    architectures=("SDARMoeForCausalLM",),
    model_type="sdar_moe",
    config_class="dlm_bridge.models.modeling_sdar_moe:SDARMoeConfig",
    model_class="dlm_bridge.models.modeling_sdar_moe:SDARMoeForCausalLM",
    mapping=MAPPING,
    attention_pattern="block_causal",
    mask_token_id=SDAR.mask_token_id,
    objective=SDAR.objective,
    sft=SDAR.sft,
    sampler=SDAR.sampler,
    lora_targets=ATTENTION_TARGETS,
    checked_against="the public modeling_rnd.py (the same body) with a block-causal mask",
)
