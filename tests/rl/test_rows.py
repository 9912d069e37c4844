"""Rows and options that do not do: one line each, with file and line, or the flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.errors import DlmBridgeError, InputFileError, LayoutError, SettingError
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.config.files import load_rl_config
from dlm_bridge.train.rl.likelihood import bound_query
from dlm_bridge.train.rl.methods import load_rows
from dlm_bridge.train.rl.policy import PolicyTrainer
from dlm_bridge.train.rl.preference import PreferenceTrainer
from dlm_bridge.train.rl.rows import Shuffled, load_pairs, load_problems
from tests.data.chats import chatty
from tests.families import diffullama
from tests.refusals import refused
from tests.rl.conftest import WORDS, Run, letters


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_prompts_are_texts_or_messages(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}h{% endif %}"
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    file = write(tmp_path / "rows.jsonl", {"prompt": "ab", "x": 1}, {"prompt": said[:1]}, {"messages": said})
    problems = load_problems([str(file)], chatty(letters(), template), 8, 1)
    assert [problem.input_ids for problem in problems] == [[2, 3], [2, 3, 9], [2, 3, 9]]
    assert problems[0].fields == {"prompt": "ab", "x": 1}
    assert problems[2].prompt == said[:1]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "ab"},
        {"prompt": ""},
        {"prompt": "abcdabcda"},  # one token too many
        {"prompt": "a<mask>"},
        {"prompt": 3},
        {"prompt": [{"content": "a"}]},  # without a role
        "{",
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, row: Any) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": "a"}, row)
    with refused(InputFileError, f"{file}:2"):
        load_problems([str(file)], letters(), 8, 1)


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": "a"}]})
    with pytest.raises(DlmBridgeError, match=r"rows\.jsonl:1"):
        load_problems([str(file)], letters(), 8, 1)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"prompt": "a", "chosen": "b"}, "1"),
        ({"prompt": "a", "chosen": "b", "rejected": ["c"]}, "1, 'rejected'"),
        ({"prompt": "abcd", "chosen": "b", "rejected": "cdef"}, "1"),  # one token too many
    ],
)
def test_bad_pairs_are_named_by_line(tmp_path: Path, row: Any, place: str) -> None:
    file = write(tmp_path / "rows.jsonl", row)
    with refused(InputFileError, f"{file}:{place}"):
        load_pairs([str(file)], letters(), 8, 1)


def test_no_rows(tmp_path: Path) -> None:
    with refused(SettingError, "data"):
        load_problems([str(write(tmp_path / "rows.jsonl"))], letters(), 8, 1)


def test_errors_name_the_option_that_gave_the_rows(tmp_path: Path) -> None:
    for items in ([str(write(tmp_path / "rows.jsonl"))], ["1", str(write(tmp_path / "rows.jsonl"))]):
        with refused(SettingError, "eval_data"):
            load_problems(items, letters(), 8, 1, "eval_data")


def test_every_epoch_has_its_order() -> None:
    shuffled = Shuffled(list(range(7)), seed=3)
    epochs = [[shuffled[7 * epoch + place] for place in range(7)] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]
    assert [shuffled[place] for place in range(7)] == epochs[0]


GIVEN: dict[str, Any] = {"model": "m", "data": ["d"], "output": "o", "method": "diffu-grpo", "reward": ["countdown"]}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": ""}, "method"),
        ({"method": "ppo"}, "method"),
        ({"reward": []}, "reward"),
        ({"group_size": 1}, "group_size"),
        ({"global_batch_size": 12}, "global_batch_size"),
        ({"gen_length": 1024}, "gen_length"),
        ({"temperature": 0.0}, "temperature"),
        ({"generation": ["steps"]}, "generation"),
        ({"generation": ["temperature=1"]}, "generation"),
        ({"generation": ["infill=true"]}, "generation"),
        ({"engine": "megatron", "megatron": ["transformer.attention_dropout=0.1"]}, "megatron"),
        ({"rollout_tp": 2}, "rollout_tp"),
        ({"objective": "masked"}, "objective"),
        ({"packing": True}, "packing"),
        ({"tp": 2}, "tp"),
        ({"beta": -1.0}, "beta"),
        ({"reward_failure": "skip"}, "reward_failure"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises((SettingError, LayoutError)) as raised:
        load_rl_config({**GIVEN, **changes})
    assert raised.value.field == field


def test_a_file_of_options(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rl.yaml", "rl: {method: block-grpo, reward: [countdown, 0.1*countdown_form], generation: steps=4}"
    )
    config = load_rl_config({"model": "m", "data": ["d"], "output": str(tmp_path), "steps": 3}, file)
    assert config.rl.reward == ["countdown", "0.1*countdown_form"]
    assert config.rl.sampler == {"steps": 4}
    assert (config.schedule.steps, config.optimizer.lr, config.rl.kl_weight) == (3, 1e-6, 0.04)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_rl_config({"output": str(tmp_path)}, resume=True) == config
    with refused(SettingError, "group_size", "4", "8"):
        load_rl_config({"output": str(tmp_path), "group_size": 4}, resume=True)
    assert isinstance(config, RLConfig)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"generation": ["stepz=3"]}, "stepz"),
        ({"generation": ["block_length=3"]}, "block_length"),
        ({"seq_length": 65}, "seq_length"),
        ({"reward": ["nowhere.f"]}, "reward"),
        ({"lora_rank": 2, "lora_targets": "x_proj"}, "lora_targets"),
        ({"sharding": "fsdp", "precision": "fp16"}, "precision"),
    ],
)
def test_runs_that_cannot_begin(run: Run, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """They leave nothing behind that would stop a second try."""
    for _ in range(2):
        with pytest.raises(DlmBridgeError, match=named):
            run(tmp_path / "run", **changes)


def test_a_mask_token_that_texts_contain(tmp_path: Path) -> None:
    """DiffuLLaMA's, in prompts and pairs. In a likelihood it is hidden where that is drawn, and nowhere else."""
    token = 4  # c
    sizes = {"vocab_size": len(WORDS), "num_hidden_layers": 1, "mask_token_id": token}
    (tmp_path / "config.json").write_text(json.dumps(diffullama.CONFIG | sizes))
    model = ModelSource(str(tmp_path), "diffullama", seed=0).load()
    files = [
        write(tmp_path / "prompts.jsonl", {"prompt": "acb"}),
        write(tmp_path / "pairs.jsonl", {"prompt": "ac", "chosen": "cbc", "rejected": "cc"}),
    ]
    config = RLConfig.from_flags(model=str(tmp_path), data=["x"], output="o", method="vrpo", seq_length=512)
    (problem,), _ = load_rows(config.replace(data=[str(files[0])]), PolicyTrainer, model, letters())
    assert problem.input_ids == [2, 4, 3]
    (row,), _ = load_rows(config.replace(data=[str(files[1])]), PreferenceTrainer, model, letters())
    text = torch.tensor([row.chosen.input_ids])
    answer = torch.tensor([row.chosen.answer])
    assert text.tolist() == [[2, 4, 4, 3, 4, 0]]
    uniforms = Uniforms.keyed(0, 1, [0], text.shape[1])
    noisy = bound_query(model, text, answer, torch.ones_like(answer), uniforms)
    masks = answer & (uniforms.token < (1 - 1e-3) * uniforms.level + 1e-3)
    assert 0 < masks.sum() < answer.sum()
    assert torch.equal(noisy.input_ids, torch.where(masks, token, text))
    assert torch.equal(noisy.targets, text[masks])
    assert torch.equal(noisy.mask, masks.roll(-1, dims=1))
