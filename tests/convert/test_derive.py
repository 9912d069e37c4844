"""Runs without a Hub twin: the config is derived from Megatron-LM's args or Megatron Bridge's run_config.yaml."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.inspect import inspect_checkpoint
from dlm_bridge.convert.verify import verify_pair
from dlm_bridge.errors import CheckpointError
from tests.checkpoints import standard_tensors, write_hub_folder, write_llada
from tests.convert.helpers import hub_tensors, run_cli, same
from tests.families.case import all_cases
from tests.refusals import refused

Capture = pytest.CaptureFixture[str]
ITERATION = "iter_0000000"
CASES = {case.name: case for case in all_cases()}
# A run of MegaDLMs' own script, made tiny: what its args say and its Hub exports are.
MEGADLMS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "kv_channels": 16,
    "group_query_attention": False, "num_query_groups": 1, "max_position_embeddings": 256, "seq_length": 256,
    "norm_epsilon": 1e-6, "rotary_base": 10000, "rotary_percent": 1.0, "swiglu": True, "normalization": "RMSNorm",
    "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "vocab_size": 125, "padded_vocab_size": 128, "num_experts": None,
    "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "model_running_mode": "difflm-noshift", "mask_token": 124, "attention_mask_type": "no_mask", "bf16": False,
}  # fmt: skip
DIFFLM: dict[str, Any] = {
    "architectures": ["DiffLM"], "attn_mask_type": "bidirectional", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 125,
    "tie_word_embeddings": False, "mask_token_id": 124,
}  # fmt: skip


def without_manifest(root: Path) -> Path:
    """As a run leaves it: no dlm_bridge.json, no Hub side."""
    (root / "dlm_bridge.json").unlink()
    shutil.rmtree(root / "hf")
    return root


def set_args(root: Path, args: dict[str, Any]) -> Path:
    """Save `args` as Megatron-LM does: in common.pt, or in each rank's file."""
    common = root / ITERATION / "common.pt"
    for path in [common] if common.exists() else list(root.rglob("model_optim_rng.pt")):
        content = torch.load(path, weights_only=False)
        torch.save({**content, "args": argparse.Namespace(**args)}, path)
    return root


@pytest.fixture(scope="module")
def difflm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub_folder(tmp_path_factory.mktemp("difflm") / "hub", DIFFLM, standard_tensors(DIFFLM, qk_norm=True))


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_megadlms_run(difflm: Path, tmp_path: Path, format: str, capsys: Capture) -> None:
    bridge = Bridge.from_hf(difflm, family="difflm")
    bridge.to_megatron(tmp_path / "run", Layout(), format=format, vocab_multiple=128)
    run = set_args(without_manifest(tmp_path / "run"), MEGADLMS)
    code, out, _ = run_cli(capsys, "export", run, tmp_path / "out", "--json")
    assert code == 0
    derived = {row["key"]: row for row in json.loads(out)["derived"]}
    assert derived["family"]["value"] == "difflm"
    assert derived["family"]["assumed"]
    assert derived["num_key_value_heads"]["value"] == 4  # num_query_groups says 1, but without grouped queries
    assert derived["vocab_size"] == {
        "key": "vocab_size", "value": 125, "origin": "args: vocab_size", "assumed": False
    }  # fmt: skip
    assert derived["mask_token_id"]["value"] == 124
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert all(config[key] == value for key, value in DIFFLM.items())
    found, wanted = hub_tensors(tmp_path / "out"), hub_tensors(difflm)
    assert found.keys() == wanted.keys()
    assert all(same(found[name], tensor) for name, tensor in wanted.items())  # trimmed to 125 rows
    facts = inspect_checkpoint(run)
    assert (facts.family, facts.parameters) == ("difflm", sum(t.numel() for t in wanted.values()))
    assert {row["key"] for row in facts.derived} == derived.keys()


@pytest.mark.parametrize("name", ["a2d_qwen3", "a2d_qwen2", "a2d_llama", "dream", "sdar", "sdar_moe", "llada"])
def test_what_we_write_is_derived_again(tmp_path: Path, name: str) -> None:
    """Our own legacy checkpoints and run_config.yaml hold what the family's config follows from."""
    case = CASES[name]
    case.write(tmp_path / "hub")
    bridge = Bridge.from_hf(tmp_path / "hub", family=case.name)
    bridge.to_megatron(tmp_path / "legacy", format="torch")
    bridge.to_megatron(tmp_path / "bridge", run_config=True)
    for folder in (tmp_path / "legacy", tmp_path / "bridge"):
        derived = Bridge.from_megatron(without_manifest(folder), family=name)
        assert derived.dims == bridge.dims
        assert derived.mapping.transformer(derived.config) == bridge.mapping.transformer(bridge.config)
        assert verify_pair(folder, tmp_path / "hub").equal


def test_run_config_is_plain_yaml(llada: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run_cli(capsys, "import", llada, tmp_path / "m", "--tp", 2, "--run-config")[0] == 0
    content = yaml.safe_load((tmp_path / "m" / ITERATION / "run_config.yaml").read_text())
    model = content["model"]
    assert model["_target_"] == "megatron.bridge.models.gpt_provider.GPTModelProvider"
    assert (model["num_layers"], model["tensor_model_parallel_size"], model["vocab_size"]) == (4, 2, 128)
    assert (model["layernorm_epsilon"], model["rotary_base"]) == (1e-5, 500000.0)
    assert run_cli(capsys, "verify", tmp_path / "m")[0] == 0


def test_guesses_are_shown_and_can_be_wrong(tmp_path: Path, capsys: Capture) -> None:
    """A LLaDA's tensors are a Llama's: --family says so."""
    hub = write_llada(tmp_path / "hub")
    Bridge.from_hf(hub).to_megatron(tmp_path / "m", format="torch", key_style="local")
    run = without_manifest(tmp_path / "m")
    code, out, _ = run_cli(capsys, "export", run, tmp_path / "guessed", "--dry-run")
    assert code == 0
    assert "config.json was derived" in out
    assert "assumed: " in out
    assert inspect_checkpoint(run).family == "llama"
    assert run_cli(capsys, "export", run, tmp_path / "out", "--family", "llada")[0] == 0
    assert verify_pair(tmp_path / "out", hub).equal
    # The public models' mask token is not a token of so small a vocabulary, so it is not assumed.
    assert "mask_token_id" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is 'learned_absolute'"),
        ({"swiglu": False}, "gated_linear_unit is False"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 32}, "[125, 32]"),
        ({"qk_layernorm": False, "model_running_mode": "vanilla"}, "llama model"),
    ],
)
def test_settings_that_fit_no_family(difflm: Path, tmp_path: Path, change: dict[str, Any], named: str) -> None:
    Bridge.from_hf(difflm, family="difflm").to_megatron(tmp_path / "run")
    run = set_args(without_manifest(tmp_path / "run"), {**MEGADLMS, **change})
    with refused(CheckpointError, run, named):
        Bridge.from_megatron(run).to_hf(tmp_path / "out")
    facts = inspect_checkpoint(run)  # says what it can
    assert facts.family is None
    assert any(named in note for note in facts.notes)


def test_families_that_settings_do_not_determine(difflm: Path, tmp_path: Path) -> None:
    Bridge.from_hf(difflm, family="difflm").to_megatron(tmp_path / "run")
    run = set_args(without_manifest(tmp_path / "run"), MEGADLMS)
    with refused(CheckpointError, run, "deepseek_v3", "`hf_config`"):
        Bridge.from_megatron(run, family="deepseek_v3")


def test_broken_run_config(llada: Path, tmp_path: Path) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m")
    run = without_manifest(tmp_path / "m")
    path = run / ITERATION / "run_config.yaml"
    for text in ("model: [", "model: 3", "model: !!python/object/apply:os.system ['touch /tmp/yaml-was-run']"):
        path.write_text(text)
        with refused(CheckpointError, path):
            Bridge.from_megatron(run)
    assert not Path("/tmp/yaml-was-run").exists()
