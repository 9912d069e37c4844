"""A killed conversion leaves no output; --resume completes it with the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert import journal, streaming, transfer
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistWriter
from dlm_bridge.convert.formats.hub_weights import HubWriter
from dlm_bridge.convert.manifest import MANIFEST
from dlm_bridge.files import atomic
from dlm_bridge.processes import leave_inherited
from tests.checkpoints import write_llada
from tests.convert.helpers import no_leftovers, run_cli, tree

LAYOUT = Layout(tp=2, pp=2)


def whole(folder: Path) -> dict[str, bytes]:
    """Contents of every file, including the manifest."""
    return tree(folder) | {MANIFEST: (folder / MANIFEST).read_bytes()}


def convert(action: str, source: Path, output: Path, **options: Any) -> None:
    if action == "import":
        Bridge.from_hf(source).to_megatron(output, LAYOUT, **options)
    elif action == "reshard":
        Bridge.from_megatron(source).to_megatron(output, Layout(tp=1), **options)
    else:
        Bridge.from_megatron(source).to_hf(output, **options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, llada: Path) -> dict[str, Path]:
    megatron = tmp_path_factory.mktemp("sources") / "m"
    Bridge.from_hf(llada).to_megatron(megatron, LAYOUT)
    return {"import": llada, "reshard": megatron, "export": megatron}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, Path]) -> dict[str, dict[str, bytes]]:
    found = {}
    for action, source in sources.items():
        output = tmp_path_factory.mktemp("expected") / "out"
        convert(action, source, output)
        found[action] = whole(output)
    return found


def killed_run(action: str, source: Path, output: Path, moment: int, resume: bool) -> bool:
    """Convert in a forked process that kills itself at its `moment`-th system call that changes the disk. Returns
    False if there are fewer calls."""
    process = multiprocessing.get_context("fork").Process(
        target=_victim, args=(action, source, output, moment, resume)
    )
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _victim(action: str, source: Path, output: Path, moment: int, resume: bool) -> None:
    leave_inherited()
    journal._EVERY = 1  # every parameter is flushed and recorded at once
    left = moment

    def counted(module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(module, name, call)

    for module, name in (
        (streaming, "write_at"), (journal, "_sync"), (journal.Journal, "_append"),
        (atomic, "sync_tree"), (atomic, "_put_in_place"), (atomic.shutil, "rmtree"), (os, "fsync"), (os, "rename"),
    ):  # fmt: skip
        counted(module, name)
    convert(action, source, output, workers=2, resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["import", "export", "reshard"])
def test_killed_again_and_again(
    tmp_path: Path, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], action: str
) -> None:
    """Each run is killed after a random number of calls, until one completes."""
    chance = random.Random(action)
    before = tree(sources[action])
    output = tmp_path / "out"
    for _ in range(25):
        killed = killed_run(action, sources[action], output, chance.randint(1, 60), resume=True)
        assert output.exists() >= (not killed)
        if output.exists():
            break
    else:
        convert(action, sources[action], output, resume=True)
    assert whole(output) == expected[action]
    assert tree(sources[action]) == before
    convert(action, sources[action], output, resume=True, overwrite=True)
    assert whole(output) == expected[action]
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize("action", ["import", "export", "reshard"])
def test_killed_when_all_is_written(
    tmp_path: Path, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], action: str
) -> None:
    """Killed before the journal is closed: the existing manifest is not a side file of the resumed output."""
    output = tmp_path / "out"
    process = multiprocessing.get_context("fork").Process(
        target=_victim_at_the_end, args=(action, sources[action], output)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert not output.exists()
    assert list(tmp_path.rglob(MANIFEST))
    convert(action, sources[action], output, resume=True)
    assert whole(output) == expected[action]


def _victim_at_the_end(action: str, source: Path, output: Path) -> None:
    leave_inherited()
    journal._EVERY = 1
    setattr(journal.Journal, "close", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010 (mypy)
    convert(action, source, output)


def interrupt(monkeypatch: pytest.MonkeyPatch, action: str, source: Path, output: Path, after: int) -> str:
    """Interrupt a conversion once `after` parameters are recorded. Returns the message."""
    monkeypatch.setattr(journal, "_EVERY", 1)
    count = 0
    real = journal.Journal.add

    def add(self: journal.Journal, *arguments: Any) -> None:
        nonlocal count
        real(self, *arguments)
        count += 1
        if count == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "add", add)
        with pytest.raises(KeyboardInterrupt) as stopped:
            convert(action, source, output, workers=1)
    return str(stopped.value)


def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of tensors that are written from now on."""
    names: list[str] = []
    slices, tensors = TorchDistWriter.write, HubWriter.sink

    def write_slice(self: TorchDistWriter, param: Any, bands: Any) -> list[str]:
        names.append(param.megatron_name)
        return slices(self, param, bands)

    def write_tensor(self: HubWriter, name: str) -> Any:
        names.append(name)
        return tensors(self, name)

    monkeypatch.setattr(TorchDistWriter, "write", write_slice)
    monkeypatch.setattr(HubWriter, "sink", write_tensor)
    return names


@pytest.mark.parametrize("action", ["import", "export"])
def test_resume_goes_on_where_it_was(
    tmp_path: Path, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], action: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    output = tmp_path / "out"
    message = interrupt(monkeypatch, action, sources[action], output, after=9)
    (left,) = tmp_path.iterdir()
    assert all(named in message for named in (str(output), "`resume`", left.name))
    done = set(journal.Journal(left, "?", []).done)
    assert 9 <= len(done) < 20  # running tasks are completed
    names = written(monkeypatch)
    convert(action, sources[action], output, resume=True)
    params = Bridge.from_hf(sources["import"]).checkpoint.params
    kept = {
        name for param in params if param.megatron_name in done for name in (param.megatron_name, *param.hub_names)
    }
    assert names
    assert not kept & set(names)
    assert whole(output) == expected[action]
    assert no_leftovers(tmp_path)


def test_what_is_damaged_meanwhile_is_written_again(
    tmp_path: Path, sources: dict[str, Path], expected: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    interrupt(monkeypatch, "import", sources["import"], output, after=9)
    (left,) = tmp_path.iterdir()
    for file in left.rglob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        file.write_bytes(data)
    lines = (left / journal.JOURNAL).read_text().splitlines()
    lines[3] = lines[3][: len(lines[3]) // 2]  # a truncated line
    lines.append('["decoder.final_layernorm.weight", {"tensors": 5}]')
    (left / journal.JOURNAL).write_text("\n".join(lines))
    convert("import", sources["import"], output, resume=True)
    assert whole(output) == expected["import"]


@pytest.mark.parametrize("change", ["source", "layout", "dtype", "no --resume"])
def test_another_conversion_starts_clean(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = write_llada(tmp_path / "hub", n_kv_heads=2)
    output = tmp_path / "out"
    interrupt(monkeypatch, "import", source, output, after=9)
    if change == "source":
        write_llada(tmp_path / "hub", seed=1, n_kv_heads=2)
    layout = Layout(tp=2, pp=4) if change == "layout" else LAYOUT
    dtype = "bf16" if change == "dtype" else None
    names = written(monkeypatch)
    bridge = Bridge.from_hf(source)
    bridge.to_megatron(output, layout, dtype, resume=change != "no --resume")
    assert sorted(names) == sorted(param.megatron_name for param in bridge.checkpoint.params)
    bridge.to_megatron(tmp_path / "fresh", layout, dtype)
    assert whole(output) == whole(tmp_path / "fresh")
    assert no_leftovers(tmp_path)


def test_resume_from_the_command_line(
    tmp_path: Path, llada: Path, expected: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    output = tmp_path / "out"
    real = streaming.read_bands
    count = 0

    def read(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 12:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(transfer, "read_bands", read)
    command = ("import", llada, output, "--tp", 2, "--pp", 2, "--workers", 1)
    code, out, err = run_cli(capsys, *command)
    assert (code, out) == (130, "")
    assert len(err.splitlines()) == 1
    assert "--resume" in err
    for _ in range(2):  # the second one finds it finished
        code, out, _ = run_cli(capsys, *command, "--resume", "--json")
        assert code == 0
        assert json.loads(out)["dry_run"] is False
        assert whole(output) == expected["import"]


@pytest.mark.parametrize("action", ["import", "export", "reshard"])
def test_a_finished_conversion_is_resumed_to_nothing(
    tmp_path: Path, sources: dict[str, Path], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    convert(action, sources[action], output)
    before = whole(output)
    names = written(monkeypatch)
    convert(action, sources[action], output, resume=True)
    assert not names
    assert whole(output) == before
    change = {"vocab_multiple": 256} if action == "reshard" else {"dtype": "bf16"}
    for other in ({"resume": True, **change}, {}):
        with pytest.raises(DlmBridgeError, match="out exists"):
            convert(action, sources[action], output, **other)
    next(path for path in output.rglob("*") if path.suffix in (".distcp", ".safetensors")).unlink()
    with pytest.raises(DlmBridgeError, match="out exists"):
        convert(action, sources[action], output, resume=True)
    convert(action, sources[action], output, resume=True, overwrite=True)
    assert whole(output) == before
    assert no_leftovers(tmp_path)


def test_a_source_that_changed_is_another_conversion(tmp_path: Path) -> None:
    source = write_llada(tmp_path / "hub", n_kv_heads=2)
    convert("import", source, tmp_path / "out")
    write_llada(source, seed=1, n_kv_heads=2)
    with pytest.raises(DlmBridgeError, match="out exists"):
        convert("import", source, tmp_path / "out", resume=True)
