"""A tiny autoregressive model, its diffusion forms, rows, and a way to distil in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console

from dlm_bridge.convert.to_dlm import convert_to_dlm
from dlm_bridge.train.accelerate.trainer import build_accelerator
from dlm_bridge.train.distill.config import DistillConfig
from dlm_bridge.train.distill.trainer import DistillTrainer, assembled, train
from dlm_bridge.train.setup import RunStart
from tests.rl.conftest import read_metrics, write_llama

FORMS = ("bidirectional", "shifted", "block-causal", "block-causal-shifted", "idlm", "nemotron")
ROWS = [("ab", "cde"), ("b", "fghab"), ("ccd", "ef"), ("da", "ghgh")]


@pytest.fixture(scope="session")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("parent"))


@pytest.fixture(scope="session")
def forms(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The parent as a diffusion model of a form, by name."""
    made: dict[str, Path] = {}

    def form(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("forms") / name
            size = {"block-causal": 4, "block-causal-shifted": 4, "idlm": 3, "nemotron": 4}.get(name)
            more = {} if size is None else {"block_size": size}
            convert_to_dlm(parent, made[name], to=name, mask_token="<mask>", **more)
        return made[name]

    return form


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in ROWS))
    return path


Settings = Callable[..., DistillConfig]


@pytest.fixture
def settings(forms: Callable[[str], Path], rows: Path, tmp_path: Path) -> Settings:
    def made(form: str = "block-causal", **changes: Any) -> DistillConfig:
        values: dict[str, Any] = {
            "model": str(forms(form)),
            "data": [str(rows)],
            "output": str(tmp_path / "run"),
            "steps": 4,
            "global_batch_size": 4,
            "seq_length": 16,
            "split": "100,0,0",
            "lr": 1e-2,
            "lr_schedule": "constant",
            "lora_rank": 2,
            "precision": "fp32",
            "eval_interval": 0,
            "save_interval": 0,
        }
        return DistillConfig.from_flags(**{**values, **changes})

    return made


@pytest.fixture
def run() -> Callable[..., list[dict[str, Any]]]:
    """Train in this process and return the rows of metrics.jsonl."""

    def _run(config: DistillConfig, resume: bool = False) -> list[dict[str, Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        train(config, resume, Console(quiet=True))
        return read_metrics(Path(config.checkpoint.output))

    return _run


@contextlib.contextmanager
def opened(config: DistillConfig) -> Iterator[DistillTrainer]:
    """A run's trainer before its first step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    start = RunStart(Path(config.checkpoint.output), 0, None, None)
    with assembled(config, build_accelerator(config), start, Console(quiet=True)) as trainer:
        yield trainer
