"""`rl --dry-run`: layout, memory of updates and of rollouts, and every refusal that needs no device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dlm_bridge.cli.app import app
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.plan.dry_run import DryRun
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.rl.dry_run import rl_dry_run
from tests.rl.conftest import write_llama

DATA = "the rows of the run"


@pytest.fixture
def given(policy_folder: Path, problems: Path, reward: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(policy_folder), "data": [str(problems)], "output": str(tmp_path / "run"), "method": "diffu-grpo",
        "reward": [reward], "global_batch_size": 32, "seq_length": 16, "gen_length": 4, "micro_batch_size": 2,
    }  # fmt: skip


def plan(given: dict[str, Any], gpus: int = 4, **changes: Any) -> DryRun:
    return rl_dry_run(RLConfig.from_flags(**{"precision": "fp32", **given, **changes}), gpus)


def parameters(run: DryRun) -> int:
    assert run.memory is not None
    return run.memory.model.parameters


def test_what_rollouts_take(given: dict[str, Any]) -> None:
    plain, halved = plan(given), plan(given, sharding="fsdp", precision="bf16", rollout_tp=2)
    count = parameters(plain)
    assert plain.rollouts is not None
    assert halved.rollouts is not None
    assert (plain.rollouts.weights, plain.rollouts.reference) == (0, 4 * count)  # the trained model samples
    assert (halved.rollouts.weights, halved.rollouts.reference) == (2 * count // 2, 4 * count // 4)
    assert plain.rollouts.row > halved.rollouts.row > 0
    on_megatron = plan(given, engine="megatron", tp=2, beta=0.0)
    assert on_megatron.rollouts is not None
    assert (on_megatron.rollouts.weights, on_megatron.rollouts.reference) == (4 * count, 0)
    assert [(group.name, group.size) for group in on_megatron.groups][:3] == [("tp", 2), ("cp", 1), ("dp", 2)]
    assert (plain.micro_batch_size, plain.micro_batches) == (2, 4)
    assert (on_megatron.micro_batch_size, on_megatron.micro_batches) == (2, 8)


def test_a_value_model_takes_what_the_policy_takes(given: dict[str, Any]) -> None:
    """fp32: weights, gradients and two moments, 16 bytes a parameter, sharded or cut as the policy's."""
    run = {**given, "method": "tracerl", "value_model": True}
    whole, cut = plan(run, gpus=1), plan(run, sharding="fsdp")
    count = parameters(whole)
    assert whole.rollouts is not None
    assert cut.rollouts is not None
    assert whole.rollouts.value_model == 16 * count
    assert 4 * count <= cut.rollouts.value_model < 16 * count  # and the layers that FSDP gathers
    assert plan(given).rollouts.value_model == 0  # type: ignore[union-attr]
    halved = plan(run, engine="megatron", tp=2)
    assert halved.rollouts is not None
    assert 8 * count / 2 < halved.rollouts.value_model < 16 * count


@pytest.mark.parametrize("method", ["vrpo", "tracerl", "block-grpo"])
def test_every_method_has_a_plan(given: dict[str, Any], method: str) -> None:
    changes: dict[str, Any] = {"reward": [], "global_batch_size": 8} if method == "vrpo" else {}
    run = plan(given, method=method, **changes)
    assert (run.rollouts is None) == (method == "vrpo")
    assert run.memory is not None


def test_autoregressive_models(given: dict[str, Any], tmp_path: Path) -> None:
    model = str(write_llama(tmp_path / "causal"))
    for method, reward in (("grpo", given["reward"]), ("dpo", [])):
        run = plan(given, model=model, method=method, reward=reward, sharding="fsdp", rollout_tp=2)
        assert run.memory is not None
        assert (run.rollouts is None) == (method == "dpo")
    # Without rollouts the number has no effect, as in the run.
    assert plan(given, model=model, method="dpo", reward=[], sharding="fsdp", rollout_tp=3).rollouts is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": ["missing.jsonl"]}, "missing.jsonl"),
        ({"eval_data": ["missing.jsonl"]}, "missing.jsonl"),
        ({"data": ["0.5", DATA, "0.5", DATA]}, "data"),
        ({"eval_data": ["1", DATA]}, "eval_data"),
        ({"method": "grpo"}, "method"),
        ({"method": "vrpo", "reward": [], "beta": 0.0}, "beta"),
        ({"lora_rank": 2, "lora_mask_only": True}, "lora_mask_only"),
        ({"lora_rank": 2, "lora_dropout": 0.1, "updates": 2}, "lora_dropout"),
        ({"reward": ["missing.py:name"]}, "reward"),
        ({"sharding": "fsdp", "rollout_tp": 3}, "rollout_tp"),
        ({"sharding": "fsdp", "rollout_tp": 4}, "rollout_tp"),  # of two heads
        ({"generation": ["num_beams=2"]}, "generation"),
        ({"sharding": "fsdp", "fsdp_replicas": 3}, "fsdp_replicas"),
        ({"global_batch_size": 16}, "global_batch_size"),
        ({"generation": ["stepz=3"]}, "stepz"),
        ({"seq_length": 100}, "seq_length"),
        ({"engine": "megatron", "tp": 4}, "tp"),
    ],
)
def test_what_is_refused(given: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    for paths in (changes.get("data", []), changes.get("eval_data", [])):
        paths[:] = [given["data"][0] if path == DATA else path for path in paths]
    with pytest.raises(DlmBridgeError, match=named):
        plan(given, **changes)
    assert not Path(given["output"]).exists()


def test_the_command(given: dict[str, Any]) -> None:
    words = ["rl", "--dry-run", "--gpus", "2"]
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value[0] if isinstance(value, list) else value)]
    shown = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert found["gpus"] == 2
    assert found["config"]["method"] == "diffu-grpo"
    assert found["rollouts"]["row"] > 0
    text = CliRunner().invoke(app, words)
    assert "each row of full length" in text.output
    assert not Path(given["output"]).exists()
