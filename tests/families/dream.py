"""Dream's case: the config.json and tokenizer_config.json of Dream-v0-Instruct-7B."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
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
    "transformers_version": "4.46.2",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 128,
}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    "bos_token": "<|beginoftext|>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "errors": "replace",
    "mask_token": "<|mask|>",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "DreamTokenizer",
    "unk_token": None,
}

CASE = FamilyCase(
    "dream",
    CONFIG,
    partial(standard_tensors, qkv_bias=True),
    decoder_logits,
    mask_token_id=151666,
    tokenizer=TOKENIZER,
)
