"""A small LLaDA whose output layer never prefers the mask token, so that the published sampler never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dlm_bridge  # noqa: F401
from tests.checkpoints import write_llada

MASK, EOS, VOCABULARY = 127, 126, 128


def load(folder: Path, **kwargs: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    with torch.no_grad():
        model.lm_head.weight[MASK] = 0
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("generation") / "llada", n_layers=2, n_kv_heads=2)


@pytest.fixture(scope="session")
def model(folder: Path) -> Any:
    return load(folder)


def prompts(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, EOS, (batch, length), generator=torch.Generator().manual_seed(seed))
