"""Prompts of a batch: what they may hold, their check row by row, their alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from dlm_bridge.errors import DlmBridgeError

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may hold.

    Args:
        mask_token_id: None: the sampler works without one.
        gen_length: new tokens behind the prompt.
        context: the longest sequence that the model was made for, in tokens; None: any.
        infill: the mask tokens of a prompt are to be filled; without it there may be none.
        inside: the new tokens take the place of these masks; there are none behind the prompt.
    """

    mask_token_id: int | None
    vocabulary_size: int
    gen_length: int
    context: int | None
    infill: bool = False
    inside: bool = False

    @property
    def masked_token_id(self) -> int:
        """The mask token; -1, which is no token, without one."""
        return -1 if self.mask_token_id is None else self.mask_token_id


@dataclass(frozen=True)
class PromptBatch:
    """B prompts of at most P tokens, so aligned that every row's last token stands in the last column."""

    tokens: torch.Tensor  # [B, P]
    pads: tuple[int, ...]  # padding columns at the left of each row
    rows: list[list[int]]  # each row's real tokens
    holes: tuple[tuple[int, ...], ...] = ()  # each row's masks to fill, counted from its first token

    @classmethod
    def build(
        cls,
        tokens_BP: torch.Tensor,
        attention_mask_BP: torch.Tensor | None,
        limits: PromptLimits,
        device: torch.device,
    ) -> PromptBatch:
        """Check every row and align it. Only here does the host read the prompt.

        Raises:
            DlmBridgeError: padding inside a row, a token outside the vocabulary, an unexpected or missing mask token,
                or a row that does not fit into the model's context together with its new tokens.
        """
        width = tokens_BP.shape[1]
        ids = tokens_BP.tolist()
        real = [[1] * width for _ in ids] if attention_mask_BP is None else attention_mask_BP.tolist()
        rows, pads, aligned = [], [], []
        for number, (row, flags) in enumerate(zip(ids, real, strict=True)):
            if any(flag not in (0, 1) for flag in flags):
                raise DlmBridgeError(f"attention_mask row {number} holds other values than 0 and 1")
            count = int(sum(flags))
            first = flags.index(1) if count else 0
            if not all(flags[first : first + count]):
                raise DlmBridgeError(
                    f"attention_mask row {number} has padding between its tokens: pad on the left or on the right"
                )
            prompt = row[first : first + count]
            check_row(prompt, f"input_ids row {number}", limits)
            rows.append(prompt)
            pads.append(width - count)
            aligned.append(row[first + count :] + row[:first] + prompt)
        tokens = torch.tensor(aligned, dtype=torch.long, device=device).view(len(ids), width)
        if not limits.infill:
            return cls(tokens, tuple(pads), rows)
        mask = limits.mask_token_id
        holes = tuple(tuple(i for i, token in enumerate(row) if token == mask) for row in rows)
        if (limits.inside or not limits.gen_length) and not any(holes):
            raise DlmBridgeError(f"infill: no row of input_ids holds the mask token {mask}: nothing to fill")
        return cls(tokens, tuple(pads), rows, holes)

    def repeated(self, copies: int) -> PromptBatch:
        """Each row so many times, its copies next to each other."""
        if copies == 1:
            return self
        which = [row for row in range(len(self.rows)) for _ in range(copies)]
        return PromptBatch(
            self.tokens.repeat_interleave(copies, dim=0),
            tuple(self.pads[row] for row in which),
            [self.rows[row] for row in which],
            tuple(self.holes[row] for row in which) if self.holes else (),
        )


def check_ids(tokens: Any, attention_mask: Any) -> torch.Tensor:
    """`tokens` as [B, P] integers. Raises DlmBridgeError where they or the mask are not what they should be."""
    if tokens is None:
        raise DlmBridgeError("generate needs input_ids: a [batch, length] tensor of token ids")
    if not isinstance(tokens, torch.Tensor):
        raise DlmBridgeError(
            f"input_ids must be a tensor, not {type(tokens).__name__}: pass a tokenizer's output as **inputs"
        )
    shape = tuple(tokens.shape)
    if len(shape) != 2:
        remedy = ": add a batch axis with input_ids[None]" if len(shape) == 1 else ""
        raise DlmBridgeError(f"input_ids must be [batch, length], not of shape {shape}{remedy}")
    if tokens.device.type == "meta":
        raise DlmBridgeError("input_ids are on the meta device, without values: pass real ones")
    if shape[0] == 0:
        raise DlmBridgeError("input_ids has no rows: there is nothing to generate")
    if shape[1] and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise DlmBridgeError(f"input_ids must hold integers, not {tokens.dtype}")
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor):
            raise DlmBridgeError(f"attention_mask must be a tensor, not {type(attention_mask).__name__}")
        if tuple(attention_mask.shape) != shape:
            raise DlmBridgeError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {shape}: they must be equal"
            )
    return tokens


def warn_of_padding(tokens_BP: torch.Tensor, pad_token_id: int) -> None:
    """Warn where some rows, not all, begin or end with the padding token and there is no attention_mask.

    Padding is not guessed: in most families the padding token is the end of text, which a prompt may contain.
    """
    edges_B2 = tokens_BP[:, [0, -1]] == pad_token_id if tokens_BP.shape[1] else torch.zeros(1, 2)
    some = (edges_B2.any(dim=0) & ~edges_B2.all(dim=0)).any()
    if bool(some):
        logger.warning_once(
            f"some rows of input_ids begin or end with the padding token {pad_token_id}, and there is no "
            "attention_mask: it counts as text; pass the tokenizer's attention_mask"
        )


def check_row(prompt: Sequence[int], name: str, limits: PromptLimits) -> None:
    """Raise DlmBridgeError, which calls the prompt `name`, where it cannot be continued or filled."""
    mask, count, new = limits.mask_token_id, len(prompt), limits.gen_length
    if mask is not None and mask in prompt and not limits.infill:
        raise DlmBridgeError(
            f"{name} holds the mask token {mask} at its token {prompt.index(mask)}: "
            "a prompt must be all real tokens (mask padding with attention_mask); infill=True fills its masks"
        )
    outside = next((token for token in prompt if not 0 <= token < limits.vocabulary_size), None)
    if outside is not None:
        raise DlmBridgeError(f"{name} holds token {outside}, outside the vocabulary of {limits.vocabulary_size}")
    if limits.inside:
        masks = sum(token == mask for token in prompt)
        if masks > new:
            raise DlmBridgeError(
                f"{name} holds {masks} masks, gen_length allows {new} tokens in their place: raise it"
            )
        count -= masks
    if limits.context is not None and count + new > limits.context:
        room = limits.context - count
        remedy = f"use gen_length {room} or less" if room > 0 else f"shorten the prompt by at least {1 - room}"
        length = f"tokens and gen_length {new} make {count + new}," if new else "tokens is"
        raise DlmBridgeError(
            f"{name}: a prompt of {count} {length} beyond the model's context of {limits.context}: "
            f"{remedy if new else f'shorten it by {-room}'}"
        )
