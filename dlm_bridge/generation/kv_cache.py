"""KV cache: one static buffer per attention layer, in the canvas' columns."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from dlm_bridge.generation.canvas import to_device

CacheMode = Literal["none", "prefix", "dual", "block"]


class StaticKVCache:
    """Buffers [rows, groups, width, head size] of every attention layer.

    Keys and values have storage of their own: compiled code takes two changed views of one tensor for each other.
    The layers reach theirs as their attributes `kv_keys` and `kv_values`: `attention.attend` is given the layer, and
    compiled code is the same for all of them.
    """

    def __init__(self, model: Any, rows: int, width: int) -> None:
        self._layers = attention_layers(model)
        processes = getattr(model, "_tp_size", None) or 1
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        layer: Any
        # Of the layers: how many query heads share keys, and how large a head is.
        self.shapes: set[tuple[int, int]] = set()
        for layer in self._layers:
            device = _device(layer)
            # What is cut over processes are the heads, but of a fused matrix, whose output every process gathers.
            share = 1 if hasattr(layer, "query_key_value") else processes
            heads = model.config.num_attention_heads // share
            self.shapes.add((layer.num_key_value_groups, layer.head_dim))
            shape = (rows, heads // layer.num_key_value_groups, width, layer.head_dim)
            keys, values = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
            self._buffers.append((keys, values))

    def show(self, rows: int) -> None:
        """Let the layers see the first so many rows."""
        for layer, (keys, values) in zip(self._layers, self._buffers, strict=True):
            layer.kv_keys, layer.kv_values = keys[:rows], values[:rows]

    def keep(self, rows: list[int]) -> None:
        """Move these rows to the front."""
        indices = {keys.device: to_device(rows, keys.device) for keys, _ in self._buffers}
        for buffers in self._buffers:
            for buffer in buffers:
                buffer[: len(rows)] = buffer[indices[buffer.device]]

    def detach(self) -> None:
        """Take the buffers away from the layers."""
        for layer in self._layers:
            for name in ("kv_keys", "kv_values"):
                if hasattr(layer, name):
                    delattr(layer, name)


def _device(layer: nn.Module) -> torch.device:
    """Where a layer computes: where its weights are, or where accelerate brings them from the CPU or the disk."""
    device = next(layer.parameters()).device
    if device.type == "meta":
        hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in layer.modules()]
        device = torch.device(next(hook.execution_device for hook in hooks if hasattr(hook, "execution_device")))
    return device


def attention_layers(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if is_attention(module)]


def is_attention(module: nn.Module) -> bool:
    return hasattr(module, "num_key_value_groups")
