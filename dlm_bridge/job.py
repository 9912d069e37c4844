"""A job: how the processes of a launcher meet, what they check before they start, and torch's default process group.

The ranks of an attempt find each other in the launcher's store by random keys. torchrun's store outlives an attempt,
and its count of restarts differs between nodes, so neither distinguishes an attempt from an earlier one. Process
groups of an engine (megatron-core's parallel state) belong to the engine.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import itertools
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from dlm_bridge import errors
from dlm_bridge.distributed import is_initialized, launched, number, rank, torch_distributed, world_size
from dlm_bridge.errors import DlmBridgeError, LayoutError, SettingError, WorkerError, one_line

logger = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 600.0
RESOLVE_S = 60.0  # for the name of a pod that was just started
REPORT_GRACE_S = 2.0  # for other ranks to find the same error
ANSWER_S = 30.0  # of a server that can be reached
NOTE_S = 5.0  # until a note names what the process waits for
LARGEST_CLOCK_OFFSET_S = 60.0
COMPARED = ("torch", "transformers", "accelerate", "megatron-core")  # packages
_HELLO, _WELCOME = "dlm_bridge/hello", "dlm_bridge/welcome"  # keys outside of an attempt
_before_end: list[Callable[[], None]] = []
_calls = itertools.count()
_reports = itertools.count()


@contextmanager
def _answers(owner: str) -> Iterator[None]:
    """Context manager that raises errors of the store, for whose answer `owner` is responsible, as WorkerError."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(owner, f"does not answer ({one_line(error)}): see its output, then start again") from error


@dataclass(frozen=True)
class Attempt:
    """The processes that a launcher has started together, in one attempt: a job that is restarted has another token.

    Args:
        token: random text, the same on all ranks.
        hosts: host name of each rank.
        timeout_s: seconds that ranks wait for each other.
        connect: returns a new connection to the store, with a timeout in seconds.
        server: the store's server on the first rank, unless the launcher has it; otherwise None.
    """

    token: str
    hosts: tuple[str, ...]
    timeout_s: float
    connect: Callable[[float], Any]
    server: Any = None

    @property
    def several_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    def store(self, name: str, timeout_s: float | None = None) -> Any:
        """New connection to the store, with keys of this attempt and of `name`. A thread needs its own. Raises
        RuntimeError if the store does not answer."""
        return _prefixed(self.connect(timeout_s or self.timeout_s), self.token, name)

    def agree(self, name: str, value: Any, decide: Callable[[list[Any]], Any], work_s: float = 0.0) -> Any:
        """Return on every rank what `decide` returns on the first one for the values of all ranks, or raise its error.
        Collective, without a process group. Values are of JSON's types. A rank may call it `work_s` later than others.
        Raises WorkerError if a rank is missing."""
        with _answers(_name(0, self.hosts)):
            store = self.store(self.unique("agree"))
            return _agree(store, name, value, decide, self.hosts, self.timeout_s + work_s)

    def unique(self, name: str) -> str:
        """Name with the number of this call, which must be the same on all ranks."""
        return f"{name}{next(_calls)}"


_joined: list[Attempt] = []
_met: list[Attempt] = []  # the same, even if the processes turned out not to fit together


def current() -> Attempt | None:
    """The job, once its processes have joined. None before, and for a single process."""
    return _joined[0] if _joined else None


@dataclass(frozen=True)
class ReportClaim:
    """Claim of a process to print the error of the attempt. `first` is True in the process that may."""

    first: bool
    store: Any

    def end(self, timeout_s: float) -> None:
        """Let the other processes end, after printing. The process that hosts the store waits for their claims."""
        if self.store is None:
            return
        self.store.set("printed", "")
        deadline = time.monotonic() + min(timeout_s, REPORT_GRACE_S)
        while _met and _met[0].server is not None and time.monotonic() < deadline:
            if self.store.add("claims", 0) >= world_size():
                break
            time.sleep(0.05)


def claim_report(timeout_s: float) -> ReportClaim:
    """Claim to print an error, in the first process of the attempt that calls this function; if the processes have not
    met, in the first one of a node that torchrun has started. The others wait a moment until it has printed, because
    their launcher ends all when one has ended. Raises RuntimeError if the store does not answer, and SettingError."""
    store = _report_store(timeout_s)
    first = store is None or store.add("claims", 1) == 1
    if not first:
        with contextlib.suppress(RuntimeError):
            store.wait(["printed"], datetime.timedelta(seconds=REPORT_GRACE_S))
    return ReportClaim(first, store)


def _report_store(timeout_s: float) -> Any:
    if _met:
        return _met[0].store(f"report{next(_reports)}", timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world_size() > 1:
        # Only processes of this node know its launcher's count of restarts.
        attempt = f"{socket.gethostname()}/{os.getppid()}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        return _prefixed(_tcp_store(_address(), timeout_s), "dlm_bridge/report", attempt)
    return None


@_answers("rank 0")
def join(
    timeout_s: float = JOIN_TIMEOUT_S, settings: Mapping[str, Any] | None = None, compare: bool = True
) -> Attempt | None:
    """Meet the other processes of the job, and check what must be the same on all of them: versions, settings and
    clocks. Collective; a second call returns the same job. Returns None for a single process.

    Args:
        timeout_s: seconds to wait for the other ranks.
        settings: of a run, which must be equal everywhere.
        compare: False to accept differences of versions, settings and clocks.

    Raises:
        SettingError: the launcher's variables cannot be used, or versions, settings or clocks differ.
        WorkerError: ranks are missing.
    """
    if _joined:
        return _joined[0]
    if world_size() == 1:
        _refuse_rankless_launchers()
        return None
    address = _address()
    server = _open_store(address, timeout_s)
    connect = functools.partial(_tcp_store, address)
    base = connect(timeout_s + NOTE_S)  # so that the first rank, which names those that are missing, decides
    me = {
        "host": socket.gethostname(),
        "address": _own_address(address[0]),
        "versions": versions(),
        "settings": dict(settings or {}),
    }
    if rank() == 0:
        token = secrets.token_hex(8)
        store = _prefixed(base, token, "join")
        _welcome_all(base, store, token, timeout_s)
    else:
        nonce = secrets.token_hex(8)
        base.set(f"{_HELLO}/{rank()}", nonce)
        token = _get(base, f"{_WELCOME}/{nonce}", "rank 0", timeout_s).decode()
        store = _prefixed(base, token, "join")
        store.set(f"arrived/{rank()}", "")
    unknown = ("",) * world_size()
    _met.append(Attempt(token, unknown, timeout_s, connect, server))
    found = _agree(store, "members", me, _members, unknown, timeout_s)
    offset = time.time() - found["time"]
    hosts = tuple(found["hosts"])
    _met[0] = Attempt(token, hosts, timeout_s, connect, server)
    if compare:
        check = functools.partial(_check_equal, hosts, found["difference"])
        _agree(store, "equal", offset, check, hosts, timeout_s)
    peers = [other for other, host in enumerate(hosts) if host == me["host"]]
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(peers)))
    os.environ.setdefault("LOCAL_RANK", str(peers.index(rank())))
    if len(peers) < len(hosts):
        others = [each for each, host in zip(found["addresses"], hosts, strict=True) if host != me["host"]]
        _choose_interface(next(filter(_is_reachable, others), address[0]))
    _joined.append(_met[0])
    return _joined[0]


def named_rank(other: int) -> str:
    """Name of a rank, with its host in a job of several hosts: "rank 1 (node1)"."""
    job = current()
    return _name(other, job.hosts if job is not None and job.several_hosts else ())


def prefix() -> str:
    """What begins lines of this process on stderr in a job of several hosts: "[rank 1, node1] ", otherwise nothing."""
    with contextlib.suppress(SettingError):  # malformed variables, which are reported elsewhere
        if (_met and _met[0].several_hosts) or (number("GROUP_WORLD_SIZE") or number("SLURM_STEP_NUM_NODES") or 1) > 1:
            return f"[rank {rank()}, {socket.gethostname()}] "
    return ""


def _name(other: int, hosts: Sequence[str]) -> str:
    return f"rank {other} ({hosts[other]})" if hosts and hosts[other] else f"rank {other}"


def _address() -> tuple[str, int]:
    """Address of the store. Raises SettingError if the launcher's variables are missing or contradict each other."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            reason = f"is not set, but WORLD_SIZE is {world_size()}: start the processes with torchrun or srun"
            raise SettingError(name, reason)
    if rank() >= world_size():
        raise SettingError("RANK", f"{rank()} must be less than WORLD_SIZE, {world_size()}")
    port = number("MASTER_PORT") or 0
    if not 0 < port < 2**16:
        raise SettingError("MASTER_PORT", f"{port} is not a port: choose one from 1 to 65535")
    return os.environ["MASTER_ADDR"], port


def _refuse_rankless_launchers() -> None:
    """Raise SettingError for launchers that start several processes which do not know of each other."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if os.environ.get(name, "1") != "1" and not launched():
            raise SettingError("WORLD_SIZE", f"is not set, but {name} is {os.environ[name]}: use torchrun or srun")
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_PORT" in os.environ and not launched():
        raise SettingError(
            "WORLD_SIZE", "is not set: accelerate launch does not rank processes on CPUs: start them with torchrun"
        )
    if "SLURM_STEP_NUM_TASKS" not in os.environ and (tasks := os.environ.get("SLURM_NTASKS", "1")) != "1":
        logger.warning("one process, but the Slurm job has %s tasks: start with srun to use them", tasks)


def _prefixed(store: Any, *names: str) -> Any:
    for name in names:
        store = torch_distributed().PrefixStore(name, store)
    return store


def _open_store(address: tuple[str, int], timeout_s: float) -> Any:
    """Wait until the store can be reached. The first rank hosts it if the launcher does not: its server is returned.
    Raises SettingError or WorkerError."""
    here = socket.gethostname()
    resolve = f"'{address[0]}' does not resolve on {here}"
    _wait_for("MASTER_ADDR", lambda: socket.getaddrinfo(*address), min(RESOLVE_S, timeout_s), resolve)
    if rank() > 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        unanswered = f"does not answer at {address[0]}:{address[1]}"
        _wait_for("rank 0", lambda: socket.create_connection(address, NOTE_S).close(), timeout_s, unanswered)
        _check_answer(address, timeout_s, f"{unanswered} as a store")
        return None
    try:
        return _tcp_store(address, timeout_s, is_master=True)
    except RuntimeError as error:
        reason = f"{address[1]} cannot be used on {here} ({one_line(error)}): choose another"
        raise SettingError("MASTER_PORT", reason) from error


def _check_answer(address: tuple[str, int], timeout_s: float, problem: str) -> None:
    """Raise WorkerError if another program has the port: torch's client would wait for its answer without a limit."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            _tcp_store(address, timeout_s)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if not answered.wait(min(timeout_s, ANSWER_S)):
        raise WorkerError("rank 0", f"{problem}: does another program have the port? Set another MASTER_PORT")


def _tcp_store(address: tuple[str, int], timeout_s: float, is_master: bool = False) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    # Several servers of a process share its port.
    return torch_distributed().TCPStore(
        *address, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=is_master
    )


def _wait_for(field: str, attempt: Callable[[], Any], timeout_s: float, problem: str) -> None:
    """Repeat `attempt` until it succeeds. After some seconds a note says why. Raises SettingError for a field
    in capitals, which is a variable, otherwise WorkerError."""
    start, noted = time.monotonic(), False
    while True:
        try:
            attempt()
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one of a host
            waited = time.monotonic() - start
            reason = f"{problem} ({getattr(error, 'strerror', None) or error})"
        if waited >= timeout_s:
            kind = SettingError if field.isupper() else WorkerError
            raise kind(field, f"{reason} for {timeout_s:g} s: check the address and the network, then start again")
        if waited >= NOTE_S and not noted:
            noted = True
            logger.warning("%s %s: waiting", field, reason)
        time.sleep(0.2)


def _welcome_all(base: Any, store: Any, token: str, timeout_s: float) -> None:
    """On the first rank: answer the others with the token, until all have taken it. Ranks of an earlier attempt, whose
    greetings are still in the store, never take it."""
    start, noted = time.monotonic(), False
    greeted: dict[int, bytes] = {}
    missing = list(range(1, world_size()))
    while missing:
        for other in missing:
            if base.check([f"{_HELLO}/{other}"]) and (nonce := base.get(f"{_HELLO}/{other}")) != greeted.get(other):
                greeted[other] = nonce
                base.set(f"{_WELCOME}/{nonce.decode()}", token)
        missing = [other for other in missing if not store.check([f"arrived/{other}"])]
        waited = time.monotonic() - start
        if missing and waited >= timeout_s:
            reason = f"has not started within {timeout_s:g} s: see its output, and start all {world_size()} processes"
            error = WorkerError(_ranks(missing), reason)
            _decided(store, "members", functools.partial(_raise, error))
        if missing and waited >= NOTE_S and not noted:
            noted = True
            logger.warning("waiting for %s of %d", _ranks(missing), world_size())
        if missing:
            time.sleep(0.02 if waited < 1 else 0.2)


def _ranks(others: Sequence[int]) -> str:
    return f"rank {errors.first_of([str(other) for other in others], 8)}"


def _raise(error: DlmBridgeError) -> None:
    raise error


def _agree(
    store: Any, name: str, value: Any, decide: Callable[[list[Any]], Any], hosts: Sequence[str], timeout_s: float
) -> Any:
    store.set(f"{name}/{rank()}", json.dumps(value, default=str))
    if rank() == 0:

        def collect() -> Any:
            deadline = time.monotonic() + timeout_s
            values = []
            for other in range(world_size()):
                left = max(deadline - time.monotonic(), 0.1)
                values.append(json.loads(_get(store, f"{name}/{other}", _name(other, hosts), left)))
            return decide(values)

        return _decided(store, name, collect, hosts)
    answer = json.loads(_get(store, name, _name(0, hosts), timeout_s + NOTE_S))
    if "error" in answer:
        store.set(f"{name}/read/{rank()}", "")
        kind, field, reason = answer["error"]
        raise getattr(errors, kind)(field, reason)
    return answer["result"]


def _decided(store: Any, name: str, decide: Callable[[], Any], hosts: Sequence[str] = ()) -> Any:
    """Result of `decide`, sent to the other ranks; its error is sent too, and raised."""
    try:
        result = decide()
    except Exception as error:
        sent = error if isinstance(error, DlmBridgeError) else WorkerError(_name(0, hosts), f"failed: {error!r}")
        store.set(name, json.dumps({"error": [type(sent).__name__, sent.field, sent.reason]}))
        with contextlib.suppress(RuntimeError):  # the store may end with this process
            readers = [f"{name}/read/{other}" for other in range(1, world_size())]
            store.wait(readers, datetime.timedelta(seconds=NOTE_S))
        raise
    store.set(name, json.dumps({"result": result}))
    return result


def _get(store: Any, key: str, owner: str, timeout_s: float) -> bytes:
    """Value of a key that `owner` sets. Raises WorkerError if it does not within `timeout_s`."""
    with _answers(owner):
        store.wait([key], datetime.timedelta(seconds=timeout_s))
        return bytes(store.get(key))


def versions() -> dict[str, str]:
    """Versions of the packages that must be the same on every rank."""
    found = {"dlm_bridge": str(vars(sys.modules["dlm_bridge"])["__version__"])}  # a checkout may not be installed
    for package in COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _members(members: list[dict[str, Any]]) -> dict[str, Any]:
    """Hosts and addresses of the ranks, and the first difference between them: name and reason."""
    hosts = [member["host"] for member in members]
    difference = next(filter(None, (_difference(hosts, members, other) for other in range(len(members)))), None)
    addresses = [member["address"] for member in members]
    return {"hosts": hosts, "addresses": addresses, "time": time.time(), "difference": difference}


def _difference(hosts: Sequence[str], members: Sequence[dict[str, Any]], other: int) -> tuple[str, str] | None:
    for kind, remedy in (
        ("versions", "install the same version on every host"),
        ("settings", "start every process with the same settings"),
    ):
        first, own = members[0][kind], members[other][kind]
        for name in sorted(first.keys() | own.keys()):
            if first.get(name) != own.get(name):
                apart = f"{own.get(name, 'none')} on {_name(other, hosts)}, but {first.get(name, 'none')} on"
                return name, f"{apart} {_name(0, hosts)}: {remedy}"
    return None


def _check_equal(hosts: Sequence[str], difference: tuple[str, str] | None, offsets: list[float]) -> None:
    """Raise SettingError for a difference between ranks, or between their clocks."""
    if difference is not None:
        raise SettingError(*difference)
    worst = max(range(len(offsets)), key=lambda other: abs(offsets[other]))
    if abs(offsets[worst]) > LARGEST_CLOCK_OFFSET_S:
        raise SettingError(
            "clock",
            f"of {_name(worst, hosts)} differs by {offsets[worst]:+.0f} s from that of {_name(0, hosts)}: synchronise "
            "them (NTP), then start again",
        )


def _own_address(host: str) -> str:
    """Address from which this machine reaches `host`. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def _is_reachable(address: str) -> bool:
    """True for an IP address that other hosts can use."""
    return bool(address) and not ipaddress.ip_address(address).is_loopback


def _choose_interface(peer: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that reaches `peer`, on a machine whose name is a loopback address, as
    Debian and Ubuntu set it up: gloo listens on the address of the name."""
    import psutil

    name = socket.gethostname()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    with contextlib.suppress(OSError):
        if _is_reachable(socket.gethostbyname(name)):
            return
    own = _own_address(peer)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses) and interface != "lo":
            logger.warning("%s is a loopback address here: gloo uses %s (GLOO_SOCKET_IFNAME)", name, interface)
            os.environ["GLOO_SOCKET_IFNAME"] = interface
            return
    raise LayoutError(
        "GLOO_SOCKET_IFNAME",
        f"{name} is a loopback address on {name} itself: set it to the interface that reaches the other hosts",
    )


# -- the default process group


def start_process_group(backend: str, device: Any = None) -> None:
    """Initialise torch's process group with the launcher's processes or this one alone, unless it exists."""
    dist = torch_distributed()
    if dist.is_initialized():
        return
    if (joined := join()) is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        return
    store = joined.store(joined.unique("group"))
    store.set_timeout(dist.constants.default_pg_timeout)  # a rank may need long before its first operation
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world_size(), device_id=device)


def end_process_group() -> None:
    """Call the functions registered with `before_end`, then destroy torch's process groups, if any."""
    if is_initialized():
        for release in _before_end:
            release()
        torch_distributed().destroy_process_group()


def before_end(release: Callable[[], None]) -> Callable[[], None]:
    """Decorator that registers a function to be called before process groups are destroyed."""
    _before_end.append(release)
    return release


@contextmanager
def process_group_ends() -> Iterator[None]:
    """Context manager that destroys a process group created inside it. An older one stays."""
    joined = is_initialized()
    try:
        yield
    finally:
        if not joined:
            end_process_group()
