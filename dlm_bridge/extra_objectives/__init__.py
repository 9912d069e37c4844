"""Published objectives that are not the default of any family."""

from dlm_bridge.registration import Extension

EXTENSION = Extension(
    "extra_objectives",
    objectives={"multi_bd": "dlm_bridge.extra_objectives.multi_bd:MultiBlockDiffusion"},
)
