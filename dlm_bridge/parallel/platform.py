"""Platforms: CUDA, other accelerators with a module like `torch.cuda`, and the CPU.

A platform encapsulates a device, its memory and its random numbers. An installed package adds another vendor's chip as
a class under the entry point group `dlm_bridge.platforms`; if PyTorch has a module for the device with `torch.cuda`'s
functions, a subclass of `Accelerator` with a name and a backend is sufficient.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform as machine
import re
import resource
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlm_bridge.distributed import local_rank
from dlm_bridge.errors import LayoutError, MissingExtraError, SettingError
from dlm_bridge.parallel.overrides import Table
from dlm_bridge.registration import load_entry_points
from dlm_bridge.settings import check_choice

VARIABLE = "DLM_BRIDGE_PLATFORM"
GROUP = "dlm_bridge.platforms"


def current() -> Platform:
    """Platform that DLM_BRIDGE_PLATFORM names, otherwise the first available one: those of installed packages, CUDA,
    CPU. Raises SettingError for an unknown name, and MissingExtraError without such a device."""
    platforms = known()
    name = os.environ.get(VARIABLE)
    if not name:
        name = next(name for name, kind in platforms.items() if kind.available())
    check_choice(VARIABLE, name, platforms)
    if not platforms[name].available():
        raise MissingExtraError(VARIABLE, f"torch sees no {name} device: unset it or set it to cpu")
    return _platform(platforms[name])


@cache
def known() -> dict[str, type[Platform]]:
    """Every platform by name, those of installed packages first. Raises SettingError for an entry point that is not a
    Platform or has a built-in name; one that fails to import is skipped with a warning."""
    built_in: dict[str, type[Platform]] = {"cuda": CUDA, "cpu": CPU}
    found: dict[str, type[Platform]] = {}
    for name, kind in load_entry_points(GROUP).items():
        is_platform = isinstance(kind, type) and issubclass(kind, Platform) and kind.name == name
        if not is_platform or name in built_in:
            raise SettingError(
                GROUP, f"the entry point {name} is {kind!r}, not a new Platform of that name: uninstall its package"
            )
        found[name] = kind
    return found | built_in


@cache
def _platform(kind: type[Platform]) -> Platform:
    return kind()


class Platform(ABC):
    """Interface of a kind of device. The engine calls it instead of `torch.cuda`. Memory sizes are in bytes."""

    name: ClassVar[str] = ""  # the value of DLM_BRIDGE_PLATFORM
    backend: ClassVar[str]  # of torch.distributed

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """True if this machine has such a device."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices that this process sees."""

    @abstractmethod
    def device(self) -> torch.device:
        """Device of this process."""

    @abstractmethod
    def device_name(self) -> str:
        """Product name of the device."""

    @abstractmethod
    def set_device(self) -> None:
        """Select LOCAL_RANK's device for this process. Raises LayoutError if it does not exist."""

    @abstractmethod
    def group_device(self) -> torch.device | None:
        """Device to bind process groups to; None if the backend does not bind one."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's default generator."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all kernels launched on the device."""

    @abstractmethod
    def total_memory(self) -> int:
        """Total memory of the device."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Memory that this process has allocated."""

    @abstractmethod
    def peak_memory(self) -> int:
        """Peak of the memory that this process had allocated."""

    def uses_transformer_engine(self) -> bool:
        """True if layers are built from Transformer Engine's modules."""
        return False

    def uses_fused_kernels(self) -> bool:
        """True if such layers can use the kernels of `fused`: Triton comes with torch's CUDA builds."""
        return self.uses_transformer_engine() and importlib.util.find_spec("triton") is not None

    def records_graphs(self) -> bool:
        """True if megatron-core records CUDA graphs on this platform."""
        return False

    def overrides(self) -> Table:
        """Overrides of megatron-core and torch that this platform needs in addition to those of `mcore_patches`."""
        return {}


class Accelerator(Platform):
    """Device with a module `torch.<name>` that has `torch.cuda`'s functions."""

    @classmethod
    def _module(cls) -> Any:
        return torch.get_device_module(cls.name)

    @classmethod
    def available(cls) -> bool:
        return bool(cls._module().is_available())

    def device_count(self) -> int:
        return int(self._module().device_count())

    def device(self) -> torch.device:
        return torch.device(self.name, self._module().current_device())

    def device_name(self) -> str:
        return str(self._module().get_device_name(self.device()))

    def set_device(self) -> None:
        rank, count = local_rank(), self.device_count()
        if rank is None:
            return
        if rank >= count:
            raise LayoutError(
                "LOCAL_RANK",
                f"{rank}, but this process sees {count} {self.name} devices: start at most {count} processes per "
                "node, or set LOCAL_RANK=0 if each process sees only its own device",
            )
        self._module().set_device(rank)

    def group_device(self) -> torch.device | None:
        return self.device()

    def manual_seed(self, seed: int) -> None:
        self._module().manual_seed(seed)

    def synchronize(self) -> None:
        self._module().synchronize()

    def total_memory(self) -> int:
        return int(self._module().get_device_properties(self.device()).total_memory)

    def memory_allocated(self) -> int:
        return int(self._module().memory_allocated())

    def peak_memory(self) -> int:
        return int(self._module().max_memory_allocated())


class CUDA(Accelerator):
    name = "cuda"
    backend = "nccl"

    def records_graphs(self) -> bool:
        return True

    def uses_transformer_engine(self) -> bool:
        return importlib.util.find_spec("transformer_engine") is not None


class CPU(Platform):
    """CPU with gloo: slow and exact, for tests and machines without a GPU. Each process is one device."""

    name = "cpu"
    backend = "gloo"

    @classmethod
    def available(cls) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def device(self) -> torch.device:
        return torch.device("cpu")

    def device_name(self) -> str:
        with contextlib.suppress(OSError):
            if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
                return found[1].strip()
        return machine.processor() or machine.machine()

    def set_device(self) -> None:
        """No-op: there is one device."""

    def group_device(self) -> torch.device | None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def synchronize(self) -> None:
        """No-op: kernels run synchronously."""

    def total_memory(self) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    def memory_allocated(self) -> int:
        import psutil

        return int(psutil.Process().memory_info().rss)

    def peak_memory(self) -> int:
        with contextlib.suppress(OSError):
            if found := re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
                return int(found[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if machine.system() == "Darwin" else 1024)
