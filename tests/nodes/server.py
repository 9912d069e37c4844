"""A process that has imported what commands need, and from which nodes are forked: `python -m tests.nodes.server`.

A node is a process tree with its own network, hostname, process ids, /dev/shm, hosts file and local disk. Its first
process starts commands: one connection to its socket is one command. `network.py` is the other side of both.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from tests import launcher
from tests.faults.job import become

IMPORTED = (
    "dlm_bridge.cli.app",
    "dlm_bridge.train.accelerate.trainer",
    "dlm_bridge.train.rl.accelerate_engine",
    "dlm_bridge.parallel.train.trainer",
    "matplotlib.backends.backend_agg",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)
POLL_S = 0.02
# linux/sched.h, linux/mount.h and linux/prctl.h
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """A request is a line {"name", "holder", "socket", "hosts", "disk", "local"}; the answer is the process id of the
    node's first process, or 0."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    launcher.skip_fsync()
    _import_all()
    for line in sys.stdin:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        answers.write(f"{_boot(json.loads(line))}\n")
        answers.flush()


def _import_all() -> None:
    import torch

    torch.set_num_threads(1)
    for module in IMPORTED:
        with suppress(ImportError):  # an extension is absent: the command says so
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _boot(request: dict[str, Any]) -> int:
    """Start a node. Returns the id of its first process as this process sees it."""
    reader, writer = os.pipe()
    parent = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        os.close(reader)
        _keep(request, writer, parent)
    os.close(writer)
    with os.fdopen(reader) as answer:
        return int(answer.read() or 0)


def _keep(request: dict[str, Any], writer: int, parent: int) -> NoReturn:
    """In the process outside the node that waits for its end."""
    try:
        _end_with(parent)
        for kind, flag in (("net", _NEWNET), ("mnt", _NEWNS)):
            with open(f"/proc/{request['holder']}/ns/{kind}") as namespace:
                _call(_libc.setns, namespace.fileno(), flag)
        _call(_libc.unshare, _NEWNS | _NEWUTS | _NEWIPC | _NEWPID)
        ready, set_ready = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(writer)
            os.close(ready)
            _first(request, set_ready)
        os.close(set_ready)
        if os.read(ready, 1):
            os.write(writer, str(first).encode())
        os.close(writer)
        os.waitpid(first, 0)
    finally:
        os._exit(0)


def _first(request: dict[str, Any], ready: int) -> NoReturn:
    """In the node's first process."""
    try:
        _end_with(0)  # of which the parent lies outside
        socket.sethostname(request["name"])
        _call(_libc.mount, b"none", b"/", None, _REC | _PRIVATE, None)
        _call(_libc.mount, b"proc", b"/proc", b"proc", 0, None)
        _call(_libc.mount, b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1g")
        for source, target in ((request["hosts"], "/etc/hosts"), (request["disk"], request["local"])):
            _call(_libc.mount, source.encode(), target.encode(), None, _BIND, None)
        with socket.socket(socket.AF_UNIX) as listener:
            Path(request["socket"]).unlink(missing_ok=True)
            listener.bind(request["socket"])
            listener.listen(50)
            os.write(ready, b"1")
            os.close(ready)
            _serve(listener)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _serve(listener: socket.socket) -> None:
    """Start commands, pass signals on, and send exit codes, until this process is killed."""
    commands: dict[int, socket.socket] = {}  # by process id
    pids: dict[socket.socket, int] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(POLL_S):
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            line = _line(connection)
            if line is None:  # nobody waits for the command
                selector.unregister(connection)
                connection.close()
                if connection in pids:
                    _signal(pids[connection], signal.SIGKILL)
            elif "signal" in line:
                _signal(pids[connection], line["signal"])
            else:
                pids[connection] = _start(line)
                commands[pids[connection]] = connection
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                connection = commands.pop(found[0], None)
                if connection is not None:
                    pids.pop(connection)
                    with suppress(OSError, ValueError):
                        connection.sendall(json.dumps({"code": os.waitstatus_to_exitcode(found[1])}).encode() + b"\n")


def _line(connection: socket.socket) -> dict[str, Any] | None:
    """A message, which is at most a few kilobytes; None at the end of the connection."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            return None
        text += part
    found: dict[str, Any] = json.loads(text)
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has no session of its own yet, or has ended
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _start(command: dict[str, Any]) -> int:
    """Start a command in a session of its own: a program, or `dlm-bridge` forked from this process."""
    log, environment = command["log"], command["environment"]
    if not command["forked"]:  # not by Popen, which would collect exit codes itself
        said = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_OPEN, 1, log, said, 0o644)]
        files.append((os.POSIX_SPAWN_DUP2, 1, 2))
        words = ["env", *command["words"]]
        return os.posix_spawn("/usr/bin/env", words, environment, file_actions=files, setsid=True)
    child = os.fork()
    if child == 0:
        exec(command["before"], {})
        become(environment, command["words"], Path(log))
    return child


def _end_with(parent: int) -> None:
    """End this process by SIGKILL when its parent ends."""
    _call(_libc.prctl, _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function.__name__)


if __name__ == "__main__":
    main()
