"""SDAR's facts. Source: the public configs, generate.py and training code of JetAstra/SDAR and Gen-Verse/dLLM-RL."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="sdar",
    title="SDAR, TraDo",
    hub_ids=(
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
        "Gen-Verse/TraDo-4B-Instruct",
        "Gen-Verse/TraDo-8B-Instruct",
        "Gen-Verse/TraDo-8B-Thinking",
    ),
    architectures=("SDARForCausalLM",),
    model_type="sdar",
    config_class="dlm_bridge.models.sdar.configuration:SDARConfig",
    model_class="dlm_bridge.models.sdar.modeling:SDARForCausalLM",
    mapping="dlm_bridge.models.sdar.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    topology="block_causal",
    mask_token_id=151669,
    objective="block",
    sft={"eos_padding": "block"},
    sampler={"algorithm": "sdar"},
    checked_against="the public modeling_sdar.py of SDAR-4B-Chat and of dLLM-RL",
)
