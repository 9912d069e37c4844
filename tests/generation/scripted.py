"""A model whose logits a test writes down, and which remembers what it was asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlm_bridge.models.llada import SPEC


class Scripted(nn.Module):
    """Gives every row the logits `table` [S, V] by column; the last token id is the mask token."""

    family = SPEC

    def __init__(self, table: torch.Tensor, context: int | None = None) -> None:
        super().__init__()
        self.table = table
        self.config = SimpleNamespace(
            vocab_size=table.shape[-1], mask_token_id=table.shape[-1] - 1, max_position_embeddings=context
        )
        self.embedding = nn.Embedding(table.shape[-1], 1)
        self.calls: list[dict[str, Any]] = []

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        logits_to_keep: slice,
    ) -> SimpleNamespace:
        self.calls.append(
            {"input_ids": input_ids.clone(), "attention_mask": attention_mask, "position_ids": position_ids}
        )
        table = self.table[: input_ids.shape[1]]
        return SimpleNamespace(logits=table[logits_to_keep].expand(len(input_ids), -1, -1))
