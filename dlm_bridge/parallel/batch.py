"""One micro-batch as a rank takes it: its context parallel part, who looks at whom, and the positions with a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PackedDocuments:
    """Documents that stand one after the other in a single row, for kernels of variable length (THD)."""

    cu_seqlens: torch.Tensor  # [documents + 1] int32, where each begins, and the row's length
    max_seqlen: int

    def params(self) -> Any:
        """megatron-core's `packed_seq_params`."""
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


@dataclass(frozen=True)
class MicroBatch:
    """What a live model takes and what it is asked for. S is this context parallel rank's part of a row, M the number
    of its positions with a loss, padded to one of a few sizes (index 0, weight 0) so that there are few shapes."""

    input_ids: torch.Tensor  # [B, S] int64
    position_ids: torch.Tensor | None  # [B or 1, S]; None for 0..S-1, or for those of `packed`
    attention: torch.Tensor | None  # `Visibility` codes [B or 1, cp * S, 5] of all ranks' parts, rank after rank
    packed: PackedDocuments | None
    chosen: torch.Tensor  # [M] int64, b * S + s, ascending up to the padding
    targets: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] fp32
    terms: torch.Tensor | None  # [M] int64, as in `NoisyBatch`

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device, copied without waiting where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> MicroBatch:
        """The same in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, PackedDocuments):
                value = PackedDocuments(change(value.cu_seqlens), value.max_seqlen)
            values[name] = change(value) if isinstance(value, torch.Tensor) else value
        return MicroBatch(**values)
