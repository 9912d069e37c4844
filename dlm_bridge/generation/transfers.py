"""Numbers between the host and the device, so that neither waits for the other longer than it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def send(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """The numbers as a tensor on the device, which may be at work on something else."""
    tensor = torch.tensor(numbers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read(flags_A: torch.Tensor, meanwhile: Callable[[], None]) -> list[bool]:
    """What the tensor holds. A GPU is given something to do, by `meanwhile`, before the host waits for the answer."""
    if not flags_A.is_cuda:
        return list(flags_A.tolist())
    copy = flags_A.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream(flags_A.device).record_event()
    meanwhile()
    arrived.synchronize()
    return list(copy.tolist())
