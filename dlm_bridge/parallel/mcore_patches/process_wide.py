"""Process-wide replacements: the places of megatron-core that take CUDA for granted, and its optimizers with torch's Adam."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import signal
import types
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import torch

from dlm_bridge.parallel.core import (
    filesystem_async,
)
from dlm_bridge.parallel.overrides import Overrides

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_MIXED = "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer"  # the base of the distributed one
_PLAIN = (
    "megatron.core.optimizer.optimizer.FP32Optimizer",
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
)


def uses_torch_adam() -> bool:
    """Whether megatron-core would take torch's Adam."""
    return all(importlib.util.find_spec(name) is None for name in ("transformer_engine", "apex"))


def _for_adam(override: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    """An override of a method only where the wrapped optimizer is torch's Adam, and not under Megatron FSDP, which has
    its own way of saving."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        replacement = override(original)

        @functools.wraps(original)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            fsdp = getattr(getattr(self, "ddp_config", None), "use_megatron_fsdp", False)
            ours = isinstance(self.optimizer, torch.optim.Adam) and not fsdp  # AdamW is one
            return (replacement if ours else original)(self, *arguments, **options)

        return method

    return make


@_for_adam
def _step_with_ready_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adam counts steps parameter by parameter, so not at all on a rank without any, such as the experts' optimizer on
    a pipeline stage without experts. But what one rank saves of an optimizer, all ranks load."""

    def step_with_ready_grads(self: Any) -> bool:
        done = original(self)
        if done and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = group.get("step", 0.0) + 1.0
        return done

    return step_with_ready_grads


def _counted(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The steps of an optimizer without parameters."""
    return torch.tensor(float(optimizer.param_groups[0].get("step", 0.0)))


@_for_adam
def _sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is saved before the first step (fp16 may skip some) has no state of Adam, and cannot be loaded."""

    def sharded_state_dict(self: Any, *arguments: Any, **options: Any) -> Any:
        _allocate(self.optimizer)
        result = original(self, *arguments, **options)
        if not self.optimizer.state:
            result.get("optimizer", result)["state"]["common_step"] = _counted(self.optimizer)
        return result

    return sharded_state_dict


@_for_adam
def _load_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step count of zero is not saved, and Adam wants one all the same."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        step = state_dict.get("optimizer", state_dict)["state"].setdefault("common_step", torch.tensor(0.0))
        original(self, state_dict)
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = float(step)

    return load_state_dict


@_for_adam
def _state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Saving asserts that there is exactly one step count, but before the first step there is none."""

    def state_dict(self: Any) -> Any:
        _allocate(self.optimizer)
        if self.optimizer.state:
            return original(self)
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            | {"step": _counted(self.optimizer).item()}
            for group in self.optimizer.param_groups
        ]
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": {"param_groups": groups}, **scaler}

    return state_dict


@_for_adam
def _load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loading makes one tensor the step count of every parameter, which Adam then advances once for each of them."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        _allocate(self.optimizer)
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


@_for_adam
def _set_main_param_and_optimizer_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loading looks for a step count among the tensors that are stored, where it is not, and copies into parameters
    while autograd watches."""

    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        main_param.copy_(tensors["param"])
        for name, value in self.optimizer.state[main_param].items():
            if name != "step":  # is in the parameter groups
                value.copy_(tensors[name])

    return set_states


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """The state that Adam itself makes at its first step, for each parameter that has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


TORCH_ADAM = Overrides(
    owner="the CUDA platform without Transformer Engine and apex",
    made_for="0.16.1",
    table={
        f"{_DISTRIBUTED}.state_dict": _state_dict,
        f"{_DISTRIBUTED}.load_state_dict": _load_state_dict,
        f"{_DISTRIBUTED}._set_main_param_and_optimizer_states": _set_main_param_and_optimizer_states,
        f"{_MIXED}.step_with_ready_grads": _step_with_ready_grads,
        f"{_PLAIN[0]}.step_with_ready_grads": _step_with_ready_grads,
        **{f"{name}.sharded_state_dict": _sharded_state_dict for name in _PLAIN},
        **{f"{name}.load_state_dict": _load_plain for name in _PLAIN},
    },
)


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


def _manual_seed(seed: int) -> None:
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

CPU_OVERRIDES = Overrides(
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
        "torch.cuda.manual_seed": _instead(_manual_seed),
        "torch.cuda.get_rng_state": _instead(_rng_state),
        "torch.cuda.random.get_rng_state": _instead(_rng_state),
        "megatron.core.tensor_parallel.random._set_cuda_rng_state": _instead(_set_rng_state),
        # ... and warns that the CPU's generator, which here is the same, has moved meanwhile.
        "megatron.core.tensor_parallel.random.logging": _without_warnings,
        # Plain numbers are made of split sizes only where they come from a GPU.
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _instead(_sizes_on_cpu),
        # Ranks that share the reading of a checkpoint make room for each other's tensors.
        "megatron.core.dist_checkpointing.mapping.ShardedTensor.init_data": _init_data_on_cpu,
        **TORCH_ADAM.table,
    },
)


def start_results_queue() -> None:
    """Start the process through which megatron-core's writers report, deaf to SIGTERM: who stops a job (Slurm, a
    shell) tells all its processes, and this one is needed for the last checkpoint."""
    resource_tracker.ensure_running()  # which would unblock the signal when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a new process begins with the same
    try:
        filesystem_async._get_write_results_queue()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
