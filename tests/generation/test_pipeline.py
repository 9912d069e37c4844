"""transformers' text-generation pipeline on a diffusion model: its defaults stay out, a length has both names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

from dlm_bridge.generation import DiffusionGenerationConfig
from tests.checkpoints import write_llada, write_tokenizer

SIZES = {"vocab_size": 272, "embedding_size": 272, "mask_token_id": 259, "eos_token_id": 258, "pad_token_id": 258}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
BLOCKS = {"block_length": 8, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llada(tmp_path_factory.mktemp("pipeline") / "llada", **SIZES)
    write_tokenizer(folder, TOKENIZER)
    return folder


@pytest.fixture
def pipe(folder: Path) -> Any:
    return opened(folder)


def opened(folder: Path, **kwargs: Any) -> Any:
    return pipeline("text-generation", model=str(folder), device="cpu", **kwargs)


def drawn(pipe: Any, text: Any = "abc", **kwargs: Any) -> Any:
    """The tokens that the pipeline returns, prompt included."""
    output = pipe(text, return_tensors=True, **kwargs)
    rows = [one["generated_token_ids"] for [one] in (output if isinstance(text, list) else [output])]
    return rows if isinstance(text, list) else rows[0]


def ours(pipe: Any, **kwargs: Any) -> list[int]:
    ids = torch.tensor([pipe.tokenizer("abc")["input_ids"]])
    return pipe.model.generate(ids, **kwargs)[0].tolist()


@pytest.mark.parametrize(
    "names", [("gen_length",), ("max_new_tokens",), ("max_length",), ("gen_length", "max_new_tokens")]
)
def test_either_name_of_the_length_gives_what_generate_gives(pipe: Any, names: tuple[str, ...]) -> None:
    length = {name: 19 if name == "max_length" else 16 for name in names}
    assert drawn(pipe, **length, **BLOCKS) == ours(pipe, gen_length=16, **BLOCKS)
    config = DiffusionGenerationConfig(**length, block_length=8)
    assert drawn(pipe, generation_config=config, eos_token_id=None) == ours(pipe, gen_length=16, **BLOCKS)


def test_the_samplers_own_defaults_hold(pipe: Any) -> None:
    """Not the pipeline's, which are 256 tokens drawn at temperature 0.7."""
    first = drawn(pipe, eos_token_id=None)
    assert len(first) == 3 + 128  # the published gen_length of LLaDA
    assert first == drawn(pipe, eos_token_id=None) == ours(pipe, eos_token_id=None)


def test_what_is_asked_for_or_stored_is_drawn(pipe: Any) -> None:
    asked = {"gen_length": 16, "temperature": 0.9, "seed": 3, **BLOCKS}
    assert drawn(pipe, **asked) == ours(pipe, **asked) != ours(pipe, **{**asked, "temperature": 0.0})
    pipe.model.generation_config.update(max_new_tokens=24, temperature=0.9)
    assert drawn(pipe, seed=3, **BLOCKS) == ours(pipe, **{**asked, "gen_length": 24})
    assert drawn(pipe, **asked) == ours(pipe, **asked)


def test_a_length_of_the_pipeline_holds_until_a_call_says_another(folder: Path) -> None:
    pipe = opened(folder, gen_length=16, **BLOCKS)
    assert [len(drawn(pipe)), len(drawn(pipe, gen_length=8))] == [19, 11]


def test_a_batch_is_what_each_row_is_alone(pipe: Any) -> None:
    both = drawn(pipe, ["abc", "defgh"], batch_size=2, gen_length=16, **BLOCKS)
    assert [row[-16:] for row in both] == [drawn(pipe, one, gen_length=16, **BLOCKS)[-16:] for one in ("abc", "defgh")]


def test_nothing_of_it_is_saved(tmp_path: Path) -> None:
    config = DiffusionGenerationConfig(eos_token_id=5)
    assert {"max_new_tokens", "do_sample", "temperature"} <= config.to_diff_dict().keys()
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()).keys() == {
        "eos_token_id",
        "transformers_version",
    }
