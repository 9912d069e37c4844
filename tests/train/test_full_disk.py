"""A disk that is full while a run writes: one line that names the folder and what to free, the last checkpoint stays
the newest, and the run goes on from it once there is room.

Most tests limit the size of files (RLIMIT_FSIZE), which the system refuses as it refuses a full disk, in every writer
and its processes; it needs no rights. Where a file system can be mounted, one that is too small shows the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.atomic import atomic_file, disk_refusal
from dlm_bridge.train import monitoring
from dlm_bridge.train.metrics import MetricsFile
from tests.train.conftest import Run, without_speed
from tests.train.test_metrics import _row

OPTIONS: dict[str, Any] = {"steps": 4, "save_interval": 2, "eval_interval": 0}


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file of this process and its children may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limit_save(patch: pytest.MonkeyPatch, trainer: Any, size: int) -> None:
    """The checkpoint of step 4 is written under `limited_files`."""
    real = trainer.save_checkpoint

    def save(self: Any, step: int) -> Path:
        with limited_files(size) if step == 4 else contextlib.nullcontext():
            folder = real(self, step)
            if hasattr(self, "checkpoints"):
                self.checkpoints.finish()  # a background save, too
            return folder

    patch.setattr(trainer, "save_checkpoint", save)


def check_goes_on(output: Path, newest: str, rows: list[dict[str, Any]], run: Run, **options: Any) -> None:
    """Only the first checkpoint is there, and a resume ends as a run that was not disturbed."""
    found = [path.name for path in (output / "checkpoints").iterdir()]
    assert [name for name in found if "iter_" in name or "step-" in name] == [newest]
    assert without_speed(run(output, resume=True, **OPTIONS, **options)) == without_speed(rows)


@pytest.mark.parametrize("size", [8_000, 60_000])
@pytest.mark.fast("8000")
def test_accelerate(size: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, or the optimizer's state."""
    from dlm_bridge.train.accelerate.trainer import AccelerateTrainer

    rows = run(tmp_path / "whole", **OPTIONS)
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        limit_save(patch, AccelerateTrainer, size)
        with pytest.raises(DlmBridgeError, match=r"step-0000004: .*step-0000002 stays the newest checkpoint: free"):
            run(output, **OPTIONS)
    check_goes_on(output, "step-0000002", rows, run)


def test_metrics_and_samples(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.append(_row(1))
    with limited_files(path.stat().st_size + 20), pytest.raises(DlmBridgeError, match=r"metrics\.jsonl"):
        metrics.append(_row(2))
    metrics.close()
    again = MetricsFile(path, 2)
    assert [row["step"] for row in again.rows] == [1]  # the torn row is gone
    again.close()
    append = monitoring.append_line

    def limited(file: Any, line: str) -> None:
        with limited_files(10):
            append(file, line)

    monkeypatch.setattr(monitoring, "append_line", limited)
    with pytest.raises(DlmBridgeError, match=r"samples\.jsonl"):
        run(tmp_path / "run", steps=1, sample_interval=1, sample_prompt=["def f1"], sample_length=16, save_interval=0)


@pytest.mark.draws
def test_the_loss_curve(tmp_path: Path) -> None:
    from dlm_bridge.train.metrics import plot_loss

    plot_loss([{"step": 1, "loss": 2.0}], tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    with limited_files(100), pytest.raises(DlmBridgeError, match=r"loss\.png"):
        plot_loss([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "no space left"),
        (RuntimeError("Worker failure: [Errno 28] No space left on device"), "no space left"),
        (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
        (PermissionError(errno.EACCES, "Permission denied", "place"), "place: Permission denied"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "cannot be written"),
    ],
)
def test_what_the_disk_refuses(error: Exception, says: str, tmp_path: Path) -> None:
    refusal = disk_refusal(error, tmp_path / "out", "free some")
    assert refusal is not None
    assert says in str(refusal)
    assert refusal.reason.endswith("free some")


def test_a_file_that_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "config.yaml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(DlmBridgeError, match=f"{path}: no space left .*make room there"),
        atomic_file(path, overwrite=True) as file,
    ):
        file.write("new")
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "old"


def test_other_errors_are_not_the_disks(tmp_path: Path) -> None:
    assert disk_refusal(RuntimeError("CUDA error: device-side assert triggered"), tmp_path) is None
    assert disk_refusal(BrokenPipeError(32, "Broken pipe"), tmp_path) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("room", [0, 60_000])
def test_a_disk_without_room(room: int, small_disk: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk_without_room(run, "step-0000002", room, small_disk, monkeypatch)


def check_disk_without_room(
    chosen: Run, newest: str, room: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 3 somebody else fills the disk: the next row of metrics.jsonl has no place, or the next checkpoint."""
    from dlm_bridge.train.trainer import Trainer

    real, filler = Trainer.start_step, small_disk / "filler"

    def start_step(self: Any, step: int, want_stop: bool) -> Any:
        if step == 3:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            if room:
                os.truncate(filler, filler.stat().st_size - room)
        return real(self, step, want_stop)

    rows = chosen(small_disk.parent / "whole", **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "start_step", start_step)
        with pytest.raises(DlmBridgeError, match=f"{small_disk / 'run'}.*: no space left"):
            chosen(small_disk / "run", **OPTIONS)
    filler.unlink()
    check_goes_on(small_disk / "run", newest, rows, chosen)
