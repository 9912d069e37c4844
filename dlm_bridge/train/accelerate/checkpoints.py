"""Checkpoints of the Accelerate engine. The main process writes a replicated model. Of a sharded one all processes
write the optimizer state, and rank 0 the weights, gathered one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dlm_bridge.convert.checkpoints.huggingface import publish_config
from dlm_bridge.convert.checkpoints.in_memory import hub_tensors, stored_tensors
from dlm_bridge.convert.formats.dcp_reader import RestrictedReader
from dlm_bridge.convert.formats.hub_weights import SAFETENSORS_INDEX, HubWriter, ShardFile, index_text, plan_by_size
from dlm_bridge.distributed import from_all, raised_everywhere
from dlm_bridge.errors import one_line
from dlm_bridge.generation.config import published_generation_config
from dlm_bridge.loading.lazy import first_row
from dlm_bridge.models.diffusion_lm import copy_remote_code
from dlm_bridge.train.accelerate.fsdp import full_tensor, reshard_model
from dlm_bridge.train.checkpoints import (
    STATE,
    atomic_checkpoint,
    checkpoint_errors,
    damaged_state,
    load_state,
    rank_files,
    remove_old_checkpoints,
    step_folder,
    temporary_folder,
    write_state,
)
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.early_stopping import KeptCheckpoints
from dlm_bridge.train.ema import AveragedModel
from dlm_bridge.train.lora import Adapter

OPTIMIZER = "optimizer"  # subfolder with the optimizer state, a torch distributed checkpoint
SHARD_SIZE = 5 * 10**9  # maximum bytes of a safetensors file


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
    kept: KeptCheckpoints | None = None,
) -> Path:
    """Write the checkpoint of `step`, and remove old ones. Collective. Returns the folder.

    Args:
        model: the model without Accelerate's wrapper; with an `adapter`, the model that contains it.
        optimizer: the optimizer, with or without Accelerate's wrapper.
        state: state of the trainer; the state of the gradient scaler is added.
        save_more: writes more files to the folder, on every process of a sharded run, otherwise on the main one.
        kept: by default the newest `keep_last`.

    Raises:
        ResourceError: the disk is full. Raised on every process.
        CheckpointError: the first process does not see the files of all. Raised on every process.
    """
    output, scaler, main = Path(config.checkpoint.output), accelerator.scaler, accelerator.is_main_process
    sharded = config.parallel.shards
    state = {"scaler": None if scaler is None else scaler.state_dict(), **state}
    if sharded:
        reshard_model(model)
        _save_sharded(
            output, step, model, optimizer, adapter, tokenizer, state, accelerator.device, averages, save_more
        )  # fmt: skip
    with raised_everywhere():
        if main and not sharded:
            state[OPTIMIZER] = optimizer.state_dict()
            with atomic_checkpoint(output, step) as folder:
                (adapter or model).save_pretrained(folder)
                publish_config(folder)
                if averages is not None:
                    averages.save(folder, model.save_pretrained, tokenizer, main=True)
                if save_more is not None:
                    save_more(folder)
                write_state(folder, step, tokenizer, state)
        if main:
            remove_old_checkpoints(output, kept or KeptCheckpoints(config.checkpoint.keep_last))
    return step_folder(output, step)


def restore_run(
    config: TrainConfig, accelerator: Accelerator, folder: Path, model: Any, optimizer: Any
) -> dict[str, Any]:
    """Load the states of optimizer and gradient scaler from a checkpoint. Collective. Returns the trainer's state. The
    weights are loaded by `starting_model`."""
    state = load_state(folder)
    load_optimizer(config, folder, model, optimizer, state)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    return state


def load_optimizer(config: TrainConfig, folder: Path, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Load the optimizer state from `state`, or if that has none from the distributed checkpoint in `folder`.
    Collective. Raises CheckpointError if it is damaged."""
    whole = state.get(OPTIMIZER) is not None
    checkpoint = folder if (folder / STATE).is_file() else folder.parent  # a value model has a subfolder
    with damaged_state(checkpoint / STATE if whole else folder / OPTIMIZER, checkpoint):
        if whole and not config.parallel.shards:
            optimizer.load_state_dict(state[OPTIMIZER])
        else:
            plain = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
            _load_sharded(folder, model, plain, state)


def _save_sharded(
    output: Path,
    step: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    adapter: Adapter | None,
    tokenizer: Any,
    state: dict[str, Any],
    device: torch.device,
    averages: AveragedModel | None = None,
    save_more: Callable[[Path], None] | None = None,
) -> None:
    """Write the checkpoint of `step` of a sharded model. Collective: rank 0 writes the weights, their `averages` and
    `state`; `save_more` runs on all ranks.

    Weights are gathered one at a time on `device`, and written before the next one. Raises ResourceError if the disk
    is full."""
    main, folder = dist.get_rank() == 0, temporary_folder(output, step)
    with contextlib.ExitStack() as checkpoint:
        # `raised_everywhere` raises an error of any rank on all ranks, at the same point.
        with raised_everywhere():
            if main:
                checkpoint.enter_context(atomic_checkpoint(output, step))
        with raised_everywhere(), checkpoint_errors(output, step):
            save_optimizer(folder / OPTIMIZER, model, optimizer)
            if save_more is not None:
                save_more(folder)
            own = rank_files(folder, dist.get_rank())
        written = from_all(own)
        with raised_everywhere(), checkpoint_errors(output, step):
            if adapter is None:
                _save_weights(folder, model, device)
            else:
                tensors = {name: full_tensor(weight, device).cpu() for name, weight in adapter.parameters().items()}
                if main:
                    adapter.save_pretrained(folder, tensors)
            if averages is not None:
                averages.save(folder, lambda place: _save_weights(place, model, device), tokenizer, main)
        with raised_everywhere(), checkpoint_errors(output, step):
            if main:
                write_state(folder, step, tokenizer, state, written)
                checkpoint.close()  # renames the folder


def save_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer state of a sharded model. Collective."""
    try:
        dcp.save({OPTIMIZER: get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    except CheckpointException as error:  # of any rank, raised on all
        failure = next((failure[0] for failure in error.failures.values()), None)
        raise failure if isinstance(failure, OSError) else RuntimeError(one_line(failure or error)) from error


def _save_weights(folder: Path, model: Any, device: torch.device) -> None:
    """Write a sharded model as `save_pretrained` does: config.json, generation_config.json, weights with their Hub
    names. Collective; rank 0 writes."""
    weights = ((name, full_tensor(tensor, device)) for name, tensor in stored_tensors(model))
    try:
        if dist.get_rank() == 0:
            _write_hub_files(folder, model, weights)
    finally:
        for _ in weights:  # after a write error too, every rank must take part in gathering all weights
            pass


def save_parameters(folder: Path, model: nn.Module, device: torch.device) -> None:
    """Write a sharded model's parameters with its own names to one safetensors file. Collective; rank 0 writes."""
    specs = {name: (weight.dtype, tuple(weight.shape)) for name, weight in model.named_parameters()}
    writer = None
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        writer = HubWriter(folder, plan_by_size(specs, 2**62))
    for name, weight in model.named_parameters():
        whole = full_tensor(weight, device)
        if writer is not None:
            writer.write(name, whole.contiguous().cpu())
    if writer is not None:
        writer.finish()


@torch.no_grad()
def load_parameters(file: Path, model: nn.Module) -> None:
    """Load a sharded model's parameters from a file of `save_parameters`. Each process reads its shards only."""
    with safe_open(file, framework="pt") as tensors:
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor)
            first, local = first_row(weight), weight.to_local()
            local.copy_(tensors.get_slice(name)[first : first + len(local)])


def _write_hub_files(folder: Path, model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    _write_configs(folder, model)
    plans = _shard_plans(model)
    writer = HubWriter(folder, plans)
    for name, whole in weights:
        for hub_name, part in hub_tensors(model, {name: whole}).items():
            writer.write(hub_name, part.contiguous().cpu())
    writer.finish()
    if len(plans) > 1:
        (folder / SAFETENSORS_INDEX).write_text(index_text(plans))


def _load_sharded(folder: Path, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the optimizer state of a checkpoint, sharded or not, from any number of processes. Collective. Called
    within `damaged_state`. `state` is the trainer's state."""
    if not (folder / OPTIMIZER).is_dir():
        whole = _by_name(state[OPTIMIZER], model, optimizer)
        set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
        return
    found: Any = {OPTIMIZER: get_optimizer_state_dict(model, optimizer)}
    with raised_everywhere():
        reader = RestrictedReader(folder / OPTIMIZER)
    dcp.load(found, storage_reader=reader)
    set_optimizer_state_dict(model, optimizer, found[OPTIMIZER])


def _by_name(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer state dict with names of parameters instead of their indices."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    order = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _shard_plans(model: Any) -> list[ShardFile]:
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in stored_tensors(model):
        parts = hub_tensors(model, {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")})
        specs |= {hub_name: (part.dtype, tuple(part.shape)) for hub_name, part in parts.items()}
    return plan_by_size(specs, SHARD_SIZE)


def _write_configs(folder: Path, model: Any) -> None:
    config = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    # FSDP prefixes the class name of a module.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    publish_config(folder)
    if model.can_generate():
        published_generation_config(model).save_pretrained(folder)
    copy_remote_code(config, folder)
