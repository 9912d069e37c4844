"""Fast-dLLM v2, Qwen2.5-Instruct adapted to block diffusion: spec, mapping.

Source: public copies of its modeling.py, NVlabs/Fast-dLLM, arXiv 2509.26328.
"""

from __future__ import annotations

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

MAPPING = dense_mapping({"max_position_embeddings": 32768}, frozenset({"qkv_bias"}))


SPEC = FamilySpec(
    name="fast_dllm_v2",
    title="Fast-dLLM v2",
    hub_ids=("Efficient-Large-Model/Fast_dLLM_v2_7B", "Efficient-Large-Model/Fast_dLLM_v2_1.5B"),
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_type="Fast_dLLM_Qwen",
    config_class="dlm_bridge.models.modeling_fast_dllm_v2:Fast_dLLM_QwenConfig",
    model_class="dlm_bridge.models.modeling_fast_dllm_v2:Fast_dLLM_QwenForCausalLM",
    mapping=MAPPING,
    auto_classes=("AutoModelForCausalLM",),  # the Hub's AutoModel is the body
    attention_pattern="block_causal",
    shift=True,  # the last token of a block predicts the first one of the next
    mask_token_id=151665,
    objective="block_complementary",
    sampler={"algorithm": "fast_dllm_v2", "threshold": 0.9},
    checked_against="a public copy of modeling.py",
)
