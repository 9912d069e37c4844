"""Bad Hub folders: one line that names the thing, nothing written, the source untouched."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.hub import with_dtype
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder, write_llada
from tests.convert.helpers import hub_tensors, no_leftovers, run_cli, tree
from tests.refusals import refused

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
FF_OUT = "model.transformer.blocks.2.ff_out.weight"


def cut(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:-100])


def corrupt_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[20] ^= 0xFF
    (folder / SHARD).write_bytes(bytes(data))


def huge_header(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(struct.pack("<Q", 1 << 62) + data[8:])


def empty(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def unknown_shard(folder: Path) -> None:
    edit_index(folder, lambda names: names.update({FF_OUT: "model-00009-of-00002.safetensors"}))


def outside_relative(folder: Path) -> None:
    shutil.copy(folder / SHARD, folder.parent / "stolen.safetensors")
    edit_index(folder, lambda names: names.update(dict.fromkeys(names, "../stolen.safetensors")))


def outside_absolute(folder: Path) -> None:
    path = folder.parent / "stolen.safetensors"
    shutil.copy(folder / SHARD, path)
    edit_index(folder, lambda names: names.update(dict.fromkeys(names, str(path))))


def outside_link(folder: Path) -> None:
    path = folder.parent / "stolen.safetensors"
    shutil.move(folder / SHARD, path)
    (folder / SHARD).symlink_to(path)


def outside_side_file(folder: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret")


def linked_folder(folder: Path) -> None:
    (folder / "more").symlink_to(folder / "assets")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SHARD)
    before = set(tensors)
    change(tensors)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    gone, new = before - set(tensors), set(tensors) - before
    for name in gone:
        edit_index(folder, lambda names, name=name: names.__delitem__(name))  # type: ignore[misc]
    edit_index(folder, lambda names: names.update(dict.fromkeys(new, SHARD)))


def in_shard(folder: Path) -> str:
    return next(name for name in sorted(load_file(folder / SHARD)) if "ff_out" in name)


def missing_tensor(folder: Path) -> None:
    name = in_shard(folder)
    rewrite(folder, lambda tensors: tensors.__delitem__(name))


def extra_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update(surplus=torch.zeros(3)))


def misshapen(folder: Path) -> None:
    name = in_shard(folder)
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))


def integers(folder: Path) -> None:
    name = in_shard(folder)
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))


def twice(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name] for name in tensors}))
    other = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(other)
    tensors[in_shard(folder)] = torch.zeros(2)
    save_file(tensors, other, metadata={"format": "pt"})


def not_in_index(folder: Path) -> None:
    name = in_shard(folder)
    edit_index(folder, lambda names: names.__delitem__(name))


def not_in_shard(folder: Path) -> None:
    name = in_shard(folder)
    edit_index(folder, lambda names: names.update({name: "model-00002-of-00002.safetensors"}))


def bad_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{]")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# (change, name in the error, field below the folder)
CASES: list[tuple[Callable[[Path], None], str, str]] = [
    (cut, SHARD, SHARD),
    (corrupt_header, SHARD, SHARD),
    (huge_header, SHARD, SHARD),
    (empty, SHARD, SHARD),
    (missing_shard, SHARD, INDEX),
    (unknown_shard, "model-00009-of-00002.safetensors", INDEX),
    (outside_relative, "'../stolen.safetensors'", INDEX),
    (outside_absolute, "stolen.safetensors", INDEX),
    (outside_link, "stolen.safetensors", INDEX),
    (outside_side_file, "link", "tokenizer.json"),
    (linked_folder, "link", "more"),
    (missing_tensor, "ff_out.weight is missing", ""),
    (extra_tensor, "tensor surplus", ""),
    (misshapen, "[64, 95]", ""),
    (integers, "I32", SHARD),
    (twice, "ff_out.weight is in two files", ""),
    (not_in_index, "ff_out.weight", INDEX),
    (not_in_shard, "ff_out.weight", INDEX),
    (bad_index, INDEX, INDEX),
    (no_weights, INDEX, ""),
    (no_config, "config.json", ""),
    (bad_config, "JSON", "config.json"),
    (lambda f: edit_config(f, architectures=["GPT9LM"]), "GPT9LM", "config.json"),
    (lambda f: edit_config(f, architectures=None), "architectures", "config.json"),
    (lambda f: edit_config(f, auto_map="modeling.py"), "auto_map", "config.json"),
    (lambda f: edit_config(f, architectures=["LLaDAMoEModelLM"], d_model=None), "config.json", ""),
    (lambda f: edit_config(f, n_layers=5), "blocks.4.", ""),
    (lambda f: edit_config(f, n_layers=10**9), "n_layers", "config.json"),
    (lambda f: edit_config(f, n_layers=-1), "layers", ""),
    (lambda f: edit_config(f, n_layers=True), "n_layers", ""),
    (lambda f: edit_config(f, d_model="x"), "d_model", ""),
    (lambda f: edit_config(f, mlp_hidden_size="wide"), "config.json", ""),
    (lambda f: edit_config(f, weight_tying=True), "ff_out.weight", ""),
    (lambda f: edit_config(f, block_type="sequential"), "block_type", ""),
    (lambda f: edit_config(f, note="\ud800"), "surrogate", "config.json"),
]


@pytest.mark.parametrize(("spoil", "named", "field"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_bad_folder(tmp_path: Path, spoil: Callable[[Path], None], named: str, field: str) -> None:
    source = write_llada(tmp_path / "hub")
    spoil(source)
    before = {path: path.lstat().st_mtime_ns for path in source.rglob("*")}
    with refused(CheckpointError, source / field, named) as raised:
        Bridge.from_hf(source).to_megatron(tmp_path / "out", Layout(tp=2))
    assert "\n" not in str(raised.value)
    assert {path: path.lstat().st_mtime_ns for path in source.rglob("*")} == before
    assert not (tmp_path / "out").exists()
    assert no_leftovers(tmp_path)


def test_a_bad_folder_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_llada(tmp_path / "hub")
    bad_index(source)
    code, out, err = run_cli(capsys, "import", source, tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_hub_cache_is_no_trick(tmp_path: Path) -> None:
    """The Hub's cache keeps files in blobs/ and links to them from snapshots/REVISION/."""
    plain = write_llada(tmp_path / "plain")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in plain.rglob("*") if path.is_file())):
        shutil.copy(path, repository / "blobs" / str(number))
        link = snapshot / path.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / str(number), link.parent))
    bridge = Bridge.from_hf(snapshot)
    bridge.to_megatron(tmp_path / "m")
    assert bridge.checkpoint.hub.source["revision"] == "a" * 40
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(plain)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_a_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    plain = write_llada(tmp_path / "plain")
    repository = tmp_path / "cache" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text("b" * 40)
    shutil.copytree(plain, repository / "snapshots" / ("b" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Bridge.from_hf("org/name", revision="v1").to_megatron(tmp_path / "m")
    source = json.loads((tmp_path / "m" / "dlm_bridge.json").read_text())["source"]
    assert (source["name"], source["revision"]) == ("org/name", "b" * 40)
    with pytest.raises(DlmBridgeError, match=r"^org/name: "):
        Bridge.from_hf("org/name", revision="v2")


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ('{"a": 1, "torch_dtype": "bfloat16"}', '{"a": 1, "torch_dtype": "float32"}'),
        ('{"dtype":null,\r\n"x": "ü"}', '{"dtype":"float32",\r\n"x": "ü"}'),
        ('{"v": {"dtype": "float16"}, "dtype": "float16"}', '{"v": {"dtype": "float16"}, "dtype": "float32"}'),
        ('{"dtype": "a", "torch_dtype" : "b"}', '{"dtype": "float32", "torch_dtype" : "float32"}'),
        ('{"v": {"torch_dtype": "float16"}}', '{"v": {"torch_dtype": "float16"}}'),
        ('{"s": "\\"dtype\\": \\"x\\"", "dtype": "x"}', '{"s": "\\"dtype\\": \\"x\\"", "dtype": "float32"}'),
    ],
)
def test_only_the_dtype_field_is_edited(text: str, edited: str) -> None:
    assert with_dtype(text, "float32") == edited


@pytest.mark.parametrize("name", ["no/such-model", "./nowhere", "nowhere", "/no/where", "a/b/c"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(DlmBridgeError, match=f"^{name}: no such folder") as refused:
        Bridge.from_hf(name)
    assert "\n" not in str(refused.value)


def test_a_revision_needs_a_hub_id(llada: Path) -> None:
    with refused(SettingError, "revision", "main"):
        Bridge.from_hf(llada, revision="main")


def test_file_for_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DlmBridgeError, match="not a folder"):
        Bridge.from_hf(tmp_path / "file")
    with refused(CheckpointError, tmp_path / "file"):
        Bridge.from_megatron(tmp_path / "file")


def test_side_files(tmp_path: Path) -> None:
    """Weights of other formats stay behind and are named; everything else is carried, code as data."""
    config = llada_config()
    source = write_hub_folder(tmp_path / "hub", config, llada_tensors(config), shards=1)
    left = {
        "pytorch_model.bin", "model.gguf", "optimizer.pt", "x.pth", "stray.safetensors", "tf_model.h5",
        "pytorch_model.bin.index.json", "sub/pytorch_model-00001-of-00002.bin", "sub/head.bin",
    }  # fmt: skip
    carried = {
        "sub/deep/notes.txt": b"\r\n\x00",
        "tokenizer.json": b"{}",
        ".gitattributes": b"x",
        "sub/sounds.bin": b"RIFF",
    }
    for name in left:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"PK\x03\x04 weights")
    for name, data in carried.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    for name in ("original/params.json", ".git/config", ".cache/huggingface/x"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    report = Bridge.from_hf(source).to_megatron(tmp_path / "m", Layout(tp=2))
    assert set(report.left_out) == left | {"original/", ".git/", ".cache/huggingface/"}
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "m2")
    report = Bridge.from_megatron(tmp_path / "m2").to_hf(tmp_path / "out")
    assert set(report.left_out) == left | {"original/", ".git/", ".cache/huggingface/"}
    kept = {name: data for name, data in tree(source).items() if name not in left}
    kept = {name: data for name, data in kept.items() if not name.startswith(("original", ".git/", ".cache"))}
    assert carried.items() <= kept.items()
    assert tree(tmp_path / "out") == kept


def test_unaligned_and_unusual_headers_keep_their_tensors(tmp_path: Path) -> None:
    """A header in another order and with other padding than usual is read all the same."""
    source = write_llada(tmp_path / "hub", shards=1)
    path = source / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    text = json.dumps({name: header[name] for name in reversed(names)}, indent=1).encode() + b"   "
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    wanted = hub_tensors(source)
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")
    found = hub_tensors(tmp_path / "out")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
