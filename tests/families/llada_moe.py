"""LLaDA-MoE's case."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints import standard_tensors
from tests.families.case import FamilyCase, Tensors
from tests.families.llada import TOKENIZER
from tests.reference import decoder_logits, softmax_router

# The keys of the public LLaDA-MoE-7B-A1B config.json, but for the sizes; it has no mask_token_id.
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_lladamoe.LLaDAConfig",
        "AutoModel": "modeling_lladamoe.LLaDAMoEModelLM",
        "AutoModelForCausalLM": "modeling_lladamoe.LLaDAMoEModelLM",
    },
    "clip_qkv": None,
    "dense_intermediate_size": 96,
    "eos_token_id": 98,
    "expert_intermediate_size": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 256,
    "model_type": "llada",
    "moe_layer_freq": [1, 1, 1, 1],
    "moe_router_enable_expert_bias": None,
    "moe_router_score_function": None,
    "norm_topk_prob": None,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "pad_token_id": 98,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000,
    "router_aux_loss_coef": 0.01,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_cache": False,
    "vocab_size": 110,
}


def tensors(config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    sizes = {"intermediate_size": 0, "moe_intermediate_size": config["expert_intermediate_size"]}
    return standard_tensors({**config, **sizes}, seed, dtype, qk_norm=True)


def reference(
    tensors: Tensors, config: dict[str, Any], input_ids: torch.Tensor, allowed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The weights of the best experts are those of the softmax over all of them."""
    route = softmax_router(config["num_experts_per_tok"], renormalise=False)
    return decoder_logits(tensors, config, input_ids, allowed, positions, route=route)


CASE = FamilyCase("llada_moe", CONFIG, tensors, reference, mask_token_id=156895, tokenizer=TOKENIZER)
