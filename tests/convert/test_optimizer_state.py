"""An optimizer's state goes through reshard with the weights, or is refused; it is never dropped unasked."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints import find_checkpoint
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistCheckpoint, rewrapped
from dlm_bridge.convert.formats.dcp import Contents, StorageLocation, read_metadata, write_metadata
from dlm_bridge.convert.verify import verify_manifest, verify_pair
from dlm_bridge.errors import ChangedTensorsError, CheckpointError
from tests.checkpoints import write_llada
from tests.convert.helpers import dcp_tensors, run_cli, save_dcp
from tests.diffusion_gemma.checkpoint import write_checkpoint
from tests.families.case import all_cases
from tests.refusals import refused

ITERATION = "iter_0000000"
MIXED = next(case for case in all_cases() if case.name == "llada2_moe")  # a key for each layer
STATES = ("param", "exp_avg", "exp_avg_sq")
Capture = pytest.CaptureFixture[str]


def train(root: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Give a checkpoint what a training run adds in the fully_reshardable form. Returns the states."""
    folder = root / ITERATION
    weights = dcp_tensors(folder)
    generator = torch.Generator().manual_seed(1)
    states = {
        f"optimizer.state.{state}.{key}": torch.randn(tensor.shape, generator=generator).to(dtype)
        for key, tensor in weights.items()
        for state in STATES
        if not key.endswith("expert_bias")
    }
    objects = {path.name: path.read_bytes() for path in folder.glob("common.pt")}
    shutil.rmtree(folder)
    save_dcp({**weights, **states, "rng_state": torch.zeros(3)}, folder)
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"] = {"optimizer": {"param_groups": [{"lr": 0.1, "step": 7}]}, "param_state_sharding_type": "x"}
    common["iteration"] = 0
    torch.save(common, folder / "common.pt")
    (root / "dlm_bridge.json").unlink()
    shutil.rmtree(root / "hf")
    assert objects
    return states


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """(Hub twin, training checkpoint, its states), with a vocabulary that nothing divides."""
    root = tmp_path_factory.mktemp("trained")
    sizes = {"vocab_size": 125, "embedding_size": 125, "mask_token_id": 124}
    hub = write_llada(root / "hub", n_kv_heads=2, dtype=torch.bfloat16, **sizes)
    Bridge.from_hf(hub).to_megatron(root / "run", Layout(tp=2))
    return hub, root / "run", train(root / "run")


def assert_states(root: Path, states: dict[str, torch.Tensor], vocab: int = 125) -> None:
    found = dcp_tensors(root / ITERATION)
    for key, tensor in states.items():
        if "word_embeddings" in key or "output_layer" in key:
            assert found[key].shape[0] >= vocab
            assert not found[key][vocab:].any()
            assert torch.equal(found[key][:vocab], tensor[:vocab]), key
        else:
            assert torch.equal(found[key], tensor), key
            assert found[key].dtype == tensor.dtype
    assert {key for key in found if key.startswith("optimizer.")} == states.keys()


@pytest.mark.parametrize(
    "options", [("--tp", 1, "--pp", 2), ("--tp", 2, "--vocab-multiple", 64)], ids=["pp2", "padded"]
)
def test_states_are_cut_as_the_weights_are(
    trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: Capture, options: tuple[Any, ...]
) -> None:
    hub, run, states = trained
    code, out, _ = run_cli(capsys, "reshard", run, tmp_path / "m", *options, "--like", hub, "--json")
    assert code == 0
    assert "optimizer state (exp_avg, exp_avg_sq, param)" in " ".join(json.loads(out)["notes"])
    assert_states(tmp_path / "m", states)
    assert (tmp_path / "m" / ITERATION / "common.pt").read_bytes() == (run / ITERATION / "common.pt").read_bytes()
    assert verify_manifest(tmp_path / "m").equal
    assert verify_pair(tmp_path / "m", hub).equal
    # And once more, back to one rank.
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "again", Layout())
    assert_states(tmp_path / "again", states)


@pytest.mark.parametrize("write", [MIXED.write, write_checkpoint], ids=["one Hub tensor each", "one for all experts"])
@pytest.mark.fast("one Hub tensor each")
def test_states_of_experts_and_unlike_layers(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    write(tmp_path / "hub")
    Bridge.from_hf(tmp_path / "hub").to_megatron(tmp_path / "run", Layout(ep=2))
    states = train(tmp_path / "run")
    vocab = Bridge.from_hf(tmp_path / "hub").dims.vocab
    Bridge.from_megatron(tmp_path / "run", like=tmp_path / "hub").to_megatron(
        tmp_path / "m", Layout(tp=2, ep=2, etp=1)
    )
    assert_states(tmp_path / "m", states, vocab)


def with_object(run: Path, root: Path) -> bytes:
    """Copy a checkpoint in the form of megatron-core 0.19, which has an object in place of common.pt: its bytes."""
    shutil.copytree(run, root)
    folder = root / ITERATION
    torch.save([torch.load(folder / "common.pt", weights_only=False)], folder / "__9_0.distcp")
    (folder / "common.pt").unlink()
    data = (folder / "__9_0.distcp").read_bytes()
    contents = read_metadata(folder)
    objects = {**contents.objects, "common_state/shard_0_1": StorageLocation("__9_0.distcp", 0, len(data))}
    write_metadata(folder, Contents({k: t for k, t in contents.tensors.items() if t.dtype}, objects))
    return data


def test_common_state_as_an_object(
    trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: Capture
) -> None:
    """What megatron-core 0.19 has in place of common.pt becomes common.pt, or goes along as it is."""
    hub, run, states = trained
    data = with_object(run, tmp_path / "run")
    bridge = Bridge.from_megatron(tmp_path / "run", like=hub)
    bridge.to_megatron(tmp_path / "old", Layout(pp=2))
    assert_states(tmp_path / "old", states)
    common = [torch.load(root / ITERATION / "common.pt", weights_only=True) for root in (run, tmp_path / "old")]
    assert common[0] == common[1]
    assert not list((tmp_path / "old" / ITERATION).glob("__common*"))
    bridge.to_megatron(tmp_path / "m", Layout(pp=2), mcore="0.19")
    assert_states(tmp_path / "m", states)
    assert data in [path.read_bytes() for path in (tmp_path / "m" / ITERATION).iterdir()]
    assert not (tmp_path / "m" / ITERATION / "common.pt").exists()
    assert verify_manifest(tmp_path / "m").equal
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "again", Layout())
    assert_states(tmp_path / "again", states)
    path = next(path for path in (tmp_path / "m" / ITERATION).iterdir() if path.read_bytes() == data)
    path.write_bytes(data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
    assert run_cli(capsys, "verify", tmp_path / "m")[0] in (1, 2)


def test_the_form_of_megatron_core_0_19_is_chosen(
    trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: Capture
) -> None:
    hub, run, states = trained
    words = (run, tmp_path / "m", "--tp", 2, "--mcore", "0.19", "--like", hub, "--json")
    code, out, _ = run_cli(capsys, "reshard", *words)
    assert code == 0
    assert json.loads(out)["mcore"] == "0.19"
    folder = tmp_path / "m" / ITERATION
    assert_states(tmp_path / "m", states)
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }
    assert not (folder / "common.pt").exists()
    (found,) = torch.load(folder / "__common_0.distcp", weights_only=True)
    assert found == torch.load(run / ITERATION / "common.pt", weights_only=True)
    assert run_cli(capsys, "verify", tmp_path / "m", hub)[0] == 0
    assert run_cli(capsys, "reshard", tmp_path / "m", tmp_path / "back", "--tp", 1, "--like", hub)[0] == 0
    assert torch.load(tmp_path / "back" / ITERATION / "common.pt", weights_only=True) == found
    assert_states(tmp_path / "back", states)
    assert run_cli(capsys, "import", hub, tmp_path / "x", "--mcore", "0.18")[0] == 2


@pytest.mark.parametrize("value", [[{"iteration": 3}, 4], ({"iteration": 3},), []], ids=["two", "tuple", "none"])
def test_a_common_state_of_an_unknown_form(value: object, tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    with refused(CheckpointError, tmp_path, "`weights_only`"):
        rewrapped(stream.getvalue(), wrap=False, where=tmp_path)


def test_weights_only(trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: Capture) -> None:
    hub, run, _ = trained
    code, out, _ = run_cli(capsys, "reshard", run, tmp_path / "m", "--tp", 1, "--weights-only", "--like", hub)
    assert code == 0
    assert "weights only" in out
    assert not [key for key in dcp_tensors(tmp_path / "m" / ITERATION) if "optimizer" in key]
    options = ("--tp", 1, "--format", "torch", "--weights-only", "--like", hub)
    assert run_cli(capsys, "reshard", run, tmp_path / "l", *options)[0] == 0
    assert verify_pair(tmp_path / "l", hub).equal
    code, _, err = run_cli(capsys, "reshard", run, tmp_path / "x", "--tp", 1, "--format", "torch", "--like", hub)
    assert code == 2
    assert "--weights-only" in err


def test_states_that_cannot_be_cut(trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    hub, run, states = trained
    weights = {key: tensor for key, tensor in dcp_tensors(run / ITERATION).items() if "optimizer" not in key}
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
    surprise = "optimizer.state.exp_avg.decoder.surprise"
    extras = {bucket: torch.zeros(9), key: states[key][:8], surprise: torch.zeros(9)}
    for name, tensor in extras.items():
        root = tmp_path / name
        save_dcp({**weights, name: tensor}, root / ITERATION)
        (root / "latest_checkpointed_iteration.txt").write_text("0")
        with refused(CheckpointError, root, name, "`weights_only`"):
            Bridge.from_megatron(root, like=hub).to_megatron(tmp_path / "m", Layout())


def test_a_flipped_bit_of_a_state_is_refused(
    trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """It has no digest of its own, its file has one."""
    hub, run, _ = trained
    Bridge.from_megatron(run, like=hub).to_megatron(tmp_path / "m", Layout(tp=2))
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "again", Layout())
    reader = find_checkpoint(tmp_path / "m")
    assert isinstance(reader, TorchDistCheckpoint)
    place = reader.contents.tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"].chunks[0].place
    file = tmp_path / "m" / ITERATION / place.file
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChangedTensorsError, match=place.file):
        Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "out", Layout())
    assert not (tmp_path / "out").exists()
    Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "weights", Layout(), weights_only=True)
    report = Bridge.from_megatron(tmp_path / "m").to_megatron(tmp_path / "out", accept_changed_tensors=True)
    assert any(place.file in note for note in report.notes)
