"""Rounds of accidents: a run on two nodes meets one at a random moment, ends as it must, and is resumed to its end.

The losses are those of a run that met none, no checkpoint is damaged, and every end has a reason and comes in time.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlm_bridge.train.metrics import read_rows
from tests.faults.chain import FaultError
from tests.nodes.cases import LAYOUTS, assert_alike, checkpoints, pretrain
from tests.nodes.network import Job, Network, wait_for
from tests.nodes.slurm import OverNodes
from tests.parallel.megatron_cases import Files

STEPS, SAVES = 60, 5  # of a run; between its checkpoints
RANK_TIMEOUT_S = 20.0
ENDED_S = RANK_TIMEOUT_S + 60  # after an accident, on a busy machine
OUT_S = 20.0  # of a cable
RUN_S = 300.0  # for a run without accidents, or a job of Slurm between two events
TOLERANCE = 1e-5  # of figures many steps after sums in another order
DISK_FULL = "disk of one node full"  # of local checkpoints, which need nvidia-resiliency-ext
KINDS = (
    "node killed",
    "power lost",
    "cable out for 20 s",
    "cable out for good",
    "node stopped",
    DISK_FULL,
)
SLURM_KINDS = ("preempted with grace", "preempted without grace", "requeued", "node lost under Slurm")
LOCAL = ("dp", "tp", "pp")  # layouts of the engine that has local checkpoints


class Accidents:
    """Two nodes, a run's inputs and its figures without accidents."""

    def __init__(self, network: Network, files: Files, root: Path) -> None:
        self.network, self.files, self.root = network, files, root
        self.reference = root / "reference"
        command = network.run(0, *self._run(self.reference, "ddp"), forked=True, timeout_s=RUN_S)
        if command.code:
            raise FaultError(f"the run without accidents failed: {command.said()[-6000:]}")

    def round(self, kind: str, seed: int) -> str:
        """One run with an accident, and its resume. Returns what happened. Raises FaultError."""
        draw = random.Random(seed)
        layout = draw.choice(LOCAL if kind == DISK_FULL else tuple(LAYOUTS))
        self.network.restore()
        output = self.root / "run"
        shutil.rmtree(output, ignore_errors=True)
        try:
            meet = self._under_slurm if kind in SLURM_KINDS else self._under_a_launcher
            said = meet(kind, layout, output, draw)
            assert_alike(output, self.reference, STEPS, TOLERANCE)
            self._check_files(output)
        except FaultError as error:
            raise FaultError(f"{kind}, {layout}: {error}") from None
        except AssertionError as error:
            raise FaultError(f"{kind}, {layout}: {str(error)[-8000:]}") from None
        return f"{layout}, {said}"

    def _run(self, output: Path, layout: str, **options: Any) -> list[str]:
        common = {"steps": STEPS, "save_interval": SAVES, "rank_timeout": RANK_TIMEOUT_S / 60, "resume": True}
        return pretrain(self.files, output, **{**common, **LAYOUTS[layout], **options})

    # -- accidents of nodes

    def _under_a_launcher(self, kind: str, layout: str, output: Path, draw: random.Random) -> str:
        options: dict[str, Any] = {}
        if kind == DISK_FULL:
            options = {"local_folder": self.network.local / "copies", "local_interval": 1}
        run = self._run(output, layout, **options)
        if kind == "cable out for 20 s":
            run[run.index("--rank-timeout") + 1] = "1.5"
        job = self.network.job(*run, before="from tests.nodes.worker import slow; slow(0.15)")
        if kind != DISK_FULL and draw.random() < 0.2:
            time.sleep(draw.uniform(0, 4))  # perhaps before the ranks have met
        else:
            self._wait_for_step(output, draw.randint(1, STEPS - 25), lambda: not job.running, job.said)
            time.sleep(draw.uniform(0, 0.5))
        step, node, began = _steps(output), draw.randrange(2), time.monotonic()
        wanted = self._meet(kind, node, job)
        codes = job.wait(RUN_S if wanted == [0, 0] else ENDED_S)
        seconds = time.monotonic() - began
        if codes != wanted and not (codes == [0, 0] and _steps(output) == STEPS):  # it had ended before
            raise FaultError(f"exit codes {codes}, not {wanted}\n{job.said()[-8000:]}")
        self._check_lines(kind, node, job, codes)
        if codes == [0, 0]:
            return f"node {node}, after step {step}: went on"
        self.network.restore()
        resumed = _steps(output)
        again = self.network.job(*run)
        if again.wait(RUN_S) != [0, 0]:
            raise FaultError(f"the resume ended with {again.wait()}\n{again.said()[-8000:]}")
        return (
            f"node {node}, after step {step}: ended after {seconds:.0f} s with {codes}, resumed after step {resumed}"
        )

    def _meet(self, kind: str, node: int, job: Job) -> list[int]:
        """Let the accident happen. Returns the exit codes that must follow."""
        network, codes = self.network, [2, 2]
        if kind in ("node killed", "power lost"):
            (network.kill if kind == "node killed" else network.power_loss)(node)
            codes[node] = -9
        elif kind == "cable out for 20 s":
            network.cable(node, False)
            time.sleep(OUT_S)
            network.cable(node, True)
            return [0, 0]
        elif kind == "cable out for good":
            network.cable(node, False)
        elif kind == "node stopped":
            network.stop(node)
            Job([job.ranks[1 - node]]).wait(ENDED_S)
            network.cont(node)
        else:
            for _ in range(40):  # a checkpoint that is removed makes room
                network.fill_disk(node, 2048)
                time.sleep(0.25)
                if not job.running:
                    break
        return codes

    def _check_lines(self, kind: str, node: int, job: Job, codes: list[int]) -> None:
        """A rank that ended with 2 is named by a line, or ended with one that printed it for all."""
        said, lines = job.said(), job.lines()
        if "Traceback" in said:
            raise FaultError(f"a traceback\n{said[-8000:]}")
        if 2 in codes and not lines:
            raise FaultError(f"no line says why it ended\n{said[-8000:]}")
        named = {"power lost": f"node{node}", "node stopped": f"node{node}", DISK_FULL: "o space left"}
        if 2 in codes and kind in named and not any(named[kind] in line or f"rank {node}" in line for line in lines):
            raise FaultError(f"no line names {named[kind]}: {lines}")

    # -- accidents of jobs

    def _under_slurm(self, kind: str, layout: str, output: Path, draw: random.Random) -> str:
        shutil.rmtree(self.network.root / "slurm", ignore_errors=True)
        with OverNodes(self.network) as slurm:
            grace = 0 if kind == "preempted without grace" else 120
            slurm.run("scontrol", "update", "partitionname=low", f"gracetime={grace}")
            job = slurm.sbatch(slurm.requeuing(self._run(output, layout, resume=None)), "--partition=low")

            def over() -> bool:
                return slurm.state(job) not in ("PENDING", "RUNNING", "CONFIGURING")

            if draw.random() < 0.2:
                slurm.wait(job, "RUNNING")
                time.sleep(draw.uniform(0, 12))  # while the processes import
            else:
                self._wait_for_step(output, draw.randint(1, STEPS - 25), over, lambda: slurm.log(job))
                time.sleep(draw.uniform(0, 0.5))
            step, began = _steps(output), time.monotonic()
            if kind.startswith("preempted"):
                other = slurm.sbatch("#!/bin/bash\nsrun sleep 1\n", "--partition=high", "--nodes=2", "--exclusive")
                slurm.wait(other, "COMPLETED", timeout_s=RUN_S)
            elif kind == "requeued":
                slurm.run("scontrol", "requeue", job)
            else:
                self.network.power_loss(1)
                wait_for(lambda: slurm.state(job) != "RUNNING", RUN_S, lambda: slurm.log(job)[-5000:])
                self.network.boot(1)
                slurm.start_slurmd(1)
            slurm.wait_for_restart(job, hurry=kind != "node lost under Slurm")
            seconds, resumed = time.monotonic() - began, _steps(output)
            ended = slurm.wait(job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", timeout_s=RUN_S)
            said = slurm.log(job)
            if ended["JobState"] != "COMPLETED" or "Traceback" in said:
                raise FaultError(f"{ended['JobState']}, {ended['Restarts']} restarts\n{said[-8000:]}")
            return f"after step {step}: restarted after {seconds:.0f} s, resumed after step {resumed}"

    # -- what must hold

    def _wait_for_step(self, output: Path, step: int, over: Callable[[], bool], said: Callable[[], str]) -> None:
        def reached() -> bool:
            if _steps(output) >= step:
                return True
            if over():
                raise FaultError(f"ended before step {step}, without an accident\n{said()[-8000:]}")
            return False

        wait_for(reached, RUN_S, lambda: said()[-8000:])

    def _check_files(self, output: Path) -> None:
        names = checkpoints(output)
        if wrong := [name for name in names if "damaged" in name or name.startswith(".")]:
            raise FaultError(f"{wrong} among the checkpoints")
        verified = self.network.run(0, "verify", output, forked=True)
        if verified.code:
            raise FaultError(f"verify: {verified.said()[-4000:]}")


def _steps(output: Path) -> int:
    with suppress(FileNotFoundError):
        rows = read_rows(output / "metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0
    return 0
