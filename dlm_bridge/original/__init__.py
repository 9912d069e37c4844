"""Comparison of a checkpoint with the code that it was published with."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "original", features={"verify --against-original": "dlm_bridge.original.comparison:verify_original"}
)
