"""SDAR and TraDo, Qwen3 adapted to block diffusion: spec, mapping.

Source: the public configs, generate.py and training code of JetAstra/SDAR and Gen-Verse/dLLM-RL.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({"head_dim": 128, "num_key_value_heads": 32}, frozenset({"qk_norm"}))


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
    config_class="dlm_bridge.models.modeling_sdar:SDARConfig",
    model_class="dlm_bridge.models.modeling_sdar:SDARForCausalLM",
    mapping=MAPPING,
    attention_pattern="block_causal",
    mask_token_id=151669,
    objective="block",
    sft={"eos_padding": "block"},
    sampler={"algorithm": "sdar"},
    checked_against="the public modeling_sdar.py of SDAR-4B-Chat and of dLLM-RL",
)
