"""The command line on two processes, with micro-batches, gives the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import launcher
from tests.processes import environments
from tests.rl.conftest import Run, read_metrics, write_llama

TRACED = {"method": "tracerl", "trace_steps": 1, "generation": ["threshold=0.3"]}
METHODS: dict[str, dict[str, Any]] = {
    "diffu-grpo": {},
    "tracerl": TRACED,
    "value-model": {**TRACED, "value_model": True, "value_lr": 1e-3, "gae_lambda": 0.9},
    "grpo": {"method": "grpo"},
}


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if options else ()) for name, options in METHODS.items()]
)
def test_two_processes_are_one(run: Run, tmp_path: Path, problems: Path, method: str) -> None:
    changes = {
        "steps": 3,
        "updates": 2,
        "beta": 0.1,
        "eval_data": [str(problems)],
        "eval_interval": 3,
        **METHODS[method],
    }
    if method == "grpo":
        changes["model"] = str(write_llama(tmp_path / "causal"))
    alone = run(tmp_path / "alone", **changes)
    options = yaml.safe_load((tmp_path / "alone" / "config.yaml").read_text())
    options["data"]["micro_batch_size"] = 8
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(options))
    words = ["rl", "--config", str(tmp_path / "rl.yaml"), "--output", str(tmp_path / "two")]
    logs = [tmp_path / f"log_{rank}.txt" for rank in range(2)]
    ended = launcher.run("dlm_bridge.cli", words, environments(2), logs, timeout_s=300)
    assert ended, "\n".join(log.read_text()[-3000:] for log in logs)
    together = read_metrics(tmp_path / "two")
    for one, two in zip(alone, together, strict=True):
        for key in ("reward", "reward_std", "idle_groups", "completion_length", "tokens", "failed_rewards"):
            assert two[key] == pytest.approx(one[key], abs=1e-9), key
        for key in ("loss", "grad_norm", "kl", "clip_fraction", "eval_reward", "value_loss"):
            assert two.get(key) == pytest.approx(one.get(key), abs=1e-5), key
    folders = [tmp_path / name / "checkpoints" / "step-0000003" for name in ("alone", "two")]
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    if method == "value-model":
        one, other = (load_file(folder / "value" / "model.safetensors") for folder in folders)
        assert all(torch.allclose(one[name], other[name], atol=2e-4) for name in one)  # Adam's first steps go by signs
