"""Ranks and world size of this process, and collective operations.

A launcher (torchrun, accelerate launch, PyTorchJob) sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without
them, a task of a Slurm step takes them from Slurm's variables. Otherwise there is a single process. Processes meet by
`dlm_bridge.job`. torch is imported on first communication.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from dlm_bridge.errors import DlmBridgeError, SettingError

T = TypeVar("T")


def launched() -> bool:
    """True if a launcher has started this process."""
    _adopt_slurm_step()
    return "WORLD_SIZE" in os.environ


def launched_by_torchrun() -> bool:
    """True if torchrun, or accelerate launch, which uses it, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Rank of this process in the job. Raises SettingError for a malformed variable, like the functions below."""
    return number("RANK") or 0


def is_main() -> bool:
    """True for the process that prints and logs for all."""
    return rank() == 0


def world_size() -> int:
    """Number of processes of the job."""
    size = number("WORLD_SIZE")
    return 1 if size is None else size


def local_rank() -> int | None:
    """Rank of this process on its node, None without a launcher."""
    return number("LOCAL_RANK")


def local_world_size() -> int:
    """Number of the job's processes on this node. Without a launcher that says it, known once they have joined."""
    return number("LOCAL_WORLD_SIZE") or world_size()


def number(name: str) -> int | None:
    """Value of an environment variable, None if it is not set. Raises SettingError."""
    _adopt_slurm_step()
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise SettingError(name, f"'{text}' is not a number: start the processes with torchrun or srun")
    return int(text)


def _adopt_slurm_step() -> None:
    """Set the launcher's variables for a task of a Slurm step of several tasks, unless a launcher has set them.

    The master is the step's first host, and its port follows from the numbers of job and step, unless MASTER_ADDR and
    MASTER_PORT are set. A process that sees only its own GPU has local rank 0.
    """
    variables = os.environ
    tasks = variables.get("SLURM_STEP_NUM_TASKS", "")
    launchers = {"WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"}  # mpirun's processes have the variables of its daemons
    if launchers & variables.keys() or not tasks.isdecimal() or int(tasks) < 2:
        return
    step = int(variables["SLURM_STEP_ID"])
    hosts = re.sub(r"\[(\d+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"])  # node[03-07,12] begins with node03
    first = hosts.split(",")[0] if variables.get("SLURM_STEP_NUM_NODES") != "1" else "127.0.0.1"
    port = 15_000 + (31 * int(variables["SLURM_JOB_ID"]) + step) % 15_000
    one_device = variables.get("CUDA_VISIBLE_DEVICES", ",").count(",") == 0
    variables |= {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": "0" if one_device else variables["SLURM_LOCALID"],
        "MASTER_ADDR": variables.get("MASTER_ADDR", first),
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
    }


# -- collective operations


def from_all(value: T) -> list[T]:
    """All-gather of picklable values: every process's value, by rank."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * torch_distributed().get_world_size()
    torch_distributed().all_gather_object(values, value)
    return values


@contextmanager
def raised_everywhere() -> Iterator[None]:
    """Context manager that raises one process's DlmBridgeError in every process.

    All processes enter and leave it, and must not wait for each other inside.
    """
    failed: DlmBridgeError | None = None
    try:
        yield
    except DlmBridgeError as error:
        failed = error
    found = [error for error in from_all(failed) if error is not None]
    if failed is not None:
        raise failed
    if found:
        raise found[0]


def first_on_main(action: Callable[[], T]) -> T:
    """Result of `action`, run on the first process before the others. An error there is raised in all processes."""
    main = not is_initialized() or torch_distributed().get_rank() == 0
    with raised_everywhere():
        result = action() if main else None
    return result if main else action()  # type: ignore[return-value]


def is_initialized() -> bool:
    """True if torch has a default process group. Does not import torch."""
    return (
        "torch.distributed" in sys.modules
        and torch_distributed().is_available()
        and torch_distributed().is_initialized()
    )


def torch_distributed() -> Any:
    """Module torch.distributed."""
    from torch import distributed

    return distributed
