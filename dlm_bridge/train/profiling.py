"""`--profile-steps A:B`: a trace of some steps of a run by torch's profiler, and on a GPU a snapshot of its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.atomic import disk_errors
from dlm_bridge.train.metrics import MAKE_ROOM

FOLDER = "profile"
MEMORY_EVENTS = 1_000_000  # allocations of which a snapshot keeps the history


class StepProfiler:
    """Profiles the steps of a range on the process that makes it; a run that resumes within it, those that are left.

    The last step, or `close`, writes DIR/profile/steps-A-B.json.gz, for chrome://tracing and Perfetto, and from CUDA
    memory-A-B.pickle, for pytorch.org/memory_viz. They raise DlmBridgeError where the disk refuses.
    """

    def __init__(self, steps: range, output: Path, device: torch.device) -> None:
        self._steps = steps
        self._folder = output / FOLDER
        self._cuda = device.type == "cuda"
        self._profile: Any = None
        self._first = self._last = 0

    def begin(self, step: int) -> None:
        """Before a step."""
        if step not in self._steps:
            return
        if self._profile is None:
            self._first = step
            self._start()
        self._last = step

    def end(self, step: int) -> None:
        """After a step, whose work the device may not have finished."""
        if step in self._steps and step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write what has been profiled, if anything."""
        if self._profile is None:
            return
        if self._cuda:
            torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"{self._first}-{self._last}"
        with disk_errors(self._folder, MAKE_ROOM):
            self._folder.mkdir(exist_ok=True)
            self._write(f"steps-{name}.json.gz", profile.export_chrome_trace)
            if self._cuda:
                self._write(f"memory-{name}.pickle", torch.cuda.memory._dump_snapshot)
        if self._cuda:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def _write(self, name: str, export: Any) -> None:
        temporary = self._folder / f".{name}"  # whose end says to torch that it is compressed
        try:
            export(str(temporary))
            os.replace(temporary, self._folder / name)
        finally:
            temporary.unlink(missing_ok=True)
