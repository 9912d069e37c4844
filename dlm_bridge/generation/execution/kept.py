"""The keys and values that are kept between forwards: a buffer for each layer, in the canvas' columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class KeptKeysValues:
    """Buffers [rows, groups, width, head size] of every attention layer.

    The layers reach theirs as their attributes `kv_keys` and `kv_values`: `attention.attend` is given the layer, and
    compiled code is the same for all of them.
    """

    def __init__(self, model: Any, rows: int, width: int) -> None:
        self._layers = attention_layers(model)
        heads = model.config.num_attention_heads // (getattr(model, "_tp_size", None) or 1)
        self._buffers = []
        for layer in self._layers:
            like = next(layer.parameters())
            shape = (2, rows, heads // layer.num_key_value_groups, width, layer.head_dim)
            self._buffers.append(torch.zeros(shape, dtype=model.dtype, device=like.device))

    def show(self, rows: int) -> None:
        """Let the layers see the first so many rows."""
        for layer, buffer in zip(self._layers, self._buffers, strict=True):
            layer.kv_keys, layer.kv_values = buffer[0, :rows], buffer[1, :rows]

    def keep(self, rows: list[int]) -> None:
        """Move these rows to the front."""
        for buffer in self._buffers:
            buffer[:, : len(rows)] = buffer[:, rows]

    def detach(self) -> None:
        """Take the buffers away from the layers."""
        for layer in self._layers:
            for name in ("kv_keys", "kv_values"):
                if hasattr(layer, name):
                    delattr(layer, name)


def attention_layers(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
