"""megatron-core on CPU: the few places of it that take CUDA for granted, overridden by full dotted name.

Everything here is process-wide and applies only when the CPU platform is chosen. It was made for one version of
megatron-core and refuses any other, because an override that no longer fits would be silently wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError

MADE_FOR = "0.16.1"

_originals: dict[str, Any] = {}


def install() -> None:
    """Apply `OVERRIDES`; calling it again changes nothing.

    Raises DlmBridgeError on another version of megatron-core, or where a name to override does not exist.
    """
    from dlm_bridge.parallel import core

    if core.version != MADE_FOR:
        raise DlmBridgeError(
            f"megatron-core {core.version} is installed, but the CPU platform is made for {MADE_FOR}: "
            f"pip install megatron-core=={MADE_FOR}, or run on a GPU"
        )
    if _originals:
        return
    found = {}
    for name in OVERRIDES:
        owner, attribute = _locate(name)
        if not hasattr(owner, attribute):
            raise DlmBridgeError(
                f"the CPU platform overrides {name}, which does not exist in this torch or megatron-core"
            )
        found[name] = getattr(owner, attribute)
    for name, make in OVERRIDES.items():
        owner, attribute = _locate(name)
        setattr(owner, attribute, make(found[name]))
    _originals.update(found)


def uninstall() -> None:
    """Undo `install`."""
    for name, original in _originals.items():
        setattr(*_locate(name), original)
    _originals.clear()


def _locate(name: str) -> tuple[Any, str]:
    """The object that holds the last part of a dotted name, and that part."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise DlmBridgeError(f"the CPU platform overrides {name}, which cannot be imported")


class _Stream:
    """A stream or an event where everything has happened when a call returns."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _CudaOnCPU(types.ModuleType):
    """`torch.cuda` where there is one stream, on which everything happens at once."""

    Stream = _Stream
    _only = _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_stream(self) -> _Stream:
        return self._only

    @staticmethod
    def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _TorchOnCPU(types.ModuleType):
    """`torch` as one module of megatron-core sees it, where `zeros(..., device="cuda")` means the CPU."""

    cuda = _CudaOnCPU("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)

    @staticmethod
    def ones(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.ones(*size, device="cpu" if device == "cuda" else device, **options)


def _instead(replacement: Any) -> Callable[[Any], Any]:
    """An override that does not look at the original."""
    return lambda original: replacement


def _cpu_device(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _torch_on_cpu(original: Any) -> Any:
    return _TorchOnCPU("torch")


def _sizes_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _same_tensor(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


# Dotted name: a function from the original to what stands there on CPU.
OVERRIDES: dict[str, Callable[[Any], Any]] = {
    # The device of parameters, rotary frequencies, gathered tensors, pipeline buffers and the checkpoint's status.
    "torch.cuda.current_device": _instead(_cpu_device),
    # Before point-to-point communication, in timers and in the checkpoint writer: nothing runs asynchronously.
    "torch.cuda.synchronize": _instead(_nothing),
    # A tied output layer on the last pipeline stage fetches the embedding with `weight.data.cuda()`.
    "torch.Tensor.cuda": _instead(_same_tensor),
    # The random number tracker forks "the CUDA generator" in attention and under sequence parallelism.
    "torch.cuda.manual_seed": _instead(_seed),
    "torch.cuda.get_rng_state": _instead(_rng_state),
    "torch.cuda.random.get_rng_state": _instead(_rng_state),
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _instead(_set_rng_state),
    # The pipeline schedules count tokens in `torch.zeros([], device="cuda")`.
    "megatron.core.pipeline_parallel.schedules.torch": _torch_on_cpu,
    # The local attention makes causal and sliding-window masks with `torch.ones(..., device="cuda")`.
    "megatron.core.transformer.utils.torch": _torch_on_cpu,
    # The all-to-all dispatcher of experts copies its split sizes to the CPU on a stream of their own ...
    "megatron.core.transformer.moe.token_dispatcher.torch": _torch_on_cpu,
    # ... and makes plain numbers of them only where they come from a GPU.
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _instead(_sizes_on_cpu),
}
