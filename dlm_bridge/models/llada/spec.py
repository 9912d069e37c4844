"""LLaDA's facts. Source: the public configs, generate.py and GUIDELINES.md of GSAI-ML/LLaDA, arXiv 2502.09992."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="llada",
    title="LLaDA-8B, LLaDA-1.5",
    hub_ids=("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-1.5"),
    architectures=("LLaDAModelLM",),
    model_type="llada",
    config_class="dlm_bridge.models.llada.configuration:LLaDAConfig",
    model_class="dlm_bridge.models.llada.modeling:LLaDAModelLM",
    mapping="dlm_bridge.models.llada.mapping:MAPPING",
    initialisation="dlm_bridge.models.llada.initialisation:rule",
    mask_token_id=126336,
    # The mean over answers, each of which reaches to the end of its row.
    sft={"eos_padding": "row", "loss_normalisation": "sequences"},
    sampler={"algorithm": "llada"},
    checked_against="the public modeling_llada.py and generate.py",
)
