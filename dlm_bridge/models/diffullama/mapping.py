"""DiffuLLaMA's tensors are Llama's."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

MAPPING = dense_mapping({})
