"""Structured output: texts that match a regular expression, a JSON schema, a list of choices or a grammar."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "structured",
    extra="dlm-bridge[structured]",
    features={"constraint": "dlm_bridge.structured.decoding:compiled_constraints"},
)
