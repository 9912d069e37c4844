"""What happens to two nodes: lost, stopped and restarted ones, a folder that is not shared, ports, names and signals.

Every rank ends within its time with its exit code, the reason names the host, and nothing is renamed or overwritten.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlm_bridge.train.metrics import read_rows
from tests.nodes.cases import LAYOUTS, assert_alike, checkpoints, pretrain
from tests.nodes.network import ADDRESSES, ROOT, Job, Network, wait_for
from tests.parallel.megatron_cases import Files
from tests.processes import free_port

RANK_TIMEOUT_S = 15.0
# A rank that watches ends so long after the last heartbeat, however busy this machine is.
ENDED_S = RANK_TIMEOUT_S + 45
SOON_S = 60.0  # for what is found before the first step
QUICK = {"rank_timeout": RANK_TIMEOUT_S / 60}
PREFIX = re.compile(r"^\[rank ([01]), node\1\] dlm-bridge: ")
# Shorter waits for what a network file system may show late.
SOON = "from dlm_bridge.train import checkpoints, output; checkpoints.LOOK_AGAIN_S = output.SHARED_WITHIN_S = 10.0"
NO_LEASE = "from dlm_bridge.train import output; output.LEASE_S = 1.0"
SLOW = "from tests.nodes.worker import slow; slow(0.4)"


@pytest.fixture(scope="module")
def alone(nodes: Network, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    command = nodes.run(0, *pretrain(files, output, steps=60, save_interval=5), forked=True)
    assert command.code == 0, command.said()
    return output


@pytest.fixture(scope="module")
def _begun(nodes: Network, files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("begun") / "run"
    job = nodes.job(*pretrain(files, output))
    assert job.wait() == [0, 0], job.said()
    return output


@pytest.fixture
def begun(_begun: Path, tmp_path: Path) -> Path:
    """A run of six steps with checkpoints of steps 3 and 6, to be resumed."""
    return shutil.copytree(_begun, tmp_path / "run")


def state(run: Path) -> dict[str, str]:
    """Digests of a run's files that no failed start may touch."""
    owned = [*(run / "checkpoints").rglob("*"), run / "metrics.jsonl", run / "config.yaml"]
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in owned if path.is_file()
    }


def wait_for_step(run: Path, step: int, job: Job, timeout_s: float = 120.0) -> None:
    def reached() -> bool:
        if (run / "metrics.jsonl").exists() and (rows := read_rows(run / "metrics.jsonl")):
            return bool(rows[-1]["step"] >= step)
        assert job.running, job.said()
        return False

    wait_for(reached, timeout_s, job.said)


def assert_refused(job: Job, *named: str, within_s: float = SOON_S, codes: tuple[int, ...] = (2, 2)) -> str:
    """All ranks ended with exit code 2, and a line, which is returned, names everything."""
    assert tuple(job.wait(within_s)) == codes, job.said()
    assert "Traceback" not in job.said()
    lines = job.lines()
    found = [line for line in lines if all(name in line for name in named)]
    assert found, f"no line names {named}: {lines}\n{job.said()[-3000:]}"
    return found[0]


# -- restarts and lost nodes


@pytest.mark.short
def test_a_restarted_job_of_torchrun_goes_on(network: Network, files: Files, alone: Path, tmp_path: Path) -> None:
    """Only the agent whose worker has failed counts the restart; heartbeats are found all the same."""
    port, output = free_port(), tmp_path / "run"
    meet = f"--rdzv-backend c10d --rdzv-endpoint {ADDRESSES[0]}:{port} --rdzv-id run --max-restarts 3".split()
    run = pretrain(files, output, steps=60, save_interval=5, rank_timeout=20 / 60, resume=True)
    start = ["torchrun", "--nnodes", 2, "--nproc-per-node", 1, *meet, "-m", "tests.nodes.worker", 0.6, *run]
    job = Job([network.start(node, *start) for node in range(2)])
    wait_for_step(output, 6, job)
    killed = network.run(1, "pkill", "-KILL", "-f", "python -u -m tests.nodes.worker")  # not torchrun
    assert killed.code == 0
    assert job.wait(300) == [0, 0], job.said()
    assert "has sent no heartbeat" not in job.said()
    assert_alike(output, alone, 60)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.short), 1])
def test_a_node_that_loses_power_ends_the_other_within_the_time(
    network: Network, files: Files, alone: Path, tmp_path: Path, lost: int
) -> None:
    """No packet says so. The run can be resumed, with the same losses."""
    output = tmp_path / "run"
    run = pretrain(files, output, steps=60, save_interval=5, **QUICK)
    job = network.job(*run, before=SLOW)
    wait_for_step(output, 6, job)
    network.power_loss(lost)
    ended = time.monotonic()
    left = Job([job.ranks[1 - lost]])
    line = assert_refused(left, f"node{lost}", within_s=ENDED_S, codes=(2,))
    assert time.monotonic() - ended > RANK_TIMEOUT_S / 2  # not at the first missing heartbeat
    assert PREFIX.match(line), line
    assert str(output / "hang") in left.said()
    assert any((output / "hang").iterdir())
    network.boot(lost)
    job = network.job(*run, "--resume")
    assert job.wait() == [0, 0], job.said()
    assert_alike(output, alone, 60)
    assert not [name for name in checkpoints(output) if "damaged" in name]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies_ends_the_other(network: Network, files: Files, tmp_path: Path, lost: int) -> None:
    output = tmp_path / "run"
    job = network.job(*pretrain(files, output, steps=60, save_interval=5, **QUICK), before=SLOW)
    wait_for_step(output, 6, job)
    network.kill(lost)
    assert_refused(Job([job.ranks[1 - lost]]), within_s=ENDED_S, codes=(2,))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_node_that_is_stopped_is_named(network: Network, files: Files, tmp_path: Path, stopped: int) -> None:
    """When it goes on it finds that the run has ended."""
    output = tmp_path / "run"
    job = network.job(*pretrain(files, output, steps=60, save_interval=5, **QUICK), before=SLOW)
    wait_for_step(output, 6, job)
    network.stop(stopped)
    assert_refused(Job([job.ranks[1 - stopped]]), f"node{stopped}", within_s=ENDED_S, codes=(2,))
    network.cont(stopped)
    assert job.wait(ENDED_S)[stopped] == 2, job.said()


def test_a_cable_that_is_out_for_seconds_is_no_end(
    network: Network, files: Files, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    job = network.job(*pretrain(files, output, steps=60, save_interval=5, rank_timeout=1), before=SLOW)
    wait_for_step(output, 6, job)
    network.cable(1, False)
    time.sleep(20)
    network.cable(1, True)
    assert job.wait(200) == [0, 0], job.said()
    assert_alike(output, alone, 60)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cable_that_is_out_for_good_ends_both(network: Network, files: Files, tmp_path: Path, cut: int) -> None:
    """Also the node that is on its own, and rank 0's, which has the store."""
    output = tmp_path / "run"
    job = network.job(*pretrain(files, output, steps=60, save_interval=5, **QUICK), before=SLOW)
    wait_for_step(output, 6, job)
    network.cable(cut, False)
    assert job.wait(ENDED_S) == [2, 2], job.said()
    for rank in range(2):
        assert f"node{1 - rank}" in "".join(Job([job.ranks[rank]]).lines())


def test_a_full_disk_of_one_node_is_named(network: Network, files: Files, tmp_path: Path) -> None:
    """The disk with node 1's local checkpoints."""
    pytest.importorskip("nvidia_resiliency_ext")
    output = tmp_path / "run"
    options = {"engine": "megatron", "local_folder": network.local / "copies", "local_interval": 1}
    run = pretrain(files, output, steps=60, save_interval=20, **options, **QUICK)
    job = network.job(*run, before=SLOW)
    wait_for_step(output, 6, job)
    ballast = network.fill_disk(1, 4096)
    line = assert_refused(job, "node1", "o space left", within_s=ENDED_S)
    assert PREFIX.match(line)
    ballast.unlink()
    job = network.job(*run, "--resume")
    assert job.wait() == [0, 0], job.said()


# -- what is not shared


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", pytest.param("tp", marks=pytest.mark.short)])
def test_an_output_that_is_not_shared_is_refused(network: Network, files: Files, layout: str) -> None:
    output = network.local / "run"
    job = network.job(*pretrain(files, output, **LAYOUTS[layout]), before=SOON)
    line = assert_refused(job, "output", "node1")
    assert PREFIX.match(line)
    for node in range(2):
        assert not (network.disk(node) / "run/checkpoints").exists()


def test_a_run_that_one_node_does_not_see_is_not_resumed(network: Network, files: Files, begun: Path) -> None:
    """The run lies on node 0's disk."""
    shutil.copytree(begun, network.disk(0) / "run")
    before = state(network.disk(0) / "run")
    job = network.job(*pretrain(files, network.local / "run", steps=9), "--resume", before=SOON)
    assert_refused(job, "output", "node1")
    assert state(network.disk(0) / "run") == before


@pytest.mark.parametrize("layout", ["ddp", "tp"])
def test_a_checkpoint_that_one_node_does_not_see_is_not_renamed(
    network: Network, files: Files, tmp_path: Path, layout: str
) -> None:
    output = tmp_path / "run"
    run = pretrain(files, output, **LAYOUTS[layout])
    job = network.job(*run)
    assert job.wait() == [0, 0], job.said()
    before = state(output)
    newest = max(path for path in (output / "checkpoints").iterdir() if path.is_dir())
    with hidden(network, 1, newest):
        job = network.job(*pretrain(files, output, steps=9, **LAYOUTS[layout], **QUICK), "--resume", before=SOON)
        line = assert_refused(job, "node1", newest.name, within_s=120)
        assert PREFIX.match(line)
    assert state(output) == before
    again = network.job(*pretrain(files, output, steps=9, **LAYOUTS[layout]), "--resume")
    assert again.wait() == [0, 0], again.said()
    assert len(read_rows(output / "metrics.jsonl")) == 9


def test_a_checkpoint_that_one_node_sees_late_is_resumed(network: Network, files: Files, begun: Path) -> None:
    with hidden(network, 1, max((begun / "checkpoints").glob("step-*"))):
        job = network.job(*pretrain(files, begun, steps=9), "--resume")
        time.sleep(6)
    assert job.wait() == [0, 0], job.said()
    assert len(read_rows(begun / "metrics.jsonl")) == 9
    assert not [name for name in checkpoints(begun) if "damaged" in name]


class hidden:  # noqa: N801
    """Context manager in which a node sees an empty folder in a folder's place."""

    def __init__(self, network: Network, node: int, folder: Path) -> None:
        self.network, self.node, self.folder = network, node, folder

    def __enter__(self) -> None:
        assert self.network.run(self.node, "mount", "-t", "tmpfs", "tmpfs", self.folder).code == 0

    def __exit__(self, *_: object) -> None:
        assert self.network.run(self.node, "umount", "-l", self.folder).code == 0


# -- signals, and two runs in one folder


@pytest.mark.parametrize("code", [None, 85])
def test_exit_codes_tell_finished_from_stopped(
    network: Network, files: Files, alone: Path, tmp_path: Path, code: int | None
) -> None:
    output = tmp_path / "run"
    run = pretrain(files, output, steps=60, save_interval=5, stopped_exit_code=code)
    job = network.job(*run, before=SLOW)
    wait_for_step(output, 3, job)
    assert json.loads((output / "status.json").read_text())["state"] == "running"
    job.signal(signal.SIGTERM)
    assert job.wait() == [code or 0] * 2, job.said()
    found = json.loads((output / "status.json").read_text())
    assert (found["state"], found["step"], found["steps"]) == ("stopped", len(read_rows(output / "metrics.jsonl")), 60)
    job = network.job(*run, "--resume")
    assert job.wait() == [0, 0], job.said()
    found = json.loads((output / "status.json").read_text())
    assert (found["state"], found["step"], found["steps"]) == ("finished", 60, 60)
    assert_alike(output, alone, 60)


def test_one_folder_takes_one_run(network: Network, files: Files, tmp_path: Path) -> None:
    """Whether the second is on the same node or on another one. A lock whose owner is gone is no obstacle."""
    output = tmp_path / "run"
    run = pretrain(files, output, steps=60, save_interval=5)
    job = network.job(*run, before=SLOW)
    wait_for_step(output, 3, job)
    for node in range(2):
        second = network.start(node, *run, "--resume", forked=True, before=NO_LEASE)
        assert_refused(Job([second]), "output", "node0", codes=(2,))
    assert job.running
    before = len(read_rows(output / "metrics.jsonl"))
    job.signal(signal.SIGKILL)
    assert job.wait() == [-9, -9]
    again = network.job(*run, "--resume")
    assert again.wait() == [0, 0], again.said()
    assert len(read_rows(output / "metrics.jsonl")) == 60 > before


def test_accelerate_launch_without_ranks_is_refused(network: Network, files: Files, tmp_path: Path) -> None:
    """With --cpu and no MPI it starts one process a machine that knows nothing of the other."""
    port = free_port()
    machines = "--cpu --num_machines 2 --num_processes 2 --same_network --mixed_precision no"
    run = ["-m", "dlm_bridge.cli", *pretrain(files, tmp_path / "run")]
    ranks = []
    for node in range(2):
        meet = ["--machine_rank", node, "--main_process_ip", ADDRESSES[0], "--main_process_port", port]
        ranks.append(network.start(node, "accelerate", "launch", *machines.split(), *meet, *run))
    job = Job(ranks)
    assert all(job.wait(120)), job.said()
    assert [line for line in job.lines() if "WORLD_SIZE" in line], job.said()
    assert not (tmp_path / "run/checkpoints").exists()


# -- the meeting of the ranks


def test_processes_per_host_are_counted(network: Network, files: Files, tmp_path: Path) -> None:
    """Without LOCAL_WORLD_SIZE: each node has the other's copy of the local checkpoints."""
    pytest.importorskip("nvidia_resiliency_ext")
    options = {"engine": "megatron", "local_folder": network.local / "copies", "local_interval": 2, "local_copies": 2}
    job = network.job(*pretrain(files, tmp_path / "run", save_interval=0, **options), before=SLOW)
    wait_for_step(tmp_path / "run", 5, job)
    for node in range(2):
        assert len(list((network.disk(node) / "copies").rglob("step-0000004.rank-*"))) == 2
    assert job.wait() == [0, 0], job.said()


def test_a_port_in_use_is_named(network: Network, files: Files, begun: Path) -> None:
    port, before = free_port(), state(begun)
    listen = f"import socket, time; s = socket.create_server(('', {port})); print('up', flush=True); time.sleep(300)"
    taken = network.start(0, "python", "-c", listen)
    wait_for(lambda: "up" in taken.said(), 30)
    job = network.job(*pretrain(files, begun, steps=9, **QUICK), "--resume", port=port)
    assert_refused(job, str(port))
    assert state(begun) == before


def test_a_master_that_does_not_resolve_is_named(network: Network, files: Files, begun: Path) -> None:
    before = state(begun)
    each = ({}, {"MASTER_ADDR": "nowhere"})
    job = network.job(*pretrain(files, begun, steps=9, **QUICK), "--resume", each=each)
    wait_for(lambda: "nowhere" in job.ranks[1].said(), RANK_TIMEOUT_S)  # in the first seconds
    assert_refused(job, "rank 1", within_s=ENDED_S)
    assert_refused(Job(job.ranks[1:]), "nowhere", codes=(2,))
    assert state(begun) == before


def test_a_host_name_on_loopback_is_no_obstacle(network: Network, files: Files, alone: Path, tmp_path: Path) -> None:
    """As Debian's and Ubuntu's installers write /etc/hosts."""
    for node in range(2):
        network.hosts(node, f"127.0.0.1 localhost\n127.0.1.1 node{node}\n")
    job = network.job(*pretrain(files, tmp_path / "run"))
    assert job.wait(SOON_S) == [0, 0], job.said()


def test_ranks_that_do_not_come_are_named(network: Network, files: Files, begun: Path) -> None:
    before = state(begun)
    for node in range(2):
        job = network.job(*pretrain(files, begun, steps=9, **QUICK), "--resume", nodes=[node])
        assert_refused(job, f"rank {1 - node}" if node == 0 else ADDRESSES[0], within_s=ENDED_S, codes=(2,))
        assert state(begun) == before


# -- what is not the same


def assert_found_before_the_run(
    job: Job, run: Path, before: dict[str, str], *named: str, within_s: float = SOON_S
) -> None:
    line = assert_refused(job, *named, within_s=within_s)
    assert PREFIX.match(line), line
    assert state(run) == before


def test_data_on_one_node_only(network: Network, files: Files, begun: Path) -> None:
    before = state(begun)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{files.corpus}{suffix}", network.disk(0) / f"corpus{suffix}")
    data = network.local / "corpus"
    run = pretrain(files, begun, steps=9, rank_timeout=5)
    run[run.index("--data") + 1] = str(data)
    job = network.job(*run, "--resume")
    assert_found_before_the_run(job, begun, before, "node1", str(data))


def test_a_model_on_one_node_only(network: Network, files: Files, tmp_path: Path) -> None:
    shutil.copytree(files.hub("masked"), network.disk(0) / "model")
    run = pretrain(files, tmp_path / "run", rank_timeout=5)
    run[run.index("--model") + 1] = str(network.local / "model")
    job = network.job(*run)
    line = assert_refused(job, "node1", str(network.local / "model"))
    assert PREFIX.match(line), line
    assert not (tmp_path / "run").exists()


def test_another_configuration_on_one_node(network: Network, files: Files, begun: Path) -> None:
    before = state(begun)
    job = network.job(*pretrain(files, begun, steps=9), "--resume", more=((), ("--lr", "2e-3")))
    assert_found_before_the_run(job, begun, before, "node1", "lr")


@pytest.fixture(scope="module")
def other_version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package that calls itself another version."""
    root = tmp_path_factory.mktemp("other")
    shutil.copytree(ROOT / "dlm_bridge", root / "dlm_bridge", ignore=shutil.ignore_patterns("__pycache__"))
    file = root / "dlm_bridge/__init__.py"
    text = file.read_text()
    file.write_text(re.sub(r'(?m)^__version__ = ".*"', '__version__ = "9.8.7"', text))
    assert file.read_text() != text
    return root


def test_another_version_on_one_node(network: Network, files: Files, begun: Path, other_version: Path) -> None:
    before = state(begun)
    own = {"PYTHONPATH": str(other_version), "forked": False}
    program = ("python", "-P", "-m", "dlm_bridge.cli")  # not the package in the working directory
    run = pretrain(files, begun, steps=9)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(free_port())}
    job = Job(
        [
            network.start(0, *run, "--resume", forked=True, RANK="0", **shared),
            network.start(1, *program, *run, "--resume", RANK="1", **shared, **own),
        ]
    )
    # Rank 1 is not forked, and imports everything first.
    assert_found_before_the_run(job, begun, before, "node1", "9.8.7", within_s=3 * SOON_S)


def test_a_clock_that_is_off(network: Network, files: Files, begun: Path) -> None:
    before = state(begun)
    ahead = (
        "import time; now, now_ns = time.time, time.time_ns; time.time = lambda: now() + 3600\n"
        "time.time_ns = lambda: now_ns() + 3600 * 10**9"
    )
    job = network.job(*pretrain(files, begun, steps=9), "--resume", each=({}, {"before": ahead}))
    assert_found_before_the_run(job, begun, before, "node1", "clock")


def test_a_rank_that_fails_alone_ends_the_others(network: Network, files: Files, tmp_path: Path) -> None:
    """Here with an error of which nobody knows anything, in the middle of a step."""
    broken = "from torch.optim.optimizer import register_optimizer_step_pre_hook as hook; hook(lambda *_: 1 / 0)"
    run = pretrain(files, tmp_path / "run", rank_timeout=5)
    job = network.job(*run, each=({}, {"before": broken}))
    assert job.wait(SOON_S) == [2, 1], job.said()
    assert "ZeroDivisionError" in job.ranks[1].said()
    assert not checkpoints(tmp_path / "run")
