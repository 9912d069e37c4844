"""Memory follows the largest tensor, not the model."""

from __future__ import annotations

import io
import json
import mmap
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert import streaming, workers
from dlm_bridge.convert.checkpoints.torch_dist import ItemSink, tensor_item_length
from dlm_bridge.convert.verify import verify_manifest
from tests.checkpoints import llada_config
from tests.convert.helpers import tree

LAYERS, HIDDEN, FFN, VOCAB = 6, 1024, 4096, 4096
MODEL = 4 * LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)  # bytes: 0.4 GB of fp32

SCRIPT = """
import json, resource, sys
from dlm_bridge import Bridge, Layout

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

hub, folder = sys.argv[1:]
before = peak()
Bridge.from_hf(hub).to_megatron(folder + "/m", Layout(tp=2, pp=2), workers=1)
Bridge.from_megatron(folder + "/m").to_hf(folder + "/out", workers=1)
print(json.dumps([before, peak()]))
"""


def write_sparse(folder: Path) -> Path:
    """A checkpoint of zeros in sparse files, which use no disk space."""
    folder.mkdir()
    config = llada_config(
        d_model=HIDDEN,
        n_heads=8,
        n_kv_heads=8,
        n_layers=LAYERS,
        mlp_hidden_size=FFN,
        vocab_size=VOCAB,
        embedding_size=VOCAB,
    )
    (folder / "config.json").write_text(json.dumps(config))
    root, shapes = "model.transformer.", {}
    shapes[root + "wte.weight"] = shapes[root + "ff_out.weight"] = [VOCAB, HIDDEN]
    shapes[root + "ln_f.weight"] = [HIDDEN]
    for layer in range(LAYERS):
        block = f"{root}blocks.{layer}."
        shapes |= {f"{block}{name}.weight": [HIDDEN] for name in ("attn_norm", "ff_norm")}
        shapes |= {f"{block}{name}.weight": [HIDDEN, HIDDEN] for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        shapes |= {f"{block}{name}.weight": [FFN, HIDDEN] for name in ("ff_proj", "up_proj")}
        shapes[f"{block}ff_out.weight"] = [HIDDEN, FFN]
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + position)
    return folder


@pytest.mark.slow
def test_peak_memory_stays_far_below_the_model(tmp_path: Path) -> None:
    hub = write_sparse(tmp_path / "hub")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hub), str(tmp_path)], check=True, capture_output=True, text=True
    )
    before, after = json.loads(result.stdout)
    for name in ("m", "out"):
        shutil.rmtree(tmp_path / name)
    assert after - before < 50e6 < MODEL / 4


@pytest.mark.parametrize("band", [32, 4096])
def test_bands_change_nothing(tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch, band: int) -> None:
    """Small bands, which cross the borders of ranks and tensors as in large models."""
    Bridge.from_hf(llada).to_megatron(tmp_path / "plain", Layout(tp=2, pp=2))
    monkeypatch.setattr(streaming, "BAND", band)
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2, pp=2), workers=2)
    assert tree(tmp_path / "m") == tree(tmp_path / "plain")
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "r", Layout(tp=1, pp=4), workers=2, format="torch")
    Bridge.from_megatron(tmp_path / "r").to_megatron(tmp_path / "again", Layout(tp=2, pp=1), workers=2)
    Bridge.from_megatron(tmp_path / "again").to_hf(tmp_path / "out", workers=2)
    assert tree(tmp_path / "out") == tree(llada)
    assert verify_manifest(tmp_path / "out").equal


def test_reused_memory_changes_nothing(tmp_path: Path, llada: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts reuse memory blocks of earlier tensors."""
    Bridge.from_hf(llada).to_megatron(tmp_path / "plain", Layout(tp=2, pp=2), "bf16")
    taken: list[int] = []
    real = workers.mmap.mmap

    def block(fd: int, size: int) -> mmap.mmap:
        taken.append(size)
        return real(fd, size)

    monkeypatch.setattr(workers, "_SMALL", 0)
    monkeypatch.setattr(workers, "_HUGE_PAGE", 4096)
    monkeypatch.setattr(workers.mmap, "mmap", block)
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2, pp=2), "bf16", workers=2)
    assert tree(tmp_path / "m") == tree(tmp_path / "plain")
    params = len(Bridge.from_hf(llada).checkpoint.params)
    assert 0 < len(taken) < 2 * params  # each param asks for two or more: blocks were used again


def test_blocks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SMALL", 0)
    pool = workers.TaskMemory(limit=16 << 20)
    for _ in range(3):
        for megabytes in (2, 6, 10, 4):
            with pool.task():
                a, b = (workers.new_tensor((megabytes << 19,), torch.int16) for _ in range(2))
                a.fill_(1)
                b.fill_(2)
                assert bool((a == 1).all())
            assert pool._total <= max(16, 2 * megabytes) << 20
    outside = workers.new_tensor((3, 5), torch.float32)
    assert outside.shape == (3, 5)


def test_an_item_is_what_torch_saves(tmp_path: Path) -> None:
    """Equal bytes except the archive's id, and valid checksums for Python's zipfile."""
    for shape in ((3, 5), (0, 4), (), (1, 1, 7, 4096)):
        for tensor in (torch.randn(shape), torch.randn((*shape, 2)).bfloat16()[..., 0]):
            dtype, size = tensor.dtype, tuple(tensor.shape)
            length = tensor_item_length(dtype, size)
            path = tmp_path / "item"
            path.write_bytes(bytes(length + 20))
            with ItemSink(path, 10, length, dtype, size) as sink:
                for _, band in streaming.tensor_bands(tensor.contiguous()):
                    sink.take(band.reshape(-1).data)
                digest = sink.finish()
            data = path.read_bytes()
            assert (data[:10], data[-10:]) == (bytes(10), bytes(10))
            data = data[10:-10]
            assert digest == xxhash.xxh3_128_digest(data)
            assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
            expected = io.BytesIO()
            torch.save(torch.empty(size, dtype=dtype).copy_(tensor), expected)
            ours, torchs = (zipfile.ZipFile(stream) for stream in (io.BytesIO(data), expected))
            assert ours.testzip() is None
            for mine, other in zip(ours.infolist(), torchs.infolist(), strict=True):
                assert (mine.filename, mine.header_offset) == (other.filename, other.header_offset)
                if not mine.filename.endswith("serialization_id"):
                    assert ours.read(mine) == torchs.read(other)
