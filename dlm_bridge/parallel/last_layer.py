"""The last layer's feed-forward at chosen positions only: nobody reads the others' hidden states after attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlm_bridge.parallel.core import TransformerConfig, TransformerLayer


class LastLayer(TransformerLayer):
    """megatron-core's layer, whose output has the rows of `positions` only where those are set."""

    positions: torch.Tensor | None = None  # [M] int64, b * S + s, during a forward pass

    @classmethod
    def take_over(cls, layer: Any, config: TransformerConfig) -> None:
        """Make one of a layer that GPTModel has built, where that can be done.

        It cannot where ranks hold rows of their own (sequence parallelism), which would be left with uneven shares,
        where the loss depends on how tokens are dealt out to experts, or where a layer is computed again when another
        micro-batch's positions are set.
        """
        fits = (
            type(layer) is TransformerLayer
            and not layer.is_moe_layer
            and not config.sequence_parallel
            and config.recompute_granularity != "full"
        )
        if fits:
            layer.__class__ = cls

    @contextmanager
    def at(self, positions: torch.Tensor) -> Iterator[None]:
        """Forward passes inside are of `positions`."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

    def _forward_mlp(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[S, B, H], or with `positions` [M, 1, H]."""
        if self.positions is not None:
            hidden_states = rows_at(hidden_states, self.positions)[:, None]
        return super()._forward_mlp(hidden_states, *args, **kwargs)


def rows_at(hidden_SBH: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
    """[M, H] at the positions b * S + s."""
    length, batch, size = hidden_SBH.shape
    if batch > 1:
        positions_M = positions_M % length * batch + positions_M // length
    return hidden_SBH.reshape(-1, size).index_select(0, positions_M)
