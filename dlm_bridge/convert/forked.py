"""A conversion's tasks over forked processes, each with threads of its own: what one interpreter's lock holds back.

Every process has its share of the tasks and sends what each of them returns; what follows from it is done here.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from dlm_bridge.convert.workers import run_tasks
from dlm_bridge.errors import DlmBridgeError

_DONE = -1  # sent in a task's place: the process has done its share
_FAILED = -2


class WorkerKilledError(DlmBridgeError):
    """A process was ended from outside; what the others have done is not lost."""


def check_processes(processes: int) -> None:
    """Raise DlmBridgeError for a number of processes that cannot be."""
    import torch

    if processes < 1:
        raise DlmBridgeError(f"--processes must be at least 1, not {processes}")
    if processes > 1 and "fork" not in get_all_start_methods():
        raise DlmBridgeError(f"--processes {processes} needs a system that can fork: use --workers")
    if processes > 1 and torch.cuda.is_initialized():
        raise DlmBridgeError(f"--processes {processes}: this process uses CUDA, which does not survive a fork")


def run_forked(
    tasks: Sequence[tuple[int, Callable[[], Any]]], processes: int, workers: int, done: Callable[[int, Any], None]
) -> None:
    """Run (bytes, task) pairs in `processes` processes of `workers` threads; `done` gets the number of each task and
    what it returned, here. The first exception ends all processes and is raised; a process that was killed is a
    WorkerKilledError."""
    context = get_context("fork")
    running = {}
    try:
        for share in _shares([size for size, _ in tasks], processes):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(there, [(n, *tasks[n]) for n in share], workers))
            process.start()
            there.close()
            running[here] = process
        while running:
            for end in wait(list(running)):
                assert isinstance(end, Connection)
                try:
                    number, result = end.recv()
                except (EOFError, OSError):
                    process = running[end]
                    process.join()
                    raise WorkerKilledError(f"a worker process was killed ({_why(process.exitcode)})") from None
                if number == _FAILED:
                    raise result
                if number == _DONE:
                    running.pop(end).join()
                else:
                    done(number, result)
    finally:
        for process in running.values():
            process.kill()
            process.join()


def _shares(sizes: Sequence[int], processes: int) -> list[list[int]]:
    """The tasks' numbers for each process, so that all have about as many bytes, each in order."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    filled = [0] * processes
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = filled.index(min(filled))
        shares[least].append(number)
        filled[least] += sizes[number]
    return [sorted(share) for share in shares if share]


def _work(end: Connection, share: Sequence[tuple[int, int, Callable[[], Any]]], workers: int) -> None:
    """In a forked process, which ends here: no handler or buffer that it has inherited may run or be flushed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears of Ctrl-C and ends this one
    torch.set_num_threads(1)  # the threads that torch had are not here
    lock = threading.Lock()

    def one(number: int, task: Callable[[], Any]) -> None:
        result = task()
        with lock:
            end.send((number, result))

    status = 0
    try:
        run_tasks([(size, partial(one, number, task)) for number, size, task in share], workers)
        end.send((_DONE, None))
    except BrokenPipeError:  # the first process is gone
        status = 1
    except (DlmBridgeError, OSError) as error:
        end.send((_FAILED, error))
    except BaseException as error:
        end.send((_FAILED, RuntimeError(f"{type(error).__name__}: {error}")))
    finally:
        os._exit(status)


def _why(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"
