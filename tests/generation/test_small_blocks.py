"""Fast-dLLM v2's cache of the block itself: the published schedule, by hand, and rows that are not equally far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.samplers.fast_dllm_v2 import SmallBlockPredictor
from tests.generation.test_caches import load_case
from tests.generation.test_families import DIFFUSION
from tests.refusals import refused

BLOCK = 8
CASE = next(case for case in DIFFUSION if case.id == "fast_dllm_v2-tied")


def load_varied(folder: Path) -> tuple[Any, int]:
    """In float64, with weights by which a token depends on where it stands and on all around it; its mask token."""
    model, mask = load_case(CASE, folder)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.4 if len(parameter) == model.config.vocab_size else 0.15, generator=generator)
    model.lm_head.weight[mask] = 0  # the embedding, too
    return model, mask


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, int]:
    return load_varied(tmp_path_factory.mktemp("model"))


class Kept:
    """Qwen2's body by hand, for one row: a pass writes its columns' keys and values, and reads all before `end`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.keys: list[Any] = [{} for _ in model.model.layers]
        self.widths: list[int] = []

    def logits(self, row: list[int], columns: range, end: int) -> torch.Tensor:
        self.widths.append(len(columns))
        body, picked = self.model.model, torch.tensor([list(columns)])
        hidden = body.embed_tokens(torch.tensor([row])[:, columns.start : columns.stop])
        cos, sin = body.rotary_emb(hidden, picked)
        for layer, kept in zip(body.layers, self.keys, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                projection(normed).view(1, len(columns), -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            for place, column in enumerate(columns):
                kept[column] = k[:, :, place], v[:, :, place]
            keys, values = (
                torch.stack([kept[column][one] for column in range(end)], dim=2).repeat_interleave(
                    attention.num_key_value_groups, 1
                )
                for one in (0, 1)
            )
            weights = (q @ keys.mT * attention.scaling).softmax(-1)
            hidden = hidden + attention.o_proj((weights @ values).transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: torch.Tensor = self.model.lm_head(body.norm(hidden))[0]
        return logits


@torch.no_grad()
def published(
    model: Any, prompt: list[int], gen: int, mask: int, *, small: int, threshold: float
) -> tuple[list[int], list[int]]:
    """The row, and how many columns the passes of its blocks with masks ran."""
    row, kept = prompt + [mask] * (-(len(prompt) + gen) % BLOCK + gen), Kept(model)
    looks, last = [], torch.empty(0)
    for begin in range(0, len(row), BLOCK):
        whole = range(begin, begin + BLOCK)
        if begin and row[begin] == mask:
            row[begin] = int(last.argmax())
        fresh = False
        for first in range(begin, begin + BLOCK, small):
            while mask in row[first : first + small]:
                columns = range(first, first + small) if fresh and row[first] != mask else whole
                logits = kept.logits(row, columns, begin + BLOCK)
                looks.append(len(columns))
                fresh = True
                ahead = {i: logits[max(i - 1 - columns.start, 0)].softmax(-1) for i in range(first, first + small)}
                open_ = [i for i in ahead if row[i] == mask]
                best = max(open_, key=lambda i: float(ahead[i].max()))
                for i in open_:
                    if i == best or float(ahead[i].max()) > threshold:
                        row[i] = int(ahead[i].argmax())
        last = kept.logits(row, whole, begin + BLOCK)[-1]
    return row[: len(prompt) + gen], looks


def ragged(lengths: tuple[int, ...], seed: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    generator, width = torch.Generator().manual_seed(seed), max(lengths)
    rows = [torch.randint(4, 60, (length,), generator=generator).tolist() for length in lengths]
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return rows, tokens, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("small", [2, 4, 8])
@pytest.mark.fast("4")
def test_tokens_and_forwards_are_the_published_ones(loaded: tuple[Any, int], small: int) -> None:
    model, mask = loaded
    approximate = narrow = 0
    for seed, length in enumerate((0, 1, 7, 8, 10, 13, 16)):
        threshold = (1.0, 0.3, 0.1)[(seed + small.bit_length()) % 3]  # each with each length, at one of the sizes
        prompt = torch.randint(4, 60, (1, length), generator=torch.Generator().manual_seed(seed))
        gen = 24 - length % BLOCK  # as far as a block's end
        settings = {"gen_length": gen, "mask_token_id": mask, "eos_token_id": None, "threshold": threshold}
        settings |= {"small_block_size": small}
        widths: list[int] = []
        hook = model.model.register_forward_pre_hook(
            lambda module, args, kwargs, widths=widths: widths.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        found = model.generate(prompt, **settings, cache="dual")[0].tolist()
        hook.remove()
        expected, looks = published(model, prompt[0].tolist(), gen, mask, small=small, threshold=threshold)
        assert found == expected
        if small < BLOCK:
            assert widths.count(small) == looks.count(small)
            narrow += looks.count(small)
        approximate += found != model.generate(prompt, **settings)[0].tolist()
    assert (approximate > 0) == (narrow > 0) == (small < BLOCK)


def test_a_row_is_what_it_is_alone(loaded: tuple[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others need: rows at one small block or at several, which look at it alone or at the whole block,
    and which end apart."""
    model, mask = loaded
    shared: set[int] = set()
    view_of_each = SmallBlockPredictor._ragged_view

    def seen(self: SmallBlockPredictor, width: int) -> Any:
        shared.add(width)
        return view_of_each(self, width)

    monkeypatch.setattr(SmallBlockPredictor, "_ragged_view", seen)
    for seed in range(4):
        rows, tokens, real = ragged((13, 5, 16, 10), seed)
        settings = {"gen_length": 24, "mask_token_id": mask, "pad_token_id": 0, "cache": "dual"}
        settings |= {"small_block_size": 4, "threshold": 0.3}
        text = model.generate(tokens, attention_mask=real, **settings, eos_token_id=None)
        for row, line in zip(rows, text.tolist(), strict=True):
            assert line[16 - len(row) :] == published(model, row, 24, mask, small=4, threshold=0.3)[0]
        stops = sorted({int(text[0, 20]), int(text[1, 27])})
        stopped = model.generate(tokens, attention_mask=real, **settings, eos_token_id=stops).tolist()
        for line, free in zip(stopped, text.tolist(), strict=True):
            end = next((i for i in range(16, 40) if free[i] in stops), 39)
            assert line[16 : end + 1] == free[16 : end + 1]
            assert not any(line[end + 1 :])
    assert shared == {4, BLOCK}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7, "seed": 3},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3, "min_new_tokens": 9, "eos_token_id": list(range(4, 30))},
    ],
    ids=["drawn", "left to right", "penalised"],
)
@pytest.mark.fast("drawn")
def test_with_other_settings(loaded: tuple[Any, int], more: dict[str, Any]) -> None:
    model, mask = loaded
    rows, tokens, real = ragged((13, 5, 10), 1)
    settings = {"gen_length": 20, "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None, **more}
    settings |= {"small_block_size": 4, "threshold": 0.3, "cache": "dual"}
    text = model.generate(tokens, attention_mask=real, **settings).tolist()
    for row, line in zip(rows, text, strict=True):
        alone = model.generate(torch.tensor([row]), **settings)[0].tolist()
        padded = alone + [0] * (len(line) - 13)
        assert line[13:] == padded[len(row) : len(row) + len(line) - 13]
        assert mask not in line[13:]


def test_holes_are_filled(loaded: tuple[Any, int]) -> None:
    model, mask = loaded
    _, tokens, real = ragged((21, 11), 2)
    tokens[0, [0, 3, 4, 5, 8, 17]], tokens[1, [12, 13, 18]] = mask, mask
    settings = {"infill": True, "mask_token_id": mask, "pad_token_id": 0, "eos_token_id": None}
    settings |= {"small_block_size": 4, "threshold": 0.3, "cache": "dual"}
    text = model.generate(tokens, attention_mask=real, **settings)
    assert torch.equal(text[tokens != mask], tokens[tokens != mask])
    assert not (text == mask).any()
    assert torch.equal(model.generate(tokens[1:, 10:], **settings), text[1:, 10:])


def test_bad_input(loaded: tuple[Any, int]) -> None:
    model, mask = loaded
    settings = {"gen_length": 8, "mask_token_id": mask, "eos_token_id": None, "cache": "dual"}
    with refused(SettingError, "cache", "dual"):
        model.generate(torch.tensor([[5]]), **settings, algorithm="sdar")
