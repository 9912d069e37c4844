"""Overrides: functions of megatron-core and torch replaced in this process, and the version that all patches are made
for.

A platform declares what it needs by full dotted names, for one version of megatron-core, because an override that no
longer fits would be silently wrong. Either all are installed or none; one that does not fit is an error that names it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlm_bridge.errors import DlmBridgeError, one_line

SUPPORTED = "0.16.1"  # megatron-core's version, by which `mcore_patches` were written and tested
ALLOW_UNTESTED = "DLM_BRIDGE_ALLOW_UNTESTED_MCORE"
_ABSENT = object()


@dataclass(frozen=True)
class Overrides:
    """What one platform overrides."""

    owner: str  # as messages name it: "the CPU platform"
    made_for: str  # the version of megatron-core
    table: Mapping[str, Callable[[Any], Any]]  # full dotted name: a function from the original to its replacement


_installed: Overrides | None = None
_originals: dict[str, Any] = {}  # what the owner itself held, or _ABSENT where it inherits the name


def installed_version() -> str:
    """The version of megatron-core that this process imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages (apex, transformer-engine) that it does without
        from megatron.core.package_info import __version__
    return str(__version__)


def check_version(found: str, wanted: str = SUPPORTED, owner: str = "dlm-bridge") -> None:
    """Raise DlmBridgeError for another version of megatron-core than the one that `owner` is made for; with
    DLM_BRIDGE_ALLOW_UNTESTED_MCORE=1 only warn."""
    if found == wanted:
        return
    problem = f"megatron-core {found} is installed, but {owner} is made for {wanted}"
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise DlmBridgeError(
            f"{problem}: pip install megatron-core=={wanted}, or set {ALLOW_UNTESTED}=1 to try this one untested"
        )
    warnings.warn(f"{problem}: its patches are untested there ({ALLOW_UNTESTED}=1)", stacklevel=2)


def install(overrides: Overrides) -> None:
    """Replace every name of the table, process-wide, until `uninstall`; installing the same again changes nothing.

    Raises DlmBridgeError, and changes nothing, on another version of megatron-core (see `check_version`), where a name
    does not exist, where a replacement cannot be made, or where another platform's overrides are installed.
    """
    global _installed  # noqa: PLW0603 (the names replaced are global too)
    if _installed == overrides:
        return
    check_version(installed_version(), overrides.made_for, overrides.owner)
    if _installed is not None:
        raise DlmBridgeError(
            f"{overrides.owner} cannot override megatron-core while {_installed.owner} does: one platform a process"
        )
    replacements = {name: _replacement(overrides, name) for name in overrides.table}
    for name, new in replacements.items():
        owner, attribute = _locate(name)
        _originals[name] = vars(owner).get(attribute, _ABSENT)
        setattr(owner, attribute, new)
    _installed = overrides


def uninstall() -> None:
    """Undo `install`, if anything is installed."""
    global _installed  # noqa: PLW0603
    for name, original in _originals.items():
        owner, attribute = _locate(name)
        if original is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)
    _originals.clear()
    _installed = None


def _replacement(overrides: Overrides, name: str) -> Any:
    try:
        owner, attribute = _locate(name)
        original = getattr(owner, attribute)
    except (ImportError, AttributeError):
        raise DlmBridgeError(
            f"{overrides.owner} overrides {name}, which does not exist in this torch or megatron-core"
        ) from None
    try:
        return overrides.table[name](original)
    except Exception as error:
        raise DlmBridgeError(f"{overrides.owner} cannot override {name}: {one_line(error)}") from error


def _locate(name: str) -> tuple[Any, str]:
    """The object that holds the last part of a dotted name, and that part. Raises ImportError or AttributeError."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ImportError(name)
