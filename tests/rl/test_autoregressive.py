"""Autoregressive models: TRL's trainers give what they give alone; rewards, metrics and checkpoints are ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import DlmBridgeError
from tests.rl.conftest import WORDS, Run, letters


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def test_grpo_rises_and_resumes(run: Run, causal: Path, tmp_path: Path, problems: Path) -> None:
    changes = {"model": str(causal), "method": "grpo", "beta": 0.01, "save_interval": 6, "updates": 2, "lr": 2e-2}
    held_out = {"eval_data": [str(problems)], "eval_interval": 12}
    rows = run(tmp_path / "whole", **changes, **held_out, steps=12)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["reward"] < 0.4
    assert rows[-1]["reward"] > 0.7
    assert rows[-1]["eval_reward"] > 0.7
    assert rows[-1]["kl"] > 0
    assert [folder.name for folder in sorted((tmp_path / "whole" / "checkpoints").iterdir())] == [
        "step-0000006",
        "step-0000012",
    ]
    run(tmp_path / "cut", **changes, **held_out, steps=6)
    resumed = run(tmp_path / "cut", resume=True, **changes, **held_out, steps=12)
    assert [row["loss"] for row in resumed[:6]] == [row["loss"] for row in rows[:6]]
    assert [row["step"] for row in resumed] == list(range(1, 13))
    # From the checkpoint's weights, and the reference is the model as it began, not the checkpoint.
    assert resumed[6]["reward"] > 0.6
    assert resumed[6]["kl"] > 0.5 * rows[6]["kl"]


def test_dpo_is_trls(run: Run, causal: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = [
        {"prompt": "ab", "chosen": "cc", "rejected": "de"},
        {"prompt": "hg", "chosen": "f", "rejected": "aab"},
    ] * 4
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    changes = {"model": str(causal), "method": "dpo", "reward": [], "data": [str(data)], "micro_batch_size": 2}
    found = run(tmp_path / "run", **changes, global_batch_size=4, steps=4)
    arguments = DPOConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        beta=0.1,
        seed=0,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32)
    trainer = DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=letters())
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [row["loss"] for row in found] == pytest.approx(logged, abs=1e-6)
    assert found[-1]["margin"] > found[0]["margin"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-0000004")
    for name, weight in model.state_dict().items():
        assert torch.allclose(saved.state_dict()[name], weight, atol=1e-6), name
    tokens = [row["tokens"] for row in run(tmp_path / "run", resume=True, **changes, global_batch_size=4, steps=6)]
    assert tokens == sorted(set(tokens))


def test_methods_of_the_other_kind(run: Run, causal: Path, policy_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DlmBridgeError, match=r"^--method diffu-grpo is not for .*, which is autoregressive: use grpo"):
        run(tmp_path / "one", model=str(causal))
    with pytest.raises(DlmBridgeError, match=r"^--method grpo is not for LLaDA.*, which is diffusion: use diffu-grpo"):
        run(tmp_path / "other", model=str(policy_folder), method="grpo")
