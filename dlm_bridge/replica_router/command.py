"""`dlm-bridge serve --replicas N`: command lines of the replicas, and the server in front of them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from dlm_bridge import terminal
from dlm_bridge.cli.generate_request import parse_options
from dlm_bridge.cli.launch import most_processes
from dlm_bridge.distributed import launched
from dlm_bridge.errors import SettingError
from dlm_bridge.serving.command import API_KEY, listen, require_extra
from dlm_bridge.serving.options import ServeOptions
from dlm_bridge.settings import options_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Settings that the router applies itself, or sets for its replicas.
OF_ROUTER = ("replicas", "host", "port", "api_key", "allowed_host", "cors_origin", "queue_size")


def serve_replicas(model: str, nproc_per_node: int | None = None, **given: Any) -> None:
    """Serve a model with several processes, or groups of `nproc_per_node` processes, one per GPU.

    Args:
        given: the options of `serve` as the command line takes them.
    """
    require_extra("serve", ("fastapi", "uvicorn", "prometheus_client", "httpx"))
    options = ServeOptions(**parse_options(given))
    if launched():
        raise SettingError("replicas", "starts its processes itself: start one process, without a launcher")
    environments = replica_environments(options, nproc_per_node or 1)
    sock, options, address = listen(options)
    from dlm_bridge.replica_router.router import RouterServer

    words = replica_words(model, nproc_per_node, given, options)
    key = {} if options.api_key is None else {API_KEY: options.api_key}
    commands = [(words, {**environment, **key}) for environment in environments]

    def ready(greeting: str) -> None:
        head, _, _ = greeting.rpartition(": http://")
        print(f"{head}: {address} ({len(commands)} replicas, Ctrl-C ends)", flush=True)

    RouterServer(commands, options, sock, ready).serve_forever()


def replica_words(
    model: str, nproc_per_node: int | None, given: Mapping[str, Any], options: ServeOptions
) -> list[str]:
    """Command line of a replica: the options of the router's own that differ from their defaults.

    Args:
        options: those of the router, with the names in `allowed_host` that requests may use.
    """
    from dlm_bridge.serving.connections import LOOPBACK  # the replica adds them itself

    declared = options_of(ServeOptions)
    values: list[tuple[str, Any]] = []
    for name, value in given.items():
        if name not in OF_ROUTER and value not in (None, declared[name].default, str(declared[name].default), []):
            values += [(declared[name].flag, each) for each in (value if isinstance(value, list) else [value])]
    values += [("--allowed-host", name) for name in options.allowed_host or ["*"] if name not in LOOPBACK]
    # A replica waits for nothing but its own batch: the queue is the router's.
    values += [("--port", 0), ("--queue-size", max(options.queue_size, 2 * (options.batch_size or 1)))]
    values += [("--nproc-per-node", nproc_per_node)] if nproc_per_node is not None else []
    verbosity = terminal.verbosity()
    flags = [] if verbosity in (None, "normal") else [f"--{verbosity}"]
    words = [f"{flag}={value}" for flag, value in values]
    return [sys.executable, "-m", "dlm_bridge.replica_router.replica", "serve", "--model", model, *words, *flags]


def replica_environments(options: ServeOptions, processes: int) -> list[dict[str, str]]:
    """Environment of each replica, with its own GPUs. Raises SettingError for more processes than GPUs.

    Args:
        processes: number of processes per replica.
    """
    assert options.replicas is not None
    count = options.replicas
    if options.device is not None and re.search(r":\d+$", options.device):
        raise SettingError("device", f"{options.device} is one device, but `replicas` need one each: omit it")
    most, devices = most_processes(options.device)
    if count * processes > most:
        size = f" of {processes} processes" if processes > 1 else ""
        raise SettingError(
            "replicas", f"{count}{size}, but this machine has {devices}: set at most {most // processes}"
        )
    inherited = {name: value for name, value in os.environ.items() if name != API_KEY}
    if "CPU" in devices:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // (count * processes), 1))
        return [{**inherited, "OMP_NUM_THREADS": threads}] * count
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(most)] if visible is None else visible.split(",")
    own = most // count if options.device_map is not None else processes  # a device map uses every GPU that it sees
    return [{**inherited, VISIBLE: ",".join(names[start : start + own])} for start in range(0, count * own, own)]
