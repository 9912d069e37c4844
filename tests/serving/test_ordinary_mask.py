"""Mask tokens in what clients send: text where it is an ordinary token, else refused with what the server offers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from dlm_bridge.loading import LoadedModel, Placement, load_model
from dlm_bridge.serving.web_page import PageModel
from tests.families.diffullama import write_with_ordinary_mask
from tests.serving.conftest import running

SETTINGS = {"gen_length": 12, "seed": 1, "diffusion_steps": 6, "eos_token_id": None}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_with_ordinary_mask(tmp_path_factory.mktemp("models") / "diffullama")
    return load_model(folder, Placement("cpu"), family="diffullama")


def test_an_ordinary_mask_token_is_prompted_and_written(loaded: LoadedModel) -> None:
    body = {"prompt": "the cat", "max_tokens": 12, "seed": 1, "diffusion_steps": 6, "ignore_eos": True}
    with running(loaded) as server:
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert "the" in text
        assert text == server.alone("the cat", **SETTINGS)
    page = PageModel(loaded.model, loaded.tokenizer, "tiny", diffusion=True)
    try:
        shown = {"steps": "6", "gen_length": "12"}
        for mode, prompt in (("Continue", "the cat"), ("Fill in [MASK:n]", "the [MASK:3] cat")):
            *_, last = page.sample(mode, prompt, "diffullama", shown)
            assert "refusal" not in last
    finally:
        page.close()


def test_a_mask_token_of_its_own_is_refused(llada: Path) -> None:
    loaded = load_model(llada, Placement("cpu"))
    with running(loaded) as server:
        body = {"prompt": ["x", "a<mask>"], "max_tokens": 4}
        answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "prompt[1]" in message
        assert "259" in message
        assert "fill" not in message  # the server does not
    page = PageModel(loaded.model, loaded.tokenizer, "tiny", diffusion=True)
    try:
        *_, last = page.sample("Continue", "a<mask>", "llada", {"gen_length": "4"})
        assert "259" in last
        assert "Fill in" in last
    finally:
        page.close()
