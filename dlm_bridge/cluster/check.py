"""`dlm-bridge env --cluster`: what a run of these processes would meet on their hosts, and between them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import job
from dlm_bridge.distributed import is_main, local_rank, rank, world_size
from dlm_bridge.errors import one_line, printable
from dlm_bridge.train.output import appears

MIB = 2**20
SIZES = {"gloo": (MIB, 16 * MIB), "nccl": (MIB, 16 * MIB, 256 * MIB)}  # bytes of an all-reduce
ROUNDS = 5
SEEN_WITHIN_S = 10.0  # for a new file to become visible on a network file system
NETWORK_TIMEOUT_S = 120.0
NEED_NOT_BE_EQUAL = ("python", "driver")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")  # of NCCL, and of processes that load data

Facts = dict[str, Any]


def check_cluster(output: Path | None, as_json: bool) -> int:
    """Collect the facts of all hosts, measure the network between them, and print a report on the first process.
    Collective. Returns the exit code, on every process: 1 if something would end a run, otherwise 0.

    Args:
        output: folder in which the run would write.
    """
    joined = job.join(compare=False)
    token = _together(joined, "token", _write_token(output) if output is not None and is_main() else None)[0]
    members = _together(joined, "facts", _facts(output, token))
    if output is not None and is_main():
        _remove_token(output, token)
    finished, found = _within(NETWORK_TIMEOUT_S, lambda: _measure(members))
    network = _together(joined, "network", found)
    report = _report(members, network)
    if is_main():
        if as_json:
            print(json.dumps(report, indent=2), flush=True)
        else:
            _show(report)
    code = 1 if report["problems"] else 0
    if not finished:  # its thread would keep this process
        os._exit(code)
    return code


def _together(joined: job.Attempt | None, name: str, value: Any) -> list[Any]:
    """Values of all ranks."""
    return [value] if joined is None else list(joined.agree(name, value, list))


# -- one process


def _facts(output: Path | None, token: Any) -> Facts:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folders = {"output": output, "tmp": Path(tempfile.gettempdir()), "shm": SHARED_MEMORY}
    return {
        "host": socket.gethostname(),
        "versions": _versions(),
        "devices": [torch.cuda.get_device_name(device) for device in range(gpus)],
        "local_rank": local_rank() or 0,
        "free_bytes": {name: _free(folder) for name, folder in folders.items() if folder is not None},
        "output": None if output is None else _seen(output, token),
    }


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], **job.versions()}
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError):
        if named := re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text()):
            found["driver"] = named[1]
    return found


def _free(folder: Path) -> int | None:
    """Free bytes on the disk of a folder, which need not exist. None if they cannot be read."""
    with contextlib.suppress(OSError):
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        return shutil.disk_usage(there).free
    return None


def _write_token(output: Path) -> Any:
    """Write a hidden file to the output folder. Returns its name and the folders that were created, or the error."""
    made = [str(folder) for folder in (output, *output.parents) if not folder.exists()]
    name = f".{secrets.token_hex(8)}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return [name, made]


def _remove_token(output: Path, token: Any) -> None:
    with contextlib.suppress(OSError):
        if not isinstance(token, str):
            (output / token[0]).unlink()
            for folder in token[1]:
                Path(folder).rmdir()


def _seen(output: Path, token: Any) -> str:
    """Problem of this process with the output folder, or an empty text."""
    if isinstance(token, str):
        return token
    if not appears(output, (output / token[0]).exists, SEEN_WITHIN_S):
        return "is not the same folder"
    return "" if os.access(output, os.W_OK) else "cannot be written: permission denied"


# -- the network


def _within(timeout_s: float, measure: Callable[[], dict[str, Any]]) -> tuple[bool, dict[str, Any]]:
    """Run `measure` in a thread. Returns whether it ended in time, and its result or the problem."""
    result: dict[str, Any] = {"problem": f"collective operations have not ended within {timeout_s:g} s"}

    def run() -> None:
        try:
            result.update(measure(), problem="")
        except (RuntimeError, ValueError, OSError) as error:  # of torch.distributed
            result["problem"] = one_line(error)[:300]

    thread = threading.Thread(target=run, name="network", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive(), dict(result)


def _measure(members: Sequence[Facts]) -> dict[str, Any]:
    """Measure the clocks of all hosts, and the bandwidth of all-reduce: with NCCL if every rank has a GPU, else with
    gloo. Collective."""
    if world_size() == 1:
        return {"backend": None, "clocks": {}, "all_reduce": []}
    nccl = all(member["local_rank"] < len(member["devices"]) for member in members)
    device = torch.device("cuda", members[rank()]["local_rank"]) if nccl else torch.device("cpu")
    if nccl:
        torch.cuda.set_device(device)
    job.start_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", device if nccl else None)
    backend = "nccl" if nccl else "gloo"
    return {
        "backend": backend,
        "clocks": _clock_offsets([member["host"] for member in members]),
        "all_reduce": [_all_reduce(size, device) for size in SIZES[backend]],
    }


def _clock_offsets(hosts: Sequence[str]) -> dict[str, float]:
    """Seconds by which the clock of each host is ahead of the first one's, on the first process. The shortest of some
    round trips counts, and its middle."""
    offsets = {hosts[0]: 0.0}
    for other in sorted({hosts.index(host) for host in hosts} - {0}):
        measured = []
        for _ in range(ROUNDS):
            clock = torch.zeros(1, dtype=torch.float64)
            if rank() == 0:
                start = time.time()
                dist.send(clock, other)
                dist.recv(clock, other)
                end = time.time()
                measured.append((end - start, clock.item() - (start + end) / 2))
            elif rank() == other:
                dist.recv(clock, 0)
                dist.send(torch.full((1,), time.time(), dtype=torch.float64), 0)
        if measured:
            offsets[hosts[other]] = min(measured)[1]
    return offsets


def _all_reduce(size: int, device: torch.device) -> dict[str, float]:
    """Time of an all-reduce of `size` bytes, and its bus bandwidth: the bytes that each process sends and receives per
    second, which is comparable between numbers of processes (as in NCCL's tests)."""
    values = torch.zeros(size // 4, device=device)
    for _ in range(2):
        dist.all_reduce(values)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    _synchronize(device)
    seconds = (time.perf_counter() - start) / ROUNDS
    moved = 2 * (world_size() - 1) / world_size() * size
    return {"bytes": size, "seconds": seconds, "bus_bytes_per_s": moved / seconds}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the report


def _report(members: Sequence[Facts], network: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All facts by host, with the `problems` that would end a run."""
    hosts: dict[str, dict[str, Any]] = {}
    clocks = network[0].get("clocks", {})
    problems = []
    for number, member in enumerate(members):
        host = hosts.setdefault(member["host"], {
            "ranks": [],
            "devices": member["devices"],
            "versions": member["versions"],
            "clock_offset_s": clocks.get(member["host"]),
            "free_bytes": member["free_bytes"],
        })  # fmt: skip
        host["ranks"].append(number)
        if member["output"]:
            problems.append(f"{member['host']}: the output folder {member['output']}")
        if member["devices"] and member["local_rank"] >= len(member["devices"]):
            problems.append(f"{member['host']}: no device for rank {number}, there are {len(member['devices'])}")
        if member["versions"] != host["versions"]:
            problems.append(f"{member['host']}: its processes have different versions")
    for name, values in _versions_by_name(hosts).items():
        if name not in NEED_NOT_BE_EQUAL and len(values) > 1:
            problems.append(f"{name} differs: {_by_value(values)}")
    for name, host in hosts.items():
        if abs(host["clock_offset_s"] or 0) > job.LARGEST_CLOCK_OFFSET_S:
            problems.append(f"{name}: its clock is off by {host['clock_offset_s']:+.0f} s")
        if bool(host["devices"]) != any(other["devices"] for other in hosts.values()):
            problems.append(f"{name}: no devices, other hosts have some")
    failed = {
        member["host"]: found["problem"] for member, found in zip(members, network, strict=True) if found["problem"]
    }
    problems += [f"{host}: {problem}" for host, problem in failed.items()]
    return {
        "processes": len(members),
        "hosts": hosts,
        "backend": network[0].get("backend"),
        "all_reduce": network[0].get("all_reduce", []),
        "problems": list(dict.fromkeys(problems)),
    }


def _versions_by_name(hosts: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Hosts by version, of each name."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys(name for host in hosts.values() for name in host["versions"]):
        for host, facts in hosts.items():
            found.setdefault(name, {}).setdefault(facts["versions"].get(name, "none"), []).append(host)
    return found


def _by_value(values: dict[str, list[str]]) -> str:
    """Format a version if it is the same everywhere, otherwise each with its hosts."""
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(
        f"{value} on {', '.join(hosts[:3])}{' ...' * (len(hosts) > 3)}" for value, hosts in values.items()
    )


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    hosts = report["hosts"]
    table = Table(title=f"Hosts ({len(hosts)}) and processes ({report['processes']})", title_justify="left")
    disks = list(next(iter(hosts.values()))["free_bytes"])
    for heading in ("host", "ranks", "devices", "clock", *(f"free: {name}" for name in disks)):
        table.add_column(heading, overflow="fold")
    for name, host in hosts.items():
        kinds = {kind: host["devices"].count(kind) for kind in host["devices"]}
        free = [host["free_bytes"][disk] for disk in disks]
        table.add_row(
            name,
            f"{host['ranks'][0]} to {host['ranks'][-1]}" if len(host["ranks"]) > 1 else str(host["ranks"][0]),
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "CPU",
            "-" if host["clock_offset_s"] is None else f"{host['clock_offset_s'] * 1000:+,.1f} ms",
            *("-" if space is None else f"{space / 1e9:,.1f} GB" for space in free),
        )
    console.print(table)
    table = Table(title="Versions", show_header=False, title_justify="left")
    for name, values in _versions_by_name(hosts).items():
        table.add_row(name, _by_value(values))
    console.print(table)
    if report["all_reduce"]:
        table = Table(title=f"All-reduce ({report['backend']})", title_justify="left")
        for heading in ("size", "time", "bus bandwidth"):
            table.add_column(heading, justify="right")
        for row in report["all_reduce"]:
            speed = row["bus_bytes_per_s"] / 1e9
            table.add_row(f"{row['bytes'] / MIB:,.0f} MiB", f"{row['seconds'] * 1000:,.2f} ms", f"{speed:,.2f} GB/s")
        console.print(table)
    for problem in report["problems"]:
        console.print(f"problem: {printable(problem)}", soft_wrap=True)
    if not report["problems"]:
        console.print("nothing was found that would end a run")
