"""The platform of this process, and the kinds of them: CUDA, devices with a module like `torch.cuda`, and the CPU.

A platform is the one place that knows a device, its memory and its random numbers. Another vendor's chip is a
class that an installed package offers under the entry point group `dlm_bridge.platforms`; where PyTorch has a module
for it that is made like `torch.cuda`, the class is `Accelerator` with a name and a backend of its own.
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
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.overrides import Table
from dlm_bridge.registration import load_entry_points

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


class Platform(ABC):
    """Interface of one kind of device. The engine never calls `torch.cuda` itself. Sizes of memory are bytes."""

    name: ClassVar[str]  # the value of DLM_BRIDGE_PLATFORM
    backend: ClassVar[str]  # of torch.distributed

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
        """The device to bind process groups to; None where the backend binds none."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the device's default generator."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work that was launched on the device."""

    @abstractmethod
    def total_memory(self) -> int:
        """Total memory of the device."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Memory that this process has allocated."""

    @abstractmethod
    def peak_memory(self) -> int:
        """The most memory that this process had allocated at once."""

    def uses_transformer_engine(self) -> bool:
        """Whether layers are built of Transformer Engine's modules."""
        return False

    def uses_fused_kernels(self) -> bool:
        """Whether such layers can have the kernels of `fused`: Triton comes with torch's CUDA builds."""
        return self.uses_transformer_engine() and importlib.util.find_spec("triton") is not None

    def records_graphs(self) -> bool:
        """Whether megatron-core records CUDA graphs here."""
        return False

    def overrides(self) -> Table:
        """What of megatron-core and torch has to be replaced here, beside what `mcore_patches` replaces."""
        return {}


class Accelerator(Platform):
    """A device that PyTorch knows as `torch.<name>`, with the functions that `torch.cuda` has."""

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
            raise DlmBridgeError(
                f"LOCAL_RANK={rank}, but this process sees {count} {self.name} devices: start at most {count} "
                "processes a node, or set LOCAL_RANK=0 where each process sees a device of its own"
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
    """gloo on CPU: slow and exact, for tests and for machines without a GPU. Each process is a device of its own."""

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
        """Nothing to choose."""

    def group_device(self) -> torch.device | None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""

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
