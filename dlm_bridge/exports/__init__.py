"""Weights in the formats of other engines: quantised Hub folders in the layout of compressed-tensors, and GGUF."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "exports",
    features={
        "export --to gguf": "dlm_bridge.exports.gguf:write_gguf",
        "export --quantize": "dlm_bridge.exports.quantized:write_quantized",
        "verify --against": "dlm_bridge.exports.bounds:verify_quantized",
        "quantized weights": "dlm_bridge.exports.loading:load_quantized",
    },
)
