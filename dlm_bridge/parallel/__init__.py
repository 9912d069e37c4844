"""The Megatron-Core engine: platform, process groups, live models with the weights loaded, training, and the hand-over
back."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "parallel", "dlm-bridge[megatron]", engines={"megatron": "dlm_bridge.parallel.engine:MegatronEngine"}
)
