"""I-DLM's case: config.json of its training code (Qwen3-8B-b3-allmasked) with the key that tells it from SDAR."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.reference import decoder_logits

CONFIG: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "block_size": 3,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "fuse_cross_entropy": True,
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": False,
    "use_regular_causal": True,
    "use_sliding_window": False,
    "vocab_size": 128,
}

CASE = FamilyCase("idlm", CONFIG, partial(standard_tensors, qk_norm=True), decoder_logits, mask_token_id=151669)
