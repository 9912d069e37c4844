"""Fixtures shared by every test: small checkpoints, made once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests, each of several processes, share the cores
torch.set_num_threads(1)

from tests.checkpoints import write_llada  # noqa: E402


@pytest.fixture(scope="session")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA checkpoint (grouped queries, fp32, two shards). Do not write to it."""
    return write_llada(tmp_path_factory.mktemp("hub") / "llada", n_kv_heads=2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
