"""Ways to run the Megatron engine in this process, on the CPU, with the models and data of `tests.train`."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dlm_bridge import Layout
from dlm_bridge.train.config import TrainConfig
from tests.conftest import end_megatron
from tests.parallel import precision_aware
from tests.train.conftest import (
    Run,
    _cache,
    _undrawn,
    corpus,
    read_metrics,
    run,
    seed_folder,
    tokenizer,
    values,
)
from tests.train.wandb_standin import wandb


@contextlib.contextmanager
def megatron_alone() -> Iterator[None]:
    """megatron-core on the CPU, in a world of one, and nothing of it afterwards."""
    pytest.importorskip("megatron.core")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLM_BRIDGE_PLATFORM", "cpu")
        try:
            yield
        finally:
            end_megatron()


@pytest.fixture
def on_megatron(values: dict[str, Any]) -> Iterator[Run]:
    """`run` on the Megatron engine, on the CPU, in a world of one."""
    pytest.importorskip("megatron.core")
    from dlm_bridge.parallel.train.assembly import train

    def _run(output: Path, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        config = TrainConfig.from_flags(**{**values, "engine": "megatron", "output": str(output), **changes})
        train(config, resume, Console(quiet=True))
        return read_metrics(output)

    with megatron_alone():
        yield _run


@pytest.fixture
def bf16_run(values: dict[str, Any]) -> Iterator[Run]:
    """`run` in bf16 on the Megatron engine, with a stand-in for Transformer Engine's Adam where it has settings."""
    from dlm_bridge.parallel.train.assembly import train

    def _run(output: Path, resume: bool = False, **changes: Any) -> list[dict[str, Any]]:
        fixed = {"engine": "megatron", "precision": "bf16", "lr_schedule": "constant", "eval_interval": 0}
        config = TrainConfig.from_flags(**{**values, **fixed, "output": str(output), **changes})
        with pytest.MonkeyPatch.context() as patch:
            if config.engine.megatron:
                precision_aware.install(patch)
            train(config, resume, Console(quiet=True))
        return read_metrics(output) if (output / "metrics.jsonl").exists() else []

    with megatron_alone():
        yield _run


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """megatron-core's groups of one process, on the CPU."""
    from dlm_bridge.parallel import groups

    with megatron_alone():
        groups.initialize(Layout())
        yield
