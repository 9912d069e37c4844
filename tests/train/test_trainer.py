"""transformers' own Trainer with DiffusionCollator, once for each body, and what the collator hands to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dlm_bridge.errors import DlmBridgeError, RowError, SettingError
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.train.collator import DiffusionCollator, trl_loss
from tests.families import dream, fast_dllm_v2, illada, sdar, wedlm
from tests.families.case import FamilyCase, all_cases, few
from tests.refusals import refused

MASK = 99
BODIES = {"llama": illada.CASES[0], "qwen2-shifted": dream.CASE, "qwen3-block": sdar.CASES[0]}


def _load(case: FamilyCase, folder: Path) -> Any:
    model = case.load(case.write(folder / "model"))
    model.config.mask_token_id = MASK
    return model


def _samples(count: int) -> list[dict[str, Any]]:
    """Sequences that count up from their prompt, of several lengths."""
    return [
        {
            "input_ids": [(number % 20) + i for i in range(10 + number % 3)],
            "labels": [IGNORE_INDEX] * 2 + [(number % 20) + i for i in range(2, 10 + number % 3)],
            "sample_index": number,
        }
        for number in range(count)
    ]


def _train(model: Any, folder: Path, samples: list[dict[str, Any]], collator: Any, **options: Any) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collator)  # type: ignore[arg-type]
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.fast("qwen3-block")
def test_trainer_learns(body: str, tmp_path: Path) -> None:
    model = _load(BODIES[body], tmp_path)
    collator = DiffusionCollator.of(model)
    losses = _train(model, tmp_path, _samples(480), collator, per_device_train_batch_size=8)
    assert len(losses) == 60
    assert sum(losses[-15:]) < 0.75 * sum(losses[:15])


@pytest.mark.parametrize("case", [*BODIES.values(), fast_dllm_v2.CASES[0]], ids=lambda case: case.id)
@pytest.mark.fast("sdar", "illada")
def test_accumulation_changes_nothing(case: FamilyCase, tmp_path: Path) -> None:
    """Trainer's count of labels is the objective's normaliser over the whole step."""
    runs = []
    for number, (size, steps) in enumerate(((8, 1), (2, 4))):
        model = _load(case, tmp_path / str(number))
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "optim": "sgd"}
        losses = _train(model, tmp_path, _samples(16), DiffusionCollator.of(model), **options)
        runs.append((losses, model.state_dict()))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    assert runs[0][0][0] != runs[0][0][1]
    for name, tensor in runs[0][1].items():
        assert torch.allclose(runs[1][1][name], tensor, atol=1e-5), name


def test_trainers_evaluation_repeats(tmp_path: Path) -> None:
    model = _load(sdar.CASES[0], tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True, disable_tqdm=True)
    arguments.remove_unused_columns = False
    trainer = Trainer(
        model=model, args=arguments, eval_dataset=_samples(10), data_collator=DiffusionCollator.of(model)
    )  # type: ignore[arg-type]
    losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.fast("False-2", "True-0")
def test_evaluations_draw_the_same_noise_for_a_row(tmp_path: Path, workers: int, generator: bool) -> None:
    """Rows without an index, in the midst of training, which draws new noise for each visit; in any order."""
    if generator and workers:
        pytest.skip("a generator is refused with workers")
    model = _load(sdar.CASES[0], tmp_path)
    rows = [{"input_ids": list(range(number, number + 10 + number % 3))} for number in range(12)]
    settings = {"generator": torch.Generator().manual_seed(0)} if generator else {}
    collator = DiffusionCollator.of(model, **settings)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        learning_rate=0.0, num_train_epochs=3, per_device_train_batch_size=4, per_device_eval_batch_size=5,
        eval_strategy="epoch", logging_steps=1, save_strategy="no", dataloader_num_workers=workers,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)  # type: ignore[arg-type]
    trainer.train()
    history = trainer.state.log_history
    evaluations = [row["eval_loss"] for row in history if "eval_loss" in row]
    assert len(evaluations) == 3
    assert len(set(evaluations)) == 1
    assert len({row["loss"] for row in history if "loss" in row}) == 9
    own = DiffusionCollator.of(model, evaluation=True)
    whole = own(rows)["input_ids"]
    parts = torch.cat([own([row])["input_ids"][:, :10] for row in reversed(rows)]).flip(0)
    assert torch.equal(whole[:, :10], parts)
    assert len({tuple((row == MASK).tolist()) for row in whole}) > 6


@pytest.mark.parametrize("column", ["position_ids", "seq_lengths"])
@pytest.mark.parametrize("case", [illada.CASES[0], dream.CASE, sdar.CASES[0]], ids=lambda case: case.id)
def test_packed_samples_are_documents_of_their_own(case: FamilyCase, column: str, tmp_path: Path) -> None:
    """No token of one document changes the logits of another."""
    model = _load(case, tmp_path).requires_grad_(False)
    lengths = [7, 5]
    packed = {"position_ids": [*range(7), *range(5)], "seq_lengths": lengths}[column]
    first, second = list(range(7)), list(range(7, 12))
    rows = [{"input_ids": first + second, column: packed, "sample_index": number} for number in range(4)]
    batch = DiffusionCollator.of(model)(rows)
    other = DiffusionCollator.of(model)([{**row, "input_ids": [*range(30, 37), *second]} for row in rows])
    mine = batch["logits_to_keep"].nonzero()[:, 1] % 12 >= 7
    found, changed = (model(**one).logits for one in (batch, other))
    torch.testing.assert_close(found[mine], changed[mine])
    assert not torch.allclose(found[~mine], changed[~mine])


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
@pytest.mark.fast(*few())
def test_a_collated_batch_costs_what_the_model_says_of_the_clean_one(case: FamilyCase, tmp_path: Path) -> None:
    """For every family: `model(**batch)` is `model(clean, labels, generator)`, with logits of all positions or few."""
    model = _load(case, tmp_path).requires_grad_(False)
    ids = torch.randint(0, MASK, (3, case.length), generator=torch.Generator().manual_seed(1))
    labels, real = ids.clone(), torch.ones_like(ids)
    labels[0, :4] = IGNORE_INDEX
    labels[1, -5:], real[1, -5:] = IGNORE_INDEX, 0
    expected = model(ids, labels=labels, attention_mask=real, generator=torch.Generator().manual_seed(6)).loss
    samples = [
        {"input_ids": tokens, "labels": answer, "attention_mask": mask}
        for tokens, answer, mask in zip(ids.tolist(), labels.tolist(), real.tolist(), strict=True)
    ]
    batch = DiffusionCollator.of(model, generator=torch.Generator().manual_seed(6))(samples)
    assert model(**batch).logits.dim() == 2
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    del batch["logits_to_keep"]
    assert model(**batch).logits.dim() == 3
    assert model(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    halved = model(**batch, num_items_in_batch=2 * int(batch["labels"].ne(IGNORE_INDEX).sum())).loss
    assert halved.item() == pytest.approx(expected.item() / 2, rel=1e-5)


def test_trls_way_to_the_loss(tmp_path: Path) -> None:
    """SFTTrainer keeps the labels from the model and hands them to `compute_loss_func`; without one it would train the
    body with a next-token loss, which is refused."""
    model = _load(sdar.CASES[0], tmp_path)
    batch = DiffusionCollator.of(model, for_trl=True)(_samples(4))
    labels = batch.pop("labels")
    outputs = model(**batch)
    assert outputs.loss > 0
    count = int(labels.ne(IGNORE_INDEX).sum())
    assert torch.equal(trl_loss(outputs, labels), outputs.loss)
    assert trl_loss(outputs, labels, 4 * count).item() == pytest.approx(outputs.loss.item() / 4)
    del batch["targets"], batch["logits_to_keep"]
    with pytest.raises(DlmBridgeError, match="compute_loss_func"):
        model.base_model(**batch)
    with torch.no_grad():
        model.base_model(**batch)  # TRL's metrics
    with refused(SettingError, "for_trl"):
        trl_loss(model(batch["input_ids"]), labels)


def test_prompts_are_never_masked_by_labels_or_trls_columns(tmp_path: Path) -> None:
    model = _load(illada.CASES[0], tmp_path)
    ids = list(range(10, 20))
    answer = [0] * 6 + [1] * 4
    for column in ("completion_mask", "assistant_masks", "labels"):
        values = [token if one else IGNORE_INDEX for token, one in zip(ids, answer, strict=True)]
        sample = {"input_ids": ids, column: values if column == "labels" else answer}
        batch = DiffusionCollator.of(model, pad_to_multiple_of=8)([sample] * 64)
        assert batch["input_ids"].shape == (64, 16)
        masked = batch["input_ids"] == MASK
        assert masked.any(0).tolist() == [False] * 6 + [True] * 4 + [False] * 6, column
        assert (batch["labels"] != IGNORE_INDEX).all(0).tolist() == [False] * 6 + [True] * 4 + [False] * 6
        assert torch.equal(batch["loss_weights"] > 0, masked)
        assert batch["attention_mask"].tolist() == [[True] * 10 + [False] * 6] * 64


def test_noise_repeats_and_differs_by_seed_batch_and_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _load(illada.CASES[0], tmp_path)
    samples = [{"input_ids": list(range(30))} for _ in range(8)]

    def batches(**settings: Any) -> list[torch.Tensor]:
        workers = settings.pop("workers", 0)
        collator = DiffusionCollator.of(model, **settings)
        loader = DataLoader(samples, batch_size=2, collate_fn=collator, num_workers=workers)  # type: ignore[arg-type]
        return [batch["input_ids"] for batch in loader]

    first = torch.cat(batches())
    assert torch.equal(first, torch.cat(batches()))
    assert not torch.equal(first, torch.cat(batches(seed=1)))
    parallel = torch.cat(batches(workers=2))
    for noisy in (first, parallel):
        assert len({tuple(row) for row in noisy.tolist()}) == 8
    monkeypatch.setenv("RANK", "1")
    assert not torch.equal(first, torch.cat(batches()))


def test_noise_of_a_sample_index_is_the_samples_own(tmp_path: Path) -> None:
    model = _load(illada.CASES[0], tmp_path)
    samples = [{"input_ids": list(range(30)), "sample_index": number} for number in range(4)]
    whole = DiffusionCollator.of(model, seed=3)(samples)["input_ids"]
    collator = DiffusionCollator.of(model, seed=3)
    assert torch.equal(torch.cat([collator([sample])["input_ids"] for sample in reversed(samples)]), whole.flip(0))
    uniforms = Uniforms.keyed(3, 0, range(4), 30)
    assert torch.equal(whole == MASK, uniforms.token < ((1 - 1e-3) * uniforms.level + 1e-3)[:, None])


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    model = _load(wedlm.CASES[0], tmp_path)
    with pytest.raises(DlmBridgeError, match="DiffusionCollator"):
        model(torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(DlmBridgeError, match=r"'masked'.* WeDLM"):
        DiffusionCollator.of(model, "masked")
    collator = DiffusionCollator.of(model)
    with refused(RowError, None, "4 input_ids and 3 labels"):
        collator([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3]}])
    with refused(RowError, None, "`input_ids`"):
        collator([{"input_ids": []}])
    batch = collator([{"input_ids": list(range(12))}])
    batch["logits_to_keep"] = 3
    with pytest.raises(DlmBridgeError, match=r"loss_weights.*logits"):
        model(**batch)


def test_an_autoregressive_model_has_no_noise_to_draw() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    with refused(SettingError, "model", "LlamaForCausalLM"):
        DiffusionCollator.of(LlamaForCausalLM(config))
