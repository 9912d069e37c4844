"""RND1's case."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase, Tensors
from tests.reference import decoder_logits, softmax_router

# Key for key what the public configuration_rnd.py writes for the 0910 checkpoint, but for the sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["RND1LM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_rnd.RND1Config",
        "AutoModel": "modeling_rnd.RND1Model",
        "AutoModelForMaskedLM": "modeling_rnd.RND1LM",
    },
    "decoder_sparse_step": 1,
    "eos_token_id": 98,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "is_causal": False,
    "mask_token_id": 99,
    "max_position_embeddings": 256,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "rnd1",
    "moe_backend": "hf",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_diffusion_steps": 256,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": 97,
    "rms_norm_eps": 1e-06,
    "rope_scaling": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 110,
}


def reference(
    tensors: Tensors, config: dict[str, Any], input_ids: torch.Tensor, allowed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Qwen3-MoE's logits: the best experts' weights are renormalised."""
    route = softmax_router(config["num_experts_per_tok"], renormalise=True)
    return decoder_logits(tensors, config, input_ids, allowed, positions, route=route)


CASE = FamilyCase("rnd1", CONFIG, partial(standard_tensors, qk_norm=True), reference, mask_token_id=99)
