"""CoDA's case: the config.json of the public repository, with tiny sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["CoDALanguageModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_kernel": "flash_attention",
    "auto_map": {"AutoConfig": "model_config.CoDAConfig", "AutoModel": "modeling_coda.CoDALanguageModel"},
    "block_masking_probability": [0.25, 0.5, 0.5, 0.75, 0.25],
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_block_sizes": [4, 8, 16, 32],
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "CoDA",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 127,
    "prefix_probability": 0,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sampling_eps": [0.001, 0.25, 0.5, 0.25, 0.001],
    "sliding_window": None,
    "torch_dtype": "float32",
    "transformers_version": "4.47.1",
    "truncate_probability": 0,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": "<|im_end|>",
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

CASE = FamilyCase(
    "coda",
    CONFIG,
    partial(standard_tensors, qk_norm=True),
    decoder_logits,
    mask_token_id=151669,
    tokenizer=TOKENIZER,
)
