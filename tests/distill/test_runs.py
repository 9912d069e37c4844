"""Runs of distillation: exact resume, texts of on-policy runs, what the command refuses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError, LayoutError, SettingError
from dlm_bridge.train.config.files import read_run_config
from dlm_bridge.train.distill.config import DistillConfig, load_distill_config
from dlm_bridge.train.distill.sampling import SampledRows
from tests.distill.conftest import FORMS, ROWS, Settings, opened
from tests.refusals import refused
from tests.rl.conftest import letters, write_llada, write_llama

ON_POLICY = {"on_policy": True, "gen_length": 8, "temperature": 1.0}
Run = Callable[..., list[dict[str, Any]]]


def weights(output: Path) -> dict[str, torch.Tensor]:
    (newest,) = sorted((output / "checkpoints").glob("step-*"))[-1:]
    found: dict[str, torch.Tensor] = {}
    for file in newest.glob("*.safetensors"):
        found |= load_file(file)
    assert found
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**ON_POLICY},
        {**ON_POLICY, "objective": "trajectory_block", "micro_batch_size": 2, "precision": "bf16"},
        {**ON_POLICY, "block_schedule": "0:2,2:4", "lora_rank": 0, "parent": True, "precision": "bf16"},
    ],
    ids=["off-policy", "on-policy", "trajectories", "growing blocks"],
)
@pytest.mark.fast("on-policy", "growing blocks")
def test_resume_is_exact(changes: dict[str, Any], settings: Settings, run: Run, parent: Path, tmp_path: Path) -> None:
    if "parent" in changes:
        changes = {**changes, "parent": str(parent)}
    whole = run(settings(**changes, output=str(tmp_path / "whole")))
    again = {**changes, "output": str(tmp_path / "parts")}
    run(settings(**again, steps=2))
    resumed = run(settings(**again), resume=True)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]
    assert len({row["loss"] for row in whole}) == 4
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(expected[name], found[name]) for name in expected.keys() | found.keys())


def test_sampled_rows_are_the_models_own_completions(settings: Settings) -> None:
    """Prompts have no loss; texts depend on the step and the weights, and on nothing else."""
    with opened(settings(**ON_POLICY)) as trainer:
        sampled = trainer.train
        assert isinstance(sampled, SampledRows)
        samples = [0, 1, 2, 3]
        sampled.sample(trainer.computing, 1, samples)
        rows = sampled.rows(samples)
        assert trainer.computing.training
        assert rows.labels is not None
        assert rows.attention_mask is not None
        assert rows.commit_steps is not None
        prompts = {tuple(letters()(prompt)["input_ids"]) for prompt, _ in ROWS}
        for ids, labels, real, steps in zip(
            rows.input_ids, rows.labels, rows.attention_mask, rows.commit_steps, strict=True
        ):
            answer = labels >= 0
            assert tuple(ids[real & ~answer].tolist()) in prompts
            assert 1 <= answer.sum() <= 8
            assert not (answer & ~real).any()
            assert torch.equal(ids[answer], labels[answer])
            assert 1 not in ids[real]  # the mask token
            assert (ids[answer][:-1] != 0).all()  # nothing follows the end of a text
            assert torch.equal(steps > 0, answer)
        sampled.sample(trainer.computing, 1, samples)
        assert torch.equal(sampled.rows(samples).input_ids, rows.input_ids)
        sampled.sample(trainer.computing, 2, samples)
        assert not torch.equal(sampled.rows(samples).input_ids, rows.input_ids)
        sampled.sample(trainer.computing, 1, [2])
        assert torch.equal(sampled.rows([2]).input_ids[0], rows.input_ids[2])


@pytest.mark.parametrize("form", [form for form in FORMS if form != "block-causal"])
def test_every_form_samples_its_texts(form: str, settings: Settings) -> None:
    mask_only = {"lora_mask_only": True} if form == "idlm" else {}
    with opened(settings(form, **ON_POLICY, **mask_only)) as trainer:
        trainer.prefetcher = trainer.prefetch(1)
        assert math.isfinite(trainer.start_step(1, False)[0]().loss)
        labels = trainer.train.rows(trainer.rank_samples(1)[0]).labels
        assert labels is not None
        assert (labels >= 0).sum() >= 4


def test_a_step_trains_on_texts_of_its_own_weights(settings: Settings) -> None:
    with opened(settings(**ON_POLICY, lr=0.5)) as trainer:
        trainer.prefetcher = trainer.prefetch(1)
        taken = []
        for step in (1, 2):
            trainer.start_step(step, False)[0]()
            rows = trainer.train.rows(trainer.rank_samples(step)[0])
            taken.append(rows.input_ids)
            trainer.train.sample(trainer.computing, step, trainer.rank_samples(step)[0])  # after the update
            assert not torch.equal(trainer.train.rows(trainer.rank_samples(step)[0]).input_ids, rows.input_ids)


def test_only_prompts_are_needed_on_policy(settings: Settings, run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt, _ in ROWS))
    with_answers = run(settings(**ON_POLICY, output=str(tmp_path / "one")))
    without = run(settings(**ON_POLICY, output=str(tmp_path / "two"), data=[str(tmp_path / "prompts.jsonl")]))
    assert [row["loss"] for row in with_answers] == [row["loss"] for row in without]


def test_rows_are_as_long_as_the_longest(settings: Settings, run: Run, tmp_path: Path) -> None:
    for number, changes in enumerate(({}, ON_POLICY)):
        output = tmp_path / str(number)
        run(settings(**changes, seq_length=0, steps=1, output=str(output)))
        assert read_run_config(output / "config.yaml", DistillConfig)["seq_length"] == (8, 16)[number]


def test_validation_has_the_divergence(settings: Settings, run: Run) -> None:
    found = run(settings(valid_data=settings().data.data, split="99,1,0", eval_interval=2, lr=0.0, lora_rank=2))
    losses = [row.get("eval_loss") for row in found]
    assert losses[0] is losses[2] is None
    assert math.isfinite(losses[1])
    assert losses[1] == losses[3] > 0


def other_vocabulary(folder: Path) -> Path:
    """An autoregressive model in whose tokenizer two letters are exchanged."""
    write_llama(folder)
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    words = values["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"lora_rank": 0}, SettingError, "parent"),
        ({"parent": "OTHER"}, SettingError, "parent"),
        ({"parent": "DIFFUSION"}, SettingError, "parent"),
        ({"parent": "SHORT"}, SettingError, "parent"),
        ({"parent": "no-such-folder"}, CheckpointError, "no-such-folder"),
        ({"model": "NATIVE"}, SettingError, "parent"),
        ({"model": "PARENT"}, SettingError, "model"),
        ({"model": "UNMASKED"}, SettingError, "mask_token_id"),
        ({"objective": "block_editing"}, SettingError, "objective"),
        ({"lora_rank": 0, "adapter": "FOREIGN"}, CheckpointError, "FOREIGN"),
        ({**ON_POLICY, "data": ["LONG"]}, InputFileError, None),
        ({**ON_POLICY, "seq_length": 128}, SettingError, "seq_length"),
        ({**ON_POLICY, "generation": ["no_such=1"]}, SettingError, "no_such"),
        ({"eos_padding": "block"}, SettingError, "eos_padding"),
        ({"gen_length": 8}, SettingError, "gen_length"),
        ({**ON_POLICY, "gen_length": 16}, SettingError, "gen_length"),
        ({**ON_POLICY, "split": "99,1,0", "valid_data": ["LONG"]}, SettingError, "valid_data"),
        ({**ON_POLICY, "sharding": "fsdp"}, SettingError, "sharding"),
        ({"engine": "megatron"}, SettingError, "engine"),
        ({"divergence": "tv"}, SettingError, "divergence"),
        ({"global_batch_size": 3, "micro_batch_size": 2}, LayoutError, None),
    ],
    ids=str,
)
def test_bad_input_is_refused(
    changes: dict[str, Any],
    kind: type[DlmBridgeError],
    field: str | None,
    settings: Settings,
    run: Run,
    parent: Path,
    tmp_path: Path,
) -> None:
    places = {
        "OTHER": lambda: other_vocabulary(tmp_path / "OTHER"),
        "DIFFUSION": lambda: Path(settings("shifted").model.model),
        "SHORT": lambda: shortened(parent, tmp_path / "SHORT"),
        "NATIVE": lambda: write_llada(tmp_path / "NATIVE"),
        "PARENT": lambda: parent,
        "UNMASKED": lambda: unmasked(Path(settings().model.model), tmp_path / "UNMASKED"),
        "FOREIGN": lambda: foreign_adapter(settings, run, tmp_path),
        "LONG": lambda: long_prompts(tmp_path / "LONG.jsonl"),
    }
    for name, value in changes.items():
        if isinstance(value, str) and value in places:
            changes = {**changes, name: str(places[value]())}
        elif isinstance(value, list) and value[0] in places:
            changes = {**changes, name: [str(places[value[0]]())]}
    named = changes["adapter"] if field == "FOREIGN" else field
    with refused(kind, named):
        run(settings(**changes))
    assert not (tmp_path / "run").exists()


def shortened(parent: Path, folder: Path) -> Path:
    shutil.copytree(parent, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    return folder


def unmasked(model: Path, folder: Path) -> Path:
    """A diffusion model whose config names no mask token."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["mask_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def foreign_adapter(settings: Settings, run: Run, tmp_path: Path) -> Path:
    """An adapter of the same form of another autoregressive model."""
    llama = write_llama(tmp_path / "llama")
    model = LlamaForCausalLM.from_pretrained(llama)
    model.get_input_embeddings().weight.data.mul_(2)
    model.save_pretrained(llama)
    convert_to_dlm(llama, tmp_path / "form", to="block-causal", mask_token="<mask>")
    run(settings(model=str(tmp_path / "form"), output=str(tmp_path / "other"), steps=1))
    (found,) = (tmp_path / "other" / "checkpoints").glob("step-*")
    return found


def long_prompts(file: Path) -> Path:
    file.write_text(json.dumps({"prompt": "abcdefgha"}) + "\n")  # 9 tokens and 8 sampled ones, in rows of 16
    return file


def test_a_run_of_sft_is_not_resumed(settings: Settings, tmp_path: Path) -> None:
    config = settings()
    values = {name: value for name, value in config.as_flags().items() if value is not None and value != []}
    output = tmp_path / "run"
    output.mkdir()
    (output / "config.yaml").write_text(f"task: sft\nmodel:\n  model: {config.model.model}\n")
    with refused(SettingError, "output"):
        load_distill_config(values, None, resume=True)
    (output / "config.yaml").write_text(config.to_yaml())
    assert load_distill_config(values, None, resume=True) == config
    assert DistillConfig.from_flags(**values) == config
