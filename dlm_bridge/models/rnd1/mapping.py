"""RND1's tensors are Qwen3-MoE's."""

from __future__ import annotations

from dlm_bridge.models.moe import qwen3_moe_mapping

MAPPING = qwen3_moe_mapping(
    {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    }
)
