"""Public config.json files, as far as planning reads them, by Hub id."""

from __future__ import annotations

from typing import Any

from tests.autoregressive import published
from tests.checkpoints import LLADA_CONFIG
from tests.families.a2d import QWEN3


def llama(hidden: int, ffn: int, layers: int, heads: int, groups: int = 8) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }


def _mixtral(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": vocab,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }


LLAMA_3_8B = llama(4096, 14336, 32, 32)
LLAMA_3_70B = llama(8192, 28672, 80, 64)
LLAMA_31_405B = llama(16384, 53248, 126, 128)
MIXTRAL_8X7B = _mixtral(4096, 14336, 32, 32, 32000)
MIXTRAL_8X22B = _mixtral(6144, 16384, 56, 48, 32768)
DEEPSEEK_V3: dict[str, Any] = {
    **published.DEEPSEEK_V3,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
LLADA_8B = LLADA_CONFIG
QWEN3_1_7B: dict[str, Any] = {  # as a diffusion model
    **QWEN3,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "layer_types": ["full_attention"] * 28,
}
LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "dense_intermediate_size": 8192,
    "expert_intermediate_size": 1024,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "moe_layer_freq": [1] * 16,
    "norm_topk_prob": None,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "tie_word_embeddings": False,
    "vocab_size": 157184,
}
