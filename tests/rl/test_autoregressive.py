"""Autoregressive models: GRPO rises, resumes exactly and samples each row by itself; DPO is TRL's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import SettingError
from dlm_bridge.train.rl.likelihood import causal as causal_query
from dlm_bridge.train.rl.reward_worker import RewardScores
from dlm_bridge.train.rl.rollout import Rollouts
from dlm_bridge.train.rl.rows import Problem
from dlm_bridge.train.rl.trainer import target_logps
from tests.refusals import refused
from tests.rl.conftest import Run, letters, write_llama

TIMED = ("tokens_per_s", "tokens_per_s_per_device", "seconds")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("causal"))


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
    # To the last bit: weights, optimizer and draws, and the reference is the model as it began, not the checkpoint.
    for one, other in zip(resumed, rows, strict=True):
        assert {key: value for key, value in one.items() if key not in (*TIMED, "eval_reward", "eval_rewards")} == {
            key: value for key, value in other.items() if key not in (*TIMED, "eval_reward", "eval_rewards")
        }
    assert resumed[-1]["eval_rewards"] == rows[-1]["eval_rewards"]


class _NoRewards:
    functions: tuple[Any, ...] = ()

    def __call__(self, prompts: Any, completions: Any, rows: Any) -> RewardScores:
        return RewardScores([float(len(text)) for text in completions], {}, 0)


def test_rows_are_sampled_by_themselves_and_their_likelihoods_are_the_models(causal: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32)
    problems = [Problem(text, text, [ord(letter) - 95 for letter in text], {}, "") for text in ("ab", "b", "ccd")]
    given = {"reward_workers": _NoRewards(), "seed": 3, "group_size": 2, "gen_length": 5, "temperature": 1.3}
    found = [
        Rollouts(letters(), sampler={"top_k": 6}, batch_size=size, autoregressive=True, **given).sample(
            model, problems, step=1, first=first
        )
        for size, first in ((None, 0), (1, 0), (4, 0), (None, 6))
    ]
    whole, *others, later = found
    for other in others:
        assert torch.equal(whole.sequences.tokens, other.sequences.tokens)
        assert torch.equal(whole.sequences.scored, other.sequences.scored)
    assert whole.completions != later.completions  # other samples, other draws
    sequences = whole.sequences
    query = causal_query(sequences)
    logps = query.per_token(target_logps(model, query.noisy))
    for row in range(len(sequences)):
        count = int((sequences.prompt | sequences.completion)[row].sum())
        tokens = sequences.tokens[row, :count]
        wanted = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        scored = sequences.scored[row, 1:count]
        torch.testing.assert_close(logps[row, 1:count], torch.where(scored, wanted, 0.0), atol=1e-5, rtol=1e-5)
    # The end of the text is the last that counts.
    ends = (sequences.tokens == 0) & sequences.scored
    assert (ends.cumsum(dim=1)[sequences.scored & ~ends] == 0).all()


def test_rollouts_are_of_the_models_own_distribution(tmp_path: Path) -> None:
    """Not of transformers' 50 most probable tokens, nor of a generation_config.json's settings for chats."""
    config = LlamaConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=0, pad_token_id=0, initializer_range=0.02,
    )  # fmt: skip
    model = LlamaForCausalLM(config)  # all tokens about equally probable
    tokenizer = letters()
    problems = [Problem("ab", "ab", [2, 3], {}, "")]

    def drawn(**sampler: Any) -> set[int]:
        rollouts = Rollouts(
            tokenizer, _NoRewards(), seed=3, group_size=16, gen_length=32, temperature=1.0, sampler=sampler,
            autoregressive=True,
        )  # fmt: skip
        sequences = rollouts.sample(model, problems, step=1, first=0).sequences
        return set(sequences.tokens[sequences.scored].tolist())

    assert len(drawn()) > 200
    stored = model.generation_config
    stored.top_k, stored.repetition_penalty, stored.num_beams, stored.do_sample = 3, 1.5, 2, True
    assert len(drawn()) > 200
    assert model.generation_config is stored
    assert len(drawn(suppress_tokens=list(range(5, 400)))) <= 5  # what the run asks for


def test_stop_strings_end_completions(causal: Path, policy: Any) -> None:
    autoregressive = AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32)
    problems = [Problem("ab", "ab", [2, 3], {}, "")]
    given = {"reward_workers": _NoRewards(), "seed": 3, "group_size": 16, "gen_length": 8, "temperature": 1.0}
    for model in (autoregressive, policy):
        rollouts = Rollouts(
            letters(), sampler={"stop_strings": ["c"]}, autoregressive=model is autoregressive, **given
        )
        found = rollouts.sample(model, problems, step=1, first=0)
        stopped = [text for text in found.completions if "c" in text]
        assert len(stopped) > 2
        assert all(text.index("c") == len(text) - 1 for text in stopped)
        assert found.sequences.scored.sum(dim=1).max() <= 8


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
    found = run(tmp_path / "run", **changes, global_batch_size=8, steps=4)  # all pairs: in whatever order
    arguments = DPOConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
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
    tokens = [row["tokens"] for row in run(tmp_path / "run", resume=True, **changes, global_batch_size=8, steps=6)]
    assert tokens == sorted(set(tokens))


def test_methods_of_the_other_kind(run: Run, causal: Path, policy_folder: Path, tmp_path: Path) -> None:
    with refused(SettingError, "method", "diffu-grpo", "autoregressive"):
        run(tmp_path / "one", model=str(causal))
    with refused(SettingError, "method", "grpo", "LLaDA", "diffusion"):
        run(tmp_path / "other", model=str(policy_folder), method="grpo")
