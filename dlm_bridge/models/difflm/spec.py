"""DiffLM's facts. Source: JinjieNi/MegaDLMs (tools/weights_conversion/hf_configs)."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="difflm",
    title="MegaDLMs exports (Quokka, Super Data Learners)",
    hub_ids=(),  # the public weights are Megatron checkpoints in dataset repositories
    architectures=("DiffLM",),
    model_type="",  # its config.json has none, so AutoConfig cannot read it
    config_class="dlm_bridge.models.difflm.configuration:DLMConfig",
    model_class="dlm_bridge.models.difflm.modeling:DiffLM",
    mapping="dlm_bridge.models.difflm.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=(),
    objective="masked_fraction",
    sampler={"algorithm": "difflm"},
    checked_against="the public modeling_dlm.py of MegaDLMs",
)
