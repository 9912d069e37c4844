"""Hub -> Megatron -> reshard -> Hub returns every tensor bit for bit and every other file byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.manifest import MANIFEST
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import CheckpointError, SettingError
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder, write_llada
from tests.convert.helpers import dcp_tensors, hub_tensors, same, tree
from tests.refusals import refused

HEAD, EMBEDDING = "model.transformer.ff_out.weight", "model.transformer.wte.weight"


def round_trip(source: Path, folder: Path, *layouts: Layout, **options: object) -> Path:
    """Import at the first layout, reshard through the others, export; the source must not change."""
    before = tree(source)
    stamps = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    Bridge.from_hf(source).to_megatron(folder / "m0", layouts[0], **options)  # type: ignore[arg-type]
    for number, layout in enumerate(layouts[1:], 1):
        Bridge.from_megatron(folder / f"m{number - 1}").to_megatron(folder / f"m{number}", layout)
    last = folder / f"m{len(layouts) - 1}"
    Bridge.from_megatron(last).to_hf(folder / "out")
    assert tree(source) == before
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == stamps
    for other in (last, folder / "out"):
        verdict = verify_pair(source, other)
        assert verdict.equal, verdict.differences
        assert verify_manifest(other).equal
    return folder / "out"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 4)])  # and 4 // tp, 4 // pp
def test_every_layout(tmp_path: Path, tp: int, pp: int) -> None:
    source = write_llada(tmp_path / "hub")
    out = round_trip(source, tmp_path, Layout(tp=tp, pp=pp), Layout(tp=4 // tp, pp=4 // pp))
    assert tree(out) == tree(source)
    assert (out / MANIFEST).is_file()


@pytest.mark.parametrize(
    "overrides",
    [
        {"n_kv_heads": 2},
        {"n_kv_heads": 1},
        {"n_kv_heads": None, "multi_query_attention": True},
        {"weight_tying": True},
        {"embedding_size": 130, "vocab_size": 126},
        {"mlp_hidden_size": 90},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"dtype": torch.float64},
        {"shards": 1},
        {"shards": 5, "seed": 3},
        {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.fast(but=["{'shards': 1}", "{'dtype': torch.float64}", "{'n_kv_heads': 1}", "{'n_kv_heads': 2}"])
def test_every_kind_of_checkpoint(tmp_path: Path, overrides: dict[str, object]) -> None:
    if overrides.get("multi_query_attention"):
        config = llada_config(n_kv_heads=None, multi_query_attention=True)
        tensors = llada_tensors({**config, "n_kv_heads": 1})
        source = write_hub_folder(tmp_path / "hub", config, tensors)
    else:
        source = write_llada(tmp_path / "hub", **overrides)  # type: ignore[arg-type]
    one = overrides.get("n_kv_heads", 2) in (1, None)
    layout = Layout(pp=1 if overrides.get("n_layers") == 1 else 2) if one else Layout(tp=2, pp=2)
    assert tree(round_trip(source, tmp_path, layout, Layout())) == tree(source)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=3, first_stage=2, last_stage=1),
        Layout(pp=2, first_stage=1),
        Layout(pp=2, vp=2),
        Layout(pp=2, pipeline="Et|t*3L"),
        Layout(tp=2, pp=3, pipeline="E|t*4|L"),
    ],
    ids=str,
)
def test_uneven_and_virtual_pipelines(tmp_path: Path, llada: Path, layout: Layout) -> None:
    assert tree(round_trip(llada, tmp_path, layout)) == tree(llada)


def test_mixed_dtypes_in_one_megatron_tensor(tmp_path: Path) -> None:
    config = llada_config()
    tensors = llada_tensors(config)
    block = "model.transformer.blocks.1."
    for name in tensors:
        if "norm" not in name and "ln_f" not in name:
            tensors[name] = tensors[name].bfloat16()
    tensors[block + "attn_norm.weight"] = tensors[block + "attn_norm.weight"].bfloat16()  # others stay fp32
    tensors[block + "q_proj.weight"] = tensors[block + "q_proj.weight"].half()  # k and v are bfloat16
    tensors[block + "v_proj.weight"][3, 5] = float("nan")
    tensors[block + "v_proj.weight"].view(torch.int16)[4, 5] = 0x7FA5  # a NaN with a payload
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    report = Bridge.from_hf(source).to_megatron(tmp_path / "plan", Layout(tp=2), dry_run=True)
    assert any("linear_qkv.weight" in note and "float32" in note for note in report.notes)
    assert not (tmp_path / "plan").exists()
    assert tree(round_trip(source, tmp_path, Layout(tp=2, pp=2), Layout(tp=4))) == tree(source)
    stored = dcp_tensors(tmp_path / "m0" / "iter_0000000")
    assert stored["decoder.layers.self_attention.linear_qkv.weight"].dtype == torch.float32
    assert stored["decoder.layers.mlp.linear_fc2.weight"].dtype == torch.bfloat16


def test_widened_weights_that_changed_are_not_narrowed_silently(tmp_path: Path) -> None:
    config = llada_config(n_layers=2)
    tensors = llada_tensors(config)
    name = "model.transformer.blocks.0.ff_norm.weight"
    tensors[name] = tensors[name].bfloat16()
    Bridge.from_hf(write_hub_folder(tmp_path / "hub", config, tensors)).to_megatron(tmp_path / "m")
    bridge = Bridge.from_megatron(tmp_path / "m")
    changed = bridge.checkpoint
    param = changed.param_of[name]
    read_into = changed.reader.read_into  # type: ignore[attr-defined]

    def read_changed(key: str, stack: tuple[int, ...], out: torch.Tensor) -> None:
        read_into(key, stack, out)
        out += 1e-6

    changed.reader.read_into = read_changed  # type: ignore[attr-defined]
    with refused(SettingError, "dtype", name, "bfloat16"):
        changed.read_param(param)


def test_redundant_tied_head_comes_back(tmp_path: Path) -> None:
    config = llada_config(weight_tying=True)
    tensors = llada_tensors(config)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    assert tree(round_trip(source, tmp_path, Layout(tp=2, pp=2), Layout())) == tree(source)
    stored = dcp_tensors(tmp_path / "m0" / "iter_0000000")
    assert "output_layer.weight" not in stored


def test_redundant_tied_head_that_differs(tmp_path: Path) -> None:
    config = llada_config(weight_tying=True)
    tensors = llada_tensors(config)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][17, 3] += 1
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    with refused(CheckpointError, source, HEAD, EMBEDDING):
        Bridge.from_hf(source).to_megatron(tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


@pytest.mark.parametrize("multiple", [100, 128, 1000])
def test_vocabulary_padding(tmp_path: Path, multiple: int) -> None:
    source = write_llada(tmp_path / "hub", vocab_size=130, embedding_size=130)
    out = round_trip(source, tmp_path, Layout(tp=4, pp=2), Layout(tp=1), vocab_multiple=multiple)
    assert tree(out) == tree(source)
    rows = -(-130 // multiple) * multiple
    for folder in ("m0", "m1"):  # reshard keeps the padding
        stored = dcp_tensors(tmp_path / folder / "iter_0000000")
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert stored[key].shape == (rows, 64)
            assert not stored[key][130:].any()
    assert same(stored["embedding.word_embeddings.weight"][:130], hub_tensors(source)[EMBEDDING])


@pytest.mark.parametrize(
    ("choice", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
@pytest.mark.parametrize("side", ["import", "export"])
def test_casts(tmp_path: Path, choice: str, dtype: torch.dtype, side: str) -> None:
    config = {**llada_config(torch_dtype="float32"), "nested": {"torch_dtype": "float32"}}
    source = write_hub_folder(tmp_path / "hub", config, llada_tensors(config))
    on_import = choice if side == "import" else None
    Bridge.from_hf(source).to_megatron(tmp_path / "m", Layout(tp=2), dtype=on_import)
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out", dtype=None if on_import else choice)
    expected = {name: tensor.to(dtype) for name, tensor in hub_tensors(source).items()}
    found = hub_tensors(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    old, new = tree(source), tree(tmp_path / "out")
    name = str(dtype).removeprefix("torch.")
    wanted = old["config.json"].replace(
        b'"torch_dtype": "float32",\n  "transf', f'"torch_dtype": "{name}",\n  "transf'.encode()
    )
    assert new["config.json"] == wanted
    assert (dtype == torch.float32) == (new == old)
    total = sum(tensor.nbytes for tensor in expected.values())
    assert f'"total_size": {total}'.encode() in new["model.safetensors.index.json"]
    assert {n: d for n, d in new.items() if "safetensors" not in n and n != "config.json"} == {
        n: d for n, d in old.items() if "safetensors" not in n and n != "config.json"
    }
    assert verify_manifest(tmp_path / "out").equal


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    config = llada_config()
    tensors = llada_tensors(config)
    tensors["model.transformer.blocks.2.up_proj.weight"][1, 2] = 1e6
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    with refused(SettingError, "dtype", "blocks.2.up_proj.weight", "float16"):
        Bridge.from_hf(source).to_megatron(tmp_path / "m", dtype="fp16")
    assert not (tmp_path / "m").exists()


def test_new_shards(tmp_path: Path, llada: Path) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2))
    bridge = Bridge.from_megatron(tmp_path / "m")
    bridge.to_hf(tmp_path / "small", shard_size="100KB")
    bridge.to_hf(tmp_path / "one", shard_size="1GB")
    names = sorted(path.name for path in (tmp_path / "small").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) > 4
    assert all((tmp_path / "small" / name).stat().st_size < 105_000 for name in names)
    assert sorted(path.name for path in (tmp_path / "one").glob("*.safetensors*")) == ["model.safetensors"]
    source = hub_tensors(llada)
    for folder in ("small", "one"):
        assert verify_pair(llada, tmp_path / folder).equal
        found = hub_tensors(tmp_path / folder)
        assert all(same(found[name], source[name]) for name in source)


def test_written_files_are_what_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = llada_config(n_layers=2)
    tensors = llada_tensors(config)
    for place, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to((torch.float32, torch.bfloat16, torch.float16)[place % 3])
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    Bridge.from_hf(source).to_hf(tmp_path / "out", shard_size="1GB")
    save_file(tensors, tmp_path / "reference", metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "reference").read_bytes()


def test_same_bytes_whatever_the_workers(tmp_path: Path, llada: Path) -> None:
    for workers in (1, 4):
        Bridge.from_hf(llada).to_megatron(tmp_path / f"m{workers}", Layout(tp=2, pp=2), workers=workers)
    assert tree(tmp_path / "m1") == tree(tmp_path / "m4")
