"""Whole models to sample from, on each process of a run whose own model is sharded."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.checkpoints import raised_everywhere
from dlm_bridge.train.lazy_weights import replace_parameters


class WholeModel:
    """A copy of a model that has memory for weights only while `allocated`, in the dtype of the run's computations.

    Each process samples its own rows from it, in as many forward passes as these take: a sharded model would need all
    processes to run as many.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Of `model`, unsharded or without weights; what transformers keeps in fp32 (routers) is so here too."""
        kept = tuple(model._get_dtype_plan(torch.bfloat16))
        empty: dict[int, Any] = {}
        for name, weight in model.named_parameters():
            own = torch.float32 if any(re.search(part, name) for part in kept) else dtype
            empty[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta", dtype=own), requires_grad=False)
        self.model = copy.deepcopy(model, memo=empty).eval()

    @contextlib.contextmanager
    def allocated(self, device: torch.device) -> Iterator[Any]:
        """The model with memory for its weights, which the caller sets; every process calls this together. Raises
        DlmBridgeError where the device has no room."""
        with raised_everywhere():
            self._check_room(device)
        empty = dict(self.model.named_parameters())
        filled = {
            id(weight): nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
            for weight in empty.values()
        }
        replace_parameters(self.model, filled)
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
                "free beside the shards: add --cpu-offload (with --engine megatron --optimizer-cpu-offload), use "
                "--precision bf16, or more GPUs"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes that the device, or this process's allocator, has free; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
