"""Process-wide replacements: what of megatron-core takes CUDA for granted, and its optimizers with torch's own Adam.

The table in `mcore_patches` says which name each function here replaces. megatron-core takes torch's Adam where
neither Transformer Engine nor apex is installed: its checkpoints do not save and load until a few places are patched.
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
from multiprocessing import connection, resource_tracker
from multiprocessing.managers import SyncManager
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.files.reading import gc_paused
from dlm_bridge.processes import end_with_parent, how_it_ended, signals_blocked

# Modules that make tensors with `device="cuda"`, or use streams.
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
    # Split sizes of the all-to-all dispatcher go to the CPU on a stream of their own; shared experts run on another.
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
    # Ranks that share the reading of a checkpoint exchange tensors; savers agree on whether a plan can be used again.
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)


def uses_torch_adam() -> bool:
    """Whether megatron-core would take torch's Adam."""
    return all(importlib.util.find_spec(name) is None for name in ("transformer_engine", "apex"))


def _for_torch_adam(
    override: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Callable[[Any], Callable[..., Any]]:
    """Override a method only where the wrapped optimizer is torch's Adam, and not under Megatron FSDP, which saves in
    its own way."""

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
    """Adam counts steps parameter by parameter, so not at all on a rank without any, such as the experts' optimizer on
    a pipeline stage without experts. But what one rank saves of an optimizer, all ranks load."""

    def step_with_ready_grads(self: Any) -> bool:
        done = original(self)
        if done and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = group.get("step", 0.0) + 1.0
        return done

    return step_with_ready_grads


def _common_step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The steps of an optimizer without parameters."""
    return torch.tensor(float(optimizer.param_groups[0].get("step", 0.0)))


@_for_torch_adam
def adam_sharded_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is saved before the first step (fp16 may skip some) has no state of Adam, and cannot be loaded."""

    def sharded_state_dict(self: Any, *arguments: Any, **options: Any) -> Any:
        _init_adam_state(self.optimizer)
        result = original(self, *arguments, **options)
        if not self.optimizer.state:
            result.get("optimizer", result)["state"]["common_step"] = _common_step(self.optimizer)
        return result

    return sharded_state_dict


@_for_torch_adam
def adam_load_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """A step count of zero is not saved, and Adam wants one all the same."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        step = state_dict.get("optimizer", state_dict)["state"].setdefault("common_step", torch.tensor(0.0))
        original(self, state_dict)
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                group["step"] = float(step)

    return load_state_dict


@_for_torch_adam
def adam_distributed_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Saving asserts that there is exactly one step count, but before the first step there is none."""

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
    """Loading makes one tensor the step count of every parameter, which Adam then advances once for each of them."""

    def load_state_dict(self: Any, state_dict: Any) -> None:
        _init_adam_state(self.optimizer)
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


@_for_torch_adam
def adam_set_main_param_and_optimizer_states(original: Callable[..., Any]) -> Callable[..., Any]:
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


def _init_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """The state that Adam itself makes at its first step, for each parameter that has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


class _Stream:
    """A stream or an event on a device without asynchronous work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """On any device, of any priority."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    wait = wait_stream

    def record(self, stream: Any = None) -> None:
        """Everything before has happened."""

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _CudaOnCPU(types.ModuleType):
    """`torch.cuda` where there is one stream, on which everything happens at once."""

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
    """A function that makes a tensor, where the device "cuda" means the CPU, whose memory is never pinned."""

    def on_cpu(*arguments: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return create(*arguments, device="cpu" if device == "cuda" else device, **options)

    return staticmethod(on_cpu)


class TorchOnCPU(types.ModuleType):
    """`torch` as a module of megatron-core sees it on the CPU platform."""

    cuda = _CudaOnCPU("cuda")
    empty = _created_on_cpu(torch.empty)
    empty_like = _created_on_cpu(torch.empty_like)
    ones = _created_on_cpu(torch.ones)
    tensor = _created_on_cpu(torch.tensor)
    zeros = _created_on_cpu(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def replace_with(replacement: Any) -> Callable[[Any], Any]:
    """An override that ignores the original."""
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


def init_data_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_data(self: Any, device: Any, *arguments: Any, **options: Any) -> None:
        original(self, "cpu" if device == "cuda" else device, *arguments, **options)

    return init_data


def release_cuda_graphs() -> None:
    """Forget the layers that CUDA graphs were made for, with the memory that graphs share, so that those of another
    model can be made. megatron-core has one list of them for the process, and no layer of another model in it."""
    from megatron.core.transformer import cuda_graphs

    cuda_graphs.delete_cuda_graphs()
    buffers = cuda_graphs._CudagraphGlobalRecord.tensor_reuse_pool
    for kept in (buffers.pool, buffers.tensor_strong_refs, buffers.tensor_strong_refs_dataptrs):
        kept.clear()


def start_results_queue() -> None:
    """Start the process through which megatron-core's checkpoint writers report, to end with this one and not before:
    whoever stops a job (Slurm, a shell) signals all its processes, and this one is needed for the last checkpoint."""
    from dlm_bridge.parallel.core import filesystem_async

    if filesystem_async._results_queue is not None:
        return
    resource_tracker.ensure_running()  # which would unblock the signals when it is started
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    with signals_blocked():
        manager.start(end_with_parent, (os.getpid(),))
    filesystem_async._results_queue = manager.Queue()


def collect_from_writers(original: Any) -> Any:
    """A rank's share of a checkpoint is written by several forked processes, whose results, or the first exception, go
    to `results_queue`. Each has a pipe of its own, which ends with it, however it ends."""

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
    """What a process for each bucket has written, by the bucket's number. Raises a process's exception, and
    RuntimeError where one has ended without a result; then none is left."""
    uncounted = types.SimpleNamespace(get=do_nothing, task_done=do_nothing)  # who is done is seen at its pipe
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
            # A process that is forked elsewhere meanwhile may hold an end of a pipe: those of the processes, too.
            connection.wait([*running, *(process.sentinel for process in running.values())])
            for here, process in list(running.items()):
                alive = process.is_alive()  # before the look at its pipe, where a result is by the time that it ends
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


def end_writers_with_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint writer, which is a process forked by a rank or by its background save, ends with that."""

    @functools.wraps(original)
    def write_preloaded_data(*arguments: Any, **options: Any) -> None:
        if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
            end_with_parent(parent.pid)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the rank
        original(*arguments, **options)

    return write_preloaded_data


def original_device(tensor: Any) -> str:
    """The kind of device of megatron-core's sharded `tensor`, also while it is on the CPU to be saved."""
    return str(getattr(tensor, "orig_device", tensor.data.device.type))


@contextlib.contextmanager
def replicas_on_cpu() -> Iterator[None]:
    """Receive local checkpoints of other ranks inside where there is no GPU."""
    from nvidia_resiliency_ext.checkpointing.local.replication import group_utils

    original = group_utils.torch
    group_utils.torch = TorchOnCPU("torch")
    try:
        yield
    finally:
        group_utils.torch = original


@contextlib.contextmanager
def distributed_reader(reader: Any) -> Iterator[None]:
    """Read the distributed checkpoint inside by `reader`, a storage reader of torch's."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    original = strategy._get_filesystem_reader
    strategy._get_filesystem_reader = lambda *_, **__: reader
    try:
        yield
    finally:
        strategy._get_filesystem_reader = original


def destroy_process_groups() -> None:
    """Destroy megatron-core's process groups, which it only forgets: their threads and sockets would pile up. Every
    process calls it."""
    from dlm_bridge.parallel.core import parallel_state

    own = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    dist.barrier()  # a group must not close while another process still talks in it
    for group in own:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS = None  # which it leaves set
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        # Operators cache their results' device mesh, and take another one over the same ranks for the same.
        _clear_sharding_prop_cache()
