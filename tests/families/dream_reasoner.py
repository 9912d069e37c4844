"""DreamReasoner's case: the keys that public ports read from its config.json, with Qwen3-8B's others."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["DreamForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModelForCausalLM": "modeling_dream.DreamForCausalLM",
    },
    "block_size": 32,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "Dream",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

CASE = FamilyCase(
    "dream_reasoner",
    CONFIG,
    partial(standard_tensors, qk_norm=True),
    decoder_logits,
    mask_token_id=151669,
    block=32,
    sizes_of_blocks=(4,),
)
