"""Slurm with two nodes: both daemons on this host, without any rights, or one on each node of a `Network`.

The daemons end with the context manager. Jobs' scripts, logs and the daemons' files lie in the folder given.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.nodes.network import ROOT, Command, Network, environment, wait_for
from tests.processes import free_port

DAEMON_S = 30.0  # for daemons to find each other
PROGRAM = ("python", "-m", "tests.nodes.worker", "0.3")  # whose steps take that long
STOPPED = 75
# From the end of a job to its next start. The end revokes the job's credentials up to that second. slurmd refuses a
# start within it ("Job 1 already killed, do not launch batch job"), and slurmctld takes the job for failed.
RESTART_S = 3
NODE_DOWN_S = 30  # after which a node that does not answer is down
COMMON = """\
ClusterName=one
SlurmUser={user}
SlurmdUser={user}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ReturnToService=2
JobRequeue=1
"""
ONE_HOST = """\
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
NodeName=node0 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=node1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=4 RealMemory=4000
PartitionName=all Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP
"""
NODES = """\
SlurmctldHost=node0
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
SlurmdTimeout={down}
NodeName=node[0-1] CPUs=4 RealMemory=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=node[0-1] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 State=UP
PartitionName=high Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF State=UP
"""


@functools.cache
def no_slurm(munge: bool = False) -> str | None:
    """The reason why there can be no Slurm here, None if there can."""
    tools = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", *(["munged"] * munge))
    missing = [name for name in tools if shutil.which(name) is None]
    return f"no {', '.join(missing)} (slurm-wlm, munge)" if missing else None


class Cluster:
    """Commands of Slurm, common to both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.variables = {"SLURM_CONF": str(root / "slurm.conf")}

    def run(self, *words: str | Path | int, timeout_s: float = 60.0) -> str:
        """The stdout of a command where jobs are submitted, which must succeed."""
        raise NotImplementedError

    def srun(self, *words: str | Path | int, timeout_s: float = 300.0) -> tuple[int, str]:
        """A step of both nodes: its exit code, and what it has said."""
        raise NotImplementedError

    def sbatch(self, script: str, *options: str | Path | int) -> int:
        """Submit a script. Returns the job's id; its log is `log(id)`."""
        path = self.root / "job.sh"
        path.write_text(script)
        log = ("--output", self.root / "log-%j.txt", "--open-mode", "append", "--chdir", self.root)
        said = self.run("sbatch", "--parsable", *log, *options, path)
        return int(said.strip().splitlines()[-1].split(";")[0])

    def log(self, job: int) -> str:
        path = self.root / f"log-{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self, job: int) -> dict[str, str]:
        """`scontrol show job`: JobState, Restarts, ExitCode, Reason, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def state(self, job: int) -> str:
        return self.show(job)["JobState"]

    def wait(self, job: int, *states: str, timeout_s: float = 300.0) -> dict[str, str]:
        """Until the job is in one of the states."""
        wait_for(lambda: self.state(job) in states, timeout_s, lambda: f"{self.show(job)}\n{self.log(job)[-5000:]}")
        return self.show(job)

    def wait_for_restart(self, job: int, number: int = 1, hurry: bool = True, timeout_s: float = 300.0) -> None:
        """Until the job runs again for the nth time, or has run; in a hurry without the two minutes that it would
        wait. After the loss of a node Slurm needs them: sooner it takes the new start for the old one."""
        hurried = not hurry

        def again() -> bool:
            nonlocal hurried
            shown = self.show(job)
            if shown["JobState"] == "PENDING" and not hurried and self._idle():  # not while the last start ends
                with suppress(AssertionError, subprocess.CalledProcessError):  # it starts, or still completes
                    self.run("scontrol", "update", f"JobId={job}", f"StartTime=now+{RESTART_S}")
                    hurried = True  # another update would put the start off
            return int(shown["Restarts"]) >= number and shown["JobState"] not in ("PENDING", "COMPLETING")

        wait_for(again, timeout_s, lambda: f"{self.show(job)}\n{self.log(job)[-5000:]}")

    @staticmethod
    def requeuing(run: Sequence[str]) -> str:
        """A batch script as in examples/slurm, which is requeued where its run has stopped early."""
        output = run[run.index("--output") + 1]
        return (
            "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --requeue\n"
            f"source {ROOT}/examples/slurm/requeue.sh\n"
            f"srun_and_requeue {' '.join([output, *PROGRAM, *run])} --resume --stopped-exit-code {STOPPED}\n"
        )

    def _write(self, text: str, **values: object) -> None:
        for name in ("state", "spool/node0", "spool/node1"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "slurm.conf").write_text((COMMON + text).format(root=self.root, user=getpass.getuser(), **values))
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _idle(self) -> bool:
        with suppress(AssertionError, subprocess.SubprocessError):
            return self.run("sinfo", "--noheader", "--format=%T %D", "--states=idle").split()[:2] == ["idle", "2"]
        return False

    def _wait_until_idle(self) -> None:
        wait_for(self._idle, DAEMON_S, self._said)

    def _said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.root.glob("slurm*.log"))


class OneHost(Cluster):
    """Context manager of both nodes on this host."""

    def __enter__(self) -> OneHost:
        self.root.mkdir(parents=True, exist_ok=True)
        self._write(ONE_HOST, host=socket.gethostname().split(".")[0], ports=[free_port() for _ in range(3)])
        self._daemons = [
            subprocess.Popen(
                [*words, "-D"], env=self._environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for words in (["slurmctld"], ["slurmd", "-N", "node0"], ["slurmd", "-N", "node1"])
        ]
        try:
            self._wait_until_idle()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(subprocess.SubprocessError):
            self.run("scancel", f"--user={getpass.getuser()}", "--signal=KILL", "--full")
        self._close()

    def _close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for daemon in reversed(self._daemons):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    daemon.send_signal(number)
                    daemon.wait(10)

    def _environment(self) -> dict[str, str]:
        return environment() | self.variables

    def run(self, *words: str | Path | int, timeout_s: float = 60.0) -> str:
        return subprocess.run(
            [str(word) for word in words],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        ).stdout

    def srun(self, *words: str | Path | int, timeout_s: float = 300.0) -> tuple[int, str]:
        found = subprocess.run(
            ["srun", "--nodes=2", "--ntasks=2", *map(str, words)],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return found.returncode, found.stdout


class OverNodes(Cluster):
    """Context manager of Slurm on the nodes of a network: slurmctld is on node 0."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.root / "slurm")
        self.network = network
        self.daemons: list[Command] = []

    def __enter__(self) -> OverNodes:
        self._write(NODES, down=NODE_DOWN_S)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = [f"--{name}={self.root}/munge.{end}" for name, end in MUNGE.items()]
        self._munged = subprocess.Popen(
            ["munged", "--foreground", "--force", *own], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for((self.root / "munge.socket").exists, DAEMON_S, self._said)
            self.daemons = [self._start(0, "slurmctld"), *(self.start_slurmd(node) for node in range(2))]
            self._wait_until_idle()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for daemon in self.daemons:
            daemon.close()
        self._munged.terminate()
        self._munged.wait()

    def _start(self, node: int, *words: str) -> Command:
        return self.network.start(node, *words, "-D", **self.variables)

    def start_slurmd(self, node: int) -> Command:
        """On a node that has just been switched on."""
        return self._start(node, "slurmd", "-N", f"node{node}")

    def run(self, *words: str | Path | int, timeout_s: float = 60.0) -> str:
        command = self.network.run(0, *words, timeout_s=timeout_s, **self.variables)
        assert command.code == 0, command.said()
        return command.said()

    def srun(self, *words: str | Path | int, timeout_s: float = 300.0) -> tuple[int, str]:
        step: Sequence[str | Path | int] = ("srun", "--nodes=2", "--ntasks=2", *words)
        command = self.network.run(0, *step, timeout_s=timeout_s, **self.variables)
        assert command.code is not None
        return command.code, command.said()


MUNGE = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
