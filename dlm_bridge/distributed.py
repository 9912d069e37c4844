"""Which process of a job this one is, and what the processes of a job do together.

A launcher (torchrun, accelerate launch) says it in environment variables; without one there is one process. Groups of
processes that an engine makes (megatron-core's parallel state, Accelerate's) stay with the engine. torch is imported
where processes communicate.
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

from dlm_bridge.errors import DlmBridgeError

T = TypeVar("T")
# The first process may have hours of rows more than another, or of scoring what was written.
TIMEOUT = datetime.timedelta(days=7)
_before_end: list[Callable[[], None]] = []


def launched() -> bool:
    """Whether a launcher has started this process."""
    return "WORLD_SIZE" in os.environ


def launched_by_torchrun() -> bool:
    """Whether torchrun, or accelerate launch, which uses it, has started this process as one of a job's."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Number of this process among those of the job."""
    return _number("RANK") or 0


def is_main() -> bool:
    """Whether this process is the one that prints and logs for all."""
    return rank() == 0


def world_size() -> int:
    """Number of processes of the job."""
    size = _number("WORLD_SIZE")
    return 1 if size is None else size


def local_rank() -> int | None:
    """Number of this process among those of its node, None without a launcher."""
    return _number("LOCAL_RANK")


def local_world_size() -> int:
    """Number of the job's processes on this node."""
    return _number("LOCAL_WORLD_SIZE") or world_size()


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise DlmBridgeError(f"{name}={text} is not a number: start the processes with torchrun")
    return int(text)


# -- the launcher's store, and the default process group


def store_address() -> tuple[str, int] | None:
    """Host and port of the launcher's store, None without one."""
    port = _number("MASTER_PORT")
    return None if port is None else (os.environ.get("MASTER_ADDR", "localhost"), port)


def launcher_store(timeout: datetime.timedelta) -> Any:
    """The launcher's store, as it is for this attempt of the job. Raises RuntimeError where it does not answer."""
    address = store_address()
    assert address is not None, "no launcher"
    store = _dist().TCPStore(*address, is_master=False, timeout=timeout)
    return _dist().PrefixStore(f"dlm_bridge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def start_process_group(backend: str, device: Any = None) -> None:
    """Initialise torch's process group, of the launcher's processes or of this one alone; an existing one stays."""
    dist, processes = _dist(), world_size()
    if dist.is_initialized():
        return
    if processes == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise DlmBridgeError(f"WORLD_SIZE={processes}, but {', '.join(missing)} is not set: start with torchrun")
    dist.init_process_group(backend, device_id=device)


def end_process_group() -> None:
    """Destroy torch's process groups, where there are any, after what was registered by `before_end`."""
    if _is_initialized():
        for release in _before_end:
            release()
        _dist().destroy_process_group()


def before_end(release: Callable[[], None]) -> Callable[[], None]:
    """Decorator of what has to be called before process groups are destroyed."""
    _before_end.append(release)
    return release


@contextmanager
def process_group_ends() -> Iterator[None]:
    """On exit, a process group that was made inside is destroyed; one that a caller in this process had stays."""
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


# -- work of all processes


def from_all(value: T) -> list[T]:
    """What each process of the run has, by rank. Every process calls it."""
    if not _is_initialized():
        return [value]
    values: list[Any] = [None] * _dist().get_world_size()
    _dist().all_gather_object(values, value)
    return values


@contextmanager
def raised_everywhere() -> Iterator[None]:
    """A DlmBridgeError of one process's block is raised in every process. They all enter and leave it, and wait for no
    other within."""
    failed: DlmBridgeError | None = None
    try:
        yield
    except DlmBridgeError as error:
        failed = error
    messages = from_all(None if failed is None else str(failed))
    if failed is not None:
        raise failed
    if found := [message for message in messages if message is not None]:
        raise DlmBridgeError(found[0])


def first_on_main(action: Callable[[], T]) -> T:
    """What `action` returns, run on the first process before the others; an error there is raised everywhere."""
    main = not _is_initialized() or _dist().get_rank() == 0
    with raised_everywhere():
        result = action() if main else None
    return result if main else action()  # type: ignore[return-value]


# -- replicas


@dataclass(frozen=True)
class Replicas:
    """Processes that work together, as one of them sees them, and the replicas of a model that they hold. Without a
    launcher there is one process, `ALONE`.

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
        """The launcher's processes. All of them call it."""
        if world_size() == 1:
            return ALONE
        start_process_group("gloo")  # of replicas, which exchange texts and figures alone
        return cls.of_group(_dist().new_group(backend="gloo", timeout=TIMEOUT), tp)

    @classmethod
    def of_group(cls, group: Any, tp: int = 1) -> Replicas:
        """The processes of a group between CPUs."""
        return cls(group.rank(), group.size(), tp, group)

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
            raise DlmBridgeError(
                f"rank {number} has ended before its rows were done: what it printed says why; start the job again"
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
