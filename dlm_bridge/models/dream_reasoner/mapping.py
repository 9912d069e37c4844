"""DreamReasoner's tensors are Qwen3's."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

MAPPING = dense_mapping({"num_key_value_heads": 32}, frozenset({"qk_norm"}))
