"""MegaDLMs' Hub exports (Quokka, Super Data Learners), class DiffLM: spec, mapping.

Source: JinjieNi/MegaDLMs (tools/weights_conversion/hf_configs).
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import SUPPORTED_VALUES, dense_mapping
from dlm_bridge.models.families import FamilySpec

REQUIRED = {"attn_mask_type": "bidirectional"}
MAPPING = dense_mapping(
    {"num_key_value_heads": 32},
    frozenset({"qk_norm"}),
    required={**SUPPORTED_VALUES, **REQUIRED},
)


SPEC = FamilySpec(
    name="difflm",
    title="MegaDLMs exports (Quokka, Super Data Learners)",
    hub_ids=(),  # the public weights are Megatron checkpoints in dataset repositories
    architectures=("DiffLM",),
    model_type="",  # missing in its config.json: AutoConfig cannot read it
    config_class="dlm_bridge.models.modeling_difflm:DLMConfig",
    model_class="dlm_bridge.models.modeling_difflm:DiffLM",
    mapping=MAPPING,
    auto_classes=(),
    objective="masked_fraction",
    sampler={"algorithm": "difflm"},
    checked_against="the public modeling_dlm.py of MegaDLMs",
)
