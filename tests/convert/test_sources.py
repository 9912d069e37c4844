"""Where Hub weights come from: torch's pickled files, one or in shards; the Hub's cache at a revision."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.formats.hub_weights import HubReader
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import CheckpointError
from dlm_bridge.processes import leave_inherited
from tests.checkpoints import write_llada
from tests.convert.helpers import hub_tensors, run_cli, same, tree
from tests.refusals import refused

Capture = pytest.CaptureFixture[str]


def pickled(source: Path, folder: Path, shards: int) -> Path:
    """The same checkpoint in `shards` pytorch_model*.bin files."""
    tensors = hub_tensors(source)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        torch.save(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights(llada: Path, tmp_path: Path, shards: int) -> None:
    """What is exported is safetensors, with every side file and every bit."""
    folder = pickled(llada, tmp_path / "bin", shards)
    facts = inspect_checkpoint(folder)
    assert (facts.family, len(facts.files)) == ("llada", shards)
    assert not [name for name in facts.left_out if "pytorch_model" in name and not name.endswith("index.json")]
    Bridge.from_hf(folder).to_megatron(tmp_path / "m", Layout(tp=2))
    assert verify_manifest(tmp_path / "m").equal
    assert verify_pair(folder, llada).equal
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    back, wanted = hub_tensors(tmp_path / "out"), hub_tensors(llada)
    assert back.keys() == wanted.keys()
    assert all(same(back[name], tensor) for name, tensor in wanted.items())
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not list((tmp_path / "out").glob("pytorch_model*"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (llada / "config.json").read_bytes()


def test_safetensors_win_over_pickled_weights(llada: Path, tmp_path: Path) -> None:
    shutil.copytree(llada, tmp_path / "both")
    torch.save({}, tmp_path / "both" / "pytorch_model.bin")
    facts = inspect_checkpoint(tmp_path / "both")
    assert "pytorch_model.bin" in facts.left_out
    assert all(name.endswith(".safetensors") for name in facts.files)


class Code:
    def __reduce__(self) -> Any:
        return print, ("the pickle was run",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(x=Code()), "its pickle refers to builtins.print"),
        (lambda t: t.update(x=torch.ones(3, dtype=torch.int64)), "tensor x has dtype int64"),
        (lambda t: t.update(x={"y": torch.ones(3)}), "'x' is not a tensor"),
        (lambda t: t.update(x=torch.ones(3, 4).T), r"has strides [1, 4]"),
        (lambda t: t.pop("model.transformer.ln_f.weight"), "tensor model.transformer.ln_f.weight is missing"),
    ],
    ids=["code", "dtype", "nested", "strides", "missing"],
)
def test_bad_pickled_weights(llada: Path, tmp_path: Path, capsys: Capture, change: Any, message: str) -> None:
    folder = pickled(llada, tmp_path / "bin", 1)
    tensors: dict[str, Any] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin")
    code, out, err = run_cli(capsys, "import", folder, tmp_path / "m")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_pickled_tensor_is_not_a_weight_file(tmp_path: Path) -> None:
    torch.save(torch.ones(2, 3), tmp_path / "pytorch_model.bin")
    with refused(CheckpointError, tmp_path / "pytorch_model.bin"):
        HubReader(tmp_path)


def test_pickled_weights_of_old_torch_and_cut_ones(llada: Path, tmp_path: Path) -> None:
    folder = pickled(llada, tmp_path / "bin", 1)
    path = folder / "pytorch_model.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DlmBridgeError, match=r"pytorch_model\.bin: truncated or damaged torch\.save file"):
        Bridge.from_hf(folder)
    torch.save(hub_tensors(llada), path, _use_new_zipfile_serialization=False)
    with pytest.raises(DlmBridgeError, match=r"torch >= 1\.6 .* save it again"):
        Bridge.from_hf(folder)


def test_index_outside_the_folder(llada: Path, tmp_path: Path) -> None:
    folder = pickled(llada, tmp_path / "bin", 2)
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(path.read_text().replace("pytorch_model-00001-of-00002.bin", "../pytorch_model.bin"))
    with pytest.raises(DlmBridgeError, match="points outside the folder"):
        Bridge.from_hf(folder)


def cached(source: Path, cache: Path, commit: str, branch: str) -> None:
    """Put a checkpoint into the Hub's cache: blobs, links to them, and what the branch points to."""
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    for path in sorted(source.rglob("*")):
        if path.is_file():
            blob = repository / "blobs" / f"{commit[:4]}-{path.name}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, blob)
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            up = "/".join([".."] * (len(link.relative_to(repository).parts) - 1))
            link.symlink_to(f"{up}/blobs/{blob.name}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / branch).write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that huggingface_hub uses, offline."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_from_the_cache_at_a_revision(llada: Path, cache: Path, tmp_path: Path, capsys: Capture) -> None:
    other = write_llada(tmp_path / "other", seed=7)
    cached(llada, cache, "a" * 40, "main")
    cached(other, cache, "b" * 40, "v2")
    for revision, source, commit in ((None, llada, "a"), ("v2", other, "b"), ("b" * 40, other, "b")):
        folder = tmp_path / f"m-{revision}"
        asked = () if revision is None else ("--revision", revision)
        assert run_cli(capsys, "import", "owner/name", folder, *asked)[0] == 0
        manifest = json.loads((folder / "dlm_bridge.json").read_text())
        assert manifest["source"]["name"] == "owner/name"
        assert manifest["source"]["revision"] == commit * 40
        assert run_cli(capsys, "export", folder, tmp_path / f"out-{revision}")[0] == 0
        assert tree(tmp_path / f"out-{revision}") == tree(source)
    code, _, err = run_cli(capsys, "import", "owner/name", tmp_path / "x", "--revision", "nope")
    assert code == 2
    assert err.count("\n") == 1


def test_pickled_weights_from_the_cache(llada: Path, cache: Path, tmp_path: Path, capsys: Capture) -> None:
    cached(pickled(llada, tmp_path / "bin", 2), cache, "c" * 40, "main")
    assert run_cli(capsys, "import", "owner/name", tmp_path / "m")[0] == 0
    assert verify_pair(llada, tmp_path / "m").equal


def test_a_hub_id_without_a_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    code, _, err = run_cli(capfd, "import", "owner/name", tmp_path / "m")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "owner/name" in err
    assert "huggingface.co cannot be found" in err


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_file_that_may_not_be_read_is_called_that(llada: Path, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # pytest's own folders are closed to others
        source = Path(folder) / "hub"
        shutil.copytree(llada, source)
        for file in source.iterdir():
            file.chmod(0 if file.name == name else 0o644)
        told = multiprocessing.get_context("fork").SimpleQueue()
        process = multiprocessing.get_context("fork").Process(target=_open_as_another_user, args=(source, told))
        process.start()
        process.join(60)
        assert not told.empty()
        assert f"{source / name}: permission denied" in told.get()


def _open_as_another_user(source: Path, told: Any) -> None:
    leave_inherited()
    if os.getuid() == 0:  # who may read everything
        os.setuid(65534)
    try:
        Bridge.from_hf(source)
        told.put("opened")
    except DlmBridgeError as error:
        told.put(str(error))
