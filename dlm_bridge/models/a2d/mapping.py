"""The A2D models' tensors are those of Qwen3, Qwen2 and Llama."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

QWEN3 = dense_mapping({"head_dim": 128, "num_key_value_heads": 32}, frozenset({"qk_norm"}))
QWEN2 = dense_mapping({"num_key_value_heads": 32}, frozenset({"qkv_bias"}))
LLAMA = dense_mapping({})
