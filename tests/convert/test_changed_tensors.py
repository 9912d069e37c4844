"""Weights that differ from their recorded digests are refused unless accepted; NaN and infinity are reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints import find_checkpoint, open_checkpoint
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.lora import MergedCheckpoint, export_adapter, open_adapter
from dlm_bridge.convert.manifest import digests_of, file_names, read_manifest, write_digests
from dlm_bridge.convert.push import push
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.streaming import count_non_finite, raw_bytes
from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import ChangedTensorsError
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder, write_llada, write_tokenizer
from tests.convert.adapters import LLAMA, to_megatron, written_adapter
from tests.convert.helpers import no_leftovers, run_cli, tree

PREFIX = "model.transformer.blocks."
UP = f"{PREFIX}1.up_proj.weight"
QUERY = f"{PREFIX}2.q_proj.weight"
FINAL = "model.transformer.ln_f.weight"
EMBEDDING = "model.transformer.wte.weight"


def flip(folder: Path, *names: str) -> None:
    """Flip one bit of each of these weights in the checkpoint's files."""
    checkpoint = open_checkpoint(folder)
    for name in names:
        param = checkpoint.param_of[name]
        flip_bit(checkpoint, name, param.hub_names.index(name))


def flip_bit(checkpoint: Checkpoint, name: str, number: int) -> None:
    param = checkpoint.param_of[name]
    assert param.hub_rows is not None
    row = param.hub_rows[number][0][0]
    for region in checkpoint.regions(param):
        for start, length in region.part.rows:
            if start <= row < start + length:
                width = region.part.columns[1] if region.part.columns else checkpoint.spec(name)[0].itemsize
                before = (row - start) * (width if len(param.megatron_shape) == 1 else _row_bytes(checkpoint, name))
                data = bytearray(region.path.read_bytes())
                data[region.offset + before] ^= 1
                region.path.write_bytes(data)
                return
    raise AssertionError(f"{name} is not stored")


def _row_bytes(checkpoint: Checkpoint, name: str) -> int:
    dtype, shape = checkpoint.spec(name)
    return dtype.itemsize * int(torch.Size(shape[1:]).numel())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model as a Megatron checkpoint of both formats and as a Hub folder, with digests."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_llada(folder / "source", n_kv_heads=2)
    Bridge.from_hf(source).to_megatron(folder / "torch_dist", Layout(pp=2))
    Bridge.from_hf(source).to_megatron(folder / "torch", Layout(tp=1), format="torch")
    Bridge.from_megatron(folder / "torch_dist").to_hf(folder / "hub")
    return {name: folder / name for name in ("torch_dist", "torch", "hub")}


@pytest.fixture
def damaged(whole: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(kind: str, *names: str) -> Path:
        shutil.copytree(whole[kind], tmp_path / "damaged")
        flip(tmp_path / "damaged", *names)
        return tmp_path / "damaged"

    return copy


def opened(folder: Path) -> Bridge:
    return Bridge(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hub", {}),
        ("hub", {"layout": Layout(tp=2, pp=2), "dtype": "bf16", "vocab_multiple": 48}),
        ("hub", {"format": "torch", "layout": Layout(tp=2), "processes": 2}),
        ("torch_dist", {"layout": Layout(tp=2)}),
        ("torch_dist", {"format": "torch"}),
        ("torch", {"layout": Layout(pp=2), "resume": True}),
        ("torch_dist", {"to_hf": True}),
        ("torch_dist", {"to_hf": True, "dtype": "bf16", "shard_size": 100_000}),
        ("torch", {"to_hf": True, "processes": 2}),
    ],
)
@pytest.mark.fast("torch-options8", "hub-options2", "torch_dist-options3", "hub-options1")
def test_a_flipped_bit_is_refused_or_recorded(
    damaged: Callable[..., Path], kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    names = [UP, QUERY, FINAL, EMBEDDING]
    folder, output = damaged(kind, *names), tmp_path / "out"
    before = tree(folder)
    convert = Bridge.to_hf if options.get("to_hf") else Bridge.to_megatron
    options = {key: value for key, value in options.items() if key != "to_hf"}
    with pytest.raises(ChangedTensorsError) as refused:
        convert(opened(folder), output, **options)
    assert refused.value.names == sorted(names)
    assert not output.exists()
    assert no_leftovers(tmp_path)
    assert tree(folder) == before

    report = convert(opened(folder), output, **options, accept_changed_tensors=True)
    assert any(UP in note for note in report.notes)
    manifest, recorded = read_manifest(output), read_manifest(folder)
    assert manifest is not None
    assert recorded is not None
    assert manifest.changed.keys() == set(names)
    for name, change in manifest.changed.items():
        assert change["recorded"]["digest"] == recorded.tensors[name].digest != change["found"]["digest"]
    verdict = verify_manifest(output)
    assert verdict.equal
    assert any(UP in note for note in verdict.notes)
    assert any(UP in note for note in inspect_checkpoint(output).notes)
    # The change stays recorded in the next conversion.
    again = Bridge.to_hf if manifest.format != "huggingface" else Bridge.to_megatron
    again(opened(output), tmp_path / "again")
    after = read_manifest(tmp_path / "again")
    assert after is not None
    assert after.changed == manifest.changed


def test_the_commands_refuse_and_accept(
    damaged: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged("torch_dist", UP)
    for command in ("export", "reshard"):
        size = ("--tp", 2) if command == "reshard" else ()
        code, _, err = run_cli(capsys, command, folder, tmp_path / "out", *size)
        assert (code, len(err.splitlines())) == (2, 1)
        assert UP in err
        assert "--accept-changed-tensors" in err
        assert not (tmp_path / "out").exists()
    code, out, err = run_cli(capsys, "export", folder, tmp_path / "out", "--accept-changed-tensors", "--json")
    assert code == 0, err
    assert UP in "".join(json.loads(out)["notes"])
    code, out, _ = run_cli(capsys, "verify", tmp_path / "out")
    assert (code, UP in out) == (0, True)
    flip(tmp_path / "out", QUERY)
    code, _, err = run_cli(capsys, "import", tmp_path / "out", tmp_path / "m")
    assert (code, QUERY in err, UP in err) == (2, True, False)


def test_what_megatron_has_no_place_for_is_checked(tmp_path: Path) -> None:
    """Rotary frequencies of a Hub folder are stored in a separate file."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = write_hub_folder(tmp_path / "hub", LLAMA, {**_llama_tensors(), name: torch.ones(4)})
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    carried = tmp_path / "m/hf/carried.safetensors"
    data = bytearray(carried.read_bytes())
    data[-1] ^= 1
    carried.write_bytes(data)
    with pytest.raises(ChangedTensorsError, match="inv_freq"):
        Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama with digests and a tokenizer."""
    source = write_hub_folder(tmp_path / "source", LLAMA, _llama_tensors())
    Bridge.from_hf(source).to_megatron(tmp_path / "m")
    Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "llama")
    return tmp_path / "llama"


def _llama_tensors() -> dict[str, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "torch_dtype"}))
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def test_a_base_is_checked_before_an_adapter_changes_it(llama: Path, tmp_path: Path) -> None:
    adapter = written_adapter(llama, tmp_path)
    changed, kept = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"

    def merge(output: str, accept: bool = False) -> None:
        base = open_checkpoint(llama)
        merged = MergedCheckpoint(base, open_adapter(adapter, base))
        write_hub(merged, tmp_path / output, HubSettings(accept_changed_tensors=accept))

    merge("merged")
    flip(llama, changed, kept)
    with pytest.raises(ChangedTensorsError) as refused:
        merge("out")
    assert refused.value.names == [changed, kept]
    assert not (tmp_path / "out").exists()
    merge("out", accept=True)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.changed.keys() == {changed, kept}


def test_an_adapter_is_checked_as_well(llama: Path, tmp_path: Path) -> None:
    megatron = to_megatron(llama, written_adapter(llama, tmp_path), tmp_path / "lora-m")
    base = open_checkpoint(llama)
    export_adapter(open_adapter(megatron, base), base, tmp_path / "lora-back")
    file = next(megatron.glob("iter_*/__0_0.distcp"))
    data = bytearray(file.read_bytes())
    value = raw_bytes(open_adapter(megatron, base).tensor("model.layers.0.self_attn.o_proj.weight", "A"))
    data[data.index(bytes(value))] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChangedTensorsError, match=r"layers\.0\.self_attn\.o_proj\.lora_A"):
        export_adapter(open_adapter(megatron, base), base, tmp_path / "out")
    with pytest.raises(ChangedTensorsError, match=r"layers\.0\.self_attn\.o_proj\.lora_A"):
        write_hub(MergedCheckpoint(base, open_adapter(megatron, base)), tmp_path / "out", HubSettings())
    export_adapter(open_adapter(megatron, base), base, tmp_path / "out", accept_changed_tensors=True)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_an_autoregressive_model_is_checked_before_it_becomes_a_diffusion_one(
    llama: Path, tmp_path: Path, name: str
) -> None:
    write_tokenizer(llama, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    convert_to_dlm(llama, tmp_path / "dlm")
    flip(llama, name)
    with pytest.raises(ChangedTensorsError) as refused:
        convert_to_dlm(llama, tmp_path / "out")
    assert refused.value.names == [name]
    convert_to_dlm(llama, tmp_path / "out", accept_changed_tensors=True)


def test_a_damaged_checkpoint_of_training_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A training run records digests of files, not of tensors."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parent.parent / "compatibility/data/run_megatron", run)
    flip(run, FINAL)
    code, _, err = run_cli(capsys, "export", run, tmp_path / "out")
    assert (code, "distcp" in err) == (2, True), err
    assert not (tmp_path / "out").exists()
    code, _, err = run_cli(capsys, "export", run, tmp_path / "out", "--accept-changed-tensors")
    assert code == 0, err
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert all(name.endswith(".distcp") for name in manifest.changed)
    assert manifest.changed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_counting_non_finite_values(dtype: torch.dtype) -> None:
    finite = [0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
    assert count_non_finite(raw_bytes(torch.tensor(finite, dtype=dtype)), dtype) == 0
    assert count_non_finite(b"", dtype) == 0
    for odd in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        assert count_non_finite(raw_bytes(torch.tensor([*finite, odd, odd], dtype=dtype)), dtype) == 2


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"processes": 2}])
def test_nan_and_infinite_weights_are_named(tmp_path: Path, options: dict[str, Any]) -> None:
    config = llada_config(n_layers=2)
    tensors = llada_tensors(config)
    tensors[f"{PREFIX}0.ff_norm.weight"][3] = float("nan")
    tensors[f"{PREFIX}1.up_proj.weight"][5, 7:9] = -float("inf")
    source = write_hub_folder(tmp_path / "hub", config, tensors)
    wanted = f"3 values are NaN or infinite: {PREFIX}0.ff_norm.weight (1), {PREFIX}1.up_proj.weight (2)"
    assert Bridge.from_hf(source).to_megatron(tmp_path / "m", **options).notes == [wanted]
    assert wanted in inspect_checkpoint(tmp_path / "m").notes
    assert Bridge.from_megatron(tmp_path / "m").to_hf(tmp_path / "out").notes == [wanted]
    assert verify_manifest(tmp_path / "out").notes == [wanted]
    assert verify_pair(tmp_path / "m", tmp_path / "out").notes == [wanted]
    assert find_checkpoint(tmp_path / "m").check() == []


def test_a_damaged_checkpoint_is_not_pushed(damaged: Callable[..., Path]) -> None:
    folder = damaged("hub", QUERY, FINAL)
    with pytest.raises(ChangedTensorsError) as refused:
        push(folder, "me/model", dry_run=True)
    assert refused.value.names == [QUERY, FINAL]
    assert push(folder, "me/model", dry_run=True, accept_changed_tensors=True).bytes


def test_digests_of_a_training_run_s_files_are_followed_in_every_layout(llama: Path, tmp_path: Path) -> None:
    (llama / "dlm_bridge.json").unlink()
    adapter = written_adapter(llama, tmp_path)
    for folder in (llama, adapter):
        write_digests(folder, digests_of(folder, file_names(folder)))
    Bridge.from_hf(llama).to_megatron(tmp_path / "whole")
    assert not list((tmp_path / "whole").rglob("dlm_bridge_files.json"))  # they are of those files alone
    to_megatron(llama, adapter, tmp_path / "whole-lora")
    for file in (next(llama.glob("*.safetensors")), adapter / "adapter_model.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    with pytest.raises(ChangedTensorsError, match=r"llama: .*model.*\.safetensors"):
        Bridge.from_hf(llama).to_megatron(tmp_path / "out")
    with pytest.raises(ChangedTensorsError, match=r"lora: .*adapter_model\.safetensors"):
        to_megatron(llama, adapter, tmp_path / "out")
    for folder in (llama, adapter):
        with pytest.raises(ChangedTensorsError, match=folder.name):
            push(folder, "me/model", dry_run=True)
    assert not (tmp_path / "out").exists()
