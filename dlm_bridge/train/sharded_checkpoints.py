"""Checkpoints of a run whose weights are cut: a whole Hub folder, and each process's part of the optimizer's state."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dlm_bridge.convert.formats.huggingface import HubWriter, ShardPlan, index_text, plan_by_size
from dlm_bridge.convert.side_files import INDEX
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.models.diffusion import carry_remote_code
from dlm_bridge.train.checkpoints import unfinished, write_state, writing
from dlm_bridge.train.lora import Adapter
from dlm_bridge.train.sharding import gathered

OPTIMIZER = "optimizer"  # folder of a checkpoint: torch's distributed checkpoint
SHARD_SIZE = 5 * 10**9  # bytes of a safetensors file


def save_sharded(
    output: Path,
    step: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    adapter: Adapter | None,
    tokenizer: Any,
    state: dict[str, Any],
    device: torch.device,
) -> None:
    """Write the checkpoint of `step`; every process calls this together, rank 0 writes the weights and `state`.

    Whole weights are gathered one after the other on `device`, and written before the next one. Raises DlmBridgeError
    where the disk refuses.
    """
    main = dist.get_rank() == 0
    with writing(output, step) if main else contextlib.nullcontext(unfinished(output, step)) as folder:
        dist.barrier()
        dcp.save({OPTIMIZER: get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / OPTIMIZER)
        if adapter is None:
            save_weights(folder, model, device)
        else:
            tensors = {name: gathered(weight, device).cpu() for name, weight in adapter.parameters().items()}
            if main:
                adapter.save_pretrained(folder, tensors)
        dist.barrier()
        if main:
            write_state(folder, step, tokenizer, state)


def save_weights(folder: Path, model: Any, device: torch.device, shard_size: int = SHARD_SIZE) -> None:
    """Write the Hub's files of a model as its `save_pretrained` does: config.json, generation_config.json, weights
    under the Hub's names. Every process calls this together, rank 0 writes."""
    writer, plans = None, []
    if dist.get_rank() == 0:
        _write_configs(folder, model)
        plans = _plans(model, shard_size)
        writer = HubWriter(folder, plans)
    for name, tensor in _stored(model):
        whole = gathered(tensor, device)
        if writer is not None:
            for hub_name, part in _hub_tensors(model, name, whole).items():
                writer.write(hub_name, part.contiguous().cpu())
    if writer is not None:
        writer.finish()
        if len(plans) > 1:
            (folder / INDEX).write_text(index_text(plans))


def load_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Set the optimizer's state to what a checkpoint has, however many processes wrote it, cut or not; `state` is what
    else it has. Every process calls this together. Raises DlmBridgeError where it is damaged."""
    if not (folder / OPTIMIZER).is_dir():
        whole = _by_name(state[OPTIMIZER], model, optimizer)
        set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
        return
    found: Any = {OPTIMIZER: get_optimizer_state_dict(model, optimizer)}
    try:
        dcp.load(found, checkpoint_id=folder / OPTIMIZER)
    except Exception as error:  # whatever a damaged file raises
        raise DlmBridgeError(
            f"{folder / OPTIMIZER}: damaged ({one_line(error)[:200]}): remove {folder} to resume from before it"
        ) from error
    set_optimizer_state_dict(model, optimizer, found[OPTIMIZER])


def _by_name(state: dict[str, Any], model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict by the names of parameters in place of their numbers."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    order = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def _stored(model: Any) -> list[tuple[str, torch.Tensor]]:
    """The weights and buffers that a checkpoint holds, a tied weight once."""
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    return [*model.named_parameters(), *buffers]


def _hub_tensors(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a parameter is on the Hub: transformers merges some of its tensors into one."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, {name: tensor}))


def _plans(model: Any, shard_size: int) -> list[ShardPlan]:
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in _stored(model):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        specs |= {
            hub_name: (part.dtype, tuple(part.shape)) for hub_name, part in _hub_tensors(model, name, empty).items()
        }
    return plan_by_size(specs, shard_size)


def _write_configs(folder: Path, model: Any) -> None:
    config = model.config
    config.dtype = str(model.dtype).removeprefix("torch.")
    # FSDP gives a module a class of its own, named after the one that it had.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    carry_remote_code(config, folder)
