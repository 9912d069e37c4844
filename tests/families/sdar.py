"""SDAR's cases: SDAR-4B-Chat's config.json, and a TraDo one that leaves block size and mask token out."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "bos_token_id": 151643,
    "debug": False,
    "eos_token_id": 151643,
    "block_size": 4,
    "mask_token_id": 151669,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "micro_forward": False,
    "model_type": "sdar",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "skip_checkpoint": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": False,
    "use_deepep": False,
    "use_sliding_window": False,
    "vocab_size": 128,
}

TRADO = {key: value for key, value in CONFIG.items() if key not in ("block_size", "mask_token_id")}

TOKENIZER: dict[str, Any] = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "auto_map": {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]},
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "mask_token": "<|MASK|>",
    "errors": "replace",
    "model_max_length": 131072,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer",
    "unk_token": None,
}

CASES = [
    FamilyCase(
        "sdar",
        CONFIG,
        partial(standard_tensors, qk_norm=True),
        decoder_logits,
        mask_token_id=151669,
        block=4,
        sizes_of_blocks=(1, 8, 64),
        tokenizer=TOKENIZER,
    ),
    FamilyCase(
        "sdar",
        {**TRADO, "tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 16},
        partial(standard_tensors, qk_norm=True),
        decoder_logits,
        mask_token_id=151669,
        label="trado",
        block=4,
    ),
]
