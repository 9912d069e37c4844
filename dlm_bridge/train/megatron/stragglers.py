"""Ranks that hold the others up: garbage collection at the same step on every rank, and straggler detection."""

from __future__ import annotations

import contextlib
import gc
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge.errors import DlmBridgeError

TimedWork = float | tuple[torch.Event, torch.Event]  # seconds, or from one event to another


def check_stragglers(interval: int, stages: int, ranks: int) -> None:
    """Raise DlmBridgeError where no two ranks do the same work."""
    if ranks == stages:
        raise DlmBridgeError(
            f"--straggler-interval {interval}: each of {stages} rank(s) does other work: leave it out"
        )


class StragglerDetector:
    """Measures `timed` work on one rank and, every `interval` steps, compares it among the ranks of a pipeline stage,
    which do the same work. On a device the time is the device's, between two events.

    megatron-core's StragglerDetector does the like, but opens a port for its commands, asks NVML and knows CUDA only.
    Ranks that exchange tensors inside a forward pass (tensor, context, expert parallel) wait there for their slowest,
    so that it is their whole group that stands out; a slow rank alone stands out among replicas.
    """

    def __init__(self, interval: int, stage: int, stages: int, device: torch.device, group: Any) -> None:
        """`group` is one of all ranks between CPUs. Raises DlmBridgeError where no two ranks do the same work."""
        check_stragglers(interval, stages, dist.get_world_size())
        self.interval = interval
        self.stage = stage
        self.device = device
        self.group = group
        self.seconds = 0.0
        self._timed: list[TimedWork] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what is launched inside."""
        if self.device.type == "cpu":
            began = time.perf_counter()
            yield
            self._timed.append(time.perf_counter() - began)
            return
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._timed.append((before, after))

    def taken(self) -> list[TimedWork]:
        """What was timed since it was asked last, of one step, which the device may still be at work on."""
        timed, self._timed = self._timed, []
        return timed

    def end_step(self, step: int, timed: list[TimedWork]) -> str | None:
        """After a step, when the device is done with what was timed of it: every `interval` steps the report, on every
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


FULL_GC_EVERY = 100  # steps; the others go over the objects of late


class GCSchedule:
    """Runs the collector between steps only, from the first step to `close`."""

    def __init__(self) -> None:
        self._steps: int | None = None  # since this took over

    def step(self) -> None:
        """Between two steps, while the device has work: cycles may hold memory of it."""
        if self._steps is None:
            if gc.isenabled():
                gc.collect()
                gc.freeze()  # the model stays
                gc.disable()
                self._steps = 0
            return
        self._steps += 1
        gc.collect(2 if self._steps % FULL_GC_EVERY == 0 else 1)

    def close(self) -> None:
        """Let the collector run by itself again."""
        if self._steps is not None:
            gc.unfreeze()
            gc.enable()
            self._steps = None
