"""The platform of this process: the one that DLM_BRIDGE_PLATFORM names, or the first that this machine has."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.parallel.devices import Platform

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
    """Every platform by name, those of installed packages first. Raises DlmBridgeError for a package's that cannot be
    loaded, is none, or has a name that another has."""
    from dlm_bridge.parallel.devices import CPU, CUDA

    built_in: dict[str, type[Platform]] = {"cuda": CUDA, "cpu": CPU}
    found: dict[str, type[Platform]] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in found or entry.name in built_in:
            raise DlmBridgeError(f"two platforms are named {entry.name}: uninstall {_package(entry)}, which has one")
        found[entry.name] = _load(entry)
    return found | built_in


def _load(entry: EntryPoint) -> type[Platform]:
    try:
        kind = entry.load()
    except Exception as error:
        raise DlmBridgeError(
            f"the platform {entry.name} of {_package(entry)} cannot be loaded, uninstall it: {one_line(error)}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Platform)) or getattr(kind, "name", None) != entry.name:
        raise DlmBridgeError(
            f"the entry point {entry.name} = {entry.value} of {_package(entry)} is no Platform of that name"
        )
    return kind


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


@cache
def _platform(kind: type[Platform]) -> Platform:
    return kind()
