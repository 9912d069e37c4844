"""dLLM's A2D models: Qwen3, Qwen2 and Llama with bidirectional attention. Specs, mappings.

Source: ZHZisZZ/dllm (pipelines/a2d, core/samplers).
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.models.decoder_mapping import dense_mapping
from dlm_bridge.models.families import FamilySpec

QWEN3_MAPPING = dense_mapping({"head_dim": 128, "num_key_value_heads": 32}, frozenset({"qk_norm"}))
QWEN2_MAPPING = dense_mapping({"num_key_value_heads": 32}, frozenset({"qkv_bias"}))
LLAMA_MAPPING = dense_mapping({})


COMMON: dict[str, Any] = {
    "auto_classes": ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"),
    "sft": {"eos_padding": "row"},
    "sampler": {"algorithm": "mdlm"},  # the bd3lm checkpoints: algorithm="bd3lm"
    "checked_against": "the public modeling files of dLLM's A2D pipeline",
}

QWEN3 = FamilySpec(
    name="a2d_qwen3",
    title="dLLM A2D on Qwen3",
    hub_ids=("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1"),
    architectures=("A2DQwen3LMHeadModel",),
    model_type="a2d-qwen3",
    config_class="dlm_bridge.models.modeling_a2d:A2DQwen3Config",
    model_class="dlm_bridge.models.modeling_a2d:A2DQwen3LMHeadModel",
    mapping=QWEN3_MAPPING,
    mask_token_id=151669,  # <|mask|>, added to Qwen3's tokenizer
    **COMMON,
)

QWEN2 = FamilySpec(
    name="a2d_qwen2",
    title="dLLM A2D on Qwen2",
    hub_ids=(
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
    ),
    architectures=("A2DQwen2LMHeadModel",),
    model_type="a2d-qwen2",
    config_class="dlm_bridge.models.modeling_a2d:A2DQwen2Config",
    model_class="dlm_bridge.models.modeling_a2d:A2DQwen2LMHeadModel",
    mapping=QWEN2_MAPPING,
    mask_token_id=151665,  # <|mask|>, the first free id of Qwen2.5's tokenizer
    **COMMON,
)

LLAMA = FamilySpec(
    name="a2d_llama",
    title="dLLM A2D on Llama",
    hub_ids=(),
    architectures=("A2DLlamaLMHeadModel",),
    model_type="a2d-llama",
    config_class="dlm_bridge.models.modeling_a2d:A2DLlamaConfig",
    model_class="dlm_bridge.models.modeling_a2d:A2DLlamaLMHeadModel",
    mapping=LLAMA_MAPPING,
    mask_token_id=None,  # no checkpoint is published
    **COMMON,
)
