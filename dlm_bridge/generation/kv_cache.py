"""KV cache: static buffers of keys and values, and the columns that a forward pass runs or reads from them.

Values of the setting `cache`:

- "none": every forward pass runs all columns that it attends to.
- "prefix", "dual" (Fast-dLLM v1, arXiv 2505.22618), for bidirectional attention: a block's first forward pass runs the
  whole canvas; later ones run the block ("dual"), or all columns from the block on ("prefix"). Approximate.
- "block", for attention that does not reach past the block: committed blocks are run once more and cached. Exact.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import torch
from torch import nn

from dlm_bridge.generation.canvas import to_device
from dlm_bridge.generation.options import CacheMode


class StaticKVCache:
    """Buffers [rows, KV heads, width, head size] of every attention layer, by columns of the canvas.

    Keys and values have separate storage, because compiled code confuses two modified views of one tensor. Each layer
    has its buffers as attributes `kv_keys` and `kv_values`: the attention function receives the layer, and compiled
    code is the same for all layers.
    """

    def __init__(self, layers: list[Any], buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layers = layers
        self._buffers = buffers
        # (query heads per KV head, head size) of the layers
        self.shapes: set[tuple[int, int]] = {(layer.num_key_value_groups, head_sizes(layer)[0]) for layer in layers}

    @classmethod
    def allocate(cls, model: Any, rows: int, width: int) -> StaticKVCache:
        """Allocate buffers for `rows` rows and `width` columns, on the device of each layer."""
        layers: list[Any] = attention_layers(model)
        buffers = []
        for layer in layers:
            shape = (rows, kv_heads(model, layer), width)
            sizes, device = head_sizes(layer), _device(layer)
            keys, values = (torch.zeros(*shape, size, dtype=model.dtype, device=device) for size in sizes)
            buffers.append((keys, values))
        return cls(layers, buffers)

    def attach(self, rows: int | None) -> None:
        """Attach the buffers of the first `rows` rows (None: all rows) to the layers."""
        for layer, (keys, values) in zip(self._layers, self._buffers, strict=True):
            layer.kv_keys, layer.kv_values = keys[:rows], values[:rows]

    def tensors(self) -> list[torch.Tensor]:
        """The buffers of keys and of values, layer by layer."""
        return [buffer for buffers in self._buffers for buffer in buffers]

    def of_rows(self, rows: slice) -> StaticKVCache:
        """The buffers of consecutive rows, in the same storage."""
        return StaticKVCache(self._layers, [(keys[rows], values[rows]) for keys, values in self._buffers])

    def detach(self) -> None:
        """Remove the buffers from the layers."""
        for layer in self._layers:
            for name in ("kv_keys", "kv_values"):
                if hasattr(layer, name):
                    delattr(layer, name)

    def select_rows(self, rows: list[int]) -> None:
        """Move these rows to the front, in this order. Rows already in place are not copied."""
        moves = [(to, row) for to, row in enumerate(rows) if to != row]
        if not moves:
            return
        devices = {keys.device for keys, _ in self._buffers}
        indices = {device: to_device([one for move in moves for one in move], device) for device in devices}
        for buffers in self._buffers:
            for buffer in buffers:
                to_M, row_M = indices[buffer.device].view(-1, 2).unbind(dim=1)
                buffer[to_M] = buffer[row_M]

    def shift(self, by: int) -> None:
        """Move the columns to the right by `by` (negative: to the left)."""
        for buffers in self._buffers:
            for buffer in buffers:
                width = buffer.shape[2] - abs(by)
                moved = buffer.narrow(2, max(-by, 0), width).clone()
                buffer.narrow(2, max(by, 0), width).copy_(moved)

    def drop_non_finite(self) -> None:
        """Replace NaN and infinity by zero."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def width(self) -> int:
        """Number of columns."""
        return self._buffers[0][0].shape[2]

    @staticmethod
    def write(buffer: torch.Tensor, columns: torch.Tensor, new: torch.Tensor) -> None:
        """Store `new` [B, KV heads, Q, D] at these columns, [Q] or [B, Q], of a layer's buffer."""
        if columns.dim() == 1:
            buffer.index_copy_(2, columns, new)
        else:
            buffer.scatter_(2, columns[:, None, :, None].expand_as(new), new)

    @staticmethod
    def read(buffer: torch.Tensor, end: int) -> torch.Tensor:
        """The first `end` columns of a layer's buffer."""
        return buffer[:, :, :end]


def kv_heads(model: Any, layer: Any) -> int:
    """Number of KV heads of an attention layer in this process."""
    # Tensor parallelism shards the heads, except those of a fused QKV matrix, whose output is gathered.
    shards = 1 if hasattr(layer, "query_key_value") else getattr(model, "_tp_size", None) or 1
    heads: int = model.config.get_text_config().num_attention_heads // shards // layer.num_key_value_groups
    return heads


class KVCache:
    """KV cache of one call of `generate`. This base class, the setting "none", caches nothing."""

    mode: ClassVar[CacheMode] = "none"
    stores: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def __init__(self) -> None:
        self.buffers: StaticKVCache | None = None

    def allocate(self, model: Any, rows: int, width: int) -> None:
        """Allocate the buffers."""

    def open_block(self, block: slice) -> None:
        """Start a block."""

    def read(self, block: slice, end: int, *, shift: bool) -> slice:
        """Columns to run in a forward pass that predicts the block and attends to the first `end` columns; the other
        columns are read from the cache. With a shift, the column before the block predicts its first token."""
        return slice(0, end)

    def write(self, stop: int) -> None:
        """Record that a forward pass has written the columns before `stop`."""

    def shift(self, by: int) -> None:
        """Move the cached columns to the right by `by`, as the canvas does."""

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        if self.buffers is not None:
            self.buffers.select_rows(rows)

    def drop_non_finite(self) -> None:
        """Clear NaN and infinity of failed rows: attention multiplies masked columns by zero, and 0 * NaN is NaN."""
        if self.buffers is not None:
            self.buffers.drop_non_finite()


class _StoringKVCache(KVCache):
    stores: ClassVar[bool] = True

    def allocate(self, model: Any, rows: int, width: int) -> None:
        self.buffers = StaticKVCache.allocate(model, rows, width)


class PrefixKVCache(_StoringKVCache):
    """KV cache of the columns before the block, from the block's first forward pass."""

    mode: ClassVar[CacheMode] = "prefix"
    exact: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._written = False  # in this block

    def open_block(self, block: slice) -> None:
        self._written = False

    def write(self, stop: int) -> None:
        self._written = True

    def read(self, block: slice, end: int, *, shift: bool) -> slice:
        return slice(max(block.start - shift, 0), end) if self._written else slice(0, end)


class DualKVCache(PrefixKVCache):
    """KV cache of the columns before and after the block, from the block's first forward pass."""

    mode: ClassVar[CacheMode] = "dual"

    def read(self, block: slice, end: int, *, shift: bool) -> slice:
        columns = super().read(block, end, shift=shift)
        return slice(columns.start, block.stop) if self._written else columns


class BlockKVCache(_StoringKVCache):
    """KV cache of the committed columns before the block, which later tokens do not change.

    Attributes:
        length: number of cached columns.
    """

    mode: ClassVar[CacheMode] = "block"

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def write(self, stop: int) -> None:
        self.length = stop

    def read(self, block: slice, end: int, *, shift: bool) -> slice:
        return slice(self.length, end)

    def shift(self, by: int) -> None:
        if by and self.buffers is not None:
            self.buffers.shift(by)
        if self.length:  # else no columns are cached, including the new ones on the left
            self.length += by


def attention_layers(model: Any) -> list[nn.Module]:
    """Attention layers of a transformers body."""
    return [module for module in model.modules() if is_attention(module)]


def is_attention(module: nn.Module) -> bool:
    """True if the module is an attention layer of transformers."""
    return hasattr(module, "num_key_value_groups")


def head_sizes(layer: Any) -> tuple[int, int]:
    """Head sizes of keys and of values. The latter are smaller in latent attention."""
    if hasattr(layer, "kv_lora_rank"):
        return layer.qk_head_dim, layer.v_head_dim
    return layer.head_dim, layer.head_dim


def _device(layer: nn.Module) -> torch.device:
    """Device of a layer's weights (buffers if they are quantised); for offloaded weights, the device that accelerate
    loads them to."""
    device = next(chain(layer.parameters(), layer.buffers())).device
    if device.type == "meta":
        hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in layer.modules()]
        device = torch.device(next(hook.execution_device for hook in hooks if hasattr(hook, "execution_device")))
    return device
