"""A tiny diffusion model with weights, a tokenizer of letters, rows, and a way to run the engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import dlm_bridge  # noqa: F401  registers the families
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.rl.accelerate_engine import train
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder

WORDS = ["<eos>", "<mask>", *"abcdefgh"]
SPECIAL = {"mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}  # of `letters`, in config.json


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are letters: <eos> is 0, <mask> 1, a 2, b 3, ..."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", mask_token="<mask>"
    )


def write_llada(
    folder: Path, vocabulary: int = len(WORDS), seed: int = 0, layers: int = 1, tied: bool = False, heads: int = 2
) -> Path:
    """A LLaDA of a few thousand parameters, with the tokenizer of letters."""
    config = llada_config(
        d_model=16,
        n_heads=heads,
        n_kv_heads=heads,
        n_layers=layers,
        weight_tying=tied,
        mlp_hidden_size=32,
        vocab_size=vocabulary,
        embedding_size=vocabulary,
        max_sequence_length=64,
        mask_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
    )
    del config["auto_map"]
    write_hub_folder(folder, config, llada_tensors(config, seed), shards=1)
    letters().save_pretrained(folder)
    return folder


def write_llama(folder: Path, layers: int = 1, heads: int = 2) -> Path:
    """An autoregressive model of as many parameters, with the same tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def policy(policy_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    prompts = ["ab", "b", "ccd", "da", "ac", "hg", "fe", "gab"]
    path.write_text("".join(json.dumps({"prompt": prompt, "wanted": "c"}) + "\n" for prompt in prompts))
    return path


@pytest.fixture(scope="session")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The share of the completion's four tokens that are the row's wanted letter."""
    path = tmp_path_factory.mktemp("rewards") / "wanted.py"
    path.write_text(
        "def share(prompts, completions, rows):\n"
        "    return [text.count(row['wanted']) / 4 for text, row in zip(completions, rows)]\n"
    )
    return f"{path}:share"


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(policy_folder: Path, problems: Path, reward: str) -> Run:
    """Train in this process and give the rows of metrics.jsonl: run(folder, resume=False, **changed options)."""

    def _run(
        output: Path, resume: bool = False, console: Console | None = None, **changes: Any
    ) -> list[dict[str, Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        values: dict[str, Any] = {
            "model": str(policy_folder),
            "data": [str(problems)],
            "output": str(output),
            "method": "diffu-grpo",
            "steps": 4,
            "global_batch_size": 32,
            "group_size": 8,
            "seq_length": 16,
            "gen_length": 4,
            "lr": 1e-2,
            "lr_schedule": "constant",
            "weight_decay": 0.0,
            "length_variation": 0.0,
            "eval_interval": 0,
            "save_interval": 0,
        }
        values |= {"reward": [reward]} if changes.get("method", "diffu-grpo") != "vrpo" else {}
        train(RLConfig.from_flags(**{**values, **changes}), resume, console or Console(quiet=True))
        return read_metrics(output)

    return _run


def read_metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
