"""Upcycling of a dense checkpoint to a mixture of experts with the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from dlm_bridge import Bridge, DlmBridgeError, Layout
from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.convert.to_moe import targets, upcycle
from dlm_bridge.convert.verify import verify_manifest
from dlm_bridge.errors import ChangedTensorsError, SettingError
from tests.autoregressive.test_families import tensors_of
from tests.autoregressive.test_to_dlm import BY_LABEL, logits_of, write
from tests.convert.helpers import run_cli, tree
from tests.convert.test_changed_tensors import flip
from tests.refusals import refused

LABELS = {"qwen3": "qwen3", "llama": "llama3.1", "mistral": "mistral"}
FAST = ("qwen3", "mistral", "sdar")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in targets()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("granularity", [1, 2])
@pytest.mark.fast("2-sdar", "1-mistral", "2-qwen3")
def test_it_computes_what_the_dense_model_computes(name: str, granularity: int, tmp_path: Path) -> None:
    way = targets()[name]
    dense = write(BY_LABEL[LABELS[way.dense]], tmp_path / "ar")
    if name != way.dense:
        convert_to_dlm(dense, tmp_path / "dlm", to=name)
        dense = tmp_path / "dlm"
    report = upcycle(dense, tmp_path / "moe", experts=4, granularity=granularity, shard_size="100KB")
    assert (report.action, report.family) == ("upcycle", way.target)
    assert len(list((tmp_path / "moe").glob("model-*.safetensors"))) > 1
    assert verify_manifest(tmp_path / "moe").equal
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert model.config.num_experts_per_tok == 2 * granularity
    torch.testing.assert_close(logits_of(tmp_path / "moe", {}), logits_of(dense, {}), atol=1e-5, rtol=1e-5)
    assert (tmp_path / "moe" / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_experts_are_the_dense_mlp_and_routers_noise(tmp_path: Path) -> None:
    dense = write(BY_LABEL["qwen3"], tmp_path / "ar")
    routers = []
    for seed in (0, 0, 1):
        upcycle(dense, tmp_path / "moe", experts=4, top_k=1, granularity=4, seed=seed, overwrite=True)
        found, old = tensors_of(tmp_path / "moe"), tensors_of(dense)
        mlp = "model.layers.1.mlp."
        for copy in range(4):
            parts = [f"{mlp}experts.{4 * copy + part}." for part in range(4)]
            for matrix in ("gate_proj.weight", "up_proj.weight"):
                assert torch.equal(torch.cat([found[part + matrix] for part in parts]), old[mlp + matrix])
            down = torch.cat([found[part + "down_proj.weight"] for part in parts], dim=1)
            assert torch.equal(down, 4 * old[mlp + "down_proj.weight"])
        router = found[mlp + "gate.weight"]
        assert torch.equal(router, router[::4].repeat_interleave(4, dim=0))  # a copy's parts are chosen together
        assert len({tuple(row.tolist()) for row in router}) == 4
        assert 0.015 < router.std() < 0.025  # initializer_range
        routers.append(router)
    assert torch.equal(routers[0], routers[1])
    assert not torch.equal(routers[0], routers[2])
    kept = {name: tensor for name, tensor in old.items() if ".mlp." not in name}
    assert all(torch.equal(tensor, found[name]) for name, tensor in kept.items())


def test_it_goes_to_megatron_and_back(tmp_path: Path) -> None:
    dense = write(BY_LABEL["mistral"], tmp_path / "ar")
    upcycle(dense, tmp_path / "moe", experts=2)
    Bridge.from_hf(tmp_path / "moe").to_megatron(tmp_path / "megatron", Layout(ep=2))
    Bridge.from_megatron(tmp_path / "megatron").to_hf(tmp_path / "back")
    expected, found = tensors_of(tmp_path / "moe"), tensors_of(tmp_path / "back")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_changed_weight_is_refused(tmp_path: Path) -> None:
    convert_to_dlm(write(BY_LABEL["qwen3"], tmp_path / "ar"), tmp_path / "dense", to="sdar")
    flip(tmp_path / "dense", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(ChangedTensorsError) as refused:
        upcycle(tmp_path / "dense", tmp_path / "moe", experts=2)
    assert refused.value.names == ["model.layers.1.mlp.experts.0.down_proj.weight"]
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=2, accept_changed_tensors=True)


def test_bad_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = BY_LABEL["qwen3"].write(tmp_path / "ar")
    for experts, settings in ((1, {}), (4, {"top_k": 5}), (4, {"granularity": 3}), (4, {"granularity": 64})):
        field = next(iter(settings), "experts")
        with refused(SettingError, field, str({"experts": experts, **settings}[field])):
            upcycle(dense, tmp_path / "moe", experts, **settings)
    code, _, err = run_cli(capsys, "upcycle", dense, tmp_path / "moe", "--experts", 4, "--top-k", 0)
    assert (code, "--top-k" in err, err.count("\n")) == (2, True, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["ar"]


def test_models_without_a_counterpart(tmp_path: Path) -> None:
    biased = BY_LABEL["qwen2.5"].write(tmp_path / "qwen2")
    windowed = BY_LABEL["qwen3"].write(tmp_path / "qwen3", use_sliding_window=True, sliding_window=6)
    for dense, named in ((biased, "qwen2"), (windowed, "use_sliding_window")):
        with refused(SettingError, "source", named):
            upcycle(dense, tmp_path / "moe", experts=2)


def test_the_command_has_the_settings_of_every_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = BY_LABEL["llama3.1"].write(tmp_path / "ar")
    options = ("--experts", 2, "--dtype", "bf16", "--processes", 2, "--shard-size", "100KB", "--json")
    code, out, err = run_cli(capsys, "upcycle", dense, tmp_path / "moe", *options)
    assert code == 0, err
    assert json.loads(out)["action"] == "upcycle"
    assert json.loads((tmp_path / "moe/config.json").read_text())["num_local_experts"] == 2
    upcycle(dense, tmp_path / "same", 2, dtype=torch.bfloat16, shard_size="100KB")
    assert tree(tmp_path / "same") == tree(tmp_path / "moe")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "moe").values()} == {torch.bfloat16}


@pytest.mark.parametrize("value", ["a", float("nan"), -1, [0.02]])
def test_noise_without_a_deviation(tmp_path: Path, value: object) -> None:
    dense = write(BY_LABEL["qwen3"], tmp_path / "dense")
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"initializer_range": value}))
    with pytest.raises(DlmBridgeError, match="initializer_range"):
        upcycle(dense, tmp_path / "moe", experts=2)
    with pytest.raises(DlmBridgeError, match="initializer_range"):
        convert_to_dlm(dense, tmp_path / "dlm")
