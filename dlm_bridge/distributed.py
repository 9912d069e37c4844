"""Ranks and world size of this process, torch's default process group, and collective operations.

A launcher (torchrun, accelerate launch) sets environment variables; without one there is a single process. Process
groups of an engine (megatron-core's parallel state, Accelerate's) belong to the engine. torch is imported on first
communication.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dlm_bridge.errors import DlmBridgeError, SettingError, WorkerError

T = TypeVar("T")
# One process may need hours longer than another for its rows, or to score all outputs.
TIMEOUT = datetime.timedelta(days=7)
_before_end: list[Callable[[], None]] = []


def launched() -> bool:
    """True if a launcher has started this process."""
    return "WORLD_SIZE" in os.environ


def launched_by_torchrun() -> bool:
    """True if torchrun, or accelerate launch, which uses it, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Rank of this process in the job. Raises SettingError for a malformed variable, like the functions below."""
    return _number("RANK") or 0


def is_main() -> bool:
    """True for the process that prints and logs for all."""
    return rank() == 0


def world_size() -> int:
    """Number of processes of the job."""
    size = _number("WORLD_SIZE")
    return 1 if size is None else size


def local_rank() -> int | None:
    """Rank of this process on its node, None without a launcher."""
    return _number("LOCAL_RANK")


def local_world_size() -> int:
    """Number of the job's processes on this node."""
    return _number("LOCAL_WORLD_SIZE") or world_size()


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise SettingError(name, f"'{text}' is not a number: start the processes with torchrun")
    return int(text)


def named_rank(rank: int) -> str:
    """A rank in messages."""
    return f"rank {rank}"


# -- the launcher's store, and the default process group


def store_address() -> tuple[str, int] | None:
    """Host and port of the launcher's store, None without one."""
    port = _number("MASTER_PORT")
    return None if port is None else (os.environ.get("MASTER_ADDR", "localhost"), port)


def launcher_store(timeout: datetime.timedelta) -> Any:
    """The launcher's store, with keys of this attempt of the job. Raises RuntimeError if it does not answer."""
    address = store_address()
    assert address is not None, "no launcher"
    store = _dist().TCPStore(*address, is_master=False, timeout=timeout)
    return _dist().PrefixStore(f"dlm_bridge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def start_process_group(backend: str, device: Any = None) -> None:
    """Initialise torch's process group with the launcher's processes or this one alone, unless it exists."""
    dist, processes = _dist(), world_size()
    if dist.is_initialized():
        return
    if processes == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise SettingError(missing[0], f"is not set, but WORLD_SIZE is {processes}: start the processes with torchrun")
    dist.init_process_group(backend, device_id=device)


def end_process_group() -> None:
    """Call the functions registered with `before_end`, then destroy torch's process groups, if any."""
    if _is_initialized():
        for release in _before_end:
            release()
        _dist().destroy_process_group()


def before_end(release: Callable[[], None]) -> Callable[[], None]:
    """Decorator that registers a function to be called before process groups are destroyed."""
    _before_end.append(release)
    return release


@contextmanager
def process_group_ends() -> Iterator[None]:
    """Context manager that destroys a process group created inside it. An older one stays."""
    joined = _is_initialized()
    try:
        yield
    finally:
        if not joined:
            end_process_group()


def _is_initialized() -> bool:
    return "torch.distributed" in sys.modules and _dist().is_available() and _dist().is_initialized()


def _dist() -> Any:
    from torch import distributed

    return distributed


# -- collective operations


def from_all(value: T) -> list[T]:
    """All-gather of picklable values: every process's value, by rank."""
    if not _is_initialized():
        return [value]
    values: list[Any] = [None] * _dist().get_world_size()
    _dist().all_gather_object(values, value)
    return values


@contextmanager
def raised_everywhere() -> Iterator[None]:
    """Context manager that raises one process's DlmBridgeError in every process.

    All processes enter and leave it, and must not wait for each other inside.
    """
    failed: DlmBridgeError | None = None
    try:
        yield
    except DlmBridgeError as error:
        failed = error
    found = [error for error in from_all(failed) if error is not None]
    if failed is not None:
        raise failed
    if found:
        raise found[0]


def first_on_main(action: Callable[[], T]) -> T:
    """Result of `action`, run on the first process before the others. An error there is raised in all processes."""
    main = not _is_initialized() or _dist().get_rank() == 0
    with raised_everywhere():
        result = action() if main else None
    return result if main else action()  # type: ignore[return-value]


# -- replicas


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
        return cls.of_group(_dist().new_group(backend="gloo", timeout=TIMEOUT), tp)

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
                error.reason += f" (rank {self.rank})"
            raise

    def _send(self, value: Any, rank: int) -> None:
        with self._waiting_for(rank):
            _dist().send_object_list([value], group_dst=rank, group=self.group)

    def _receive(self, rank: int) -> Any:
        received = [None]
        with self._waiting_for(rank):
            _dist().recv_object_list(received, group_src=rank, group=self.group)
        return received[0]

    @contextmanager
    def _waiting_for(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo's connection is closed
            number = _dist().get_global_rank(self.group, rank)
            raise WorkerError(
                f"rank {number}", "ended before its rows were done: see its output for the cause, then start again"
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
