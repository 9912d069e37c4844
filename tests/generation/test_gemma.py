"""DiffusionGemma, with the tokens of transformers' own `generate`: the command, its views, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_bridge.generation.offline import write_texts
from dlm_bridge.generation.token_sampling import row_seeds
from dlm_bridge.loading import LoadedModel, load_model
from tests.canvas_models import CANVAS, CONTEXT, has_class, keyed_draws, write_canvas_model
from tests.cli.conftest import Cli, cli  # noqa: F401  a fixture

pytestmark = has_class
STEPS = 3
SHORT = ["--steps", STEPS, "--seed", 1, "--set", "eos_token_id=null"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_canvas_model(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


def by_hand(loaded: LoadedModel, text: str, seed: int = 1, **settings: Any) -> list[int]:
    """The new tokens by transformers alone, if it draws what a row of this prompt draws at this seed."""
    ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"]
    own = {"max_denoising_steps": STEPS, "eos_token_id": None, **settings}
    with keyed_draws(row_seeds(seed, ids.tolist())[0]):
        return loaded.model.generate(ids, **own).sequences[0, ids.shape[1] :].tolist()


def test_the_tokens_are_those_of_transformers_own_generate(cli: Cli, folder: Path, loaded: LoadedModel) -> None:  # noqa: F811
    state = torch.random.get_rng_state()
    report = cli.report(folder, "--prompt", "the cat", "--gen-length", 12, *SHORT)
    assert torch.equal(torch.random.get_rng_state(), state)
    expected = by_hand(loaded, "the cat", max_new_tokens=12)
    assert len(expected) == 2 * CANVAS
    assert report["samples"][0]["token_ids"] == expected[:12]  # not more than were asked for
    assert (report["family"], report["tokens"], report["forwards"]) == ("diffusion_gemma", 12, 2 * STEPS)
    settings = [
        f"--set={setting}" for setting in ("t_max=0.9", "t_min=0", "entropy_bound=3", "confidence_threshold=9")
    ]
    other = cli.report(folder, "--prompt", "the cat", "--gen-length", 8, *SHORT, *settings)
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    bound = EntropyBoundSamplerConfig(entropy_bound=3.0)
    own = {"t_max": 0.9, "t_min": 0.0, "sampler_config": bound, "confidence_threshold": 9.0, "max_new_tokens": 8}
    assert other["samples"][0]["token_ids"] == by_hand(loaded, "the cat", **own)


def test_a_text_ends_at_its_end_token(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = loaded.tokenizer("the cat")["input_ids"]
    whole = by_hand(loaded, "the cat", max_new_tokens=16)
    settings = {"gen_length": 16, "steps": STEPS, "seed": 1, "eos_token_id": whole[3]}
    found = write_texts(loaded.model, loaded.tokenizer, [prompt], settings)
    assert found.token_ids[0] == tuple(whole[: whole.index(whole[3]) + 1])
    assert found.forwards == STEPS  # no second canvas
    monkeypatch.setattr(loaded.model.config.text_config, "eos_token_id", whole[3])
    del settings["eos_token_id"]
    again = write_texts(loaded.model, loaded.tokenizer, [prompt], settings)
    assert again.token_ids == found.token_ids


def test_a_file_of_prompts(cli: Cli, folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"prompt": "the cat"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "a"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = []
    for size in ("1", "2", "auto"):
        out = tmp_path / f"{size}.jsonl"
        words = [*SHORT, "--gen-length", 8, "--batch-size", size, "--output", out]
        code, _, err = cli(folder, "--jsonl", tmp_path / "in.jsonl", *words)
        assert code == 0, err
        written = [json.loads(line) for line in out.read_text().splitlines()]
        assert [row["tokens"] for row in written] == [8, 8, 8]
        texts.append([row["token_ids"] for row in written])
    assert texts[0] == texts[1] == texts[2]  # however they are batched
    alone = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    assert alone[0]["token_ids"] == by_hand(loaded, "the cat", max_new_tokens=8)
    assert alone[2]["token_ids"] == by_hand(loaded, "a", max_new_tokens=8)
    words = [*SHORT, "--gen-length", 8, "--set", "cache_implementation=dynamic"]
    report = cli.report(folder, "--prompt", "the cat", *words)  # transformers' own loop, with its own random numbers
    ids = loaded.tokenizer("the cat", return_tensors="pt")["input_ids"]
    torch.manual_seed(1)
    theirs = loaded.model.generate(ids, max_denoising_steps=STEPS, eos_token_id=None, max_new_tokens=8)
    assert report["samples"][0]["token_ids"] == theirs.sequences[0, ids.shape[1] :].tolist()
    two = [
        write_texts(
            loaded.model,
            loaded.tokenizer,
            [loaded.tokenizer("the cat")["input_ids"]],
            {"gen_length": 8, "steps": STEPS, "seed": 1, "num_return_sequences": 2, "eos_token_id": None},
        )
    ]
    assert len(set(two[0].token_ids)) == 2


def test_another_canvas_than_the_model_was_trained_with_is_said(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = loaded.tokenizer("the cat")["input_ids"]
    settings = {"gen_length": 8, "steps": STEPS, "seed": 1, "eos_token_id": None}
    found = write_texts(loaded.model, loaded.tokenizer, [prompt], settings)
    assert not caplog.records
    other = write_texts(loaded.model, loaded.tokenizer, [prompt], {**settings, "block_length": 4})
    assert (other.forwards, found.forwards) == (2 * STEPS, STEPS)
    (said,) = [record.getMessage() for record in caplog.records]
    assert {"4", str(CANVAS)} <= set(said.replace(":", "").split())
    assert loaded.model.config.canvas_length == CANVAS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "see <image>"], "image"),
        (["--unconditional"], "at least one token"),
        (["--prompt", "x", "--gen-length", CONTEXT], f"context of {CONTEXT}"),
        (["--prompt", "x", "--block-length", 2 * CONTEXT], "--block-length"),
        (["--prompt", "x", "--temperature", 0.5], "t_max"),
        (["--prompt", "x", "--set", "nonsense=1"], "nonsense"),
        (["--prompt", "x", "--steps", 0], "steps"),
        (["--prompt", "x", "--steps", 2, "--set", "max_denoising_steps=3"], "max_denoising_steps"),
        (["--prompt", "x", "--set", "t_min=0.9"], "t_max"),
        (["--prompt", "x", "--set", "cache_implementation=none"], "cache_implementation"),
    ],
)
def test_what_is_refused(cli: Cli, folder: Path, words: list[Any], said: str) -> None:  # noqa: F811
    code, _, err = cli(folder, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


def test_an_image_in_a_file_of_prompts_is_named_by_its_line(cli: Cli, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": content}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = cli(folder, "--jsonl", tmp_path / "in.jsonl", "--gen-length", 4, *SHORT)
    assert code == 2
    assert "in.jsonl:2" in err
    assert "image" in err
