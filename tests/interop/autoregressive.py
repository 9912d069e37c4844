"""Tiny checkpoints of the autoregressive families: the public configs' keys, with only the widths shrunk."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge.models.families import find_family
from dlm_bridge.models.family_spec import FamilySpec
from tests.autoregressive.published import DEEPSEEK_V3, GPT_OSS

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 110,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {  # Llama-3.1-8B
        **SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen2": {  # Qwen2.5-0.5B: biases, tied
        **SIZES,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3_yarn": {  # Qwen3-8B with the YaRN of its card; heads wider than hidden / heads
        **SIZES,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 24,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "rope_theta": 1000000,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B, with one dense layer
        **SIZES,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 24,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [2],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "mistral_window": {  # Mistral-7B-v0.1, whose window is 4096
        **SIZES,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "mixtral": {  # Mixtral-8x7B
        **SIZES,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "max_position_embeddings": 32768,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "glm4_moe": {  # GLM-4.5-Air without its multi-token prediction layer
        **SIZES,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "olmoe": {  # OLMoE-1B-7B
        **SIZES,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": 32,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rope_theta": 10000.0,
    },
    "gpt_oss": {  # gpt-oss-20b; windows shorter than the tests' rows
        **SIZES,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 2,
        "head_dim": 16,
        "initial_context_length": 4096,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rms_norm_eps": 1e-5,
        "rope_scaling": GPT_OSS["rope_scaling"],
        "rope_theta": 150000,
        "sliding_window": 5,
        "swiglu_limit": 1.0,  # so that some of the tests' values are clamped
    },
    "deepseek_v3": {  # DeepSeek-V3 without its multi-token prediction layer
        **SIZES,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rope_scaling": DEEPSEEK_V3["rope_scaling"],
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
}
CONFIGS["bailing_moe_v2"] = {  # Ling-mini-2.0 without a multi-token prediction layer
    **SIZES,
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 32,
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 2,
    "use_qk_norm": True,
}
CONFIGS["glm4_moe_mtp"] = {**CONFIGS["glm4_moe"], "num_nextn_predict_layers": 1}


def tensors_of(
    config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32, family: FamilySpec | None = None
) -> dict[str, torch.Tensor]:
    """Random weights under the Hub's names, of a size that keeps activations near one."""
    mapping = (family or find_family(config)).mapping
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for param in mapping.params(mapping.dims(config)):
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
            noise = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                noise *= shape[-1] ** -0.5
            elif "bias" in name:
                noise *= 0.1
            else:
                noise = 1 + 0.1 * noise
            found[name] = noise.to(dtype)
    return found
