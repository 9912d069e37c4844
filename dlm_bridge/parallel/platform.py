"""The platform that megatron-core runs on: its device, its communication backend, and what prepares a process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar

import torch

from dlm_bridge.errors import DlmBridgeError

VARIABLE = "DLM_BRIDGE_PLATFORM"


class Platform(ABC):
    """One kind of device. The engine asks the platform and never `torch.cuda` itself."""

    name: ClassVar[str]
    backend: ClassVar[str]  # of torch.distributed

    @abstractmethod
    def device(self) -> torch.device:
        """This process's device."""

    @abstractmethod
    def prepare(self) -> None:
        """Make this process ready for megatron-core; calling it again changes nothing. Raises DlmBridgeError."""


class CUDA(Platform):
    name = "cuda"
    backend = "nccl"

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def prepare(self) -> None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


class CPU(Platform):
    """gloo on CPU: slow and exact, for tests and for machines without a GPU."""

    name = "cpu"
    backend = "gloo"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self) -> None:
        """Install the overrides of `dlm_bridge.parallel.cpu`: process-wide, until its `uninstall` is called."""
        from dlm_bridge.parallel import cpu

        cpu.install()


PLATFORMS: dict[str, type[Platform]] = {"cuda": CUDA, "cpu": CPU}


def current() -> Platform:
    """The platform that DLM_BRIDGE_PLATFORM names, else CUDA where there is one, else CPU. Raises DlmBridgeError."""
    name = os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in PLATFORMS:
        raise DlmBridgeError(f"{VARIABLE}={name}: unknown platform, known are {', '.join(PLATFORMS)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise DlmBridgeError(f"{VARIABLE}=cuda, but torch sees no CUDA device: unset it or set it to cpu")
    return _platform(name)


@cache
def _platform(name: str) -> Platform:
    return PLATFORMS[name]()
