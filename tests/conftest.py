"""Fixtures shared by every test: small checkpoints, made once."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests, each of several processes, share the cores
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: its kernels run on the CPU

import torch

torch.set_num_threads(1)

import typer.main  # noqa: E402
import typer.testing  # noqa: E402

from tests.checkpoints import write_llada  # noqa: E402


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, wanted in (("gpu", 1), ("gpu2", 2)):
        found = item.get_closest_marker(marker)
        if found is not None and "optional" not in found.kwargs and torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} GPU" + "s" * (wanted > 1))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage, of which checkpoints ask for many, need walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _commands() -> Iterator[None]:
    """Typer makes all commands anew whenever one is called; here once."""
    made = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture(scope="session")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaDA checkpoint (grouped queries, fp32, two shards). Do not write to it."""
    return write_llada(tmp_path_factory.mktemp("hub") / "llada", n_kv_heads=2)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
