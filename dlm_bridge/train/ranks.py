"""Detection of slow ranks of a run, and of ranks that no longer answer."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import distributed, processes
from dlm_bridge.errors import one_line
from dlm_bridge.job import Attempt, current, named_rank
from dlm_bridge.train import hang

INTERVAL_S = 5.0  # between two heartbeats
STORE_GRACE_S = 30.0  # for a run to end after the process of the store has ended
FAILURE = "failure"  # key

TimedWork = float | tuple[torch.Event, torch.Event]  # seconds, or (start, end)


class StragglerDetector:
    """Times work on each rank, and compares it every `interval` steps among the ranks of a pipeline stage, which do
    the same work. On a GPU the time is measured between two events.

    megatron-core's own StragglerDetector opens a port for its commands, needs NVML and supports CUDA only. Ranks that
    communicate inside a forward pass (tensor, context, expert parallel) wait for their slowest, so a report shows the
    whole group as slow; among data parallel replicas it shows the single rank.

    Args:
        stage: pipeline stage of this rank.
        group: CPU process group of all ranks.
    """

    def __init__(self, interval: int, stage: int, device: torch.device, group: Any) -> None:
        self.interval = interval
        self.stage = stage
        self.device = device
        self.group = group
        self.seconds = 0.0
        self._timed: list[TimedWork] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Context manager that times the work launched inside."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            yield
            self._timed.append(time.perf_counter() - start)
            return
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._timed.append((before, after))

    def take_timed(self) -> list[TimedWork]:
        """Return and clear the timings since the last call, of one step that may still run on the device."""
        timed, self._timed = self._timed, []
        return timed

    def end_step(self, step: int, timed: list[TimedWork]) -> str | None:
        """Add the timings of a step that the device has finished. Returns a report every `interval` steps, on every
        rank. Collective."""
        self.seconds += sum(_seconds(one) for one in timed)
        if step % self.interval:
            return None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.stage, self.seconds / self.interval, socket.gethostname()), self.group)
        self.seconds = 0.0
        return straggler_report(step, found)


def _seconds(timed: TimedWork) -> float:
    return timed if isinstance(timed, float) else timed[0].elapsed_time(timed[1]) / 1000


def straggler_report(step: int, found: list[tuple[int, float, str]]) -> str:
    """One-line report about the pipeline stage whose ranks differ most. `found` contains (stage, seconds per step,
    host) of each rank."""
    by_stage: dict[int, list[tuple[float, int, str]]] = {}
    for rank, (stage, seconds, host) in enumerate(found):
        by_stage.setdefault(stage, []).append((seconds, rank, host))
    extremes = {stage: (max(ranks), min(ranks)) for stage, ranks in by_stage.items()}
    worst = max(extremes, key=lambda stage: extremes[stage][0][0] / max(extremes[stage][1][0], 1e-9))
    (slow, slow_rank, slow_host), (fast, fast_rank, fast_host) = extremes[worst]
    more = slow / max(fast, 1e-9) - 1
    return (
        f"step {step}: forward passes of stage {worst} take {slow:.3f} s on rank {slow_rank} ({slow_host}), the "
        f"slowest, and {fast:.3f} s on rank {fast_rank} ({fast_host}), the fastest: {more:.1%} more"
    )


class Watchdog:
    """Ends this process when another process of the run has failed or has stopped sending heartbeats, and names that
    process: it is stopped or swapped out, or its host is gone, and the others would wait for it in a collective
    operation.

    One thread of each rank writes a new number to the job's store every few seconds. The first rank reads those of all
    ranks, the others read the first rank's. As a call to a store whose machine has lost its network can block for
    minutes, another thread without such calls counts the time. It counts in rounds, which do not pass while this
    process itself is stopped, as by Ctrl-Z.

    Args:
        job: processes of the run.
        timeout_s: seconds without a heartbeat after which the run ends.
        folder: for what `hang.dump` writes before this process ends.
    """

    def __init__(self, job: Attempt, timeout_s: float, folder: Path) -> None:
        self.job, self.timeout_s, self.folder, self.name = job, timeout_s, folder, job.unique("ranks")
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self.interval_s = min(INTERVAL_S, timeout_s / 8)
        self.most_rounds = math.ceil(timeout_s / self.interval_s)
        self.closed = threading.Event()
        self.exchanged = 0  # rounds of heartbeats
        self.silent: str | None = None  # problem of another rank
        for name, run in (("heartbeat", self._exchange), ("watchdog", self._watch)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def close(self, failure: str | None = None) -> None:
        """Stop watching. The rank that hosts the store waits a moment for the others, which read the failure there.

        Args:
            failure: of this rank, which ends the others; empty if it was interrupted; None if it has finished.
        """
        self.closed.set()
        with contextlib.suppress(RuntimeError):
            store = self._store(self.interval_s)
            if failure:
                store.compare_set(FAILURE, "", failure)
            store.set(f"left/{self.rank}", "finished" if failure is None else "")
            others = [f"left/{other}" for other in range(1, self.world_size)]
            if self.job.server is not None:
                store.wait(others, datetime.timedelta(seconds=2 * self.interval_s))

    def _watch(self) -> None:
        exchanged = rounds = 0
        while not self.closed.wait(self.interval_s) and self.silent is None:
            rounds = 0 if self.exchanged != exchanged else rounds + 1
            exchanged = self.exchanged
            if rounds > self.most_rounds:
                self.silent = f"rank 0 ({self.job.hosts[0]}, which has the store) {self._no_heartbeat}"
        if self.closed.is_set():
            return
        hangs = str(self.silent).endswith(self._no_heartbeat)
        stacks = f"; stacks are in {self.folder}" if hangs else ""
        processes.report(f"{self.silent}: the run ends; start it again with `resume`{stacks}")
        if hangs:
            hang.dump(self.folder, self.rank)
        os._exit(2)

    @property
    def _no_heartbeat(self) -> str:
        return f"has sent no heartbeat for {self.timeout_s:g} s (`rank_timeout`)"

    def _exchange(self) -> None:
        try:
            store = self._store(self.timeout_s)
            self.silent = self._first_watches(store) if self.rank == 0 else self._other_watches(store)
        except RuntimeError:  # the process of the store has ended, as at the end of a run, or does not answer
            self.closed.wait(min(self.timeout_s, STORE_GRACE_S))
            self.silent = "the process of the launcher's store has ended or does not answer"

    def _store(self, timeout_s: float) -> Any:
        return self.job.store(self.name, timeout_s)

    def _first_watches(self, store: Any) -> str | None:
        """Watch all ranks from the first one. Returns the problem of a rank, or None when the run ends."""
        others = list(range(1, self.world_size))
        signs, rounds = dict.fromkeys(others, ""), dict.fromkeys(others, 0)
        while not self.closed.wait(self.interval_s):
            self._send_heartbeat(store)
            if failure := _value(store, FAILURE):
                return failure
            there = [rank for rank in others if signs[rank] or store.check([str(rank)])]
            found = dict(zip(there, store.multi_get([str(rank) for rank in there]), strict=True)) if there else {}
            for rank in others:
                sign = found.get(rank, b"").decode()
                rounds[rank] = 0 if sign != signs[rank] else rounds[rank] + 1
                signs[rank] = sign
            silent = [rank for rank in others if self._is_silent(store, rank, rounds[rank])]
            if silent:
                longest = max(silent, key=lambda rank: rounds[rank])
                failure = f"{self._named(longest, signs[longest])} {self._no_heartbeat}"
                store.set(FAILURE, failure)
                return failure
        return None

    def _other_watches(self, store: Any) -> str | None:
        """Watch the first rank from the others. Returns the problem that a rank has recorded, or the first rank's, or
        None when the run ends. Never waits for a key, which may not exist."""
        last, rounds = "", 0
        while not self.closed.wait(self.interval_s):
            self._send_heartbeat(store)
            if failure := _value(store, FAILURE):
                return failure
            sign = _value(store, "0")
            rounds = 0 if sign != last else rounds + 1
            last = sign
            if self._is_silent(store, 0, rounds):
                return f"{self._named(0, sign)} {self._no_heartbeat}"
        return None

    def _is_silent(self, store: Any, rank: int, rounds: int) -> bool:
        """True for a rank without a heartbeat for too many rounds, unless it has finished."""
        return rounds >= self.most_rounds and not _value(store, f"left/{rank}")

    def _named(self, rank: int, sign: str) -> str:
        return f"rank {rank} ({self.job.hosts[rank]}, {sign.partition(' ')[2] or 'which has not started'})"

    def _send_heartbeat(self, store: Any) -> None:
        store.set(str(self.rank), f"{time.time_ns()} process {os.getpid()}")
        self.exchanged += 1


def _value(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


@contextlib.contextmanager
def watched(timeout_min: float, folder: Path) -> Iterator[None]:
    """Context manager of a run, with a `Watchdog` if it has several processes, unless `timeout_min` is zero. An error
    of this rank ends the other ranks."""
    job = current()
    if not timeout_min or job is None:
        yield
        return
    watchdog = Watchdog(job, 60 * timeout_min, folder)
    failure: str | None = ""
    try:
        yield
        failure = None
    except Exception as error:
        failure = f"{named_rank(distributed.rank())} failed: {one_line(error)}"
        raise
    finally:
        watchdog.close(failure)
