"""iLLaDA's tensors are Llama's."""

from __future__ import annotations

from dlm_bridge.models.standard import dense_mapping

MAPPING = dense_mapping({}, required={"layer_norm_eps": None, "resid_pdrop": 0.0})
