"""Multi-head latent attention: megatron-core's own layer, at explicit positions, with Transformer Engine or without.

Queries, keys and values are made of low-rank vectors (DeepSeek-V2, arXiv 2405.04434). megatron-core's layer makes its
rotary angles itself, of positions 0, 1, 2, ..., and takes Transformer Engine's linear layers for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import MLASelfAttention, TransformerConfig, multi_latent_attention


class LatentAttention(MLASelfAttention):
    """megatron-core's layer, which takes the angles of its positions where a call has them."""

    rotary_pos_emb: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _linear_layers():
            super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _Angles(self.rotary_pos_emb)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As megatron-core's. `rotary_pos_emb` is [S, B or 1, 1, D] with D the rotated part of a head; None for the
        positions 0, 1, 2, ... of the row or of each packed document."""
        self.rotary_pos_emb.given = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            self.rotary_pos_emb.given = None


class _Angles(torch.nn.Module):
    """A layer's rotary embedding, `own`, or in its place the angles that a forward pass was given."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.given: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """As megatron-core's."""
        length: int = self.own.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, length: int, packed_seq: bool = False) -> Any:
        """Angles [S, B or 1, 1, D], with YaRN's scale where that is the embedding."""
        found = self.own(length, packed_seq=packed_seq)
        if self.given is None:
            return found
        return (self.given, found[1]) if isinstance(found, tuple) else self.given


class ReplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor parallel rank holds whole, as Transformer Engine's with `parallel_mode`
    "duplicated". Under sequence parallelism each rank has its own tokens: `weight.sequence_parallel` tells
    megatron-core to sum the gradient over the ranks."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        **_: Any,
    ) -> None:
        super().__init__()
        device = platform.current().device()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, device=device, dtype=config.params_dtype)
        )
        init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (unknown to torch)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias."""
        return torch.nn.functional.linear(input_, self.weight), None

    def get_extra_state(self) -> None:
        """Nothing, under the name that Transformer Engine's layer has in a checkpoint."""

    def set_extra_state(self, state: Any) -> None:
        """Of Transformer Engine's layer: nothing here."""


@contextmanager
def _linear_layers() -> Iterator[None]:
    """Build a layer of our linear layers where Transformer Engine is not used: megatron-core asks for its class by
    name, which without it is no class at all."""
    theirs = multi_latent_attention.TELinear
    if not platform.current().uses_transformer_engine():
        multi_latent_attention.TELinear = ReplicatedLinear
    try:
        yield
    finally:
        multi_latent_attention.TELinear = theirs
