"""Fast-dLLM v2's facts. Source: public copies of its modeling.py, NVlabs/Fast-dLLM, arXiv 2509.26328."""

from __future__ import annotations

from dlm_bridge.models.spec import FamilySpec

SPEC = FamilySpec(
    name="fast_dllm_v2",
    title="Fast-dLLM v2",
    hub_ids=("Efficient-Large-Model/Fast_dLLM_v2_7B", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_type="Fast_dLLM_Qwen",
    config_class="dlm_bridge.models.fast_dllm_v2.configuration:Fast_dLLM_QwenConfig",
    model_class="dlm_bridge.models.fast_dllm_v2.modeling:Fast_dLLM_QwenForCausalLM",
    mapping="dlm_bridge.models.fast_dllm_v2.mapping:MAPPING",
    initialisation="dlm_bridge.models.initialisation:normal",
    auto_classes=("AutoModelForCausalLM",),  # the Hub's AutoModel is the body alone
    topology="block_causal",
    shift=True,  # inside the block; its first token is predicted by the last one of the block before
    mask_token_id=151665,
    objective="block_complementary",
    sampler={"algorithm": "fast_dllm_v2", "threshold": 0.9},
    checked_against="a public copy of modeling.py",
)
