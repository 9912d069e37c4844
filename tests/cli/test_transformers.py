"""`dlm-bridge transformers`: transformers' own server answers with a diffusion model, whole and streamed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlm_bridge.cli.app import main
from dlm_bridge.models.auto_classes import register_model_names
from dlm_bridge.serving.command import refuse_chats_without_template
from tests.cli.conftest import TEMPLATE

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16, "temperature": 0.0}


@pytest.fixture(scope="module")
def chatty(llada: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLaDA with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "llada"
    shutil.copytree(llada, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(chatty: Path) -> Iterator[str]:
    with serving(chatty) as address:
        yield address


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of transformers' server, asked for continuous batching, which it has to leave out."""
    pytest.importorskip("openai")
    serve = pytest.importorskip("transformers.cli.serve")
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    register_model_names()
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("transformers.cli.serving.server")
        patch.setattr(module, "build_server", module.build_server)  # put back afterwards
        refuse_chats_without_template()
        running = serve.Serve(
            str(folder), device="cpu", port=port, host="127.0.0.1", continuous_batching=True, non_blocking=True
        )
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
        running.kill_server()


def expected(folder: Path, **settings: Any) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("user: hi\nassistant: ", return_tensors="pt", add_special_tokens=False)["input_ids"]
    return tokenizer.decode(model.generate(ids, **settings)[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_diffusion_model_answers_a_chat(server: str, chatty: Path) -> None:
    import httpx

    answer = httpx.post(f"{server}/v1/chat/completions", json=BODY, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == expected(chatty, gen_length=16)


def test_a_model_without_a_chat_template_refuses_chats(llada: Path) -> None:
    with serving(llada) as address:
        import httpx

        answer = httpx.post(f"{address}/v1/chat/completions", json=BODY, timeout=120)
    assert answer.status_code == 400
    assert "chat template" in answer.json()["error"]["message"]


def test_its_blocks_are_streamed_as_they_are_committed(server: str, chatty: Path) -> None:
    """`transformers chat` sends a generation config, which can contain a sampler's settings."""
    import httpx

    config = json.dumps({"max_new_tokens": 16, "block_length": 4, "do_sample": False})
    body = {**BODY, "stream": True, "generation_config": config}
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines]
    texts = [part for part in parts if part]
    assert len(texts) > 1
    # The stream holds back bytes of an incomplete character.
    whole = expected(chatty, gen_length=16, block_length=4)
    assert "".join(texts).rstrip("\ufffd") == whole.rstrip("\ufffd") != ""


def test_continuous_batching_is_not_offered(chatty: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(chatty)
    assert not hasattr(model, "init_continuous_batching")
    with pytest.raises(AttributeError, match="LLaDAModelLM"):
        model.generate_batch([[1, 2]], progress_bar=False)


def test_the_launcher_hands_everything_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "transformers", "serve", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None)
    assert "--continuous-batching" in capsys.readouterr().out
