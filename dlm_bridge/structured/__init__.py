"""Structured output: texts that match a regular expression, a JSON schema, a list of choices or a grammar."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "structured",
    features={
        "constraint": "dlm_bridge.structured.decoding:compiled_constraints",
        "constraint for a model": "dlm_bridge.structured.requests:compile_for_model",
        "form": "dlm_bridge.structured.composed:form_constraint",
        "structured output": "dlm_bridge.structured.requests",
        "tools": "dlm_bridge.structured.tools",
    },
)
