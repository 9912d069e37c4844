"""Fast-dLLM v2's cases: the config.json of the 7B model, and the 1.5B one's tied output layer."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
        "AutoModel": "modeling.Fast_dLLM_QwenModel",
        "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
    },
    "bd_size": 32,
    "bos_token_id": 151643,
    "conplemenrary_mask": True,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 127,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "additional_special_tokens": ["|<MASK>|"],
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "extra_special_tokens": {},
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "padding_side": "right",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}

CASES = [
    FamilyCase(
        "fast_dllm_v2",
        CONFIG,
        partial(standard_tensors, qkv_bias=True),
        decoder_logits,
        mask_token_id=151665,
        block=32,
        sizes_of_blocks=(8,),
        tokenizer=TOKENIZER,
    ),
    FamilyCase(
        "fast_dllm_v2",
        {**CONFIG, "tie_word_embeddings": True, "bd_size": 8},
        partial(standard_tensors, qkv_bias=True),
        decoder_logits,
        mask_token_id=151665,
        label="tied",
        block=8,
    ),
]
