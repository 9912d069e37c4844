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
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import distributed, processes

INTERVAL_S = 5.0  # between two heartbeats
STORE_GRACE_S = 30.0  # for a run to end after the process of the store has ended
VERDICT = "verdict"

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
    """Ends this process when another process of the run has stopped sending heartbeats, and names that process. It is
    stopped or swapped out, or its host is gone, and the other ranks would wait for it in a collective operation.

    A thread of each rank writes a new number to the launcher's store every few seconds. The first rank reads those of
    all ranks, the others read the first rank's. Time is counted in rounds of the thread, which do not pass while this
    process itself is stopped, as by Ctrl-Z.

    Args:
        timeout_s: seconds without a heartbeat after which the run ends.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self.timeout_s = timeout_s
        self.interval_s = min(INTERVAL_S, timeout_s / 8)
        self.most_rounds = math.ceil(timeout_s / self.interval_s)
        self.closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching at the end of the run."""
        self.closed.set()

    def _watch(self) -> None:
        try:
            store = self._store()
            silent = self._first_watches(store) if self.rank == 0 else self._other_watches(store)
        except RuntimeError:  # the process of the store has ended, as at the end of a run, or does not answer
            self.closed.wait(min(self.timeout_s, STORE_GRACE_S))
            silent = "the process of the launcher's store"
        if silent is not None and not self.closed.is_set():
            processes.report(
                f"{silent} has sent no heartbeat for {self.timeout_s:g} s (`rank_timeout`): the run ends; start it "
                "again with `resume`"
            )
            os._exit(2)

    def _store(self) -> Any:
        return dist.PrefixStore("ranks", distributed.launcher_store(datetime.timedelta(seconds=self.timeout_s)))

    def _first_watches(self, store: Any) -> str | None:
        """Watch all ranks from the first one. Returns the name of a silent rank, or None when the run ends."""
        others = list(range(1, self.world_size))
        signs, rounds = dict.fromkeys(others, ""), dict.fromkeys(others, 0)
        while not self.closed.wait(self.interval_s):
            self._send_heartbeat(store)
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
        """Watch the first rank from the others. Returns the silent rank that the first has named, or the first itself,
        or None when the run ends. Never waits for a key, which may not exist."""
        last, rounds = "", 0
        while not self.closed.wait(self.interval_s):
            self._send_heartbeat(store)
            if store.check([VERDICT]) and (verdict := store.get(VERDICT).decode()):
                return str(verdict)
            sign = store.get("0").decode() if store.check(["0"]) else ""
            rounds = 0 if sign != last else rounds + 1
            last = sign
            if rounds >= self.most_rounds:
                return _named(0, sign)
        return None

    def _send_heartbeat(self, store: Any) -> None:
        store.set(str(self.rank), f"{time.time_ns()} {socket.gethostname()}, process {os.getpid()}")


def _named(rank: int, sign: str) -> str:
    return f"rank {rank} ({sign.partition(' ')[2] or 'which has not started'})"


def start_watchdog(timeout_min: float) -> Watchdog | None:
    """Start the `Watchdog` of a run of several processes, unless `timeout_min` is zero."""
    if not timeout_min or distributed.world_size() == 1 or distributed.store_address() is None:
        return None
    return Watchdog(60 * timeout_min)
