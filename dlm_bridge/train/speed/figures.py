"""Numbers on their way from a device to the CPU, which goes on working until somebody reads them."""

from __future__ import annotations

import torch


class Figures:
    """`values` [N] float64 on a device, copied behind what is queued there; `read` waits for the copy."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.detach()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
