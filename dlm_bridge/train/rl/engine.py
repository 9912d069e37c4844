"""Runs of reinforcement learning from their configuration to their last checkpoint; here those under Accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from rich.console import Console

from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.accelerate.trainer import run
from dlm_bridge.train.config import RLConfig
from dlm_bridge.train.loading import starting_model
from dlm_bridge.train.lora import add_adapter, with_lora
from dlm_bridge.train.rl.accelerate_engine import AccelerateUpdates
from dlm_bridge.train.rl.methods import check_model, load_rows
from dlm_bridge.train.rl.trainer import RLTrainer
from dlm_bridge.train.setup import RunStart, training_errors


@training_errors
def train(config: RLConfig, resume: bool = False, console: Console | None = None) -> Path:
    """Train until `--steps`, a SIGTERM or `--exit-duration`, and return the last checkpoint's folder.

    With `resume` the run in `--output` continues from its newest checkpoint. Raises DlmBridgeError for bad input, for
    rewards that fail and where a loss is NaN.
    """
    console = console or Console(stderr=True, markup=False)
    if config.engine.name == "megatron":
        from dlm_bridge.train.rl.megatron_engine import train_with_megatron

        return train_with_megatron(config, resume, console)
    return run(fsdp.with_launcher_settings(config), resume, console, assembled)


@contextlib.contextmanager
def assembled(
    config: RLConfig, accelerator: Accelerator, start: RunStart, console: Console
) -> Iterator[RLTrainer[Any]]:
    """Model, reference, optimizer and rows of a run; what it started ends with it."""
    starting = starting_model(config, start.checkpoint, accelerator.is_main_process)
    model = starting.model
    kind, tokenizer = check_model(config, model)
    config = with_lora(config, model)
    with accelerator.main_process_first():
        rows, held_out = load_rows(config, kind, model, tokenizer)
    with fsdp.process_group(config):
        adapter = add_adapter(config, model, start.checkpoint, starting.weights) if config.model.adapts else None
        engine = AccelerateUpdates(config, accelerator, starting, adapter, tokenizer, start.checkpoint)
        with contextlib.closing(kind(config, engine, tokenizer, rows, held_out, start.output, console)) as trainer:
            yield trainer
