"""Straggler detection: which rank of a pipeline stage takes longest for its forward passes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

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
