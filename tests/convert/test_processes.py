"""Conversions over several processes: the same bytes, and what happens when one of them is lost."""

from __future__ import annotations

import errno
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert import journal, streaming
from dlm_bridge.convert.workers import run_forked
from dlm_bridge.errors import WorkerError
from dlm_bridge.files.reading import gc_paused
from tests.convert.helpers import no_leftovers, run_cli, tree

LAYOUT = Layout(tp=2, pp=2)


def fails_in_a_child(monkeypatch: pytest.MonkeyPatch, after: int, how: Any) -> None:
    """Call `how` in every forked process after `after` writes."""
    real, here, count = streaming.write_at, os.getpid(), 0

    def write(*arguments: Any) -> None:
        nonlocal count
        count += os.getpid() != here
        if count > after:
            how()
        real(*arguments)

    monkeypatch.setattr(streaming, "write_at", write)


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.fast("2")
def test_processes_write_what_threads_write(tmp_path: Path, llada: Path, processes: int) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", LAYOUT)
    told: list[tuple[int, int]] = []
    Bridge.from_hf(llada).to_megatron(
        tmp_path / "m2", LAYOUT, processes=processes, progress=lambda done, total: told.append((done, total))
    )
    assert sum(done for done, _ in told) == told[0][1]
    assert tree(tmp_path / "m2") == tree(tmp_path / "m")
    assert (tmp_path / "m2/dlm_bridge.json").read_bytes() == (tmp_path / "m/dlm_bridge.json").read_bytes()
    Bridge.from_megatron(tmp_path / "m2").to_megatron(
        tmp_path / "r", Layout(tp=1), format="torch", processes=processes
    )
    Bridge.from_megatron(tmp_path / "r").to_hf(tmp_path / "out", processes=processes, workers=1)
    assert tree(tmp_path / "out") == tree(llada)
    assert no_leftovers(tmp_path)


def test_a_killed_process_leaves_no_output_and_the_run_goes_on(
    tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "whole", LAYOUT)
    monkeypatch.setattr(journal, "_EVERY", 1)
    output = tmp_path / "here" / "out"
    with monkeypatch.context() as patch:
        fails_in_a_child(patch, 30, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(WorkerError, match=r"SIGKILL\): .*out was not written; the same command with"):
            Bridge.from_hf(llada).to_megatron(output, LAYOUT, processes=2, workers=1)
    (left,) = (tmp_path / "here").iterdir()
    assert journal.has_progress(left)
    Bridge.from_hf(llada).to_megatron(output, LAYOUT, processes=2, resume=True)
    assert tree(output) == tree(tmp_path / "whole")
    assert no_leftovers(tmp_path / "here")


def test_an_error_in_a_process_is_the_run_s(
    tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fails_in_a_child(monkeypatch, 5, full)
    code, _, err = run_cli(capsys, "import", llada, tmp_path / "out", "--processes", 2)
    assert code == 2
    assert "no space left" in err
    assert list(tmp_path.iterdir()) == []


def test_a_worker_leaves_the_garbage_of_its_parent_alone() -> None:
    """Garbage may own threads or process groups, which a fork does not copy."""
    read, write = os.pipe()

    class Native:
        def __del__(self) -> None:
            os.write(write, b"parent" if os.getpid() == parent else b"worker")

    parent, collected = os.getpid(), []
    with gc_paused():
        for _ in range(2):
            garbage = Native()
            garbage.cycle = garbage  # type: ignore[attr-defined]
            del garbage
        tasks = [(1, gc.collect), (1, gc.collect)]
        run_forked(tasks, 2, 1, lambda number, found: collected.append(number))
    assert sorted(collected) == [0, 1]
    gc.collect()
    assert os.read(read, 100) == b"parentparent"
    os.close(read)
    os.close(write)
