"""TRL's own SFTTrainer with DiffusionCollator and trl_loss, once for each body, on TRL's two kinds of datasets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.models import diffusion_lm
from dlm_bridge.train.collator import DiffusionCollator, trl_loss
from tests.families import dream, llada, sdar
from tests.families.case import FamilyCase
from tests.refusals import refused
from tests.train.conftest import VOCAB

BODIES = {"llama": llada.CASES[0], "qwen2-shifted": dream.CASE, "qwen3-block": sdar.CASES[0]}
PROMPT, ANSWER = "f{}>", "    return x + {}\n"  # no merge of the tokenizer crosses the ">"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


class Recorder:
    """A model's collator, and every batch that it made."""

    def __init__(self, model: Any) -> None:
        self.collator = DiffusionCollator.of(model, for_trl=True)
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, samples: Any) -> dict[str, torch.Tensor]:
        batch = self.collator(samples)
        self.batches.append({name: tensor.clone() for name, tensor in batch.items()})
        return batch


def _model(case: FamilyCase, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    sizes = {"vocab_size": VOCAB, **({"embedding_size": VOCAB} if "embedding_size" in case.config else {})}
    ids = {"mask_token_id": tokenizer.mask_token_id, "pad_token_id": tokenizer.eos_token_id}
    ids["eos_token_id"] = tokenizer.eos_token_id
    return case.load(case.write(folder / "model", **sizes, **ids))


def _prompts(count: int) -> Dataset:
    return Dataset.from_list(
        [{"prompt": PROMPT.format(i % 20), "completion": ANSWER.format(i % 20)} for i in range(count)]
    )


def _conversations(count: int) -> Dataset:
    rows = [[("user", PROMPT.format(i % 20)), ("assistant", ANSWER.format(i % 20))] for i in range(count)]
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": content} for role, content in row]} for row in rows]
    )


def _trainer(model: Any, folder: Path, dataset: Dataset, tokenizer: Any, collator: Any, **options: Any) -> Any:
    options = {"max_length": 64, "learning_rate": 5e-3, "per_device_train_batch_size": 8, **options}
    arguments = SFTConfig(
        output_dir=str(folder / "run"),
        lr_scheduler_type="constant",
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    return SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        data_collator=collator,
        compute_loss_func=trl_loss,
    )


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.fast("qwen3-block")
def test_sft_trainer_learns_and_never_masks_the_prompt(
    body: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = _model(BODIES[body], tmp_path, tokenizer)
    collator = Recorder(model)
    trainer = _trainer(model, tmp_path, _prompts(320), tokenizer, collator)
    losses = _losses(trainer)
    assert len(losses) == 40
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])
    _assert_prompts_are_whole(collator.batches, tokenizer)


def test_conversations_mask_the_assistant_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", mask_token="<mask>", chat_template=TEMPLATE
    )
    model = _model(BODIES["llama"], tmp_path, chat)
    collator = Recorder(model)
    trainer = _trainer(model, tmp_path, _conversations(320), chat, collator, assistant_only_loss=True)
    assert len(_losses(trainer)) == 40
    _assert_prompts_are_whole(collator.batches, chat)


def _assert_prompts_are_whole(batches: list[dict[str, torch.Tensor]], tokenizer: PreTrainedTokenizerFast) -> None:
    """In every batch each row begins with a prompt, and each place of the answer was masked in some."""
    prompts = {tuple(tokenizer(PROMPT.format(i)).input_ids) for i in range(20)}
    rows = [row for batch in batches for row in batch["input_ids"].tolist()]
    assert len(rows) == 320
    masked = set()
    for row in rows:
        start = next((len(prompt) for prompt in prompts if tuple(row[: len(prompt)]) == prompt), None)
        assert start is not None, row
        masked |= {place - start for place, token in enumerate(row) if token == tokenizer.mask_token_id}
    assert masked >= set(range(len(tokenizer(ANSWER.format(19)).input_ids)))


def test_accumulation_changes_nothing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    runs = []
    for size, steps in ((8, 1), (2, 4)):
        model = _model(BODIES["llama"], tmp_path / str(size), tokenizer)
        dataset = _prompts(16)
        dataset = dataset.add_column("sample_index", list(range(16)))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        collator = DiffusionCollator.of(model, for_trl=True)
        runs.append(
            _losses(_trainer(model, tmp_path, dataset, tokenizer, collator, remove_unused_columns=False, **options))
        )
    assert len(runs[0]) == 2
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


def _plain(trainer: Any, model: Any, folder: Path, tokenizer: Any, dataset: Dataset, **options: Any) -> Any:
    """One of TRL's trainers, given nothing of ours but the model."""
    config = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, GRPOTrainer: GRPOConfig}[trainer]
    more = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if trainer is GRPOTrainer else {}
    arguments = config(
        output_dir=str(folder / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    return trainer(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer, **more)


PAIRS = [{"prompt": PROMPT.format(i), "chosen": ANSWER.format(i), "rejected": ANSWER.format(i + 1)} for i in range(8)]


@pytest.mark.parametrize(
    ("trainer", "body", "options"),
    [
        (SFTTrainer, "llama", {}),
        (SFTTrainer, "qwen3-block", {}),
        (SFTTrainer, "llama", {"label_smoothing_factor": 0.1}),
        (DPOTrainer, "llama", {}),
        (GRPOTrainer, "llama", {"num_generations": 2, "max_completion_length": 8}),
    ],
    ids=["sft", "sft-block", "sft-smoothed", "dpo", "grpo"],
)
def test_trl_trains_no_diffusion_model_on_next_tokens(
    trainer: Any, body: str, options: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = _model(BODIES[body], tmp_path, tokenizer)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    dataset = _prompts(8) if trainer is SFTTrainer else Dataset.from_list(PAIRS)
    with refused(SettingError, "compute_loss_func"):
        _plain(trainer, model, tmp_path, tokenizer, dataset, **options).train()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_trl_trains_no_adapter_on_next_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = get_peft_model(_model(BODIES["llama"], tmp_path, tokenizer), LoraConfig(target_modules=["q_proj"]))
    with refused(SettingError, "compute_loss_func"):
        _plain(SFTTrainer, model, tmp_path, tokenizer, _prompts(8)).train()


def test_a_next_token_evaluation_warns(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(BODIES["llama"], tmp_path, tokenizer)
    trainer = _plain(SFTTrainer, model, tmp_path, tokenizer, _prompts(8), eval_strategy="no")
    diffusion_lm.logger.warning_once.cache_clear()
    trainer.evaluate(trainer.train_dataset)
    trainer.evaluate(trainer.train_dataset)
    assert [record.name for record in caplog.records].count(diffusion_lm.__name__) == 1


def test_trainer_smooths_no_labels_of_a_diffusion_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = _model(BODIES["llama"], tmp_path, tokenizer)
    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    with refused(SettingError, "compute_loss_func"):
        Trainer(model=model, args=arguments, train_dataset=data).train()


@pytest.mark.parametrize("trainer", ["sft", "trainer"])
def test_no_documented_call_drops_label_smoothing(
    trainer: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Nor with our collator and our loss function, which takes the place of the smoothing one."""
    model = _model(BODIES["llama"], tmp_path, tokenizer)
    collator = DiffusionCollator.of(model, for_trl=True)
    smoothed: dict[str, Any] = {"label_smoothing_factor": 0.1}
    if trainer == "sft":
        made = _trainer(model, tmp_path, _prompts(8), tokenizer, collator, **smoothed)
    else:
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to=[], remove_unused_columns=False, **smoothed
        )
        data: Any = [{"input_ids": [1, 2, 3]}] * 8
        made = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    with pytest.raises(DlmBridgeError, match="label_smoothing_factor"):
        made.train()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.fast("qwen3-block")
def test_a_model_that_trl_loads_by_its_path_is_refused_too(
    body: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """TRL reads the config's auto_map, which not every config.json has."""
    case = dataclasses.replace(BODIES[body], config={k: v for k, v in BODIES[body].config.items() if k != "auto_map"})
    _model(case, tmp_path, tokenizer)
    with refused(SettingError, "compute_loss_func"):
        _plain(DPOTrainer, str(tmp_path / "model"), tmp_path, tokenizer, Dataset.from_list(PAIRS)).train()


@pytest.mark.parametrize("body", BODIES)
def test_pefts_card_names_the_base(body: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = get_peft_model(_model(BODIES[body], tmp_path, tokenizer), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    card = (tmp_path / "adapter/README.md").read_text()
    assert f"base_model: {tmp_path / 'model'}" in card


def test_a_loss_of_ones_own_is_left_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that is called in training, and logits that a compute_loss_func takes, may be right: they warn once."""
    model = _model(BODIES["llama"], tmp_path, tokenizer)
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    diffusion_lm.logger.warning_once.cache_clear()
    Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.float().square().mean(),
    ).train()
    for _ in range(2):
        model.train().model(torch.arange(4)[None]).last_hidden_state.sum().backward()
    model.eval().model(torch.arange(4)[None])
    assert [record.name for record in caplog.records].count(diffusion_lm.__name__) == 2


def test_without_its_loss_function_nothing_trains(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = _model(BODIES["llama"], tmp_path, tokenizer)
    trainer = _trainer(model, tmp_path, _prompts(8), tokenizer, DiffusionCollator.of(model, for_trl=True))
    trainer.compute_loss_func = None
    with pytest.raises(DlmBridgeError, match="compute_loss_func=dlm_bridge"):
        trainer.train()
