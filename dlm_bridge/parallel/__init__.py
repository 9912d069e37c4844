"""Megatron-Core engine: platform, process groups, live models with loaded weights, training, and weights back to the
Hub's layout."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "parallel", "dlm-bridge[megatron]", engines={"megatron": "dlm_bridge.parallel.engine:MegatronEngine"}
)
