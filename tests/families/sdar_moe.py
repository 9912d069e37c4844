"""SDAR-MoE's case."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase
from tests.families.rnd1 import reference

# The keys of SDAR-30B-A3B's config.json, that is Qwen3-30B-A3B's and the block size, but for the sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sdar_moe.SDARMoeConfig",
        "AutoModel": "modeling_sdar_moe.SDARMoeModel",
        "AutoModelForCausalLM": "modeling_sdar_moe.SDARMoeForCausalLM",
    },
    "block_size": 4,
    "bos_token_id": 98,
    "decoder_sparse_step": 1,
    "eos_token_id": 98,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "mask_token_id": 99,
    "max_position_embeddings": 256,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "sdar_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 98,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 110,
}

TENSORS = partial(standard_tensors, qk_norm=True)

CASE = FamilyCase("sdar_moe", CONFIG, TENSORS, reference, mask_token_id=99, block=4, sizes_of_blocks=(8,))
