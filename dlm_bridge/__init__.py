"""Train, convert and sample diffusion and autoregressive language models, on the Hub and on Megatron.

Importing this package registers every supported family with transformers' Auto classes. It imports neither torch nor
transformers (see `dlm_bridge.models.auto_classes`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlm_bridge.errors import (
    ChangedTensorsError,
    CheckpointError,
    DlmBridgeError,
    InputFileError,
    LayoutError,
    MissingExtraError,
    NonFiniteError,
    ResourceError,
    RowError,
    SettingError,
    WorkerError,
)
from dlm_bridge.models.auto_classes import install as _install

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge
    from dlm_bridge.mapping.layout import Layout

__version__ = "0.1.0"
__all__ = [
    "Bridge",
    "ChangedTensorsError",
    "CheckpointError",
    "DlmBridgeError",
    "InputFileError",
    "Layout",
    "LayoutError",
    "MissingExtraError",
    "NonFiniteError",
    "ResourceError",
    "RowError",
    "SettingError",
    "WorkerError",
    "__version__",
]

_LAZY = {"Bridge": "dlm_bridge.bridge", "Layout": "dlm_bridge.mapping.layout"}

_install()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dlm_bridge' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
