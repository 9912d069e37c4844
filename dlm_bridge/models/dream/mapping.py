"""Dream's tensors, Hub to Megatron: Qwen2's names, with biases on the query, key and value projections."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

MAPPING = dense_mapping({"max_position_embeddings": 32768}, frozenset({"qkv_bias"}))
