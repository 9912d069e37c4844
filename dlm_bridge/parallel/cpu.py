"""megatron-core on CPU: the places of it that take CUDA for granted, by full dotted name."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from dlm_bridge.parallel import torch_adam
from dlm_bridge.parallel.overrides import Overrides


class _Stream:
    """A stream or an event where everything has happened when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """On any device, of any priority."""

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

    def default_stream(self) -> _Stream:
        return self._only

    @staticmethod
    def stream(stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _created_on_cpu(create: Callable[..., torch.Tensor]) -> staticmethod[..., torch.Tensor]:
    """A function that makes a tensor, where the device "cuda" means the CPU, whose memory is never pinned."""

    def on_cpu(*arguments: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return create(*arguments, device="cpu" if device == "cuda" else device, **options)

    return staticmethod(on_cpu)


class _TorchOnCPU(types.ModuleType):
    """`torch` as one module of megatron-core sees it."""

    cuda = _CudaOnCPU("cuda")
    empty = _created_on_cpu(torch.empty)
    empty_like = _created_on_cpu(torch.empty_like)
    ones = _created_on_cpu(torch.ones)
    tensor = _created_on_cpu(torch.tensor)
    zeros = _created_on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


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


def _without_warnings(original: Any) -> types.SimpleNamespace:
    silent = logging.Logger("silent", logging.CRITICAL)
    return types.SimpleNamespace(getLogger=lambda name: silent)


def _sizes_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _same_tensor(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _type_of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_of_cuda(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of_cuda


def _init_data_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_data(self: Any, device: Any, *arguments: Any, **options: Any) -> None:
        original(self, "cpu" if device == "cuda" else device, *arguments, **options)

    return init_data


# Modules that make tensors with `device="cuda"`, or use streams.
_TORCH_ON_CPU = (
    # Causal and sliding-window masks of the local attention; the gradient norm without Transformer Engine and apex.
    "megatron.core.transformer.utils",
    "megatron.core.utils",
    # The token count of the pipeline schedules.
    "megatron.core.pipeline_parallel.schedules",
    # Loss scale, overflow flags and clipping.
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    # A communication stream, with several instances of the distributed optimizer.
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.param_and_grad_buffer",
    # Split sizes of the all-to-all dispatcher go to the CPU on a stream of their own; shared experts run on another.
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.moe.shared_experts",
    # The tracker of auxiliary losses.
    "megatron.core.transformer.moe.moe_utils",
    # The rotary embedding under context parallelism pins its indices.
    "megatron.core.models.common.embeddings.rope_utils",
    # Ranks that share the reading of a checkpoint exchange tensors; savers agree on whether a plan can be used again.
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)

OVERRIDES = Overrides(
    owner="the CPU platform",
    made_for="0.16.1",
    table={
        **{f"{module}.torch": _instead(_TorchOnCPU("torch")) for module in _TORCH_ON_CPU},
        # The device of parameters, rotary frequencies, gathered tensors, pipeline buffers, the optimizer's state and
        # the checkpoint's status.
        "torch.cuda.current_device": _instead(_cpu_device),
        # Before point-to-point communication, in timers and in the checkpoint writer: nothing runs asynchronously.
        "torch.cuda.synchronize": _instead(_nothing),
        # A tied output layer on the last pipeline stage fetches the embedding with `weight.data.cuda()`.
        "torch.Tensor.cuda": _instead(_same_tensor),
        # Optimizers and clipping ask for "torch.cuda.FloatTensor" and the like by name.
        "torch.Tensor.type": _type_of_cuda,
        # The random number tracker forks "the CUDA generator" in attention, in recomputation and under sequence
        # parallelism.
        "torch.cuda.manual_seed": _instead(_seed),
        "torch.cuda.get_rng_state": _instead(_rng_state),
        "torch.cuda.random.get_rng_state": _instead(_rng_state),
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": _instead(_set_rng_state),
        # ... and warns that the CPU's generator, which here is the same, has moved meanwhile.
        "megatron.core.tensor_parallel.random.logging": _without_warnings,
        # Plain numbers are made of split sizes only where they come from a GPU.
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _instead(_sizes_on_cpu),
        # Ranks that share the reading of a checkpoint make room for each other's tensors.
        "megatron.core.dist_checkpointing.mapping.ShardedTensor.init_data": _init_data_on_cpu,
        **torch_adam.OVERRIDES.table,
    },
)
