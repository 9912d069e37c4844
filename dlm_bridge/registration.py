"""Registries of extensions: components that are found by name and imported on first use.

An extension is a package that imports the core and is not imported by it, such as `dlm_bridge.parallel`. Its
`__init__`, which must be cheap to import, declares the components:

    EXTENSION = Extension("parallel", extra="dlm-bridge[megatron]", engines={"megatron": "package.module:Class"})

An extension can be removed by deleting its folder. Other packages add extensions with an entry point of the group
`dlm_bridge.extensions`; single families, objectives, samplers and platforms have their own groups.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Literal

from dlm_bridge.distributed import is_main
from dlm_bridge.errors import DlmBridgeError, MissingExtraError, one_line

logger = logging.getLogger(__name__)

Kind = Literal["engines", "commands", "features", "samplers", "objectives", "kernels"]

# Extensions in this repository: the packages `dlm_bridge.NAME`, if their folders exist.
EXTENSIONS = (
    "parallel", "train.rl", "train.distill", "plan", "display", "serving", "chat", "kernels", "extra_samplers",
    "original", "cluster", "exports", "structured", "prefix_cache", "replica_router",
    "extra_objectives",
)  # fmt: skip
ENTRY_POINTS = "dlm_bridge.extensions"
# Oldest and newest tested version of each distribution; Transformer Engine was tested on GPUs.
TESTED = {"torch": ("2.11", "2.15"), "transformers": ("5.23", "5.24"), "transformer-engine": ("2.20", "2.20")}


@dataclass(frozen=True)
class Extension:
    """Components of an extension by name. Values are "module:attribute" or "module", imported on first use.

    Args:
        name: name of the package below `dlm_bridge`; any other name outside this repository.
        extra: pip requirement that installs its dependencies, such as "dlm-bridge[megatron]".
        needs: other extensions that it imports.
        engines: values of the setting `engine`; subclasses of `train.engine.TrainingEngine`.
        commands: functions that add a command to the Typer app.
        features: optional features of the core's commands.
        samplers: subclasses of `Sampler`.
        objectives: subclasses of `Objective`, or `ObjectiveSpec`s.
        kernels: modules of kernels by subject (a key of `KERNELS`), for one device type ("attention.cuda") or for all.
    """

    name: str
    extra: str | None = None
    needs: tuple[str, ...] = ()
    engines: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    features: Mapping[str, str] = field(default_factory=dict)
    samplers: Mapping[str, str] = field(default_factory=dict)
    objectives: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)


# Functions and classes that a module of kernels must have. Each replaces the core's one of the same name.
KERNELS = {
    "attention": ("supports_attention", "attend"),  # in generation.runtime.attention
    "tokens": ("supports_logits", "best_token", "draw_token", "probability_of", "philox_uniform"),  # in token_sampling
    "layers": ("Layers",),  # base class: generation.runtime.graphs.DecoderLayers
}
CORE = Extension("core", engines={"accelerate": "dlm_bridge.train.engine:AccelerateEngine"})


@cache
def extensions() -> dict[str, Extension]:
    """Installed extensions by name, those of this repository first. An extension of another package is skipped with a
    warning if it fails to import, is not an `Extension`, or has a name in use."""
    there = [name for name in EXTENSIONS if _is_package(f"dlm_bridge.{name}")]
    found: dict[str, Extension] = {name: importlib.import_module(f"dlm_bridge.{name}").EXTENSION for name in there}
    for point, extension in load_entry_points(ENTRY_POINTS).items():
        if not isinstance(extension, Extension):
            logger.warning(f"entry point '{point}' of {ENTRY_POINTS} is not an Extension, skipped: {extension!r}")
        elif extension.name in (CORE.name, *EXTENSIONS, *found):
            logger.warning(f"entry point '{point}' of {ENTRY_POINTS} has a name in use, skipped")
        else:
            found[extension.name] = extension
    return found


def registered(kind: Kind) -> dict[str, Extension]:
    """Registered names of one kind, with the (first) extension that adds each."""
    found: dict[str, Extension] = {}
    for extension in (CORE, *extensions().values()):
        for name in getattr(extension, kind):
            found.setdefault(name, extension)
    return found


def load(kind: Kind, name: str) -> Any:
    """Import the object that an extension registers under a name.

    Raises MissingExtraError if no installed extension has the name, or if the extension lacks a package; the reason
    names the extra to install.
    """
    known = registered(kind)
    if name not in known:
        raise MissingExtraError(name, f"not installed: the {kind} are {', '.join(known) or 'none'}{absent()}")
    extension = known[name]
    lacking = [one for one in extension.needs if one not in extensions()]
    if lacking:
        raise MissingExtraError(name, f"{extension.name} needs {', '.join(lacking)}{absent()}")
    with named_failures(extension, name):
        return _imported(getattr(extension, kind)[name])


@contextmanager
def named_failures(extension: Extension, name: str) -> Iterator[None]:
    """Context manager that raises any exception of an extension of another package, and a missing package of any
    extension, as a MissingExtraError that names the extension and the extra to install."""
    try:
        yield
    except DlmBridgeError:
        raise
    except Exception as error:  # other packages may raise any exception
        if extension.name in EXTENSIONS and not _lacks_a_package(error):
            raise  # a bug in this repository
        remedy = f": pip install '{extension.extra}'" if extension.extra else ""
        cause = one_line(error)[:300]
        raise MissingExtraError(name, f"the extension {extension.name} fails to load: {cause}{remedy}") from error


@cache
def find_kernels(subject: str, device: str) -> Any:
    """Module of kernels for a subject and a device type, or None. Looked up once per process.

    A module that fails to import or lacks a function is skipped with a warning. (There is no warning if a module of
    this repository fails to import: these modules only need Triton.)
    """
    known = registered("kernels")
    for name in (f"{subject}.{device}", subject):
        if name not in known:
            continue
        try:
            module = load("kernels", name)
        except (DlmBridgeError, ImportError) as error:
            if known[name].name not in EXTENSIONS:
                logger.warning(f"kernels skipped: {one_line(error)}")
            continue
        lacking = [function for function in KERNELS[subject] if not hasattr(module, function)]
        if not lacking:
            return module
        logger.warning(f"kernels {name} of {known[name].name} skipped: they lack {', '.join(lacking)}")
    return None


def deferred(place: str) -> Any:
    """Create a method that calls the function "module:attribute", imported at the call."""

    def method(_: Any, *arguments: Any, **options: Any) -> Any:
        return _imported(place)(*arguments, **options)

    return method


def _imported(place: str) -> Any:
    module, _, attribute = place.partition(":")
    imported = importlib.import_module(module)
    return getattr(imported, attribute) if attribute else imported


def absent() -> str:
    """Suffix for error messages that lists missing extensions of this repository; empty if none is missing."""
    names = [f"dlm_bridge.{name}" for name in EXTENSIONS if name not in extensions()]
    return f"; this installation lacks {', '.join(names)}" if names else ""


def _is_package(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # None: a folder with nothing but __pycache__


def _lacks_a_package(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "dlm_bridge"


@cache
def load_entry_points(group: str) -> dict[str, Any]:
    """Objects that installed packages register under an entry point group, by entry point name.

    A group is loaded once per process. An entry point that fails to import is skipped with a one-line warning that
    names its package.
    """
    loaded: dict[str, Any] = {}
    for point in entry_points(group=group):
        try:
            loaded[point.name] = point.load()
        except Exception as error:  # other packages may raise any exception
            package = point.dist.name if point.dist is not None else point.value
            cause = one_line(error)[:300]
            logger.warning(f"{package}: entry point '{point.name}' of {group} fails to import, skipped: {cause}")
    return loaded


def untested(distribution: str) -> str | None:
    """Warning text if the installed version of a distribution of `TESTED` is older or newer than the tested ones, else
    None."""
    oldest, newest = TESTED[distribution]
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return None
    if _minor(oldest) <= _minor(found) <= _minor(newest):
        return None
    tested = newest if oldest == newest else f"{oldest} to {newest}"
    return f"{distribution} {found} is untested: dlm-bridge was tested with {tested}"


@cache
def warn_if_untested(distribution: str) -> None:
    """Log `untested` once per process, on the main process only."""
    sentence = untested(distribution)
    if sentence is not None and is_main():
        logger.warning(sentence)


def _minor(found: str) -> tuple[int, ...]:
    """First two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2])
