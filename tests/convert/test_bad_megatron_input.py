"""Bad and hostile Megatron checkpoints: refused with one line that names the thing; nothing of theirs is run."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.checkpoints.megatron import iteration_folder
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader
from dlm_bridge.convert.formats.dcp import read_metadata
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.hub import TRACKER
from tests.convert.helpers import hub_tensors, no_leftovers, run_cli, save_dcp, tree
from tests.convert.test_torch_dist import expected
from tests.refusals import refused

QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC2 = "decoder.layers.mlp.linear_fc2.weight"
ITERATION = "iter_0000000"


class Exploit:
    """Runs a command when a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def checkpoint(tmp_path: Path, llada: Path) -> Path:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2, pp=2))
    return tmp_path / "m"


def edit_metadata(root: Path, change: Callable[[Metadata], None]) -> None:
    folder = root / ITERATION
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def without_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata[FC2].chunks.pop()  # type: ignore[union-attr]


def double_chunk(metadata: Metadata) -> None:
    item = metadata.state_dict_metadata[FC2]
    item.chunks.append(item.chunks[0])  # type: ignore[union-attr]


def overlapping_chunk(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata[QKV].chunks  # type: ignore[union-attr]
    old = chunks[1]
    moved = torch.Size([old.offsets[0], old.offsets[1] + 1 if old.offsets[1] == 0 else old.offsets[1] - 1, 0])
    chunks[1] = ChunkStorageMetadata(moved, old.sizes)
    metadata.storage_data[MetadataIndex(QKV, moved)] = metadata.storage_data[MetadataIndex(QKV, old.offsets)]


def chunk_out_of_range(metadata: Metadata) -> None:
    metadata.state_dict_metadata[FC2].chunks[0].sizes = torch.Size([1, 10**12, 48])  # type: ignore[union-attr]


def negative_size(metadata: Metadata) -> None:
    metadata.state_dict_metadata[FC2].chunks[0].offsets = (-1, 0, 0)  # type: ignore[union-attr, assignment]


def no_place(metadata: Metadata) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == FC2)]


def change_place(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == FC2)
        for name, value in changes.items():
            setattr(metadata.storage_data[index], name, value)

    return change


def swap_items(metadata: Metadata) -> None:
    """Points one tensor's chunk at another tensor's item."""
    fc2 = next(index for index in metadata.storage_data if index.fqn == FC2)
    metadata.storage_data[fc2] = metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == QKV)]


def missing_key(metadata: Metadata) -> None:
    del metadata.state_dict_metadata[FC2]


def unknown_key(metadata: Metadata) -> None:
    metadata.state_dict_metadata["decoder.layers.mlp.surplus.weight"] = metadata.state_dict_metadata.pop(FC2)
    for index in [index for index in metadata.storage_data if index.fqn == FC2]:
        place = metadata.storage_data[index]
        metadata.storage_data[MetadataIndex("decoder.layers.mlp.surplus.weight", index.offset)] = place


def surplus_key(metadata: Metadata) -> None:
    metadata.state_dict_metadata["decoder.surplus"] = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    place = next(p for i, p in metadata.storage_data.items() if i.fqn == "decoder.final_layernorm.weight")
    metadata.storage_data[MetadataIndex("decoder.surplus", torch.Size([0]))] = place


METADATA = f"{ITERATION}/.metadata"


@pytest.mark.parametrize(
    ("change", "file", "named"),
    [
        (without_chunk, ITERATION, (FC2, "3072")),
        (double_chunk, ITERATION, (FC2, "overlap")),
        (overlapping_chunk, ITERATION, (QKV, "overlap")),
        (chunk_out_of_range, METADATA, (FC2,)),
        (negative_size, METADATA, ("-1",)),
        (no_place, METADATA, (FC2,)),
        (change_place(relative_path="../../secret"), METADATA, ("'../../secret'", "outside")),
        (change_place(relative_path="/etc/passwd"), METADATA, ("'/etc/passwd'", "outside")),
        (change_place(relative_path="__9_0.distcp"), f"{ITERATION}/__9_0.distcp", (FC2,)),
        (change_place(offset=10**9), f"{ITERATION}/__0_0.distcp", (FC2,)),
        (change_place(offset=-5), METADATA, ("-5",)),
        (change_place(length=1 << 70), METADATA, (str(1 << 70),)),
        (change_place(transform_descriptors=["zstd"]), METADATA, ("transforms",)),
        (swap_items, f"{ITERATION}/__0_0.distcp", (FC2, "[1, 64, 64]")),
        (missing_key, "", (FC2, "missing")),
        (unknown_key, "", (FC2, "missing")),
        (surplus_key, "", ("decoder.surplus", "llada")),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)
def test_bad_metadata(
    tmp_path: Path, checkpoint: Path, change: Callable[[Metadata], None], file: str, named: tuple[str, ...]
) -> None:
    edit_metadata(checkpoint, change)
    before = tree(checkpoint)
    with refused(CheckpointError, checkpoint / file, *named):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")
    assert tree(checkpoint) == before
    assert not (tmp_path / "out").exists()
    assert no_leftovers(tmp_path)


def test_an_item_that_is_not_whole(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_metadata(checkpoint, change_place(length=100))
    code, _, err = run_cli(capsys, "export", checkpoint, tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert FC2 in err


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_hostile_pickles_are_not_run(tmp_path: Path, checkpoint: Path, file: str) -> None:
    marker = tmp_path / "marker"
    hostile = {"iteration": 0, "args": Exploit(marker)}
    path = checkpoint / ITERATION / file
    if file == ".metadata":
        path.write_bytes(pickle.dumps(hostile))
    else:
        torch.save(hostile, path)
    with refused(CheckpointError, path, "posix.system"):
        Bridge.from_megatron(checkpoint)
    assert not marker.exists()


def test_hostile_metadata_by_other_ways(tmp_path: Path, checkpoint: Path) -> None:
    marker = tmp_path / "marker"
    command = f"touch {marker}".encode()
    payloads = [
        b"cbuiltins\neval\n(V__import__('os').system('" + command + b"')\ntR.",
        b"cposix\nsystem\n(V" + command + b"\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"ctorch\nload\n(Vx\ntR.",
        b"ctorch.serialization\n_get_layout.__globals__\n.",
        pickle.dumps(Metadata({}, storage_data={}))[:-1] + b"\x85\x82" + b"\x01" + b".",
    ]
    for payload in payloads:
        (checkpoint / ITERATION / ".metadata").write_bytes(payload)
        with refused(CheckpointError, checkpoint / METADATA):
            Bridge.from_megatron(checkpoint)
    assert not marker.exists()


def test_a_pickle_cannot_alter_classes_for_the_next_one(checkpoint: Path) -> None:
    """BUILD on a class would set attributes of it: what it reaches is made anew for every file."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    good = (checkpoint / ITERATION / ".metadata").read_bytes()
    (checkpoint / ITERATION / ".metadata").write_bytes(name + b"(N}Vfields\nI1\ns\x86b.")
    with refused(CheckpointError, checkpoint / METADATA):
        Bridge.from_megatron(checkpoint)
    (checkpoint / ITERATION / ".metadata").write_bytes(good)
    assert Bridge.from_megatron(checkpoint).hub_names()


def test_extra_states_are_never_unpickled(tmp_path: Path, checkpoint: Path, llada: Path) -> None:
    """Their bytes may hold anything: they are written anew."""
    marker, folder = tmp_path / "marker", checkpoint / ITERATION
    torch.save([Exploit(marker)], folder / "evil")
    evil = (folder / "evil").read_bytes() + bytes(8192)

    def point(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            if "_extra_state" in index.fqn:
                place.relative_path, place.offset, place.length = "evil", 0, len(evil)

    (folder / "evil").write_bytes(evil)
    edit_metadata(checkpoint, point)
    report = Bridge.from_megatron(checkpoint).to_megatron(tmp_path / "again")
    assert any("extra states with content" in note for note in report.notes)
    Bridge.from_megatron(tmp_path / "again").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(llada)
    assert not any(b"touch" in data for data in tree(tmp_path / "again").values())
    assert not marker.exists()


def test_hostile_tensor_items_are_not_run(tmp_path: Path, checkpoint: Path) -> None:
    marker, folder = tmp_path / "marker", checkpoint / ITERATION
    torch.save(Exploit(marker), folder / "evil")
    length = (folder / "evil").stat().st_size
    edit_metadata(checkpoint, change_place(relative_path="evil", offset=0, length=length))
    with refused(CheckpointError, None, FC2, "posix.system"):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")
    assert not marker.exists()


def test_common_pt_of_megatron_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Namespace of plain values, and enums of Megatron's own, which become inert."""
    module = types.ModuleType("megatron.made_up")
    backend = Enum("Backend", {"flash": 1}, module="megatron.made_up")
    module.Backend = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.made_up", module)
    args = argparse.Namespace(num_layers=4, params_dtype=torch.bfloat16, attention_backend=backend(1))
    torch.save({"iteration": 3, "checkpoint_version": 3.0, "args": args}, checkpoint / ITERATION / "common.pt")
    common = TorchDistReader(checkpoint / ITERATION).common
    assert common["iteration"] == 3
    assert common["args"]["num_layers"] == 4
    assert not isinstance(common["args"]["attention_backend"], Enum)


def test_common_pt_with_the_classes_of_an_offloaded_optimizer_is_read(checkpoint: Path) -> None:
    """megatron-core names them in every group of parameters; they become inert, and a call of one makes nothing."""

    class Called:
        def __reduce__(self) -> Any:
            return torch.optim.AdamW, ([torch.nn.Parameter(torch.ones(1))],)

    group = {"lr": 1e-3, "cpu_optimizer_cls": torch.optim.AdamW, "called": Called()}
    torch.save({"iteration": 3, "optimizer": {"param_groups": [group]}}, checkpoint / ITERATION / "common.pt")
    (found,) = TorchDistReader(checkpoint / ITERATION).common["optimizer"]["param_groups"]
    assert found["lr"] == 1e-3
    assert not issubclass(found["cpu_optimizer_cls"], torch.optim.Optimizer)
    assert not isinstance(found["called"], torch.optim.Optimizer)


def test_damaged_files(tmp_path: Path, checkpoint: Path) -> None:
    folder = checkpoint / ITERATION

    def spoiled(name: str, data: bytes | None, field: object = None, *named: str) -> None:
        """Replace or delete a file; the error's field is `field`, or else the file."""
        path = checkpoint / name
        old = path.read_bytes()
        path.unlink() if data is None else path.write_bytes(data)
        with refused(CheckpointError, field or path, *named) as error:
            Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")
        assert "\n" not in str(error.value)
        path.write_bytes(old)

    backend = f"{ITERATION}/metadata.json"
    spoiled(METADATA, b"garbage")
    spoiled(METADATA, (folder / ".metadata").read_bytes()[:-500])
    spoiled(METADATA, None, folder, ".metadata")
    spoiled(f"{ITERATION}/common.pt", b"garbage")
    spoiled(f"{ITERATION}/common.pt", None)
    spoiled(backend, b"{")
    spoiled(backend, b'{"sharded_backend": "zarr"}', None, "zarr")
    spoiled(backend, None, folder, "metadata.json")
    spoiled(f"{ITERATION}/__1_0.distcp", b"short", None, "5 bytes")
    spoiled(f"{ITERATION}/__1_0.distcp", None)
    spoiled(TRACKER, b"5", None, "iter_0000005")
    spoiled(TRACKER, b"9" * 50)
    spoiled(TRACKER, b"../..")
    spoiled(TRACKER, None, checkpoint, TRACKER)
    spoiled("dlm_bridge.json", b"{")
    spoiled("dlm_bridge.json", b'{"format_version": 99}')
    spoiled("dlm_bridge.json", b'{"format_version": 1}')
    spoiled("hf/config.json", None, checkpoint, "hf/config.json", "`like`")
    for path in (tmp_path / "nowhere", tmp_path):
        with refused(CheckpointError, path):
            Bridge.from_megatron(path)
    (tmp_path / "checkpoints").mkdir()
    with refused(CheckpointError, tmp_path, "checkpoints"):
        Bridge.from_megatron(tmp_path)
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    with refused(CheckpointError, folder / ".metadata", "__1_0.distcp"):
        Bridge.from_megatron(checkpoint)


@pytest.mark.parametrize("file", ["../../escape.safetensors", "/tmp/escape.safetensors", "config.json"])
def test_hostile_shard_map(tmp_path: Path, checkpoint: Path, file: str) -> None:
    manifest = json.loads((checkpoint / "dlm_bridge.json").read_text())
    manifest["shards"][0]["file"] = file
    (checkpoint / "dlm_bridge.json").write_text(json.dumps(manifest))
    with refused(CheckpointError, None, file):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "deep" / "out")
    assert not (tmp_path / "escape.safetensors").exists()


def test_shard_map_of_another_model(tmp_path: Path, checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "dlm_bridge.json").read_text())
    manifest["shards"][0]["tensors"].pop()
    (checkpoint / "dlm_bridge.json").write_text(json.dumps(manifest))
    with refused(CheckpointError, None, "shard map"):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")
    Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out", shard_size="1GB")


def test_hostile_hf_folder(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (checkpoint / "hf" / "stolen").symlink_to(tmp_path / "secret")
    with refused(CheckpointError, checkpoint / "hf/stolen", "secret"):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "change", "named"),
    [
        (FC2, lambda t: t[:, :, :-1], ("[4, 64, 95]", "[4, 64, 96]")),
        (FC2, lambda t: t[:3], ("[3, 64, 96]",)),
        ("embedding.word_embeddings.weight", lambda t: t[:100], ("[100, 64]", "[128, 64]")),
        (QKV, lambda t: t.to(torch.int32), ("int32",)),
    ],
)
def test_other_shapes(
    tmp_path: Path, llada: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor], named: tuple[str, ...]
) -> None:
    state = expected(hub_tensors(llada))
    state[key] = change(state[key]).contiguous()
    save_dcp(state, tmp_path / "m" / "iter_0000001")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    with refused(CheckpointError, None, key, *named):
        Bridge.from_megatron(tmp_path / "m", like=llada).to_hf(tmp_path / "out")


def test_absurd_sizes_allocate_nothing(tmp_path: Path, llada: Path, checkpoint: Path) -> None:
    def absurd(metadata: Metadata) -> None:
        item = metadata.state_dict_metadata[FC2]
        item.size = torch.Size([4, 1 << 40, 1 << 20])  # type: ignore[union-attr]

    edit_metadata(checkpoint, absurd)
    with refused(CheckpointError, checkpoint, FC2):
        Bridge.from_megatron(checkpoint).to_hf(tmp_path / "out")
    config = json.loads((llada / "config.json").read_text())
    for changes in (
        {"n_layers": 1 << 40},
        {"d_model": 1 << 50},
        {"n_layers": True},
        {"vocab_size": 1 << 35, "embedding_size": None},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(DlmBridgeError):
            Bridge.from_megatron(checkpoint, hf_config=tmp_path / "config.json").to_hf(tmp_path / "out")


def test_like_and_config_exclude_each_other(checkpoint: Path, llada: Path) -> None:
    with refused(SettingError, "like", "`hf_config`"):
        Bridge.from_megatron(checkpoint, like=llada, hf_config=llada / "config.json")


def test_a_tracker_that_is_a_device_is_not_read(checkpoint: Path) -> None:
    (checkpoint / TRACKER).unlink()
    (checkpoint / TRACKER).symlink_to("/dev/full")
    with refused(CheckpointError, checkpoint / TRACKER):
        iteration_folder(checkpoint)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file whose first byte cannot be read")
def test_a_common_state_that_cannot_be_read(checkpoint: Path) -> None:
    (checkpoint / ITERATION / "common.pt").unlink()
    (checkpoint / ITERATION / "common.pt").symlink_to("/proc/self/mem")
    with refused(CheckpointError, checkpoint / ITERATION / "common.pt"):
        Bridge.from_megatron(checkpoint)


def test_metadata_that_is_a_pipe_is_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / ITERATION / ".metadata").unlink()
    os.mkfifo(checkpoint / ITERATION / ".metadata")
    with refused(CheckpointError, checkpoint / METADATA):
        read_metadata(checkpoint / ITERATION)


def test_a_side_file_that_cannot_be_read_is_seen_by_verify(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("dlm_bridge.convert.verify.file_digest", fails)
    found = verify_manifest(checkpoint).differences
    assert {difference.kind for difference in found} == {"file"}
    assert "hf/config.json" in {difference.name for difference in found}


def test_a_damaged_copy_is_seen_by_verify(tmp_path: Path, checkpoint: Path) -> None:
    """Every byte of every tensor counts: one flipped bit is found, and its tensor named."""
    folder = checkpoint / ITERATION
    metadata = FileSystemReader(folder).read_metadata()
    index = next(index for index in metadata.storage_data if index.fqn == FC2 and index.offset[0] == 2)  # type: ignore[index]
    place = metadata.storage_data[index]
    copy = tmp_path / "copy"
    for position in (place.offset + place.length // 2, place.offset + 2):  # a value, then the archive's head
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoint, copy)
        data = bytearray((copy / ITERATION / place.relative_path).read_bytes())
        data[position] ^= 0x10
        (copy / ITERATION / place.relative_path).write_bytes(bytes(data))
        verdict = verify_manifest(copy)
        names = {item.name for item in verdict.differences}
        assert not verdict.equal
        value = position > place.offset + 2
        assert names == {"model.transformer.blocks.2.ff_out.weight" if value else f"{ITERATION}/{place.relative_path}"}
