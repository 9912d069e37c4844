"""Overrides: functions of megatron-core and torch replaced in this process, and the version that all patches are made
for.

megatron-core takes CUDA for granted: tests, and machines without a GPU, need it on the CPU, another vendor's chip
there. Either all of a platform's overrides are installed or none; one that does not fit is an error that names it.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from dlm_bridge.errors import DlmBridgeError, one_line

SUPPORTED = "0.16.1"  # megatron-core's version, by which `mcore_patches` were written and tested
ALLOW_UNTESTED = "DLM_BRIDGE_ALLOW_UNTESTED_MCORE"
_ABSENT = object()


Table = Mapping[str, Callable[[Any], Any]]  # full dotted name: a function from the original to its replacement

_installed: tuple[Table, str] | None = None  # with the owner
_originals: dict[str, Any] = {}  # what the owner itself held, or _ABSENT where it inherits the name


def installed_version() -> str:
    """The version of megatron-core that this process imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages (apex, transformer-engine) that it does without
        from megatron.core.package_info import __version__
    return str(__version__)


def check_version(found: str) -> None:
    """Raise DlmBridgeError for another version of megatron-core than `SUPPORTED`; with
    DLM_BRIDGE_ALLOW_UNTESTED_MCORE=1 only warn."""
    if found == SUPPORTED:
        return
    problem = f"megatron-core {found} is installed, but dlm-bridge is made for {SUPPORTED}"
    if os.environ.get(ALLOW_UNTESTED) != "1":
        raise DlmBridgeError(
            f"{problem}: pip install megatron-core=={SUPPORTED}, or set {ALLOW_UNTESTED}=1 to try this one untested"
        )
    warnings.warn(f"{problem}: its patches are untested there ({ALLOW_UNTESTED}=1)", stacklevel=2)


def install(table: Table, owner: str) -> None:
    """Replace every name of the table, process-wide, until `uninstall`; installing the same again changes nothing.
    `owner` is who needs it, for messages.

    Raises DlmBridgeError, and changes nothing, where a name does not exist, where a replacement cannot be made, or
    where another table is installed.
    """
    global _installed  # noqa: PLW0603 (the names replaced are global too)
    if _installed is not None and _installed[0] == table:
        return
    if _installed is not None:
        raise DlmBridgeError(
            f"{owner} cannot override megatron-core while {_installed[1]} does: one platform a process"
        )
    replacements = {name: _replacement(name, make, owner) for name, make in table.items()}
    for name, new in replacements.items():
        holder, attribute = _locate(name)
        _originals[name] = vars(holder).get(attribute, _ABSENT)
        setattr(holder, attribute, new)
    _installed = table, owner


def uninstall() -> None:
    """Undo `install`, if anything is installed."""
    global _installed  # noqa: PLW0603
    for name, original in _originals.items():
        holder, attribute = _locate(name)
        if original is _ABSENT:
            delattr(holder, attribute)
        else:
            setattr(holder, attribute, original)
    _originals.clear()
    _installed = None


def _replacement(name: str, make: Callable[[Any], Any], owner: str) -> Any:
    try:
        holder, attribute = _locate(name)
        original = getattr(holder, attribute)
    except (ImportError, AttributeError):
        raise DlmBridgeError(
            f"{owner} overrides {name}, which does not exist in this torch or megatron-core"
        ) from None
    try:
        return make(original)
    except Exception as error:
        raise DlmBridgeError(f"{owner} cannot override {name}: {one_line(error)}") from error


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
