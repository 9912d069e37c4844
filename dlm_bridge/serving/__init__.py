"""Serving: OpenAI's API over HTTP for diffusion and autoregressive models, and a page to sample in."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "serving",
    extra="dlm-bridge[serve,app]",
    needs=("display",),
    commands={
        "serve": "dlm_bridge.serving.command:register_serve",
        "app": "dlm_bridge.serving.command:register_app",
        "transformers": "dlm_bridge.serving.command:register_transformers",
    },
)
