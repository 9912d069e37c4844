"""Ranks of a run that are slow, and ranks that do not answer any more."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import distributed, processes

INTERVAL_S = 5.0  # between two signs of life
STORE_GRACE_S = 30.0  # for a run to end after the store's process has
VERDICT = "verdict"

TimedWork = float | tuple[torch.Event, torch.Event]  # seconds, or start and end


class StragglerDetector:
    """Measures `timed` work on each rank and compares it every `interval` steps among the ranks of a pipeline stage,
    which do the same work. On a device the time is the device's, between two events.

    megatron-core's own StragglerDetector opens a port for its commands, needs NVML and supports CUDA only. Ranks that
    communicate inside a forward pass (tensor, context, expert parallel) wait there for their slowest, so their whole
    group stands out; a slow rank alone stands out among data parallel replicas.
    """

    def __init__(self, interval: int, stage: int, device: torch.device, group: Any) -> None:
        """`group` has all ranks, between CPUs."""
        self.interval = interval
        self.stage = stage
        self.device = device
        self.group = group
        self.seconds = 0.0
        self._timed: list[TimedWork] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Measure what is launched inside."""
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
        """What was timed since the last call: of one step, which the device may still work on."""
        timed, self._timed = self._timed, []
        return timed

    def end_step(self, step: int, timed: list[TimedWork]) -> str | None:
        """After a step, when the device has finished what was timed of it: every `interval` steps the report, on every
        rank. All ranks call it."""
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
    """The line of a report, of the pipeline stage whose ranks differ the most. `found` has each rank's stage, seconds
    a step and host."""
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
    """Ends this process where another one of the run gives no sign of life any more, and names that: it is stopped or
    swapped out, or its host is gone, and every other rank would wait for it in a collective operation.

    A thread of each rank writes a new number to the launcher's store every few seconds. The first rank's reads those
    of all, the others' read the first one's. Time is counted in a thread's own rounds, which do not pass while this
    process is stopped itself, as by Ctrl-Z. On accelerators and on CPUs alike.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` without a sign of life end the run. Every process makes one."""
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self.timeout_s = timeout_s
        self.interval_s = min(INTERVAL_S, timeout_s / 8)
        self.most_rounds = math.ceil(timeout_s / self.interval_s)
        self.closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """End the watch: the run has ended."""
        self.closed.set()

    def _watch(self) -> None:
        try:
            store = self._store()
            silent = self._first_watches(store) if self.rank == 0 else self._other_watches(store)
        except RuntimeError:  # the store's process has ended, as at the end of a run, or does not answer
            self.closed.wait(min(self.timeout_s, STORE_GRACE_S))
            silent = "the process of the launcher's store"
        if silent is not None and not self.closed.is_set():
            processes.report(
                f"{silent} has given no sign of life for {self.timeout_s:g} s (--rank-timeout): the run ends; start "
                "it again with --resume"
            )
            os._exit(2)

    def _store(self) -> Any:
        return dist.PrefixStore("ranks", distributed.launcher_store(datetime.timedelta(seconds=self.timeout_s)))

    def _first_watches(self, store: Any) -> str | None:
        """On the first rank: the one that has become silent; None where the run has ended before."""
        others = list(range(1, self.world_size))
        signs, rounds = dict.fromkeys(others, ""), dict.fromkeys(others, 0)
        while not self.closed.wait(self.interval_s):
            self._give_sign(store)
            there = [rank for rank in others if signs[rank] or store.check([str(rank)])]
            found = dict(zip(there, store.multi_get([str(rank) for rank in there]), strict=True)) if there else {}
            for rank in others:
                sign = found.get(rank, b"").decode()
                rounds[rank] = 0 if sign != signs[rank] else rounds[rank] + 1
                signs[rank] = sign
            longest = max(others, key=lambda rank: rounds[rank])
            if rounds[longest] >= self.most_rounds:
                verdict = _named(longest, signs[longest])
                store.set(VERDICT, verdict)
                return verdict
        return None

    def _other_watches(self, store: Any) -> str | None:
        """On every other rank: the silent one that the first rank has named, or the first itself, which may have been
        silent from its start. Nothing here waits for a key."""
        last, rounds = "", 0
        while not self.closed.wait(self.interval_s):
            self._give_sign(store)
            if store.check([VERDICT]) and (verdict := store.get(VERDICT).decode()):
                return str(verdict)
            sign = store.get("0").decode() if store.check(["0"]) else ""
            rounds = 0 if sign != last else rounds + 1
            last = sign
            if rounds >= self.most_rounds:
                return _named(0, sign)
        return None

    def _give_sign(self, store: Any) -> None:
        store.set(str(self.rank), f"{time.time_ns()} {socket.gethostname()}, process {os.getpid()}")


def _named(rank: int, sign: str) -> str:
    return f"rank {rank} ({sign.partition(' ')[2] or 'which has not started'})"


def start_watchdog(timeout_min: float) -> Watchdog | None:
    """A run's `Watchdog`, where several processes run together and `timeout_min` is not zero."""
    if not timeout_min or distributed.world_size() == 1 or distributed.store_address() is None:
        return None
    return Watchdog(60 * timeout_min)
