"""What lies on disk in Megatron's layout, against index arithmetic written here; and other writers' checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader, plan_torch_dist
from dlm_bridge.convert.formats.dcp import (
    Chunk,
    Contents,
    StorageLocation,
    StoredTensor,
    read_contents,
    write_metadata,
)
from dlm_bridge.convert.formats.dcp_reader import torch_metadata
from dlm_bridge.convert.verify import verify_pair
from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import Dims, Direct, GatedMLP, ParamMapping
from tests.checkpoints import write_llada
from tests.convert.helpers import dcp_tensors, hub_tensors, save_dcp, tree
from tests.refusals import refused

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN = 4, 64, 4, 2, 16, 96
ROOT = "model.transformer."


def expected(hub: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's tensors, element by element from the Hub's, by row arithmetic of our own."""
    per_group = HEADS // GROUPS
    state: dict[str, torch.Tensor] = {
        "embedding.word_embeddings.weight": hub[ROOT + "wte.weight"],
        "output_layer.weight": hub[ROOT + "ff_out.weight"],
        "decoder.final_layernorm.weight": hub[ROOT + "ln_f.weight"],
    }
    stacked: dict[str, list[torch.Tensor]] = {}
    for layer in range(LAYERS):
        prefix = f"{ROOT}blocks.{layer}."
        block = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in hub.items()
            if name.startswith(prefix)
        }
        qkv = torch.empty((HEADS + 2 * GROUPS) * HEAD, HIDDEN)
        for group in range(GROUPS):
            base = group * (per_group + 2) * HEAD
            for head in range(per_group):
                for row in range(HEAD):
                    qkv[base + head * HEAD + row] = block["q_proj"][(group * per_group + head) * HEAD + row]
            for row in range(HEAD):
                qkv[base + per_group * HEAD + row] = block["k_proj"][group * HEAD + row]
                qkv[base + (per_group + 1) * HEAD + row] = block["v_proj"][group * HEAD + row]
        fc1 = torch.empty(2 * FFN, HIDDEN)
        for row in range(FFN):
            fc1[row], fc1[FFN + row] = block["ff_proj"][row], block["up_proj"][row]
        for key, value in (
            ("self_attention.linear_qkv.weight", qkv),
            ("self_attention.linear_qkv.layer_norm_weight", block["attn_norm"]),
            ("self_attention.linear_proj.weight", block["attn_out"]),
            ("mlp.linear_fc1.weight", fc1),
            ("mlp.linear_fc1.layer_norm_weight", block["ff_norm"]),
            ("mlp.linear_fc2.weight", block["ff_out"]),
        ):
            stacked.setdefault("decoder.layers." + key, []).append(value)
    return state | {key: torch.stack(values) for key, values in stacked.items()}


@pytest.fixture(scope="module")
def imported(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / "ckpt"
    Bridge.from_hf(llada).to_megatron(folder, Layout(tp=2, pp=2))
    return folder


def test_values_by_other_arithmetic(llada: Path, imported: Path) -> None:
    found, wanted = dcp_tensors(imported / "iter_0000000"), expected(hub_tensors(llada))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_the_arithmetic_catches_what_shapes_do_not(llada: Path) -> None:
    """A transposed square matrix and a swapped gate and up have the right shapes; `expected` must tell them apart."""
    hub = hub_tensors(llada)
    wrong = dict(hub)
    wrong[ROOT + "blocks.0.attn_out.weight"] = hub[ROOT + "blocks.0.attn_out.weight"].T.contiguous()
    wrong[ROOT + "blocks.1.ff_proj.weight"] = hub[ROOT + "blocks.1.up_proj.weight"]
    wrong[ROOT + "blocks.1.up_proj.weight"] = hub[ROOT + "blocks.1.ff_proj.weight"]
    right, other = expected(hub), expected(wrong)
    assert {key for key in right if not torch.equal(right[key], other[key])} == {
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.mlp.linear_fc1.weight",
    }


def test_files_as_megatron_has_them(imported: Path) -> None:
    assert (imported / "latest_checkpointed_iteration.txt").read_text() == "0"
    folder = imported / "iter_0000000"
    names = {path.name for path in folder.iterdir()}
    assert names == {".metadata", "common.pt", "metadata.json", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = torch.load(folder / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert common["content_metadata"] == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    manifest = json.loads((imported / "dlm_bridge.json").read_text())
    assert manifest["family"] == "llada"
    assert manifest["layout"]["tp"] == 2
    assert manifest["config"]["architectures"] == ["LLaDAModelLM"]


def test_every_rank_holds_its_own(imported: Path) -> None:
    """tp rank counts first: rank 3 is tp 1 of stage 1."""
    metadata = FileSystemReader(imported / "iter_0000000").read_metadata()
    places: dict[tuple[Any, ...], int] = {
        (index.fqn, tuple(index.offset)): int(info.relative_path[2])
        for index, info in metadata.storage_data.items()
        if index.offset is not None
    }
    for (key, offset), rank in places.items():
        stage = int("output" in key or "final" in key) if "layers" not in key else int(offset[0] >= 2)
        chunks = metadata.state_dict_metadata[key].chunks
        sizes = next(tuple(chunk.sizes) for chunk in chunks if tuple(chunk.offsets) == offset)
        if "norm" in key:
            tp = 0
        elif key.endswith(("linear_proj.weight", "linear_fc2.weight")):
            tp = int(offset[2] > 0)
            assert sizes[2] == metadata.state_dict_metadata[key].size[2] // 2
        elif key.endswith("linear_fc1.weight"):
            tp = int(offset[1] in (FFN // 2, FFN + FFN // 2))
            assert sizes == (1, FFN // 2, HIDDEN)
        else:
            tp = int(offset[-2] > 0)
        assert rank == stage * 2 + tp, (key, offset)
    fc1 = sorted(offset for key, offset in places if key.endswith("linear_fc1.weight") and offset[0] == 0)
    assert fc1 == [(0, 0, 0), (0, 48, 0), (0, 96, 0), (0, 144, 0)]


def test_extra_states(imported: Path) -> None:
    folder = imported / "iter_0000000"
    metadata = FileSystemReader(folder).read_metadata()
    objects = {key for key, item in metadata.state_dict_metadata.items() if not hasattr(item, "size")}
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    wanted = {f"decoder.layers.{module}._extra_state/shard_{i}_4" for module in modules for i in range(4)}
    assert objects == wanted | {"decoder.final_layernorm._extra_state/shard_0_1"}
    for index, info in metadata.storage_data.items():
        if index.fqn in objects:
            with (folder / info.relative_path).open("rb") as stream:
                stream.seek(info.offset)
                (folder.parent / "item").write_bytes(stream.read(info.length))
            assert torch.load(folder.parent / "item", weights_only=True) == [None]
    (folder.parent / "item").unlink()


@pytest.mark.parametrize("tensors", [0, 3, 997, 998])
def test_metadata_is_what_torchs_own_classes_pickle(tmp_path: Path, tensors: int) -> None:
    places = (StorageLocation(f"__{place % 3}_0.distcp", 100 * place, 100) for place in range(10_000))
    contents = Contents(
        {
            f"layers.{index}.weight": StoredTensor(
                dtype,
                str(dtype).removeprefix("torch."),
                (4, 6),
                (Chunk((0, 0), (4, 3), next(places)), Chunk((0, 3), (4, 3), next(places))),
            )
            for index, dtype in zip(range(tensors), 400 * [torch.bfloat16, torch.float32, torch.float16], strict=False)
        }
        | {
            "long": StoredTensor(
                torch.float32, "float32", (1001,), tuple(Chunk((i,), (1,), next(places)) for i in range(1001))
            )
        }
        | {"scalar": StoredTensor(torch.float32, "float32", (), (Chunk((), (), next(places)),))},
        {name: next(places) for name in ("extra_state", "common_state/shard_0_1")},
    )
    write_metadata(tmp_path, contents)
    expected = torch_metadata(contents, StorageMeta())
    expected.version = "1.0.0"
    assert (tmp_path / ".metadata").read_bytes() == pickle.dumps(expected)
    assert FileSystemReader(tmp_path).read_metadata().storage_data == expected.storage_data
    assert read_contents(tmp_path) == contents


@pytest.mark.parametrize("chunking", ["whole", "per layer", "two layers", "odd columns", "rows and columns"])
@pytest.mark.fast("rows and columns", "odd columns per layer")
def test_any_chunking_reads(tmp_path: Path, llada: Path, chunking: str) -> None:
    state = expected(hub_tensors(llada))
    state["embedding.word_embeddings.weight"] = torch.cat(
        [state["embedding.word_embeddings.weight"], torch.ones(32, 64)]
    )
    cut: dict[str, Any] = {
        key: _Chunked(tensor, _boxes(tuple(tensor.shape), chunking)) for key, tensor in state.items()
    }
    iteration = tmp_path / "m" / "iter_0000007"
    _save_chunked(cut, iteration)
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert all(torch.equal(tensor, dcp_tensors(iteration)[key]) for key, tensor in state.items())
    report = Bridge.from_megatron(tmp_path / "m", like=llada).to_hf(tmp_path / "out")
    assert report.notes == []
    assert tree(tmp_path / "out") == tree(llada)
    Bridge.from_megatron(tmp_path / "m", like=llada).to_megatron(tmp_path / "m2", Layout(pp=4))
    assert (tmp_path / "m2" / "iter_0000007").is_dir()
    assert (tmp_path / "m2" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert verify_pair(tmp_path / "m", tmp_path / "m2").equal


@pytest.mark.parametrize("path", ["root", "iteration", "release"])
def test_without_manifest(tmp_path: Path, llada: Path, path: str) -> None:
    root = tmp_path / "m"
    name = "release" if path == "release" else "iter_0000012"
    save_dcp(expected(hub_tensors(llada)), root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("release" if path == "release" else "12")
    checkpoint = root / name if path == "iteration" else root
    with refused(CheckpointError, checkpoint, "dlm_bridge.json", "`like`", "`hf_config`"):
        Bridge.from_megatron(checkpoint)
    Bridge.from_megatron(checkpoint, like=llada).to_hf(tmp_path / "like")
    assert tree(tmp_path / "like") == tree(llada)
    Bridge.from_megatron(checkpoint, hf_config=llada / "config.json").to_hf(tmp_path / "config")
    assert set(tree(tmp_path / "config")) == {"README.md", "config.json", "model.safetensors"}
    assert verify_pair(llada, tmp_path / "config").equal
    assert verify_pair(llada, checkpoint).equal
    Bridge.from_megatron(checkpoint, like=llada).to_megatron(tmp_path / "again", Layout(tp=2))
    assert (tmp_path / "again" / ("iter_0000012" if path != "release" else "release")).is_dir()


def test_layers_with_keys_of_their_own(tmp_path: Path, llada: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for key, tensor in expected(hub_tensors(llada)).items():
        head, _, rest = key.partition("decoder.layers.")
        state |= {f"decoder.layers.{i}.{rest}": tensor[i] for i in range(LAYERS)} if not head else {key: tensor}
    save_dcp(state, tmp_path / "m" / "iter_0000001")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    Bridge.from_megatron(tmp_path / "m", like=llada).to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(llada)


def test_newest_iteration_by_the_tracker(tmp_path: Path, llada: Path) -> None:
    root = tmp_path / "m"
    state = expected(hub_tensors(llada))
    save_dcp({key: torch.zeros_like(tensor) for key, tensor in state.items()}, root / "iter_0000099")
    save_dcp(state, root / "iter_0000012")
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    Bridge.from_megatron(root, like=llada).to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(llada)


def test_training_state_is_left_behind_and_said(tmp_path: Path, llada: Path) -> None:
    state = expected(hub_tensors(llada))
    extra = {f"optimizer.state.exp_avg.{key}": torch.zeros_like(tensor) for key, tensor in state.items()}
    extra["optimizer.state.step"] = torch.tensor(3)
    save_dcp({**state, **extra}, tmp_path / "m" / "iter_0000001")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    report = Bridge.from_megatron(tmp_path / "m", like=llada).to_hf(tmp_path / "out")
    assert len(report.notes) == 1
    assert f"weights only: {len(extra)} " in report.notes[0]
    assert tree(tmp_path / "out") == tree(llada)


def test_checkpoint_without_common_pt(tmp_path: Path, llada: Path, imported: Path) -> None:
    """megatron-core 0.19 keeps the common state as an object of the distributed checkpoint."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    root = tmp_path / "m"
    shutil.copytree(imported, root)
    folder = root / "iter_0000000"
    metadata = FileSystemReader(folder).read_metadata()
    torch.save([torch.load(folder / "common.pt", weights_only=True)], folder / "common_item")
    (folder / "common.pt").unlink()
    info = next(iter(metadata.storage_data.values()))
    length = (folder / "common_item").stat().st_size
    metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("common_state/shard_0_1")] = type(info)("common_item", 0, length)
    import pickle

    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert TorchDistReader(folder).common["checkpoint_version"] == 3.0
    Bridge.from_megatron(root).to_hf(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(llada)


def test_each_source_byte_is_read_once(
    llada: Path, imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.convert import streaming

    counted = 0
    real = streaming.read_at

    def count(fd: int, path: Path, offset: int, view: memoryview) -> None:
        nonlocal counted
        counted += len(view)
        real(fd, path, offset, view)

    monkeypatch.setattr(streaming, "read_at", count)
    total = sum(tensor.nbytes for tensor in hub_tensors(llada).values())
    Bridge.from_hf(llada).to_megatron(tmp_path / "a", Layout(tp=4 // 2, pp=4))
    assert counted == total
    counted = 0
    Bridge.from_megatron(tmp_path / "a").to_megatron(tmp_path / "b")
    assert counted == total
    counted = 0
    Bridge.from_megatron(tmp_path / "b").to_hf(tmp_path / "c")
    assert counted == total


def test_experts_are_placed_by_rank() -> None:
    """tp 2, ep 2, etp 1, pp 2: rank 1 of a stage holds the second half of the experts whole."""
    dims = Dims(layers=2, hidden=8, heads=2, groups=2, head_dim=4, ffn=0, vocab=16, experts=4, moe_ffn=6)
    fc1 = GatedMLP(
        "decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight", gate="g", up="u", width="moe_ffn"
    )
    router = Direct("decoder.layers.{layer}.mlp.router.weight", name="r", shape="experts hidden")
    params = [ParamMapping(rule, dims, layer, expert) for layer in range(2) for rule, expert in
             [(router, None), *((fc1, e) for e in range(4))]]  # fmt: skip
    keys = {param.megatron_key: torch.float32 for param in params}
    plan = plan_torch_dist(params, Layout(tp=2, pp=2, ep=2, etp=1), keys)
    stored = plan.contents.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert stored.shape == (2, 4, 12, 8)
    assert {(chunk.offsets[:2], chunk.place.file) for chunk in stored.chunks} == {
        ((layer, expert), f"__{2 * layer + expert // 2}_0.distcp") for layer in range(2) for expert in range(4)
    }
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in plan.contents.objects
    assert {c.place.file for c in plan.contents.tensors["decoder.layers.mlp.router.weight"].chunks} == {
        "__0_0.distcp",
        "__2_0.distcp",
    }


def test_read_one_tensor(llada: Path, imported: Path) -> None:
    bridge = Bridge.from_megatron(imported)
    hub = hub_tensors(llada)
    assert sorted(bridge.hub_names()) == sorted(hub)
    assert all(torch.equal(bridge.read(name), hub[name]) for name in hub)
    assert bridge.family.name == "llada"
    assert bridge.dims.groups == GROUPS


class _Chunked:
    """A tensor that torch's writer is to save in given boxes."""

    def __init__(self, tensor: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.tensor, self.boxes = tensor, boxes


def _boxes(shape: tuple[int, ...], chunking: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every axis in steps, as (offsets, sizes)."""
    from itertools import product

    steps = list(shape)
    if chunking == "per layer" and len(shape) == 3:
        steps[0] = 1
    if chunking == "two layers" and len(shape) > 1:
        steps[0] = 2 if len(shape) == 3 else shape[0]
    if chunking == "odd columns":
        steps[-1] = 7
    if chunking == "rows and columns":
        steps = [max(1, size // 3) for size in shape]
    axes = [
        [(start, min(step, size - start)) for start in range(0, size, step)]
        for size, step in zip(shape, steps, strict=True)
    ]
    return [(tuple(a for a, _ in box), tuple(n for _, n in box)) for box in product(*axes)]


def _save_chunked(state: dict[str, _Chunked], iteration: Path) -> None:
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    iteration.mkdir(parents=True)
    metadata = Metadata({}, storage_data={})
    with (iteration / "__0_0.distcp").open("wb") as stream:
        for key, cut in state.items():
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in cut.boxes]
            properties = TensorProperties(dtype=cut.tensor.dtype)
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, cut.tensor.shape, chunks)
            for offsets, sizes in cut.boxes:
                start = stream.tell()
                box = cut.tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
                torch.save(box.clone(memory_format=torch.contiguous_format), stream)
                info = _StorageInfo("__0_0.distcp", start, stream.tell() - start)
                metadata.storage_data[MetadataIndex(key, offsets)] = info
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, iteration / "common.pt")


def test_sources_of_other_layouts_agree(tmp_path: Path) -> None:
    """Whatever the layout, the global tensors are the same."""
    source = write_llada(tmp_path / "hub")
    for number, layout in enumerate((Layout(), Layout(tp=4, pp=4), Layout(pp=2, vp=2))):
        Bridge.from_hf(source).to_megatron(tmp_path / f"m{number}", layout)
    first, *others = (dcp_tensors(tmp_path / f"m{number}" / "iter_0000000") for number in range(3))
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], first[key]) for key in first)
