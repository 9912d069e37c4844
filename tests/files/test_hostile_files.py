"""Small files that a reader might run, or that take long or much memory: pickles, archives of torch.save, YAML."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.data.sources import find_sources
from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError
from dlm_bridge.files.pickles import (
    RestrictedUnpickler,
    check_torch_file,
    load_torch_file,
    read_torch_file,
    restricted_loading,
)
from dlm_bridge.files.reading import parse_yaml
from dlm_bridge.train.config.files import read_yaml
from tests.fuzz.hostile import BOMBS, CODE, MARKER, WHOLE, Place, put
from tests.processes import limited_memory
from tests.refusals import refused

ROOM = 1 << 30  # bytes


@pytest.fixture
def little_room() -> Iterator[None]:
    with limited_memory(ROOM):
        yield


def archive(path: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> Path:
    """A file of torch.save whose records `change` writes."""
    saved = io.BytesIO()
    torch.save({"a": torch.arange(4.0)}, saved)
    with zipfile.ZipFile(saved) as sound, zipfile.ZipFile(path, "w") as made:
        for name in sound.namelist():
            change(made, name, sound.read(name))
    return path


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("name", BOMBS)
def test_pickles_are_refused_before_they_grow(name: str) -> None:
    unpickler = RestrictedUnpickler(BOMBS[name], "it", re.compile("nothing"))
    if name == "a memo of 32 GB":
        assert unpickler.load() is None  # whose memo is a dictionary
        return
    with pytest.raises((pickle.UnpicklingError, TypeError, EOFError)):
        unpickler.load()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_values_that_are_shared_a_few_times_pass(protocol: int) -> None:
    shape, settings = (1, 2), {"lr": 0.1, "betas": (0.9, 0.99)}
    value = [
        {(1, 2): shape, 2**70: shape, "é": b"\0" * 300},
        settings,
        settings,
        [shape] * 1000,
        {shape},
        bytearray(3),
    ]
    assert RestrictedUnpickler(pickle.dumps(value, protocol), "it", re.compile("nothing")).load() == value


def compressed(made: zipfile.ZipFile, name: str, content: bytes) -> None:
    made.writestr(name, content, zipfile.ZIP_DEFLATED)


def twice(made: zipfile.ZipFile, name: str, content: bytes) -> None:
    for _ in range(1 + name.endswith("data.pkl")):
        made.writestr(name, content)


def cut(made: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Less data than the pickle says."""
    made.writestr(name, content[:8] if "/data/" in name else content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("change", [compressed, twice, cut])
def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path, change: Callable[..., None]) -> None:
    path = archive(tmp_path / "a.pt", change)
    for read in (read_torch_file, load_torch_file, lambda path: check_torch_file(path, path)):
        with refused(CheckpointError, path):
            read(path)


def test_tensors_of_any_strides_are_loaded(tmp_path: Path) -> None:
    saved = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.Size([2]), "c": [torch.bfloat16, torch.device("cpu")]}
    torch.save(saved, tmp_path / "a.pt")
    found = load_torch_file(tmp_path / "a.pt")
    assert found["a"].stride() == (1, 3)
    assert torch.equal(found.pop("a"), saved.pop("a"))
    assert found == saved


@pytest.mark.parametrize("what", ["archive", WHOLE])
def test_libraries_load_nothing_that_runs(tmp_path: Path, what: str) -> None:
    """Whatever they ask torch.load for; afterwards it is torch's own."""
    (tmp_path / "it").mkdir()
    path, own = tmp_path / "it" / "a.pt", torch.load
    torch.save({"a": 1}, path)
    with restricted_loading(), restricted_loading():
        assert torch.load(path, weights_only=False) == {"a": 1}
        put(path.parent, Place(path.name, what), CODE)
        for file in (path, io.BytesIO(path.read_bytes())):
            with refused(CheckpointError, path if file == path else "an item"):
                torch.load(file, weights_only=False)
    assert torch.load is own
    assert not (tmp_path / MARKER).exists()


ALIASES = "a0: &a0 {x: 1}\n"
YAML_BOMBS = {
    "lists": ALIASES + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "merged": ALIASES + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    "in itself": "a: &a [*a]\n",
    "wide": f"a: &a [{'1,' * 1000}]\nb: [{'*a,' * 1000}]\n",
    "deep": "[" * 5_000,
}


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("name", YAML_BOMBS)
def test_yaml_is_refused_before_it_grows(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"values|recursion"):
        parse_yaml(YAML_BOMBS[name])
    path = tmp_path / "run.yaml"
    path.write_text(YAML_BOMBS[name])
    with refused(InputFileError, path):
        read_yaml(path)


@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_yaml_of_a_dataset_is_refused_before_it_grows(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / name).write_text(f"---\n{YAML_BOMBS['lists']}configs: *a39\n---\n")
    with pytest.raises(DlmBridgeError, match="values"):
        find_sources(f"{tmp_path}::train")


def test_aliases_of_yaml_work() -> None:
    found: Any = parse_yaml("a: &x {lr: 1}\nb: *x\nc: {<<: *x, y: [2020-01-01, 1e-3]}\n")
    assert found["b"] == {"lr": 1}
    assert found["c"].keys() == {"lr", "y"}
