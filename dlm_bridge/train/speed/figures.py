"""Numbers on their way from a device to the CPU, which goes on working until somebody reads them."""

from __future__ import annotations

import time

import torch


class Moment:
    """When a device has done what it was given before, or now, where the CPU is the device. Nobody waits."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.now = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def until(self, later: Moment) -> float:
        """The seconds between two moments that have passed, on the device's clock."""
        if self.event is None or later.event is None:
            return later.now - self.now
        return self.event.elapsed_time(later.event) / 1000


class Figures:
    """`values` [N] float64 of a step that began at `began`, copied behind what the device is doing."""

    def __init__(self, values: torch.Tensor, began: Moment) -> None:
        cuda = values.device.type == "cuda"
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True) if cuda else values.detach()
        if cuda:
            self._values.copy_(values.detach(), non_blocking=True)
        self._began, self._ended = began, Moment(values.device)

    def read(self) -> tuple[list[float], float]:
        """The values, and how many seconds the step took. Waits for the copy."""
        if self._ended.event is not None:
            self._ended.event.synchronize()
        return self._values.tolist(), self._began.until(self._ended)
