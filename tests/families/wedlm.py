"""WeDLM's cases: the 8B models' config.json (Qwen3's body) and the 7B ones' (Qwen2's)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

QWEN3: dict[str, Any] = {
    "architectures": ["WeDLMForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_wedlm.WeDLMConfig",
        "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 16384,
    "max_window_layers": 36,
    "model_type": "wedlm",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "qk_norm": True,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

QWEN2 = {key: value for key, value in QWEN3.items() if key != "head_dim"}
QWEN2 |= {"attention_bias": True, "qk_norm": False, "mask_token_id": None}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}

CASES = [
    FamilyCase(
        "wedlm",
        QWEN3,
        partial(standard_tensors, qk_norm=True),
        decoder_logits,
        mask_token_id=151665,
        tokenizer=TOKENIZER,
    ),
    FamilyCase(
        "wedlm",
        QWEN2,
        partial(standard_tensors, qkv_bias=True),
        decoder_logits,
        mask_token_id=151665,
        label="qwen2",
    ),
]
