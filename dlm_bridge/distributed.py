"""Rows over the processes of a launcher: each, or each group of them, holds the model and takes its share of the
batches."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from dlm_bridge.errors import DlmBridgeError

T = TypeVar("T")
# The first process may have hours of rows more than another, or of scoring what was written.
TIMEOUT = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Replicas:
    """The processes of a job, as one of them sees them. Without a launcher there is one, `ALONE`.

    A share is every n-th of the batches (or rows) that one process would run, so that each of them is computed exactly
    as in one process. Objects go between CPUs, from process to process: whoever waits knows the one that has ended.

    Args:
        rank: of this process.
        processes: how many there are.
        tp: how many neighbouring ones have one model together, tensor parallel, and run the same rows; 1: each has the
            whole model.
        group: between CPUs; None with one process.
    """

    rank: int = 0
    processes: int = 1
    tp: int = 1
    group: Any = None

    @classmethod
    def of_launcher(cls, tp: int) -> Replicas:
        """The launcher's processes, whose process group is initialised. All of them call it."""
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), tp, group)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    @property
    def leads_share(self) -> bool:
        """Whether this is the process that writes the rows of its share."""
        return self.rank % self.tp == 0

    @property
    def shares(self) -> int:
        """In how many parts rows are split."""
        return self.processes // self.tp

    @property
    def number(self) -> int:
        """Of this process's share, from 0."""
        return self.rank // self.tp

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of `items`, in their order."""
        return items[self.number :: self.shares]

    def broadcast(self, value: Any = None) -> Any:
        """The first process's value, in all."""
        if self.leads:
            for rank in range(1, self.processes):
                self._send(value, rank)
            return value
        return self._receive(0)

    def gather(self, value: T) -> list[T]:
        """Each share's value, in all processes: that of the first of those that have it."""
        if self.shares == 1:
            return [value]
        if not self.leads:
            if self.leads_share:
                self._send(value, 0)
            return list(self.broadcast())
        return list(
            self.broadcast([value, *(self._receive(rank) for rank in range(self.tp, self.processes, self.tp))])
        )

    def collect(self, values: Mapping[int, T]) -> list[T]:
        """The values of all shares by their index, which count from 0 over all shares, in all processes."""
        merged = {index: value for part in self.gather(dict(values)) for index, value in part.items()}
        return [merged[index] for index in range(len(merged))]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context of work on a share: an error says in which process it was raised."""
        try:
            yield
        except DlmBridgeError as error:
            if self.shares == 1:
                raise
            raise DlmBridgeError(f"rank {self.rank}: {error}") from error

    def _send(self, value: Any, rank: int) -> None:
        with self._waiting_for(rank):
            dist.send_object_list([value], dst=rank, group=self.group)

    def _receive(self, rank: int) -> Any:
        received = [None]
        with self._waiting_for(rank):
            dist.recv_object_list(received, src=rank, group=self.group)
        return received[0]

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's connection is closed
            raise DlmBridgeError(
                f"rank {rank} has ended before its rows were done: what it printed says why; start the job again"
            ) from error


ALONE = Replicas()


def in_all_processes(method: Callable[..., T]) -> Callable[..., T]:
    """Decorator of a method with one argument, of an object that every process has with its `replicas`: the first
    process calls it, the others run it in `serve`."""

    @functools.wraps(method)
    def announced(self: Any, argument: Any, *args: Any, **kwargs: Any) -> T:
        if self.replicas.leads:
            self.replicas.broadcast((method.__name__, argument))
        return method(self, argument, *args, **kwargs)

    return announced


def serve(owner: Any) -> None:
    """In every process but the first: run the methods that the first one calls, until it broadcasts None."""
    while (call := owner.replicas.broadcast()) is not None:
        name, argument = call
        getattr(owner, name)(argument)
