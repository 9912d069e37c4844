"""A model of one attention layer in float64, with the forward contract of the real ones and any family's facts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dlm_bridge.attention.masks import AttentionPattern
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.models.llada import SPEC

VOCABULARY, MASK = 48, 47


class StandIn(nn.Module):
    """Sees who the mask lets it see and how far away they are; never prefers the mask token."""

    def __init__(self, family: FamilySpec, seed: int = 0, peak: float = 1.5, **config: Any) -> None:
        super().__init__()
        self.family = family
        self.config = SimpleNamespace(
            **{"vocab_size": VOCABULARY, "mask_token_id": MASK, "max_position_embeddings": None, **config}
        )
        generator = torch.Generator().manual_seed(seed)
        shapes = [(VOCABULARY, 16), (16, 16), (16, 16), (16, VOCABULARY)]
        self.embed, self.query, self.value, self.head = (
            torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes
        )
        self.head *= peak
        self.head[:, MASK] = 0
        self.embedding = nn.Embedding.from_pretrained(self.embed)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: Any = slice(None),
        inputs_embeds: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        embeddings = self.embed[input_ids] if inputs_embeds is None else inputs_embeds.to(self.embed.dtype)
        length = embeddings.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        if attention_mask is None:
            attention_mask = torch.ones(embeddings.shape[:2])
        if attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()[:, None, :] | torch.eye(length, dtype=torch.bool)
        else:
            attention_mask = attention_mask[:, 0]
        # Absolute positions too: a canvas of nothing but masks would be all ties otherwise.
        hidden = embeddings + (position_ids[..., None] * self.embed[MASK]).sin() / 2
        distance = (position_ids[:, :, None] - position_ids[:, None, :]).to(self.embed.dtype)
        scores = hidden @ self.query @ hidden.mT + (distance * 0.7).sin()
        hidden = hidden / 2 + scores.masked_fill(~attention_mask, -torch.inf).softmax(dim=-1) @ hidden @ self.value
        logits = hidden @ self.head
        if isinstance(logits_to_keep, torch.Tensor):
            return SimpleNamespace(logits=torch.take_along_dim(logits, logits_to_keep[..., None], dim=1))
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def family(
    attention_pattern: AttentionPattern = "bidirectional", *, shift: bool = False, name: str = "llada", **sampler: Any
) -> Any:
    return replace(SPEC, name=name, attention_pattern=attention_pattern, shift=shift, sampler=sampler)


def ragged(lengths: tuple[int, ...], seed: int = 0) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Rows of these lengths, their batch padded on the left, and its mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY - 4, (length,), generator=generator).tolist() for length in lengths]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], dtype=torch.long).view(len(rows), width)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]).view(len(rows), width)
    return rows, ids, mask


def keep_tokens(model: Any, count: int) -> None:
    """Let the model predict the first `count` tokens only."""
    forward = model.forward

    def of_few_tokens(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[..., count:] = -torch.inf
        return output

    model.forward = of_few_tokens
