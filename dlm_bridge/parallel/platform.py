"""The platform of this process: the one that DLM_BRIDGE_PLATFORM names, or the first that this machine has."""

from __future__ import annotations

import os
from functools import cache

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.devices import CPU, CUDA, Platform
from dlm_bridge.plugins import load_entry_points

VARIABLE = "DLM_BRIDGE_PLATFORM"
GROUP = "dlm_bridge.platforms"


def current() -> Platform:
    """The platform that DLM_BRIDGE_PLATFORM names; else the first available one of those that packages offer, CUDA and
    CPU. Raises DlmBridgeError."""
    platforms = known()
    name = os.environ.get(VARIABLE)
    if not name:
        name = next(name for name, kind in platforms.items() if kind.available())
    elif name not in platforms:
        raise DlmBridgeError(f"{VARIABLE}={name}: unknown platform, known are {', '.join(platforms)}")
    elif not platforms[name].available():
        raise DlmBridgeError(f"{VARIABLE}={name}, but torch sees no {name} device: unset it or set it to cpu")
    return _platform(platforms[name])


@cache
def known() -> dict[str, type[Platform]]:
    """Every platform by name, those of installed packages first. Raises DlmBridgeError for an entry point that is no
    platform or has a name of ours; one that fails to import is left out with a warning."""
    built_in: dict[str, type[Platform]] = {"cuda": CUDA, "cpu": CPU}
    found: dict[str, type[Platform]] = {}
    for name, kind in load_entry_points(GROUP).items():
        if not (isinstance(kind, type) and issubclass(kind, Platform)) or getattr(kind, "name", None) != name:
            raise DlmBridgeError(f"the entry point {name} of {GROUP} is {kind!r}: no Platform of that name")
        if name in built_in:
            raise DlmBridgeError(f"two platforms are named {name}: uninstall the package of {kind.__module__}")
        found[name] = kind
    return found | built_in


@cache
def _platform(kind: type[Platform]) -> Platform:
    return kind()
