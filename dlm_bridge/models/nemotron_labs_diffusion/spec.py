"""Nemotron-Labs-Diffusion's facts. Source: copies of its modeling and config files, NVIDIA's Megatron-Bridge."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="nemotron_labs_diffusion",
    title="Nemotron-Labs-Diffusion",
    hub_ids=tuple(
        f"nvidia/Nemotron-Labs-Diffusion-{size}{kind}" for size in ("3B", "8B", "14B") for kind in ("-Base", "")
    ),
    architectures=("NemotronLabsDiffusionModel",),
    model_type="nemotron_labs_diffusion",
    config_class="dlm_bridge.models.nemotron_labs_diffusion.configuration:NemotronLabsDiffusionConfig",
    model_class="dlm_bridge.models.nemotron_labs_diffusion.modeling:NemotronLabsDiffusionModel",
    mapping="dlm_bridge.models.nemotron_labs_diffusion.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=("AutoModel", "AutoModelForCausalLM"),  # the Hub's auto_map has the first; both have the output layer
    topology="bidirectional",  # of one pass, as `dlm_paradigm` says in every public config; see modeling.py
    mask_token_id=100,
    objective="nemotron",
    sampler={"algorithm": "nemotron"},
    checked_against="the attention of NVIDIA's Megatron-Bridge, the rest our own maths",
)
