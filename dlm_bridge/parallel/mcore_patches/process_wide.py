"""Process-wide replacements: code of megatron-core that assumes CUDA, and its optimizers with torch's Adam.

The table in `mcore_patches` lists the name that each function replaces. megatron-core uses torch's Adam if neither
Transformer Engine nor apex is installed, but cannot save and load its checkpoints without these patches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, resource_tracker
from multiprocessing.managers import SyncManager
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.files.reading import gc_paused
from dlm_bridge.processes import end_with_parent, how_it_ended, signals_blocked

# Modules that create tensors with `device="cuda"`, or use streams.
CUDA_ONLY_MODULES = (
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
    # The all-to-all dispatcher copies split sizes to the CPU on a separate stream; shared experts run on another.
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.moe.shared_experts",
    # The tracker of auxiliary losses.
    "megatron.core.transformer.moe.moe_utils",
    # The rotary embedding under context parallelism pins its indices.
    "megatron.core.models.common.embeddings.rope_utils",
    # Schedule plans run on two streams.
    "megatron.core.pipeline_parallel.utils",
    "megatron.core.pipeline_parallel.combined_1f1b",
    "megatron.core.models.common.model_chunk_schedule_plan",
    "megatron.core.models.gpt.fine_grained_callables",
    # Ranks that read a checkpoint together exchange tensors; ranks that save agree on reusing a plan.
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)


def uses_torch_adam() -> bool:
    """True if megatron-core uses torch's Adam."""
    return all(importlib.util.find_spec(name) is None for name in ("transformer_engine", "apex"))


def _for_torch_adam(
    override: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[Any], Callable[..., Any]]:
    """Override a method only if the wrapped optimizer is torch's Adam, and not with Megatron FSDP, which has its own
    checkpoint format."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        replacement = override(original)

        @functools.wraps(original)
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            fsdp = getattr(getattr(self, "ddp_config", None), "use_megatron_fsdp", False)
            ours = isinstance(self.optimizer, torch.optim.Adam) and not fsdp  # AdamW is one
            return (replacement if ours else original)(self, *arguments, **options)

        return method

    return make


@_for_torch_adam
def adam_step_with_ready_grads(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count steps on ranks without parameters, such as a pipeline stage without experts in the experts' optimizer.
    Adam counts per parameter, but all ranks load the steps that one rank saves."""

    def step_with_ready_grads(self: Any) -> bool:
        done = original(self)
        if done and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = group.get("step", 0.0) + 1.0
        return done

    return step_with_ready_grads


def _common_step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Step count of an optimizer without parameters."""
    return torch.tensor(float(optimizer.param_groups[0].get("step", 0.0)))


@_for_torch_adam
def adam_sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Initialise Adam's state before the first step (fp16 may skip some); a checkpoint without it cannot be loaded."""

    def sharded_state_dict(self: Any, *arguments: Any, **options: Any) -> Any:
        _init_adam_state(self.optimizer)
        result = original(self, *arguments, **options)
        if not self.optimizer.state:
            result.get("optimizer", result)["state"]["common_step"] = _common_step(self.optimizer)
        return result

    return sharded_state_dict


@_for_torch_adam
def adam_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Restore a step count of zero, which is not saved but which Adam needs."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        step = state_dict.get("optimizer", state_dict)["state"].setdefault("common_step", torch.tensor(0.0))
        original(self, state_dict)
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = float(step)

    return load_state_dict


@_for_torch_adam
def adam_distributed_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Initialise a step count before the first step: saving asserts that there is exactly one."""

    def state_dict(self: Any) -> Any:
        _init_adam_state(self.optimizer)
        if self.optimizer.state:
            return original(self)
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            | {"step": _common_step(self.optimizer).item()}
            for group in self.optimizer.param_groups
        ]
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": {"param_groups": groups}, **scaler}

    return state_dict


@_for_torch_adam
def adam_distributed_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give every parameter its own step count. Loading shares one tensor, which Adam would advance once for each."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        _init_adam_state(self.optimizer)
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


@_for_torch_adam
def adam_set_main_param_and_optimizer_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load without a step count among the tensors, where it is not stored, and without autograd."""

    @torch.no_grad()
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        main_param.copy_(tensors["param"])
        for name, value in self.optimizer.state[main_param].items():
            if name != "step":  # is in the parameter groups
                value.copy_(tensors[name])

    return set_states


def _init_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam creates in its first step, for each parameter without state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


class _Stream:
    """Stream or event on a device without asynchronous kernels: all methods are no-ops."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    wait = wait_event = wait_stream

    def record(self, stream: Any = None) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


class _CudaOnCPU(types.ModuleType):
    """`torch.cuda` with a single stream, on which all kernels run synchronously."""

    Stream = Event = _Stream
    nvtx = types.SimpleNamespace(range_push=lambda name: None, range_pop=lambda: None)
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
    """Wrap a tensor constructor: the device "cuda" is the CPU, and memory is never pinned."""

    def on_cpu(*arguments: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return create(*arguments, device="cpu" if device == "cuda" else device, **options)

    return staticmethod(on_cpu)


class TorchOnCPU(types.ModuleType):
    """`torch` for megatron-core's modules on the CPU platform."""

    cuda = _CudaOnCPU("cuda")
    empty = _created_on_cpu(torch.empty)
    empty_like = _created_on_cpu(torch.empty_like)
    ones = _created_on_cpu(torch.ones)
    tensor = _created_on_cpu(torch.tensor)
    zeros = _created_on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def replace_with(replacement: Any) -> Callable[[Any], Any]:
    """Override that ignores the original."""
    return lambda original: replacement


def cpu_device(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def do_nothing(*_: Any, **__: Any) -> None:
    return None


def cpu_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_cpu_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def cpu_manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def silent_logging(original: Any) -> types.SimpleNamespace:
    silent = logging.Logger("silent", logging.CRITICAL)
    return types.SimpleNamespace(getLogger=lambda name: silent)


def split_sizes_on_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def same_tensor(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_of_cuda(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of_cuda


def in_one_dtype(original: Any) -> Any:
    """Convert the operands of a product to the result's dtype if they differ."""

    def te_general_gemm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, **options: Any) -> Any:
        if a.dtype != b.dtype:
            a, b = a.to(out_dtype), b.to(out_dtype)
        return original(a, b, out_dtype, **options)

    return None if original is None else te_general_gemm


def init_data_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_data(self: Any, device: Any, *arguments: Any, **options: Any) -> None:
        original(self, "cpu" if device == "cuda" else device, *arguments, **options)

    return init_data


def start_results_queue(writers: Any) -> None:
    """Start the process of the queue to which the checkpoint writers in a module, `writers`, report, unless it is
    running. It ends with this process and ignores signals: Slurm or a shell signals all processes of a job, but the
    last checkpoint needs this queue."""
    if writers._results_queue is not None:
        return
    resource_tracker.ensure_running()  # before signals are blocked: starting it unblocks them
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    with signals_blocked():
        manager.start(end_with_parent, (os.getpid(),))
    writers._results_queue = manager.Queue()


def drop_stale_results(writers: Any) -> None:
    """Empty the queue of `start_results_queue` before a save, while no other one is running: the save would take the
    results of one that failed before it read them for its own, and write their files' names into its .metadata."""
    while not writers._results_queue.empty():
        writers._results_queue.get_nowait()


def collect_from_writers(original: Any) -> Any:
    """Write a rank's part of a checkpoint with several forked processes, and put their results, or the first
    exception, into `results_queue`. Each process has its own pipe, so that a killed process is detected."""

    def write_preloaded_data_multiproc(
        transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results_queue: Any
    ) -> None:
        from dlm_bridge.parallel.core import filesystem_async

        write = functools.partial(
            filesystem_async.FileSystemWriterAsync.write_preloaded_data, transforms, use_fsync=True, use_msc=use_msc
        )
        try:
            with gc_paused():  # a collection would free the rank's CUDA tensors in another process
                results: Any = _written(write, write_buckets, rank)
        except Exception as error:
            results = error
        results_queue.put(results)

    return staticmethod(write_preloaded_data_multiproc)


def _written(write: Callable[..., None], buckets: list[Any], rank: int) -> dict[int, Any]:
    """Write each bucket in a process of its own; returns their results by bucket number. Raises a process's exception,
    or RuntimeError if one ends without a result, after all processes were stopped."""
    uncounted = types.SimpleNamespace(get=do_nothing, task_done=do_nothing)  # the pipes show which processes are done
    context = multiprocessing.get_context("fork")
    running: dict[connection.Connection, Any] = {}
    results: dict[int, Any] = {}
    try:
        for number, bucket in enumerate(buckets):
            here, there = context.Pipe(duplex=False)
            queues = {"results_queue": types.SimpleNamespace(put=there.send), "count_queue": uncounted}
            words = {"local_proc_idx": number, "write_bucket": bucket, **queues}
            process = context.Process(target=write, kwargs=words)
            process.start()
            running[here] = process
            there.close()
        while running:
            # Sentinels too: a process forked elsewhere in the meantime may hold an end of a pipe.
            connection.wait([*running, *(process.sentinel for process in running.values())])
            for here, process in list(running.items()):
                alive = process.is_alive()  # read before the pipe: a process that ended has sent its result
                if not (readable := here.poll()) and alive:
                    continue
                try:
                    if not readable:
                        raise EOFError
                    number, result = here.recv()
                except (EOFError, OSError):
                    process.join()
                    ended = how_it_ended(process.exitcode)
                    raise RuntimeError(f"a process of rank {rank} that writes it {ended}") from None
                if isinstance(result, Exception):
                    raise result
                results[number] = result
                running.pop(here).join()
        return results
    finally:
        for process in running.values():
            process.kill()
            process.join()


def collect_from_threads(original: Any) -> Any:
    """Write a rank's part of a checkpoint with a thread for each file, and put their results, or the first exception,
    into `results_queue`."""

    def write_preloaded_data_multithread(
        transforms: list[Any], use_msc: bool, rank: int, write_buckets: list[Any], results_queue: Any
    ) -> None:
        from dlm_bridge.parallel.core import filesystem_async

        def write(number: int, bucket: Any) -> tuple[int, Any]:
            written: tuple[int, Any] = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, results_queue=None, count_queue=None, use_fsync=True, use_msc=use_msc
            )
            return written

        with gc_paused(), ThreadPoolExecutor(len(write_buckets) or 1) as threads:
            results = dict(threads.map(write, range(len(write_buckets)), write_buckets))
        failures = (result for result in results.values() if isinstance(result, Exception))
        results_queue.put(next(failures, results))

    return staticmethod(write_preloaded_data_multithread)


def end_writers_with_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    """End a checkpoint writer with its parent, the rank or the rank's background save."""

    @functools.wraps(original)
    def write_preloaded_data(*arguments: Any, **options: Any) -> None:
        if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
            end_with_parent(parent.pid)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the rank
        original(*arguments, **options)

    return write_preloaded_data


def original_device(tensor: Any) -> str:
    """Device type of megatron-core's sharded `tensor` before it was copied to the CPU to be saved."""
    return str(getattr(tensor, "orig_device", tensor.data.device.type))


@contextlib.contextmanager
def replicas_on_cpu() -> Iterator[None]:
    """Context manager in which local checkpoints of other ranks are received on the CPU."""
    from nvidia_resiliency_ext.checkpointing.local.replication import group_utils

    original = group_utils.torch
    group_utils.torch = TorchOnCPU("torch")
    try:
        yield
    finally:
        group_utils.torch = original


@contextlib.contextmanager
def distributed_reader(reader: Any) -> Iterator[None]:
    """Context manager in which megatron-core reads distributed checkpoints with `reader`, a torch storage reader."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    original = strategy._get_filesystem_reader
    users = [module for module in (strategy, serialization) if hasattr(module, "_get_filesystem_reader")]
    for module in users:
        module._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        for module in users:
            module._get_filesystem_reader = original


def destroy_process_groups() -> None:
    """Destroy megatron-core's process groups. megatron-core only drops references to them, so that their threads and
    sockets would accumulate. Every process calls it."""
    from dlm_bridge.parallel.core import parallel_state

    own = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    dist.barrier()  # a group must not be destroyed while another process still communicates in it
    for group in own:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None  # destroy_model_parallel leaves it set
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # Operators cache their results' device mesh, and confuse it with another one over the same ranks.
        _clear_sharding_prop_cache()
