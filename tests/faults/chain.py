"""Rounds of faults: a run is started or resumed, meets a fault, and is checked; the next round resumes it.

A chain of rounds ends where the run reaches its last step, with the losses of a run that met no fault.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge.train.metrics import read_rows
from tests.faults.job import POLL_S, Job
from tests.parallel.megatron_cases import SUBJECTS, Files

STEPS, SAVES = 30, 3  # of a run; between its checkpoints
RANK_TIMEOUT_S = 20.0
LAUNCH_S = 300.0  # for a round in all
TOLERANCE = 1e-5
DISK = 24 << 20  # bytes of a run's disk, where one can be mounted
KINDS = {
    "kill": 5,  # SIGKILL of a rank at any moment
    "kill while saving": 5,
    "stop": 3,  # SIGSTOP of a rank
    "slow": 1,  # a rank is stopped and goes on, again and again
    "full disk": 3,
    "kill a writer": 3,  # SIGKILL of a process with which a rank writes a checkpoint
}
DAMAGED = 0.3  # of the rounds find their newest checkpoint damaged
ENGINES = {
    "accelerate": {"engine": "accelerate"},
    "megatron": {"engine": "megatron", "tp": 2, "pp": 2},
    "megatron async": {"engine": "megatron", "tp": 2, "pp": 2, "async-save": True},
}


class FaultError(AssertionError):
    """A round in which something was not as it must be."""


@dataclass
class Chain:
    """The rounds of one run."""

    engine: str
    processes: int
    root: Path
    reference: dict[int, dict[str, Any]]
    mounted: bool = False
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = self.root / "run"
        shutil.rmtree(self.root, ignore_errors=True)
        self.output.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.output)]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.output)], check=False)
        shutil.rmtree(self.root, ignore_errors=True)

    def round(self, arguments: list[str], seed: int) -> tuple[str, bool]:
        """One launch with a fault: its kind, and whether the run has reached its end. Raises FaultError."""
        draw = random.Random(seed)
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "full disk" and not self.mounted:
            kind = "kill"
        if kind == "kill a writer" and self.engine == "accelerate":
            kind = "kill while saving"  # its ranks write themselves
        damaged = self._damage(draw) if draw.random() < DAMAGED else None
        before = self._last_step()
        job = Job([*arguments, "--output", str(self.output), "--resume"], self.processes, self.root / "logs")
        try:
            if not self._meet(job, kind, draw, before):
                kind = "none"  # it had ended before
            self._check(job, kind, damaged)
        except FaultError as error:
            raise FaultError(f"{self.engine}, {kind}: {error}\n{job.said()[-12000:]}") from None
        finally:
            job.close()
        return kind + (", damaged checkpoint" if damaged else ""), not job.failed

    def _meet(self, job: Job, kind: str, draw: random.Random, before: int) -> bool:
        """Let the fault happen at its moment; whether it did. Raises FaultError."""
        rank = draw.randrange(self.processes)
        early = kind == "kill" and draw.random() < 0.3
        delay_s, steps = draw.uniform(0, 4) if early else draw.uniform(0, 0.4), draw.randint(1, 9)

        def reached() -> bool:
            return early or self._last_step() >= before + steps

        def saving() -> bool:
            hidden = (self.output / "checkpoints").glob(".*")
            return reached() and any(not folder.name.endswith(".old") for folder in hidden)

        if kind == "kill a writer":
            if not self._wait(job, lambda: reached() and job.kill_writer(draw)):
                return False
            self._wait(job, lambda: bool(job.codes))
            return True
        if not self._wait(job, saving if kind == "kill while saving" else reached):
            return False
        time.sleep(delay_s if kind != "kill while saving" else draw.uniform(0, 0.1))
        if kind.startswith("kill"):
            job.signal(rank, signal.SIGKILL)
            self._wait(job, lambda: bool(job.codes))
        elif kind == "stop":
            job.poll()
            if job.running != list(range(self.processes)):
                return False
            job.signal(rank, signal.SIGSTOP)
            stopped = time.monotonic()
            self._wait(job, lambda: bool(job.codes))
            seconds = time.monotonic() - stopped
            if job.failed and seconds > 2 * RANK_TIMEOUT_S + 20:
                raise FaultError(f"rank {rank} was stopped, and the run ended after {seconds:.0f} s")
            named = f"rank {rank} (" in job.said() and "has sent no heartbeat" in job.said()
            if not named and any(job.codes.values()):
                raise FaultError(f"rank {rank} was stopped, and nothing names it")
        elif kind == "slow":
            for _ in range(3):
                job.signal(rank, signal.SIGSTOP)
                time.sleep(draw.uniform(0.5, 2))
                job.signal(rank, signal.SIGCONT)
                time.sleep(0.5)
        elif kind == "full disk":
            ballast = self.output / "ballast"
            free = shutil.disk_usage(self.output).free
            with suppress(OSError):  # the run has written meanwhile
                ballast.write_bytes(bytes(max(0, free - draw.randrange(1, 400_000))))
            self._wait(job, lambda: bool(job.codes))
            ballast.unlink()
        return True

    def _wait(self, job: Job, condition: Callable[[], bool]) -> bool:
        """Until it holds (True) or the job ends (False). Raises FaultError where neither happens."""
        while time.monotonic() < job.started + LAUNCH_S:
            if condition():
                return True
            job.poll()
            if job.failed or not job.running:
                return False
            time.sleep(POLL_S)
        raise FaultError(f"neither the fault's moment nor an end came in {LAUNCH_S:.0f} s")

    def _check(self, job: Job, kind: str, damaged: Path | None) -> None:
        self._wait(job, lambda: job.failed or not job.running)
        ended = time.monotonic()
        left = job.shut_down() if job.failed else job.leftovers()
        said = job.said()
        if left:
            raise FaultError(f"processes are left {time.monotonic() - ended:.0f} s after the end: {'; '.join(left)}")
        if "Traceback" in said:
            raise FaultError("a traceback")
        lines = [line for line in said.splitlines() if line.startswith("dlm-bridge: ")]
        if len(lines) > 1:
            raise FaultError(f"{len(lines)} lines say why it ended")
        killed = {code for code in job.codes.values() if code < 0} - {-signal.SIGKILL, -signal.SIGTERM}
        if killed or not set(job.codes.values()) <= {0, 2, -signal.SIGKILL, -signal.SIGTERM}:
            raise FaultError(f"exit codes {job.codes}")
        if kind in ("slow", "none") and job.failed:
            raise FaultError(f"the run ended at no fault, or at a slow rank: {lines}")
        if kind == "full disk" and job.failed and not any("no space left" in line.lower() for line in lines):
            raise FaultError(f"a full disk, and no line says so: {lines}")
        if kind == "kill a writer" and job.failed and not any("SIGKILL" in line for line in lines):
            raise FaultError(f"a writer was killed, and no line says so: {lines}")
        if damaged is not None and damaged.name not in said and job.started + 60 < ended:
            raise FaultError(f"{damaged.name} was damaged, and nothing says so")
        self._check_losses(complete=not job.failed)
        if not job.failed:
            hidden = [str(path) for path in self.output.rglob(".*") if path.name != ".metadata"]
            if hidden:
                raise FaultError(f"temporary files are left: {hidden}")

    def _check_losses(self, complete: bool) -> None:
        rows = read_rows(self.output / "metrics.jsonl") if (self.output / "metrics.jsonl").exists() else []
        if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
            raise FaultError(f"steps {[row['step'] for row in rows]}")
        if complete and len(rows) != STEPS:
            raise FaultError(f"{len(rows)} of {STEPS} steps at the end")
        for row in rows:
            for name in ("loss", "grad_norm", "lr"):
                wanted = self.reference[row["step"]][name]
                if row[name] != pytest.approx(wanted, rel=TOLERANCE):
                    raise FaultError(f"step {row['step']}: {name} {row[name]}, without faults {wanted}")

    def _last_step(self) -> int:
        metrics = self.output / "metrics.jsonl"
        rows = read_rows(metrics) if metrics.exists() else []
        return int(rows[-1]["step"]) if rows else 0

    def _damage(self, draw: random.Random) -> Path | None:
        """Damage a file of the newest of at least two checkpoints."""
        root = self.output / "checkpoints"
        found = sorted([*root.glob("iter_*"), *root.glob("step-*")]) if root.is_dir() else []
        found = [folder for folder in found if folder.suffix == "" and ".damaged" not in folder.name]
        if len(found) < 2:
            return None
        file = draw.choice(sorted(path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size))
        content = bytearray(file.read_bytes())
        how = draw.choice(("flipped", "truncated", "removed"))
        if how == "flipped":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif how == "truncated":
            del content[draw.randrange(len(content)) :]
        file.unlink() if how == "removed" else file.write_bytes(content)
        self.notes.append(f"{file.name} {how}")
        return found[-1]


def write_inputs(root: Path) -> Files:
    """A tiny model's configuration and its data."""
    return Files(root).write_some("masked")


def arguments_of(files: Files, engine: str) -> list[str]:
    """The command line of an engine's run, without its output."""
    subject = SUBJECTS["masked"]
    options: dict[str, Any] = {
        "model": files.hub("masked"),
        "data": files.corpus,
        "objective": subject.objective,
        "steps": STEPS,
        "save-interval": SAVES,
        "keep-last": 3,
        "eval-interval": 0,
        "global-batch-size": 16,
        "micro-batch-size": 1,
        "seq-length": 16,
        "split": "90,10,0",
        "lr": 1e-3,
        "warmup-steps": 5,
        "rank-timeout": RANK_TIMEOUT_S / 60,
        **ENGINES[engine],
    }
    words = ["pretrain", "--from-scratch"]
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def reference_losses(files: Files, engine: str, processes: int, root: Path) -> dict[int, dict[str, Any]]:
    """The metrics of a run that meets no fault, by step. Raises FaultError."""
    job = Job([*arguments_of(files, engine), "--output", str(root / "run")], processes, root / "logs")
    try:
        while job.running and not job.failed:
            time.sleep(POLL_S)
            job.poll()
        if job.failed:
            raise FaultError(f"the run without faults failed: {job.codes}\n{job.said()[-6000:]}")
        return {row["step"]: row for row in json.loads(json.dumps(read_rows(root / "run/metrics.jsonl")))}
    finally:
        job.close()
