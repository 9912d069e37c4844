"""Views of the denoising: live in the terminal, as an animated HTML page and as an animated SVG."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "display",
    features={
        "denoising trace": "dlm_bridge.display.trace:trace_of",
        "generate --show": "dlm_bridge.display.trace:live",
        "generate --html": "dlm_bridge.display.trace:page",
        "generate --svg": "dlm_bridge.display.picture:svg",
    },
)
