"""Ragged batches: every row is what it would be alone, and the model sees neither padding nor its positions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.generation import generate
from dlm_bridge.generation.engine import SamplingEngine
from dlm_bridge.loading import load_model
from tests.checkpoints import write_tokenizer
from tests.generation import published
from tests.generation.conftest import EOS, MASK, load, prompts
from tests.generation.scripted import Scripted
from tests.refusals import refused

LENGTHS = (6, 3, 9, 1, 9)


def ragged(side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rows of LENGTHS, the padded batch and its mask. Padding is whatever token, even the mask token."""
    rows = [prompts(1, length, seed=number) for number, length in enumerate(LENGTHS)]
    ids = torch.full((len(rows), 9), MASK)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        columns = slice(9 - row.shape[1], 9) if side == "left" else slice(0, row.shape[1])
        ids[number, columns], mask[number, columns] = row[0], 1
    return rows, ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "more", [{}, {"cfg_scale": 1.0}, {"seed": 3, "temperature": 0.8}, {"seed": 3, "remasking": "random"}]
)
def test_a_row_in_a_ragged_batch_equals_the_row_alone(model: Any, side: str, more: dict[str, Any]) -> None:
    rows, ids, mask = ragged(side)
    arguments = {"gen_length": 16, "block_length": 8, "steps": 8, "eos_token_id": None, **more}
    output = model.generate(ids, attention_mask=mask, **arguments)
    assert output.shape == (5, 25)
    for row, together in zip(rows, output, strict=True):
        alone = model.generate(row, **arguments)[0]
        assert torch.equal(together[9 - row.shape[1] :], alone)  # prompts come back padded on the left
    if not more:
        expected = published.sample(model, rows[0], mask=MASK, gen_length=16, block_length=8, steps=8)
        assert torch.equal(output[0, 3:], expected[0])


class OperatorCount(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {"remasking": "low_confidence"},
        {"threshold": 0.9, "cache": "dual"},
        {"algorithm": "mdlm"},
        {"algorithm": "dream", "alg": "entropy", "block_length": None},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
@pytest.mark.fast("dream-entropy-None", "0.9-dual")
def test_a_steps_operators_do_not_grow_with_the_rows(model: Any, settings: dict[str, Any]) -> None:
    def operators(batch: int, gen_length: int) -> int:
        lengths = [3 + 2 * (row % 3) for row in range(batch)]
        ids, mask = torch.full((batch, 7), EOS), torch.zeros((batch, 7), dtype=torch.long)
        for row, length in enumerate(lengths):
            ids[row, -length:], mask[row, -length:] = prompts(1, length, seed=row), 1
        arguments = {"gen_length": gen_length, "block_length": 16, "steps": gen_length, "eos_token_id": None}
        with OperatorCount() as counted:
            model.generate(ids, attention_mask=mask, **{**arguments, **settings})
        return counted.count

    few, many = ([operators(batch, length) for length in (16, 32)] for batch in (3, 9))
    assert many[1] - many[0] == few[1] - few[0]  # what a block costs; before the first, rows are laid out one by one


def test_the_model_gets_a_mask_and_positions_per_row() -> None:
    model = Scripted(torch.zeros(6, 4))
    ids = torch.tensor([[1, 1, 1, 1], [2, 2, 0, 0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    output = generate(model, ids, attention_mask=mask, gen_length=2, cfg_scale=1.0, eos_token_id=None)
    assert isinstance(output, torch.Tensor)
    assert output[:, :4].tolist() == [[1, 1, 1, 1], [0, 0, 2, 2]]
    call = model.calls[0]
    mask_rows = [[1] * 6, [1, 1, 1, 1, 0, 0]]  # every row begins in the first column
    assert call["attention_mask"].tolist() == mask_rows * 2  # once with the prompt, once without
    assert call["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 4
    assert (call["input_ids"][2:] == 3).all()


def test_ties_are_broken_as_they_are_alone() -> None:
    row, mask = torch.tensor([[1, 1]]), torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    arguments = {"gen_length": 40, "block_length": 40, "steps": 4, "eos_token_id": None}
    alone, together = Scripted(torch.zeros(42, 4)), Scripted(torch.zeros(45, 4))  # equal confidence everywhere
    generate(alone, row, **arguments)
    generate(together, torch.ones(2, 5, dtype=torch.long), attention_mask=mask, **arguments)
    assert len(alone.calls) == len(together.calls) == 4
    for one, both in zip(alone.calls, together.calls, strict=True):
        assert torch.equal(one["input_ids"][0], both["input_ids"][0, :42])


def test_without_padding_no_mask_is_passed() -> None:
    model = Scripted(torch.zeros(4, 4))
    generate(model, torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2), gen_length=2, eos_token_id=None)
    assert model.calls[0]["attention_mask"] is None
    assert model.calls[0]["position_ids"] is None


def test_the_input_is_not_changed_and_both_names_work(model: Any) -> None:
    ids = prompts(2, 5)
    before = ids.clone()
    first = model.generate(inputs=ids, gen_length=8)
    second = model.generate(input_ids=ids.int(), gen_length=8)
    assert torch.equal(first, second)
    assert torch.equal(ids, before)
    assert torch.equal(first[:, :5], ids)
    assert first.dtype == torch.long


def test_the_mode_is_left_alone_and_the_tokens_can_be_trained_on(model: Any) -> None:
    model.train()
    output = model.generate(prompts(1, 4), gen_length=8, eos_token_id=None)
    assert model.training
    model(output).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.zero_grad()
    model.eval()


def test_a_peft_model_samples_with_its_adapter(folder: Path) -> None:
    model = get_peft_model(load(folder), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    arguments = {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    plain = model.generate(input_ids=prompts(2, 5), **arguments)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    tuned = model.generate(input_ids=prompts(2, 5), **arguments)
    assert not torch.equal(plain, tuned)
    assert torch.equal(generate(model, prompts(2, 5), **arguments), tuned)
    with model.disable_adapter():
        assert torch.equal(model.generate(input_ids=prompts(2, 5), **arguments), plain)
    assert torch.equal(model.merge_and_unload().generate(prompts(2, 5), **arguments), tuned)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_adapters_that_change_the_input_are_refused(folder: Path, tmp_path: Path, kind: Any) -> None:
    """In every way to `generate`, and in loading: without their tokens the texts would be the base model's."""
    write_tokenizer(folder, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"})
    model = get_peft_model(load(folder), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    ids = prompts(1, 4)
    for sample in (
        lambda: model.generate(input_ids=ids, gen_length=4),
        lambda: generate(model, ids, gen_length=4),
        lambda: SamplingEngine(model, {"gen_length": 4}, max_rows=1),
    ):
        with refused(CheckpointError, None, model.active_peft_config.peft_type.value):
            sample()
    model.save_pretrained(tmp_path / "adapter")
    with refused(CheckpointError, tmp_path / "adapter"):
        load_model(tmp_path / "adapter", dtype="keep")


def test_a_dispatched_model_samples(model: Any, folder: Path, tmp_path: Path) -> None:
    devices = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    dispatched = type(model).from_pretrained(
        folder, device_map=devices | {"lm_head": "disk"}, offload_folder=tmp_path / "offload"
    )
    assert dispatched.get_input_embeddings().weight.device.type == "meta"
    undispatched = type(model).from_pretrained(folder)
    ids = prompts(2, 5).clamp(max=EOS - 1)
    assert torch.equal(dispatched.generate(ids, gen_length=8), undispatched.generate(ids, gen_length=8))


def test_a_model_without_weights_is_refused(model: Any) -> None:
    with refused(SettingError, "model", "meta"):
        copy.deepcopy(model).to("meta").generate(prompts(1, 4), gen_length=8)


def test_padding_without_a_mask_is_warned_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dlm_bridge.generation.prompts.logger.warning_once", said.append)
    left, right = torch.tensor([[EOS, EOS, 3], [4, 5, 6]]), torch.tensor([[3, EOS, EOS], [4, 5, 6]])
    for ids in (left[:1], left[1:], left[:, :0], torch.tensor([[EOS, 3], [EOS, 4]])):
        model.generate(ids, gen_length=4)
    model.generate(left, attention_mask=(left != EOS).long(), gen_length=4)
    assert not said
    for ids in (left, right):
        model.generate(ids, gen_length=4)
    assert len(said) == 2
    assert all("padding token 126" in line for line in said)
