"""A mask token that texts contain, as DiffuLLaMA's: text where it was not masked, predicted where it was."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedTokenizerFast

from dlm_bridge.data.blocks import Epochs, split
from dlm_bridge.data.documents import find_files, pack
from dlm_bridge.errors import SettingError
from dlm_bridge.loading.source import ModelSource
from dlm_bridge.models.families import families, family_by_name
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import OBJECTIVES, build_objective, family_objective
from tests.families import diffullama
from tests.refusals import refused
from tests.train.conftest import TEXT, VOCAB, Run
from tests.train.test_objectives_editing import CONFIG

LENGTH, ROWS = 16, 8
OPTIONS: dict[str, Any] = {
    "family": "diffullama", "steps": 1, "seq_length": LENGTH, "global_batch_size": ROWS, "length_variation": 0.0,
    "eval_interval": 0,
}  # fmt: skip


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> tuple[Path, int]:
    """A DiffuLLaMA config with the commonest piece of the corpus as mask token, and that token."""
    token = Counter(tokenizer(TEXT, add_special_tokens=False)["input_ids"]).most_common(1)[0][0]
    config = {**diffullama.CONFIG, "vocab_size": VOCAB, "num_hidden_layers": 2, "mask_token_id": token}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder, token


def check_first_loss(run: Run, folder: Path, tokenizer: PreTrainedTokenizerFast, corpus: Path) -> None:
    """The first loss of a run, written out: the mean over masked positions of CE / t of the logits one before."""
    place, token = write_model(folder / "model", tokenizer)
    rows = run(folder / "run", model=str(place), data=[str(corpus)], **OPTIONS)
    model = ModelSource(str(place), "diffullama", seed=0).load()
    train, _, _ = split(pack(find_files([str(corpus)]), tokenizer, LENGTH), (0.99, 0.01, 0.0))
    ids = Epochs(train, seed=0).rows(range(ROWS)).input_ids
    uniforms = Uniforms.keyed(0, 1, range(ROWS), LENGTH)
    t = (0.999 * uniforms.level + 1e-3)[:, None].expand(ROWS, LENGTH)
    masked = uniforms.token < t
    masked[:, 0] = False
    assert (masked & (ids == token)).any()
    assert (~masked & (ids == token)).any()
    logits = model(input_ids=torch.where(masked, token, ids)).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    wanted = (losses / t[:, 1:])[masked[:, 1:]].sum() / masked.sum()
    assert rows[0]["loss"] == pytest.approx(wanted.item(), rel=1e-5)


def test_a_run_on_texts_with_the_mask_token(
    tmp_path: Path, run: Run, tokenizer: PreTrainedTokenizerFast, corpus: Path
) -> None:
    check_first_loss(run, tmp_path, tokenizer, corpus)


def test_the_loss_of_a_model_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    place, token = write_model(tmp_path / "model", tokenizer)
    objective = family_objective(ModelSource(str(place), "diffullama", seed=0).load())
    assert objective.mask_token_id == token
    assert objective.mask_token is None


@pytest.mark.parametrize(
    "name", [name for name, spec in OBJECTIVES.items() if spec.fits(family_by_name("diffullama")) and spec.kind.masks]
)
def test_noise_does_not_depend_on_which_token_is_the_mask(name: str) -> None:
    """A text with the mask token is noised as one that has another token in its place."""
    objective = build_objective(name, 5, ordinary_mask=True)
    other = dataclasses.replace(objective, mask_token_id=9)
    text = torch.tensor([[5, 1, 5, 2, 5, 5, 3, 4, 5, 6, 7, 5]])
    uniforms = Uniforms.keyed(3, 1, [0], text.shape[1])
    steps = torch.arange(text.shape[1])[None] if objective.trajectories else None
    found, wanted = (each.noise(text, uniforms, commit_steps=steps) for each in (objective, other))
    assert 0 < found.mask.sum() < text.numel() - 1
    for field in ("mask", "counted", "targets", "weights", "normaliser"):
        assert torch.equal(getattr(found, field), getattr(wanted, field)), field
    masks = wanted.input_ids == 9
    assert torch.equal(found.input_ids, torch.where(masks, 5, text))


def test_edits_know_their_masks_by_position() -> None:
    """The edit labels of a text with the mask token are those with another token in its place."""
    settings: dict[str, Any] = {"config": CONFIG, "edit_probability": 0.5, "indel_probability": 0.6}
    objective = build_objective("block_editing", 5, ordinary_mask=True, **settings)
    text = torch.tensor([[5, 1, 5, 2, 5, 5, 3, 4, 5, 6, 7, 5, 5, 1, 2, 5]] * 8)
    uniforms = Uniforms.keyed(3, 1, range(8), text.shape[1])
    found = objective.noise(text, uniforms)
    # A token that is in no text, and that random tokens, all but the mask, are mapped to the same way.
    wanted = dataclasses.replace(objective, mask_token_id=CONFIG.vocab_size + 5).noise(text, uniforms)
    masks = wanted.input_ids == CONFIG.vocab_size + 5
    assert masks.any()
    same = (found.input_ids == wanted.input_ids) | masks
    random_tokens = ~same  # from the mask token on they are moved by one
    assert torch.equal(found.input_ids[random_tokens], wanted.input_ids[random_tokens] + 1)
    assert (found.input_ids[masks] == 5).all()
    assert torch.equal(found.weights, wanted.weights)
    assert torch.equal(found.terms, wanted.terms)


def test_noise_of_random_tokens() -> None:
    """Uniform noise replaces by any token of the vocabulary, that of the masks too; a hybrid is refused."""
    config = SimpleNamespace(vocab_size=12)
    text = torch.full((16, 64), 5)
    uniforms = Uniforms.keyed(0, 1, range(16), 64)
    noisy = build_objective("uniform", 5, config=config, ordinary_mask=True).noise(text, uniforms)
    assert noisy.noise is not None
    assert noisy.noise.mask_token_id == -1
    assert torch.isfinite(noisy.weights).all()
    assert set(noisy.input_ids.unique().tolist()) == set(range(12))
    with refused(SettingError, "objective", "5"):
        build_objective("uniform_hybrid", 5, config=config, ordinary_mask=True)


def test_only_diffullamas_mask_is_an_ordinary_token() -> None:
    assert [spec.name for spec in families() if spec.ordinary_mask] == ["diffullama"]
