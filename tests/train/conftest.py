"""A tiny model without weights, a tokenizer, a corpus and a way to run the engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from matplotlib.figure import Figure
from rich.console import Console
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from dlm_bridge.train.config import TrainConfig
from tests.checkpoints import llada_config
from tests.train.wandb_standin import wandb  # noqa: F401  a fixture

VOCAB = 288
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60))


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed data go to a folder of this session; `datasets` reads its cache folder from a module attribute."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        datasets.disable_progress_bars()
        yield


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw a loss curve takes longer than most runs here: only tests marked `draws` do."""
    if "draws" not in request.keywords:
        undrawn(monkeypatch)


def undrawn(patch: pytest.MonkeyPatch) -> None:
    """Figures are made, and written as empty files."""
    patch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=VOCAB, special_tokens=["<eos>", "<mask>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", mask_token="<mask>")


@pytest.fixture(scope="session")
def seed_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A config.json and a tokenizer: what --from-scratch needs."""
    folder = tmp_path_factory.mktemp("seed")
    tokenizer.save_pretrained(folder)
    config = llada_config(
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=2,
        mlp_hidden_size=48,
        vocab_size=VOCAB,
        embedding_size=VOCAB,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        max_sequence_length=64,
    )
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "code.txt"
    path.write_text(TEXT)
    return path


Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def values(seed_folder: Path, corpus: Path) -> dict[str, Any]:
    """A short run's options, without the output folder."""
    return run_values(seed_folder, corpus)


def run_values(seed_folder: Path, corpus: Path) -> dict[str, Any]:
    return {
        "model": str(seed_folder),
        "from_scratch": True,
        "data": [str(corpus)],
        "steps": 10,
        "global_batch_size": 8,
        "seq_length": 16,
        "lr": 1e-2,
        "warmup_steps": 2,
        "length_variation": 0.2,
        "eval_interval": 5,
        "save_interval": 4,
    }


@pytest.fixture
def run(values: dict[str, Any]) -> Run:
    """Train in this process and give the rows of metrics.jsonl: run(folder, resume=False, **changed options)."""
    from dlm_bridge.train.accelerate.trainer import train

    def _run(output: Path, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        config = TrainConfig.from_flags(**{**values, "output": str(output), **changes})
        train(config, resume, Console(quiet=True))
        return read_metrics(output)

    return _run


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl; a line that is not whole JSON fails."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def without_speed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what differs from run to run."""
    return [{key: value for key, value in row.items() if not key.startswith("tokens_per_s")} for row in rows]
