"""Where the device's time in a training step goes: to which kernels, and to waiting between which of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

STEPS = 3  # one after the other, so that the one that is looked at has a step before and after it
BOUNDS = (0.0, 0.002, 0.005, 0.02, 0.1, 1.0, float("inf"))  # ms, of gaps that are counted together


def profile(step: Callable[[int], Any], number: int) -> None:
    """Take steps from `number` on, and print on the first rank what one of them consists of."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiled:
        for following in range(STEPS):
            step(number + following)
        torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    spans = [
        (event.time_range.start / 1000, event.time_range.end / 1000, event.name, event.device_type)
        for event in profiled.events() or []
    ]
    kernels = sorted(span[:3] for span in spans if span[3] == DeviceType.CUDA)
    # Steps repeat each other, so where one is cut out does not matter.
    length = (kernels[-1][1] - kernels[0][0]) / STEPS
    begin = kernels[-1][1] - (STEPS - 1) * length
    mine = [kernel for kernel in kernels if begin <= kernel[0] < begin + length]
    gaps = _gaps(mine)
    busy = sum(end - start for start, end, _ in mine)
    print(f"PROFILE {length:8.1f} ms a step, {busy:.1f} of kernels, {sum(gap for gap, *_ in gaps):.1f} without one")
    _print_by_name("PROFILE", mine, 1, 45)
    for least, most in itertools.pairwise(BOUNDS):
        these = [gap for gap, *_ in gaps if least <= gap < most]
        print(f"IDLE    {sum(these):8.2f} ms {len(these):6} x from {least} to {most} ms")
    for gap, at, before, after in sorted(gaps, reverse=True)[:20]:
        print(f"IDLE    {gap:8.3f} ms at {at - begin:8.1f} ms: {before[:60]} -> {after[:60]}")
    _print_by_name("HOST", (span[:3] for span in spans if span[3] == DeviceType.CPU), STEPS, 12)


def _gaps(kernels: list[tuple[float, float, str]]) -> list[tuple[float, float, str, str]]:
    """Each time when no kernel of any stream runs: how long, when, after which and before which. [ms]"""
    found = []
    busy_until, before = kernels[0][1], kernels[0][2]
    for start, end, name in kernels:
        if start > busy_until:
            found.append((start - busy_until, busy_until, before, name))
        if end > busy_until:
            busy_until, before = end, name
    return found


def _print_by_name(title: str, spans: Iterable[tuple[float, float, str]], steps: int, most: int) -> None:
    """The longest of a step, those of one name summed."""
    sums: dict[str, tuple[float, int]] = {}
    for start, end, name in spans:
        milliseconds, count = sums.get(name, (0.0, 0))
        sums[name] = milliseconds + end - start, count + 1
    for name, (milliseconds, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:most]:
        print(f"{title:7} {milliseconds / steps:8.2f} ms {count / steps:6.0f} x {name[:110]}")
