"""Collectives through the host: several ranks share a GPU, which NCCL does not let them.

What a layout computes does not depend on how its messages travel, so four ranks on one GPU show its equality as four
GPUs do; they show nothing of speed, of NCCL or of communication that overlaps computation. A collective waits for the
caller's stream, copies what it sends to host memory, lets gloo carry it, and copies what came back to the device when
the caller waits. 16-bit numbers are summed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

NAME = "host"  # the backend that `register` adds
Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make `dist.init_process_group(NAME)` known."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, HostGroup, devices=["cpu", "cuda"])


class HostWork(Work):
    """A collective under way: what gloo does, then the copies to the device. `result` is what its future holds."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], None], result: Tensors = ()) -> None:
        super().__init__()
        self.works, self.finish, self.result = works, finish, result
        self.done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.done:
            for work in self.works:
                work.wait()
            self.finish()
            self.done = True
        return True

    def is_completed(self) -> bool:
        return self.done

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """As DistributedDataParallel asks for one: complete already."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self.result))
        return future


class HostGroup(dist.ProcessGroup):
    """The collectives that megatron-core, its FSDP and Transformer Engine call, by the names that torch calls them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for device in ("cpu", "cuda"):  # which gives the group its name, and whoever asks a backend
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def broadcast(self, tensors: Tensors, opts: Any) -> HostWork:
        (tensor,) = tensors
        staged = _bytes(tensor)
        return HostWork([self.gloo.broadcast([staged], opts)], lambda: _put(tensor, staged))

    def allreduce(self, tensors: Tensors, opts: Any) -> HostWork:
        staged = [_numbers(tensor) for tensor in tensors]
        works = [self._sum(number, opts.reduceOp) for number in staged]

        def finish() -> None:
            for tensor, number in zip(tensors, staged, strict=True):
                tensor.detach().copy_(self._mean(number, opts.reduceOp))

        return HostWork(works, finish, tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> HostWork:
        (tensor,) = tensors
        staged = _numbers(tensor)
        work = self._sum(staged, opts.reduceOp)

        def finish() -> None:
            if self.rank() == opts.rootRank:
                tensor.detach().copy_(self._mean(staged, opts.reduceOp))

        return HostWork([work], finish)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> HostWork:
        ((tensor,), (found,)) = inputs, outputs
        staged = [torch.empty_like(_bytes(part)) for part in found]

        def finish() -> None:
            for part, arrived in zip(found, staged, strict=True):
                _put(part, arrived)

        return HostWork([self.gloo.allgather([staged], [_bytes(tensor)])], finish)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> HostWork:
        mine = _bytes(tensor)
        staged = [torch.empty_like(mine) for _ in range(self.size())]
        return HostWork([self.gloo.allgather([staged], [mine])], lambda: _put(output, torch.cat(staged)))

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HostWork:
        return _all([self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)])

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> HostWork:
        staged = _numbers(tensor)
        work = self._sum(staged, opts.reduceOp)

        def finish() -> None:
            mine = staged.view(self.size(), -1)[self.rank()]
            output.detach().copy_(self._mean(mine, opts.reduceOp).view(output.shape))

        return HostWork([work], finish)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> HostWork:
        ((output,), (parts,)) = outputs, inputs
        return self._reduce_scatter_base(output, torch.stack(list(parts)), opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> HostWork:
        return _all([self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, to_me: list[int], from_me: list[int], opts: Any = None
    ) -> HostWork:
        arrived = torch.empty_like(_bytes(output))
        options = dist.AllToAllOptions()
        options.timeout = timedelta(minutes=5)
        work = self.gloo.alltoall_base(
            arrived, _bytes(tensor), _in_bytes(to_me, output), _in_bytes(from_me, tensor), options
        )
        return HostWork([work], lambda: _put(output, arrived))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> HostWork:
        sent = torch.cat([_bytes(part) for part in inputs])
        arrived = torch.empty(sum(map(_size, outputs)), dtype=torch.uint8)
        work = self.alltoall_base(arrived, sent, [*map(_size, outputs)], [*map(_size, inputs)])

        def finish() -> None:
            work.wait()
            for part, found in zip(outputs, arrived.split([*map(_size, outputs)]), strict=True):
                _put(part, found)

        return HostWork([], finish)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> HostWork:
        (tensor,) = inputs
        mine = _bytes(tensor)
        staged = [torch.empty_like(mine) for _ in range(self.size())]

        def finish() -> None:
            for part, arrived in zip(outputs[0] if outputs else [], staged, strict=False):
                _put(part, arrived)

        return HostWork([self.gloo.allgather([staged], [mine])], finish)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> HostWork:
        (output,) = outputs
        parts = torch.cat([_bytes(part) for part in inputs[0]]) if inputs else None
        staged = torch.empty(_size(output) * self.size(), dtype=torch.uint8) if parts is None else parts
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = opts.rootRank, 0
        work = self.gloo.broadcast([staged], options)
        return HostWork([work], lambda: _put(output, staged.view(self.size(), -1)[self.rank()]))

    def send(self, tensors: Tensors, rank: int, tag: int) -> HostWork:
        return HostWork([self.gloo.send([_bytes(tensor)], rank, tag) for tensor in tensors], lambda: None)

    def recv(self, tensors: Tensors, rank: int, tag: int) -> HostWork:
        (tensor,) = tensors
        arrived = torch.empty_like(_bytes(tensor))
        return HostWork([self.gloo.recv([arrived], rank, tag)], lambda: _put(tensor, arrived))

    def barrier(self, opts: Any = None) -> HostWork:
        _synchronize()
        options = dist.BarrierOptions()
        options.timeout = timedelta(minutes=10)
        return HostWork([self.gloo.barrier(options)], lambda: None)

    def shutdown(self) -> None:
        """gloo's connections close with the group."""

    # torch 2.13's names for the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _sum(self, numbers: torch.Tensor, op: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        return self.gloo.allreduce([numbers], options)

    def _mean(self, numbers: torch.Tensor, op: Any) -> torch.Tensor:
        return numbers / self.size() if op == dist.ReduceOp.AVG else numbers


def _all(works: Sequence[HostWork]) -> HostWork:
    return HostWork(works, lambda: None)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory of what the caller's stream has made of it."""
    _synchronize()
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Of any dtype, gloo's few among them or not."""
    return _host(tensor).reshape(-1).view(torch.uint8)


def _put(tensor: torch.Tensor, arrived: torch.Tensor) -> None:
    tensor.detach().copy_(arrived.view(tensor.dtype).view(tensor.shape))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    found = _host(tensor)
    return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_bytes(rows: Sequence[int], tensor: torch.Tensor) -> list[int]:
    each = _size(tensor) // max(len(tensor), 1)
    return [count * each for count in rows]
