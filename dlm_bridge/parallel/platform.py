"""The platform that megatron-core runs on: the one place that knows a device, its memory, random numbers and streams.

CUDA and the CPU are in `devices`. Another vendor's chip is a class that an installed package offers under the entry
point group `dlm_bridge.platforms`; where PyTorch has a module for it that is made like `torch.cuda`, the class is
`devices.Accelerator` with a name and a backend of its own.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import torch

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.parallel import overrides
from dlm_bridge.parallel.overrides import Overrides

VARIABLE = "DLM_BRIDGE_PLATFORM"
GROUP = "dlm_bridge.platforms"


class Platform(ABC):
    """One kind of device. The engine asks the platform and never `torch.cuda` itself. Sizes of memory are bytes."""

    name: ClassVar[str]  # what DLM_BRIDGE_PLATFORM says
    backend: ClassVar[str]  # of torch.distributed
    pinned_memory: ClassVar[bool]  # whether copies from pinned memory run beside the computation

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """Whether this machine has such a device."""

    @abstractmethod
    def device_count(self) -> int:
        """How many devices this process sees."""

    @abstractmethod
    def device(self) -> torch.device:
        """This process's device."""

    @abstractmethod
    def device_name(self) -> str:
        """The product's name."""

    @abstractmethod
    def set_device(self) -> None:
        """Make LOCAL_RANK's device this process's. Raises DlmBridgeError where there is none."""

    @abstractmethod
    def group_device(self) -> torch.device | None:
        """The device to which process groups are bound when they are made; None where the backend has none."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's default generator."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """A copy of the state of the device's default generator, a uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what `rng_state` gave."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was launched on the device is done."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream beside the current one, with `wait_stream`."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream on which work is launched now."""

    @abstractmethod
    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which work is launched on `stream`."""

    @abstractmethod
    def total_memory(self) -> int:
        """What the device has."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """What this process holds now."""

    @abstractmethod
    def peak_memory(self) -> int:
        """The most that this process has held since `reset_peak_memory`."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Begin a new peak."""

    def uses_transformer_engine(self) -> bool:
        """Whether layers are made of Transformer Engine's modules."""
        return False

    def overrides(self) -> Overrides | None:
        """What of megatron-core and torch has to be replaced here."""
        return None

    def prepare(self) -> None:
        """Make this process ready for megatron-core; calling it again changes nothing.

        The overrides are process-wide, until `overrides.uninstall`. Raises DlmBridgeError.
        """
        self.set_device()
        if (wanted := self.overrides()) is not None:
            overrides.install(wanted)


def current() -> Platform:
    """The platform that DLM_BRIDGE_PLATFORM names; else the first that this machine has, of those that packages offer,
    CUDA and CPU. Raises DlmBridgeError."""
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
