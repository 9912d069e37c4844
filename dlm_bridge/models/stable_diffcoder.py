"""Stable-DiffCoder, Seed-Coder's Llama body as a block diffusion model: spec, mapping.

Its config.json has Llama's model type: transformers' Auto classes load a causal Llama, this package goes by the class
name. Source: ByteDance's public modeling file, arXiv 2601.15892.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({})


SPEC = FamilySpec(
    name="stable_diffcoder",
    title="Stable-DiffCoder",
    hub_ids=("ByteDance-Seed/Stable-DiffCoder-8B-Base", "ByteDance-Seed/Stable-DiffCoder-8B-Instruct"),
    architectures=("StableDiffcoderForCausalLM",),
    model_type="llama",
    config_class="dlm_bridge.models.modeling_stable_diffcoder:StableDiffcoderConfig",
    model_class="dlm_bridge.models.modeling_stable_diffcoder:StableDiffcoderForCausalLM",
    mapping=MAPPING,
    auto_classes=(),  # Llama's model type is registered already
    attention_pattern="block_causal",
    mask_token_id=5,
    objective="block",
    sft={"eos_padding": "block"},
    sampler={"algorithm": "sdar", "temperature": 0.0, "threshold": 0.95},
    checked_against="ByteDance's public modeling file",
)
