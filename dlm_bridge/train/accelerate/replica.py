"""Whole replicas of a model under FSDP2, gathered on every process to sample from."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.accelerate.fsdp import full_tensor, replace_parameters, reshard_model
from dlm_bridge.train.checkpoints import raised_everywhere


class Replica:
    """A copy of a model that has weights only while `gathered`, in the dtype that the sharded one computes in.

    Each process samples its own rows from it, in as many forward passes as these take: under FSDP all processes would
    have to run as many.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Of `model` before it is sharded; what transformers keeps in fp32 (routers) is so here too."""
        kept = tuple(model._get_dtype_plan(torch.bfloat16))
        empty: dict[int, Any] = {}
        for name, weight in model.named_parameters():
            own = torch.float32 if any(re.search(part, name) for part in kept) else dtype
            empty[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta", dtype=own), requires_grad=False)
        self.model = copy.deepcopy(model, memo=empty).eval()

    @contextlib.contextmanager
    def gathered(self, sharded: nn.Module, device: torch.device) -> Iterator[Any]:
        """The copy with the weights of `sharded`, gathered one at a time; every process calls this together. Raises
        DlmBridgeError where the device has no room."""
        with raised_everywhere():
            self._check_room(device)
        reshard_model(sharded)
        weights, empty = dict(sharded.named_parameters()), dict(self.model.named_parameters())
        assert weights.keys() == empty.keys(), "the replica is of another model"
        with torch.no_grad():
            filled = {
                id(weight): nn.Parameter(full_tensor(weights[name], device).to(weight.dtype), requires_grad=False)
                for name, weight in empty.items()
            }
        replace_parameters(self.model, filled)
        for name, buffer in sharded.named_buffers(remove_duplicate=False):
            owner, _, own_name = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[own_name] = buffer
        try:
            yield self.model
        finally:
            replace_parameters(self.model, {id(filled[id(weight)]): weight for weight in empty.values()})

    def _check_room(self, device: torch.device) -> None:
        free = free_memory(device)
        needed = sum(weight.numel() * weight.itemsize for weight in self.model.parameters())
        if free is not None and needed > free:
            raise DlmBridgeError(
                f"rollouts need the whole model on each GPU, {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are "
                "free beside the shards: add --cpu-offload, use --precision bf16, or more GPUs"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes that the device, or this process's allocator, has free; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
