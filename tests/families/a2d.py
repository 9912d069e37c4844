"""The A2D cases: what dLLM's converter writes for Qwen3-0.6B, Qwen2.5-Coder-0.5B and a Llama with plain RoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0",
    "use_cache": True,
    "vocab_size": 128,
}

WINDOW: dict[str, Any] = {
    "layer_types": ["full_attention"] * 4,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}

QWEN3: dict[str, Any] = {
    **COMMON,
    **WINDOW,
    "architectures": ["A2DQwen3LMHeadModel"],
    "attention_bias": False,
    "head_dim": 24,
    "model_type": "a2d-qwen3",
}

QWEN2: dict[str, Any] = {**COMMON, **WINDOW, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}

LLAMA: dict[str, Any] = {
    **COMMON,
    "architectures": ["A2DLlamaLMHeadModel"],
    "attention_bias": False,
    "head_dim": 16,
    "mlp_bias": False,
    "model_type": "a2d-llama",
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "mask_token": "<|mask|>",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}

CASES = [
    FamilyCase(
        "a2d_qwen3",
        QWEN3,
        partial(standard_tensors, qk_norm=True),
        decoder_logits,
        mask_token_id=151669,
        tokenizer=TOKENIZER,
    ),
    FamilyCase(
        "a2d_qwen2",
        QWEN2,
        partial(standard_tensors, qkv_bias=True),
        decoder_logits,
        mask_token_id=151665,
        tokenizer=TOKENIZER,
    ),
    FamilyCase("a2d_llama", LLAMA, standard_tensors, decoder_logits, mask_token_id=None),
]
