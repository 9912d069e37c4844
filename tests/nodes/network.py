"""Two nodes of this machine, joined by a switch: network namespaces with hostnames, hosts files, disks and process ids
of their own, which lose power, cables and processes at will. Everything else they share, as nodes share a file system.

Nothing of it has a name outside the processes that are part of it: it vanishes with the process that made it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.processes import free_port

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.99.0.10", "10.99.0.11")
HOSTS = "127.0.0.1 localhost\n10.99.0.10 node0\n10.99.0.11 node1\n"
DISK = 512 << 20  # bytes of a node's disk
POLL_S = 0.05
# What a launcher or Slurm around the tests would say to the commands.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM", "PMI", "OMPI_")


@functools.cache
def unavailable() -> str | None:
    """The reason why there can be no nodes here, None if there can."""
    tools = ("ip", "unshare", "nsenter", "setpriv", "mount")
    if missing := [name for name in tools if shutil.which(name) is None]:
        return f"no {', '.join(missing)}"
    try_out = "ip link add br0 type bridge && ip link add p type veth peer name q && mount -t tmpfs tmpfs /mnt"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", try_out], check=False, capture_output=True, text=True
    )
    return f"no right to make namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Command:
    """A process on a node, by the connection to the node's first process."""

    def __init__(self, node: int, connection: socket.socket, log: Path) -> None:
        self.node, self.log = node, log
        self.code: int | None = None  # negative: the signal; -9 also if its node is gone
        self.started = time.monotonic()
        self.ended = 0.0
        self._connection = connection

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.code is not None:
            return self.code
        try:
            self._connection.setblocking(False)
            line = self._connection.recv(65536)
            self.code = json.loads(line)["code"] if line else -signal.SIGKILL
        except BlockingIOError:
            return None
        except OSError:
            self.code = -signal.SIGKILL
        self.ended = time.monotonic()
        self._connection.close()
        return self.code

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit code; AssertionError with its last words if it does not end in time."""
        wait_for(lambda: self.poll() is not None, timeout_s, lambda: f"{self.log}: {self.said()[-3000:]}")
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        """Signal the command's process group."""
        if self.poll() is None:
            self._connection.setblocking(True)
            self._connection.sendall(json.dumps({"signal": number}).encode() + b"\n")

    def close(self) -> None:
        """End the command, if it runs."""
        if self.poll() is None:
            self.code = -signal.SIGKILL
            self._connection.close()

    def said(self) -> str:
        """stdout and stderr."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Job:
    """The ranks of a job, one on each node."""

    def __init__(self, ranks: Sequence[Command]) -> None:
        self.ranks = ranks

    def wait(self, timeout_s: float = 120.0) -> list[int]:
        """The exit codes, by rank."""
        wait_for(lambda: not self.running, timeout_s, lambda: self.said()[-6000:])
        return [rank.wait() for rank in self.ranks]

    @property
    def running(self) -> bool:
        return None in [rank.poll() for rank in self.ranks]

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def said(self) -> str:
        return "\n".join(f"--- {rank.log.name}\n{rank.said()}" for rank in self.ranks)

    def lines(self) -> list[str]:
        """The lines that say why the job ended, in order of rank."""
        found = re.compile(r"(\[rank \d, node\d\] )?dlm-bridge: ")
        return [line for rank in self.ranks for line in rank.said().splitlines() if found.match(line)]


class Network:
    """Context manager of two nodes. Both are up at first.

    Args:
        root: folder for sockets, logs, the nodes' disks and `local`, where each node has its own.
        disk: bytes of a node's disk.
    """

    def __init__(self, root: Path, disk: int = DISK) -> None:
        self.root, self.size = root, disk
        self.local = root / "local"
        self.logs = root / "logs"
        self._first: list[int] = [0, 0]  # the nodes' first processes, 0: off
        self._holders: list[subprocess.Popen[bytes]] = []
        self._commands: list[Command] = []
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        for folder in (self.local, self.logs, *(self._disk(i) for i in range(2))):
            folder.mkdir(parents=True)
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.nodes.server"],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._connect()
            for node in range(2):
                self.hosts(node, HOSTS)
                self.boot(node)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _connect(self) -> None:
        """The switch, the disks and the cables, held by three processes."""
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "sleep", "infinity"]
        own = os.readlink("/proc/self/ns/mnt")
        for _ in range(3):
            self._holders.append(subprocess.Popen(hold, stdin=subprocess.DEVNULL))
        for holder in self._holders:
            wait_for(lambda holder=holder: os.readlink(f"/proc/{holder.pid}/ns/mnt") != own, 10.0)  # type: ignore[misc]
        self._ip(2, "link add br0 type bridge")
        self._ip(2, "link set br0 up")
        for node, address in enumerate(ADDRESSES):
            peer = self._holders[node].pid
            self._ip(2, f"link add port{node} type veth peer name eth0 netns {peer}")
            self._ip(2, f"link set port{node} master br0 up")
            self._ip(node, "link set lo up")
            self._ip(node, f"addr add {address}/24 dev eth0")
            self._ip(node, "link set eth0 up")
            self._in(node, "mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(self._disk(node)))

    def _in(self, holder: int, *words: str) -> None:
        """Run a command in a holder's namespaces."""
        enter = ["nsenter", "--net", "--mount", "--target", str(self._holders[holder].pid)]
        subprocess.run([*enter, *words], check=True)

    def _ip(self, holder: int, words: str) -> None:
        self._in(holder, "ip", *words.split())

    def _close(self) -> None:
        for command in self._commands:
            command.close()
        for node in range(2):
            with suppress(ProcessLookupError):
                self._kill(node)
        for process in (self._server, *self._holders):
            if process is not None:
                process.kill()
                process.wait()

    def _disk(self, node: int) -> Path:
        return self.root / f"disk{node}"

    # -- what a node is

    def boot(self, node: int) -> None:
        """Switch a node on, with its cable in."""
        assert not self._first[node]
        request = {
            "name": f"node{node}",
            "holder": self._holders[node].pid,
            "socket": str(self._socket(node)),
            "hosts": str(self.root / f"hosts{node}"),
            "disk": str(self._disk(node)),
            "local": str(self.local),
        }
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self._first[node] = int(self._server.stdout.readline())
        assert self._first[node], f"node {node} has not started"
        self.cable(node, True)

    def restore(self) -> None:
        """End all commands; both nodes are on, with their cables in, their hosts files and empty disks."""
        for command in self._commands:
            command.close()
        for node in range(2):
            if self._first[node]:
                self.cont(node)
                self.cable(node, True)
            else:
                self.boot(node)
            self.hosts(node, HOSTS)
            for path in self.disk(node).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def hosts(self, node: int, text: str) -> None:
        """Write a node's /etc/hosts."""
        (self.root / f"hosts{node}").write_text(text)

    def disk(self, node: int) -> Path:
        """The local disk of a node, from here."""
        return Path(f"/proc/{self._holders[node].pid}/root{self._disk(node)}")

    def _socket(self, node: int) -> Path:
        return self.root / f"node{node}.sock"

    # -- commands

    def start(
        self,
        node: int,
        *words: str | Path | int,
        forked: bool = False,
        log: str = "",
        before: str = "",
        **variables: str,
    ) -> Command:
        """Start a program on a node.

        Args:
            node: its number.
            words: program and arguments; with `forked` those of `dlm-bridge`.
            forked: fork the process from one that has imported everything, which saves seconds.
            log: name of the log, which is written anew.
            before: with `forked`, Python code that the process runs first.
            variables: environment variables besides those of every command.
        """
        path = self.logs / (log or f"{len(self._commands)}-node{node}.txt")
        path.unlink(missing_ok=True)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._socket(node)))
        (self.disk(node) / "tmp").mkdir(exist_ok=True)
        own = {"TMPDIR": str(self.local / "tmp"), "HF_HOME": str(self.local / "hf")}
        message = {
            "words": [str(word) for word in words],
            "environment": environment() | own | variables,
            "log": str(path),
            "forked": forked,
            "before": before,
        }
        connection.sendall(json.dumps(message).encode() + b"\n")
        self._commands.append(Command(node, connection, path))
        return self._commands[-1]

    def run(self, node: int, *words: str | Path | int, timeout_s: float = 120.0, **options: Any) -> Command:
        """Run a command to its end."""
        command = self.start(node, *words, **options)
        command.wait(timeout_s)
        return command

    def job(
        self,
        *words: str | Path | int,
        port: int | None = None,
        each: Sequence[Mapping[str, Any]] = ({}, {}),
        more: Sequence[Sequence[str | Path]] = ((), ()),
        nodes: Iterable[int] = (0, 1),
        **options: Any,
    ) -> Job:
        """Start `dlm-bridge WORDS` as rank 0 on node 0 and rank 1 on node 1, with variables as Kubernetes gives them.

        Args:
            words: arguments of both ranks.
            port: the master's.
            each: further options of `start` for each rank, before `options`.
            more: further arguments of each rank.
            nodes: those whose rank is started.
            options: of both.
        """
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port or free_port())}
        ranks = []
        for node in nodes:
            own = {**shared, "RANK": str(node), "forked": True, **options, **each[node]}
            ranks.append(self.start(node, *words, *more[node], **own))
        return Job(ranks)

    # -- accidents

    def kill(self, node: int) -> None:
        """The node dies: its processes end, and its kernel tells the others."""
        self._kill(node)

    def power_loss(self, node: int) -> None:
        """The node dies without a packet."""
        self.cable(node, False)
        self._kill(node)

    def cable(self, node: int, plugged: bool) -> None:
        """Plug the node's cable in, or pull it."""
        self._ip(2, f"link set port{node} {'up' if plugged else 'down'}")

    def stop(self, node: int) -> None:
        """SIGSTOP to every process of the node."""
        self._signal_all(node, signal.SIGSTOP)

    def cont(self, node: int) -> None:
        """SIGCONT to every process of the node."""
        self._signal_all(node, signal.SIGCONT)

    def fill_disk(self, node: int, free: int) -> Path:
        """Leave so many bytes free on a node's disk. Returns the file that fills it."""
        ballast = self.disk(node) / "ballast"
        with ballast.open("ab") as file, suppress(OSError):  # others write meanwhile
            file.write(bytes(max(0, shutil.disk_usage(self.disk(node)).free - free)))
        return ballast

    def _kill(self, node: int) -> None:
        first, self._first[node] = self._first[node], 0
        if first:
            members = self._members(first)
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: not any(map(_runs, members)), 10.0)

    def _signal_all(self, node: int, number: int) -> None:
        for pid in self._members(self._first[node]):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _members(self, first: int) -> list[int]:
        """All processes of the node whose first process is given."""
        wanted, found = os.readlink(f"/proc/{first}/ns/pid"), []
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == wanted:
                    found.append(int(name))
        return found


def environment() -> dict[str, str]:
    """Variables of every command on a node."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return own | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DLM_BRIDGE_PLATFORM": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }


def wait_for(condition: Callable[[], Any], timeout_s: float, said: Callable[[], str] = str) -> None:
    """Until the condition holds. AssertionError after so long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {said()}"
        time.sleep(POLL_S)


def _runs(pid: int) -> bool:
    """False for a process that has ended, reaped or not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
