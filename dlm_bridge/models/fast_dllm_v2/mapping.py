"""Fast-dLLM v2's tensors are Qwen2's; the 1.5B model ties its output layer."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

MAPPING = dense_mapping({"max_position_embeddings": 32768}, frozenset({"qkv_bias"}))
