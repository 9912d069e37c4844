"""Tiny models of both kinds with tokenizers, and `dlm-bridge generate` in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dlm_bridge.cli.app import main
from tests.checkpoints import write_llada, write_tokenizer

MASK, EOS = 259, 258
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "clean_up_tokenization_spaces": False,
}


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA whose tokenizer has no chat template."""
    sizes = {"vocab_size": 272, "embedding_size": 272, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
    folder = write_llada(tmp_path_factory.mktemp("models") / "llada", **sizes)
    write_tokenizer(folder, TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny autoregressive model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.5,
        eos_token_id=EOS,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Cli:
    """Runs the command in this process: its exit code, stdout and stderr."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, *words: Any) -> tuple[int, str, str]:
        self._patch.setattr(sys, "argv", ["dlm-bridge", "generate", *map(str, words)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = self._capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    def report(self, *words: Any) -> dict[str, Any]:
        code, out, err = self(*words, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)
