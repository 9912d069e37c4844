"""Runs that Slurm starts, stops, preempts and requeues: srun sets the ranks, and exit codes say what to do next."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dlm_bridge.train.metrics import read_rows
from tests import launcher
from tests.nodes.cases import assert_alike, checkpoints, pretrain
from tests.nodes.network import ROOT, Network, environment, wait_for
from tests.nodes.slurm import PROGRAM, Cluster, OneHost, OverNodes, no_slurm
from tests.parallel.megatron_cases import Files

STEPS = 60
HERE = {"MASTER_ADDR": "127.0.0.1"}  # the nodes of one host have names that do not resolve


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneHost]:
    if reason := no_slurm():
        pytest.skip(f"no Slurm: {reason}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, OneHost(Path(folder) / "slurm") as cluster:
        cluster.variables |= HERE
        yield cluster


@pytest.fixture(scope="module")
def over_nodes(nodes: Network) -> Iterator[OverNodes]:
    if reason := no_slurm(munge=True):
        pytest.skip(f"no Slurm: {reason}")
    with OverNodes(nodes) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    root = tmp_path_factory.mktemp("alone")
    words = pretrain(files, root / "run", steps=STEPS, save_interval=5)
    assert launcher.run("dlm_bridge.cli", words, [environment()], [root / "log.txt"], timeout_s=600), (
        root / "log.txt"
    ).read_text()
    return root / "run"


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(read_rows(file)) if file.exists() else 0


def tasks(run: Path) -> int:
    """The number of processes of this host that are ranks of a run."""
    found = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            program, *words = process.read_text().split("\0")
            found += Path(program).name == PROGRAM[0] and str(run) in words
    return found


def wait_for_step(cluster: Cluster, job: int, run: Path, step: int) -> None:
    wait_for(lambda: steps(run) >= step, 300, lambda: f"{cluster.show(job)}\n{cluster.log(job)[-5000:]}")


@pytest.mark.short
def test_srun_alone_starts_one_run(one_host: OneHost, files: Files, alone: Path, tmp_path: Path) -> None:
    """Not one for each task: ranks and the master are the step's. A second step is kept out of the folder."""
    run = pretrain(files, tmp_path / "run", steps=STEPS, save_interval=5)
    job = one_host.sbatch(
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\nsrun {' '.join([*PROGRAM, *run])}\n", "--overcommit"
    )
    wait_for_step(one_host, job, tmp_path / "run", 3)
    # On a slow machine the run would end before the second step has imported what it needs.
    one_host.run("scancel", "--signal=STOP", job)
    code, said = one_host.srun("python", "-m", "dlm_bridge.cli", *run, "--resume")
    one_host.run("scancel", "--signal=CONT", job)
    assert code == 2, said
    assert re.search(r"dlm-bridge: .*output", said)
    ended = one_host.wait(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", one_host.log(job)
    assert_alike(tmp_path / "run", alone, STEPS)


def test_sigterm_is_answered_by_a_requeue(one_host: OneHost, files: Files, alone: Path, tmp_path: Path) -> None:
    """While the processes still import, and later in a step."""
    run = pretrain(files, tmp_path / "run", steps=STEPS, save_interval=5)
    job = one_host.sbatch(one_host.requeuing(run))
    # The step is listed before its tasks run, and a task that starts after the signal would wait for the other's rank.
    wait_for(lambda: tasks(tmp_path / "run") == 2, 60, lambda: one_host.log(job))
    one_host.run("scancel", "--signal=TERM", job)
    one_host.wait_for_restart(job)
    assert steps(tmp_path / "run") == 0
    wait_for_step(one_host, job, tmp_path / "run", 6)
    one_host.run("scancel", "--signal=TERM", job)
    one_host.wait_for_restart(job, 2)
    ended = one_host.wait(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", one_host.log(job)
    assert_alike(tmp_path / "run", alone, STEPS)


def test_an_error_is_not_answered_by_a_requeue(one_host: OneHost, tmp_path: Path) -> None:
    """A rank that takes longer to end than the one with the error is not ended by SIGTERM, which would be requeued."""
    ends = "trap 'exit 143' TERM; for i in $(seq $((40 * (1 - SLURM_PROCID)))); do sleep 0.1; done; exit 2"
    job = one_host.sbatch(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --requeue\n"
        f"source {ROOT}/examples/slurm/requeue.sh\nsrun_and_requeue {tmp_path} bash -c {shlex.quote(ends)}\n"
    )
    wait_for(lambda: one_host.state(job) in ("FAILED", "COMPLETED") or one_host.show(job)["Restarts"] != "0", 90)
    assert one_host.show(job)["ExitCode"] == "2:0"
    assert one_host.show(job)["Restarts"] == "0"


@pytest.mark.parametrize("grace", [120, 0])
def test_a_preempted_job_resumes(over_nodes: OverNodes, files: Files, alone: Path, tmp_path: Path, grace: int) -> None:
    """With a grace time it saves and is requeued by its script, without one it is killed and requeued by Slurm."""
    over_nodes.run("scontrol", "update", "partitionname=low", f"gracetime={grace}")
    run = pretrain(files, tmp_path / "run", steps=STEPS, save_interval=5)
    job = over_nodes.sbatch(over_nodes.requeuing(run), "--partition=low")
    wait_for_step(over_nodes, job, tmp_path / "run", 7)
    other = over_nodes.sbatch("#!/bin/bash\nsrun sleep 1\n", "--partition=high", "--nodes=2", "--exclusive")
    over_nodes.wait(other, "COMPLETED", timeout_s=90)
    over_nodes.wait_for_restart(job)
    ended = over_nodes.wait(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", over_nodes.log(job)
    assert_alike(tmp_path / "run", alone, STEPS)
    assert not [name for name in checkpoints(tmp_path / "run") if "damaged" in name]
