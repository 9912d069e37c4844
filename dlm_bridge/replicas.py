"""Data-parallel replicas of a model that share rows: for sampling, evaluation and rollouts."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm_bridge.distributed import torch_distributed, world_size
from dlm_bridge.errors import DlmBridgeError, WorkerError
from dlm_bridge.job import named_rank, start_process_group

T = TypeVar("T")
# One process may need hours longer than another for its rows, or to score all outputs.
TIMEOUT = datetime.timedelta(days=7)


@dataclass(frozen=True)
class Replicas:
    """Data-parallel replicas of a model, from the point of view of one process. `ALONE` without a launcher.

    A share is every n-th batch (or row) of those that a single process would run, so that each is computed exactly as
    in one process. Objects are sent point to point between CPUs, so that an error names the process that has ended.

    Args:
        rank: rank of this process.
        processes: number of processes.
        tp: number of consecutive processes that share a tensor parallel model and its rows.
        group: gloo process group; None with one process.
    """

    rank: int = 0
    processes: int = 1
    tp: int = 1
    group: Any = None

    @classmethod
    def of_launcher(cls, tp: int) -> Replicas:
        """Replicas of the launcher's processes; a collective operation."""
        if world_size() == 1:
            return ALONE
        start_process_group("gloo")
        return cls.of_group(torch_distributed().new_group(backend="gloo", timeout=TIMEOUT), tp)

    @classmethod
    def of_group(cls, group: Any, tp: int = 1) -> Replicas:
        """Replicas of the processes of a gloo group."""
        return cls(group.rank(), group.size(), tp, group)

    @property
    def leads(self) -> bool:
        """True for the process that writes and reports."""
        return self.rank == 0

    @property
    def leads_share(self) -> bool:
        """True for the process that writes the rows of its share."""
        return self.rank % self.tp == 0

    @property
    def shares(self) -> int:
        """Number of shares."""
        return self.processes // self.tp

    @property
    def number(self) -> int:
        """Index of this process's share, from 0."""
        return self.rank // self.tp

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Select the items of this process's share, in order."""
        return items[self.number :: self.shares]

    def broadcast(self, value: Any = None) -> Any:
        """Send the first process's value to all. Returns it. Raises WorkerError if a process has ended."""
        if self.leads:
            for rank in range(1, self.processes):
                self._send(value, rank)
            return value
        return self._receive(0)

    def gather(self, value: T) -> list[T]:
        """All-gather one value per share, from its first process. Raises WorkerError if a process has ended."""
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
        """All-gather the values of all shares, ordered by their index over all shares."""
        merged = {index: value for part in self.gather(dict(values)) for index, value in part.items()}
        return [merged[index] for index in range(len(merged))]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that adds the rank to the reason of a DlmBridgeError, if there are several shares."""
        try:
            yield
        except DlmBridgeError as error:
            if self.shares > 1:
                error.reason += f" ({named_rank(self.rank)})"
            raise

    def _send(self, value: Any, rank: int) -> None:
        with self._waiting_for(rank):
            torch_distributed().send_object_list([value], group_dst=rank, group=self.group)

    def _receive(self, rank: int) -> Any:
        received = [None]
        with self._waiting_for(rank):
            torch_distributed().recv_object_list(received, group_src=rank, group=self.group)
        return received[0]

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's connection is closed
            number = torch_distributed().get_global_rank(self.group, rank)
            raise WorkerError(
                named_rank(number), "ended before its rows were done: see its output for the cause, then start again"
            ) from error


ALONE = Replicas()


def in_all_processes(method: Callable[..., T]) -> Callable[..., T]:
    """Decorator of a method with one argument that the first process calls and the others run in `serve`. Every
    process has the object, with an attribute `replicas`."""

    @functools.wraps(method)
    def announced(self: Any, argument: Any, *args: Any, **kwargs: Any) -> T:
        if self.replicas.leads:
            self.replicas.broadcast((method.__name__, argument))
        return method(self, argument, *args, **kwargs)

    return announced


def serve(owner: Any) -> None:
    """Run the methods of `owner` that the first process calls, until it broadcasts None; for the other processes."""
    while (call := owner.replicas.broadcast()) is not None:
        name, argument = call
        getattr(owner, name)(argument)
