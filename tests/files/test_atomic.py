"""Atomic output: killed, interrupted, out of space, existing, inside the source."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dlm_bridge import Bridge, Layout
from dlm_bridge.cli.app import main
from dlm_bridge.convert import streaming, transfer
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import ResourceError, SettingError
from dlm_bridge.files import atomic
from dlm_bridge.files.atomic import atomic_output
from dlm_bridge.processes import leave_inherited
from tests.convert.helpers import no_leftovers, run_cli, tree
from tests.refusals import refused

MOMENTS = ["write 1", "write 40", "write 77", "sync", "place", "clean"]


def run_victim(action: str, source: Path, output: Path, moment: str, overwrite: bool = False) -> int | None:
    """Run a conversion in a forked process that kills itself at a moment. Returns its exit code."""
    victim = multiprocessing.get_context("fork").Process(
        target=_victim, args=(action, source, output, moment, overwrite)
    )
    victim.start()
    victim.join(120)
    return victim.exitcode


def _victim(action: str, source: Path, output: Path, moment: str, overwrite: bool) -> None:
    leave_inherited()
    count = 0

    def dies_before(module: Any, name: str, label: str) -> None:
        real = getattr(module, name)

        def spy(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if moment in (label, f"write {count}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(module, name, spy)

    dies_before(streaming, "write_at", "")
    dies_before(atomic, "sync_tree", "sync")
    dies_before(atomic, "_put_in_place", "place")
    dies_before(atomic.shutil, "rmtree", "clean")
    if action == "import":
        Bridge.from_hf(source).to_megatron(output, Layout(tp=2), overwrite=overwrite, workers=2)
    else:
        Bridge.from_megatron(source).to_hf(output, overwrite=overwrite, workers=2)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_import_leaves_nothing_or_a_whole_one(tmp_path: Path, llada: Path, moment: str) -> None:
    before = tree(llada)
    output = tmp_path / "out"
    killed = run_victim("import", llada, output, moment)
    assert killed == -signal.SIGKILL
    assert tree(llada) == before
    if output.exists():
        assert moment == "clean"  # after the rename
        assert verify_manifest(output).equal
        return
    for left in tmp_path.rglob("*"):  # what is left is hidden, and no tool takes it for a checkpoint
        assert left.name.startswith(".") or left.parent != tmp_path
        assert left.name != "latest_checkpointed_iteration.txt" or moment in ("sync", "place")
    Bridge.from_hf(llada).to_megatron(output, Layout(tp=2))
    assert verify_pair(llada, output).equal
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize("moment", ["write 30", "place", "clean"])
def test_killed_overwrite_leaves_the_old_or_the_new(tmp_path: Path, llada: Path, moment: str) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2))
    output = tmp_path / "out"
    output.mkdir()
    (output / "old").write_text("old")
    assert run_victim("export", tmp_path / "m", output, moment, overwrite=True) == -signal.SIGKILL
    assert tree(output) == ({"old": b"old"} if moment != "clean" else tree(llada))
    Bridge.from_megatron(tmp_path / "m").to_hf(output, overwrite=True)
    assert tree(output) == tree(llada)
    assert no_leftovers(tmp_path)


def test_interrupt_says_what_happened(tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "run_tasks", interrupted)
    code, out, err = run_cli(capsys, "import", llada, tmp_path / "out", "--json")
    assert (code, out) == (130, "")
    assert err == f"dlm-bridge: interrupted: {tmp_path / 'out'} was not written, nothing is left behind\n"
    assert list(tmp_path.iterdir()) == []


def test_sigint_to_a_running_import(tmp_path: Path, llada: Path) -> None:
    """A real Ctrl-C, while a worker is busy."""
    context = multiprocessing.get_context("fork")
    busy = context.Event()
    process = context.Process(target=_slow_import, args=(llada, tmp_path / "here" / "out", tmp_path / "err", busy))
    process.start()
    assert busy.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    printed, left = (tmp_path / "err").read_text(), list((tmp_path / "here").iterdir())
    if left:  # the tensor being written was completed
        assert "--resume" in printed
        assert left[0].name in printed
    else:
        assert "nothing is left behind" in printed
    assert not (tmp_path / "here" / "out").exists()


def _slow_import(source: Path, output: Path, errors: Path, busy: Any) -> None:
    leave_inherited()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    real = streaming.write_at

    def slow(*arguments: Any) -> None:
        busy.set()
        time.sleep(0.1)
        real(*arguments)

    streaming.write_at = slow
    sys.argv = ["dlm-bridge", "import", str(source), str(output), "--workers", "1"]
    with errors.open("w") as sys.stderr:
        main()


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_space(
    tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overwrite: bool
) -> None:
    output = tmp_path / "out"
    if overwrite:
        Bridge.from_hf(llada).to_megatron(output)
    before = tree(output)
    real, count = streaming.write_at, 0

    def full(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count > 50:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(streaming, "write_at", full)
    code, out, err = run_cli(capsys, "import", llada, output, "--tp", 2, *(["--overwrite"] if overwrite else []))
    assert (code, out) == (2, "")
    assert err.startswith(f"dlm-bridge: {output}: no space left")
    assert len(err.splitlines()) == 1
    assert tree(output) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if overwrite else [])


def test_no_space_is_seen_before_writing(tmp_path: Path) -> None:
    with (
        refused(ResourceError, tmp_path / "out"),
        atomic_output(tmp_path / "out", [], expected=1 << 60),
    ):
        raise AssertionError("must not start")
    assert list(tmp_path.iterdir()) == []


def test_existing_output(tmp_path: Path, llada: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    output.mkdir()
    code, _, err = run_cli(capsys, "import", llada, output)
    assert code == 2
    assert err.startswith(f"dlm-bridge: OUT: {output} ")
    assert "--overwrite" in err
    (output / "old").write_text("old")
    assert run_cli(capsys, "import", llada, output, "--overwrite")[0] == 0
    assert not (output / "old").exists()
    assert verify_manifest(output).equal
    file = tmp_path / "file"
    file.write_text("x")
    code, _, err = run_cli(capsys, "export", output, file, "--overwrite")
    assert code == 2
    assert "is not a folder" in err
    assert file.read_text() == "x"
    link = tmp_path / "link"
    link.symlink_to(output)
    with refused(SettingError, "output"):
        Bridge.from_megatron(output).to_hf(link, overwrite=True)


def test_output_may_not_touch_a_source(tmp_path: Path, llada: Path) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "all" / "m")
    before = tree(tmp_path / "all")
    bridge = Bridge.from_megatron(tmp_path / "all" / "m", like=llada)
    for output, source in (
        (tmp_path / "all" / "m", tmp_path / "all" / "m"),
        (tmp_path / "all" / "m" / "hf" / "new", tmp_path / "all" / "m"),
        (tmp_path / "all" / "m" / ".." / "m" / "new", tmp_path / "all" / "m"),
        (tmp_path / "all", tmp_path / "all" / "m"),
        (llada, llada),
        (llada / "new", llada),
    ):
        for write in (bridge.to_hf, bridge.to_megatron):
            with refused(SettingError, "output", f"source {source}"):
                write(output, overwrite=True)
    assert tree(tmp_path / "all") == before


def test_a_running_conversion_is_not_a_leftover(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with atomic_output(tmp_path / "out", []) as folder:
            (folder / "file").write_text("first")
            started.set()
            go_on.wait(30)

    first = threading.Thread(target=write)
    first.start()
    started.wait(30)
    with (
        refused(SettingError, "output", "another process"),
        atomic_output(tmp_path / "out", []),
    ):
        raise AssertionError("must not start")
    go_on.set()
    first.join()
    assert tree(tmp_path / "out") == {"file": b"first"}
    assert no_leftovers(tmp_path)


def test_overwrite_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two renames, and an old output that a killed run had set aside comes back."""
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)
    output = tmp_path / "out"
    for text in ("one", "two"):
        with atomic_output(output, [], overwrite=True) as folder:
            (folder / "file").write_text(text)
    assert tree(output) == {"file": b"two"}
    assert no_leftovers(tmp_path)
    output.rename(tmp_path / ".out.dlm-bridge-old-x")
    (tmp_path / ".out.dlm-bridge-new-y").mkdir()
    with refused(SettingError, "output"), atomic_output(output, []):
        raise AssertionError("the old output is back, so that it may not be replaced")
    assert tree(output) == {"file": b"two"}


def test_unwritable_parent(tmp_path: Path, llada: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(ResourceError, tmp_path / "file"):
        Bridge.from_hf(llada).to_megatron(tmp_path / "file" / "out")


def test_permissions_are_the_usual_ones(tmp_path: Path) -> None:
    with atomic_output(tmp_path / "out", []) as folder:
        (folder / "file").write_text("x")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_weights_have_the_mode_of_their_neighbours(tmp_path: Path) -> None:
    """safetensors creates files that only their owner can read."""
    with atomic_output(tmp_path / "out", []) as folder:
        (folder / "inner").mkdir()
        for place in (folder, folder / "inner"):
            save_file({"a": torch.zeros(1)}, place / "model.safetensors")
            (place / "file").touch()
    assert len({file.stat().st_mode for file in (tmp_path / "out").rglob("*") if file.is_file()}) == 1
