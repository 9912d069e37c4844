"""Overrides: functions of megatron-core and torch that are replaced in this process, and the supported version.

megatron-core assumes CUDA. Tests and machines without a GPU run it on the CPU, and other vendors' chips on their own
device. A platform's overrides are installed all or none; an override that does not fit raises an error that names it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from dlm_bridge.errors import MissingExtraError, SettingError, one_line

MEGATRON_CORE = "megatron-core"
SUPPORTED = ("0.16.1", "0.19.2")  # the versions for which `mcore_patches` were written and tested
_RESILIENCY = "nvidia-resiliency-ext"
ALLOW_UNTESTED = "DLM_BRIDGE_ALLOW_UNTESTED_MCORE"
_ABSENT = object()


Table = Mapping[str, Callable[[Any], Any]]  # full dotted name -> function from the original to its replacement

_installed: tuple[Table, str] | None = None  # with its owner
_originals: dict[str, Any] = {}  # by dotted name; _ABSENT if the holder inherits the attribute


@functools.cache
def installed_version() -> str:
    """Version of megatron-core that this process imports, read without importing it: an unsupported version, or one
    beside an old nvidia-resiliency-ext, may fail to import."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return str(runpy.run_path(str(Path(spec.submodule_search_locations[0], "package_info.py")))["__version__"])


def nearest_supported(found: str) -> str:
    """The supported version whose patches and names apply to an installed one."""
    return SUPPORTED[Version(found) >= Version("0.17")]


def is_supported(found: str) -> bool:
    """True for 0.16.1 and for every release of 0.19."""
    return found == SUPPORTED[0] or Version(found).release[:2] == Version(SUPPORTED[1]).release[:2]


def check_version(found: str) -> None:
    """Raise MissingExtraError for a version of megatron-core that is not supported; only warn if
    DLM_BRIDGE_ALLOW_UNTESTED_MCORE=1. Also raise it for a supported version on a Python that it does not support."""
    if is_supported(found):
        if found != SUPPORTED[0] and sys.version_info < (3, 12):
            raise MissingExtraError(
                MEGATRON_CORE,
                f"{found} needs Python 3.12 or later: use that, or pip install megatron-core=={SUPPORTED[0]}",
            )
        _check_resiliency(found)
        return
    problem = f"version {found} is installed, but dlm-bridge supports 0.16.1 and 0.19"
    if os.environ.get(ALLOW_UNTESTED) != "1":
        best = SUPPORTED[sys.version_info >= (3, 12)]
        raise MissingExtraError(
            MEGATRON_CORE,
            f"{problem}: pip install megatron-core=={best}, or set {ALLOW_UNTESTED}=1 to try it untested",
        )
    warnings.warn(f"{MEGATRON_CORE}: {problem}: its patches are untested ({ALLOW_UNTESTED}=1)", stacklevel=2)


def _check_resiliency(found: str) -> None:
    """Raise MissingExtraError if nvidia-resiliency-ext prevents the import of a version of megatron-core: 0.19 reads
    its __version__, which 0.4 lacks, and asserts 0.6 (dist_checkpointing/strategies/nvrx.py 45, 85)."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        other = metadata.version(_RESILIENCY)
        if nearest_supported(found) != SUPPORTED[0] and Version(other) < Version("0.6"):
            raise MissingExtraError(
                _RESILIENCY,
                f"{other} is too old for {MEGATRON_CORE} {found}: pip uninstall {_RESILIENCY}, or with glibc 2.39 "
                f"pip install '{_RESILIENCY}>=0.6'",
            )


def install(table: Table, owner: str) -> None:
    """Replace every name of the table in this process until `uninstall`. Installing the same table again is a no-op.

    Args:
        owner: the platform or package that the table belongs to, for messages.

    Raises SettingError if another table is installed, and MissingExtraError if a name does not exist or its
    replacement cannot be made. Nothing is then replaced.
    """
    global _installed  # noqa: PLW0603 (the names replaced are global too)
    if _installed is not None and _installed[0] == table:
        return
    if _installed is not None:
        raise SettingError(
            owner, f"cannot override megatron-core while {_installed[1]} does: one platform per process"
        )
    replacements = {name: _replacement(name, make, owner) for name, make in table.items()}
    for name, new in replacements.items():
        holder, attribute = _locate(name)
        _originals[name] = vars(holder).get(attribute, _ABSENT)
        setattr(holder, attribute, new)
    _installed = table, owner


def uninstall() -> None:
    """Undo `install`; a no-op if nothing is installed."""
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
        raise MissingExtraError(
            name, f"does not exist in this torch or megatron-core, but {owner} overrides it"
        ) from None
    try:
        return make(original)
    except Exception as error:
        raise MissingExtraError(name, f"cannot be overridden by {owner}: {one_line(error)}") from error


def _locate(name: str) -> tuple[Any, str]:
    """Split a dotted name into the object that has the attribute, and the attribute's name. Raises ImportError or
    AttributeError."""
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
