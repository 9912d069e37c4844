"""What a source of training data gives: clean rows of tokens, with what is known about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """B rows of L tokens, named as `Objective.noise` takes them."""

    input_ids: torch.Tensor  # [B, L] int64
    labels: torch.Tensor | None = None  # [B, L] int64, -100 where a token is never masked nor counted; None: all count
    attention_mask: torch.Tensor | None = None  # [B, L] bool, false at padding; None where every token is real
    documents: torch.Tensor | None = None  # [B, L] int, a number for each document that stands alone; None: one a row
