"""Checkpoints of runs under Accelerate: the main process writes a model that each process holds, all write shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dlm_bridge.distributed import raised_everywhere
from dlm_bridge.train.accelerate import fsdp
from dlm_bridge.train.checkpoints import (
    STATE,
    damaged_state,
    load_state,
    remove_old_checkpoints,
    save_checkpoint,
    step_folder,
)
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.ema import AveragedModel
from dlm_bridge.train.lora import Adapter


def save_run(
    config: TrainConfig,
    accelerator: Accelerator,
    step: int,
    model: Any,
    optimizer: Any,
    adapter: Adapter | None,
    tokenizer: Any,
    state: dict[str, Any],
    averages: AveragedModel | None = None,
    save_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of `step` and remove old ones; every process calls this together, and gets its folder.

    `model` is the plain one, without Accelerate around it, and of an `adapter` the one in which it is; `optimizer` may
    have Accelerate around it. `state` is the trainer's own, to which the gradient scaler's is added. `save_more` adds
    to the folder, on every process of a run that is sharded and else on the main one. Raises DlmBridgeError on every
    process where the disk refuses.
    """
    output, scaler, main = Path(config.checkpoint.output), accelerator.scaler, accelerator.is_main_process
    sharded = config.parallel.shards
    state = {"scaler": None if scaler is None else scaler.state_dict(), **state}
    if sharded:
        fsdp.reshard_model(model)
        fsdp.save_sharded(
            output, step, model, optimizer, adapter, tokenizer, state, accelerator.device, averages, save_more
        )  # fmt: skip
    with raised_everywhere():
        if main and not sharded:
            state["optimizer"] = optimizer.state_dict()

            def save_beside(folder: Path) -> None:
                if averages is not None:
                    averages.save(folder, model.save_pretrained, tokenizer, main=True)
                if save_more is not None:
                    save_more(folder)

            save_checkpoint(output, step, adapter or model, tokenizer, state, save_beside)
        if main:
            remove_old_checkpoints(output, config.checkpoint.keep_last)
    return step_folder(output, step)


def restore_run(
    config: TrainConfig, accelerator: Accelerator, folder: Path, model: Any, optimizer: Any
) -> dict[str, Any]:
    """Set the optimizer's state and the gradient scaler's to those of a checkpoint, and return the trainer's state;
    `starting_model` has loaded the weights. Every process calls this together."""
    state = load_state(folder)
    load_optimizer(config, folder, model, optimizer, state)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state


def load_optimizer(config: TrainConfig, folder: Path, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Set the optimizer to the one under "optimizer" in a `state`, or where that has none to the sharded one in
    `folder`. Every process calls this together. Raises DlmBridgeError where it is damaged."""
    whole = state.get(fsdp.OPTIMIZER) is not None
    checkpoint = folder if (folder / STATE).is_file() else folder.parent  # of a value model's folder
    with damaged_state(checkpoint / STATE if whole else folder / fsdp.OPTIMIZER, checkpoint):
        if whole and not config.parallel.shards:
            optimizer.load_state_dict(state[fsdp.OPTIMIZER])
        else:
            plain = getattr(optimizer, "optimizer", optimizer)  # without Accelerate around it
            fsdp.load_optimizer(folder, model, plain, state)
