"""Distributed checkpoints by torch's own writer: Megatron FSDP's `fsdp_dtensor`, and FSDP2's of a Hub model."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_pair
from dlm_bridge.errors import CheckpointError
from tests.checkpoints import write_llada
from tests.convert.helpers import hub_tensors, run_cli, same, save_dcp, tree
from tests.families.case import all_cases
from tests.processes import assert_ok, launch
from tests.refusals import refused

CASES = {case.name: case for case in all_cases()}
MOE, MIXED = CASES["rnd1"], CASES["llada2_moe"]
Capture = pytest.CaptureFixture[str]
_EXPERT = re.compile(r"experts\.experts\.(\d+)\.(linear_fc[12])\.weight")
_SWIGLU = re.compile(r"mlp\.(linear_fc1|experts\.linear_fc1|shared_experts\.linear_fc1)\.weight\d*$")


def megatron_parameters(bridge: Bridge) -> dict[str, torch.Tensor]:
    """A whole model's parameters by the names that one process's GPTModel has (Transformer Engine's spec)."""
    checkpoint = bridge.checkpoint
    return {
        _EXPERT.sub(r"experts.\2.weight\1", param.megatron_name): param.to_megatron(list(checkpoint.read_param(param)))
        for param in checkpoint.params
    }


def as_megatron_fsdp(bridge: Bridge) -> dict[str, Any]:
    """What megatron-core hands to torch's writer: halves of SwiGLU apart, an optimizer, the arguments."""
    model: dict[str, torch.Tensor] = {}
    for name, tensor in megatron_parameters(bridge).items():
        if _SWIGLU.search(name):
            model[f"module.{name}_w"], model[f"module.{name}_v"] = (half.clone() for half in tensor.chunk(2))
        else:
            model[f"module.{name}"] = tensor.clone()
    state = {f"module.{name}": {"exp_avg": tensor * 0, "exp_avg_sq": tensor * 0} for name, tensor in model.items()}
    args = argparse.Namespace(tensor_model_parallel_size=1, data_parallel_sharding_strategy="optim_grads_params")
    return {"model": model, "optimizer": {"state": state}, "args": args, "iteration": 30, "checkpoint_version": 3.0}


@pytest.fixture(scope="module")
def saved(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hub checkpoints, and beside them what two processes saved of each in both forms."""
    root = tmp_path_factory.mktemp("dcp")
    (root / "states").mkdir()
    shutil.copytree(llada, root / "llada")
    for case in (MOE, MIXED):
        case.write(root / case.name)
        torch.save(as_megatron_fsdp(Bridge.from_hf(root / case.name)), root / "states" / f"{case.name}-megatron.pt")
    torch.save(as_megatron_fsdp(Bridge.from_hf(root / "llada")), root / "states" / "llada-megatron.pt")
    torch.save({"model": hub_tensors(root / "llada")}, root / "states" / "llada-hub.pt")
    # As the transformers body has it: names of its own, and all experts of a layer in one tensor.
    for name in ("llada", MOE.name):
        model = Bridge.from_hf(root / name).build_hf_model()
        torch.save({"model": dict(model.state_dict())}, root / "states" / f"{name}-body.pt")
    assert_ok("saved", launch("tests.convert.dcp_worker", root))
    return root


@pytest.mark.parametrize("name", ["llada", MOE.name, MIXED.name])
@pytest.mark.fast("llada", "rnd1")
def test_megatron_fsdp(saved: Path, tmp_path: Path, name: str) -> None:
    source, folder = saved / name, saved / f"{name}-megatron"
    facts = inspect_checkpoint(folder)
    assert (facts.format, facts.family, facts.iteration) == ("fsdp_dtensor", None, 30)
    assert facts.training_state > 0
    assert verify_pair(folder, source).equal
    report = Bridge.from_megatron(folder, like=source).to_hf(tmp_path / "out")
    assert any("training state" in note for note in report.notes)
    assert tree(tmp_path / "out") == tree(source)


def test_megatron_fsdp_becomes_torch_dist(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """By the config.json alone, and under a tracker file as Megatron-LM writes it."""
    root = tmp_path / "run"
    shutil.copytree(saved / "llada-megatron", root / "iter_0000030")
    (root / "latest_checkpointed_iteration.txt").write_text("30")
    config = ("--hf-config", saved / "llada" / "config.json")
    code, _, err = run_cli(capsys, "reshard", root, tmp_path / "m", "--tp", 2, *config)
    assert code == 2
    assert "--weights-only" in err
    assert run_cli(capsys, "reshard", root, tmp_path / "m", "--tp", 2, "--weights-only", *config)[0] == 0
    assert (tmp_path / "m" / "iter_0000030" / ".metadata").is_file()
    assert verify_pair(saved / "llada", tmp_path / "m").equal


@pytest.mark.parametrize(("name", "form"), [("llada", "hub"), ("llada", "body"), (MOE.name, "body")])
def test_fsdp2_of_a_hub_model(saved: Path, tmp_path: Path, name: str, form: str) -> None:
    source, folder = saved / name, saved / f"{name}-{form}"
    assert verify_pair(folder, source).equal
    Bridge.from_megatron(folder, like=source).to_hf(tmp_path / "out")
    assert hub_tensors(tmp_path / "out").keys() == hub_tensors(source).keys()
    assert all(same(tensor, hub_tensors(source)[key]) for key, tensor in hub_tensors(tmp_path / "out").items())


def test_fsdp2_with_its_config_beside(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    """A training checkpoint as Accelerate leaves it: the weights in a folder below."""
    shutil.copytree(saved / "llada-hub", tmp_path / "checkpoint-7" / "pytorch_model_fsdp_0")
    with refused(CheckpointError, tmp_path / "checkpoint-7", "`like`", "`hf_config`"):
        Bridge.from_megatron(tmp_path / "checkpoint-7")
    shutil.copy(saved / "llada" / "config.json", tmp_path / "checkpoint-7")
    facts = inspect_checkpoint(tmp_path / "checkpoint-7")
    assert (facts.format, facts.family, facts.tensors) == ("dcp", "llada", 39)
    assert run_cli(capsys, "verify", tmp_path / "checkpoint-7", saved / "llada")[0] == 0
    assert run_cli(capsys, "export", tmp_path / "checkpoint-7", tmp_path / "out")[0] == 0
    other = write_llada(tmp_path / "other", seed=3, n_kv_heads=2)
    assert run_cli(capsys, "verify", tmp_path / "out", other)[0] == 1


def _save(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_dcp(state, folder)
    for name in ("metadata.json", "common.pt"):  # torch's own writer leaves them out
        (folder / name).unlink()
    return folder


def test_bad_tensors_are_named(llada: Path, tmp_path: Path) -> None:
    whole = {f"model.{name}": t for name, t in as_megatron_fsdp(Bridge.from_hf(llada))["model"].items()}
    key = "model.module.decoder.layers.1.mlp.linear_fc1.weight_w"
    for number, (change, named) in enumerate(
        (
            ({key: None}, ("decoder.layers.1.mlp.linear_fc1.weight", "missing")),
            ({key: torch.zeros(95, 64)}, ("linear_fc1.weight_w", "[95, 64]", "[96, 64]")),
            ({"model.module.decoder.layers.1.mlp.surprise": torch.zeros(1)}, ("surprise", "llada")),
        )
    ):
        state = {name: t for name, t in {**whole, **change}.items() if t is not None}
        folder = _save(state, tmp_path / str(number))
        with refused(CheckpointError, folder, *named):
            Bridge.from_megatron(folder, like=llada).to_hf(tmp_path / "out")


def test_neither_megatrons_nor_the_models_names(llada: Path, tmp_path: Path) -> None:
    folder = _save({"a.b": torch.zeros(2)}, tmp_path / "x")
    with pytest.raises(DlmBridgeError, match="is missing"):
        Bridge.from_megatron(folder, like=llada).to_hf(tmp_path / "out")


def test_singleton_local_shards(tmp_path: Path) -> None:
    """torch_dist with a key for each layer, each expert and each half of SwiGLU."""
    MIXED.write(tmp_path / "hub")
    bridge = Bridge.from_hf(tmp_path / "hub")
    state: dict[str, torch.Tensor] = {}
    for param in bridge.checkpoint.params:
        tensor = param.to_megatron(list(bridge.checkpoint.read_param(param)))
        halves = ("_w", "_v") if param.megatron_name.endswith("linear_fc1.weight") else ("",)
        state |= {
            param.megatron_name + half: part for half, part in zip(halves, tensor.chunk(len(halves)), strict=True)
        }
    folder = tmp_path / "m" / "iter_0000007"
    save_dcp({name: tensor.contiguous() for name, tensor in state.items()}, folder)
    common = {"iteration": 7, "checkpoint_version": 3.0, "content_metadata": {"singleton_local_shards": True}}
    torch.save(common, folder / "common.pt")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("7")
    assert verify_pair(tmp_path / "m", tmp_path / "hub").equal
    Bridge.from_megatron(tmp_path / "m", like=tmp_path / "hub").to_megatron(tmp_path / "again", Layout(ep=2))
    assert verify_pair(tmp_path / "again", tmp_path / "hub").equal
