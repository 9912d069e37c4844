"""Norms of megatron-core's distributed parameters and gradients by layer (`norm_interval`), each element counted on
one rank. They show in which layer a run starts to diverge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dlm_bridge.parallel.core import (
    parallel_state,
    param_is_not_shared,
    param_is_not_tensor_parallel_duplicate,
)
from dlm_bridge.parallel.mcore_patches.optimizers import (
    inner_main_params,
    keeps_inner_main_params,
    param_range,
    parts_of,
    read_main_param,
)
from dlm_bridge.train.norms import EMBEDDING, FINAL_NORM, HEAD, OTHER, LayerNorms


class MegatronLayerNorms(LayerNorms):
    """Norms over this rank's virtual stages: over the optimizer's shards, or on the first data parallel rank if it is
    not sharded. If the head is tied to the embedding, the first stage's copy counts."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any, device: torch.device, cpu_group: Any) -> None:
        self.optimizer = optimizer
        self.parts = parts_of(optimizer)
        names = {
            parameter: _layer(name, chunk)
            for chunk in (wrapped.module for wrapped in chunks)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and param_is_not_shared(parameter)
        }
        self.counted = {parameter: name for parameter, name in names.items() if _is_no_duplicate(parameter)}
        super().__init__(names.values(), device, cpu_group)

    def gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        for parameter, layer in self.counted.items():
            if (own := self._own(parameter)) is not None:
                yield layer, parameter.main_grad.reshape(-1)[own]

    def weights(self) -> Iterable[torch.Tensor]:
        inside = {
            parameter: (part.optimizer, shard)
            for part in self.parts
            if keeps_inner_main_params(part)
            for parameter, shard in inner_main_params(part)
        }
        for parameter in self.counted:
            if (own := self._own(parameter)) is None:
                continue
            if parameter in inside:
                yield read_main_param(*inside[parameter])
            elif getattr(parameter, "main_param", None) is not None:
                yield parameter.main_param
            else:
                yield parameter.detach().reshape(-1)[own]

    def gradient_scale(self) -> torch.Tensor | float:
        scale: torch.Tensor = self.optimizer.get_loss_scale()
        return scale.to(self.device, torch.float64).squeeze()

    def _own(self, parameter: torch.Tensor) -> slice | None:
        """Range of a flat parameter that this rank counts; None if it counts none."""
        for part in self.parts:
            if parameter in getattr(part, "model_param_gbuf_map", ()):
                # Every instance of the distributed optimizer has all shards.
                return param_range(part, parameter) if part.distributed_optimizer_instance_id == 0 else None
        if any(hasattr(part, "model_param_gbuf_map") for part in self.parts):
            return None
        if _of_expert(parameter):
            first = parallel_state.get_expert_data_parallel_rank() == 0
        else:
            first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        return slice(None) if first else None


def _is_no_duplicate(parameter: Any) -> bool:
    """True if this rank counts a parameter for its tensor parallel group."""
    if _of_expert(parameter):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return bool(param_is_not_tensor_parallel_duplicate(parameter, group))


def _of_expert(parameter: Any) -> bool:
    """True if a parameter's gradients are summed only over the ranks that hold the same expert."""
    return not getattr(parameter, "allreduce", True)


def _layer(name: str, chunk: Any) -> str:
    """Name of a parameter's layer in the metrics, with its global number."""
    if found := re.search(r"\bmtp\.layers\.(\d+)\.", name):
        return f"mtp.{found[1]}"
    if found := re.search(r"\bdecoder\.layers\.(\d+)\.", name):
        return str(_decoder(chunk).layers[int(found[1])].layer_number - 1)
    if "embedding." in name:
        return EMBEDDING
    if "output_layer." in name:
        return HEAD
    return FINAL_NORM if "norm" in name else OTHER


def _decoder(chunk: Any) -> Any:
    while not hasattr(chunk, "decoder"):  # megatron-core wraps a model in half precision
        chunk = chunk.module
    return chunk.decoder
