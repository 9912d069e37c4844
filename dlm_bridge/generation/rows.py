"""Rows of a batch: the prompts that they begin with, what ends them, and what is kept of each from step to step.

A prompt is checked row by row and aligned. A row ends with an end-of-sequence token or a stop string. What rules and
predictors keep of a row while it denoises a block follows it where others enter or leave the canvas.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from dlm_bridge.errors import DlmBridgeError

logger = logging.get_logger(__name__)
Read = Callable[[torch.Tensor], list[Any]]  # gives a tensor's values on the host, as `canvas.read_flags`
KNOWN_TEXTS = 1024  # texts of which is known whether they hold a stop string: of more rows than run at once


def to_device(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers, on the host, as an integer tensor on the device, without a device sync."""
    tensor = torch.as_tensor(numbers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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


class StopCondition:
    """End-of-sequence tokens and stop strings.

    A stop string is searched in the decoded new tokens, as far as the row is committed without a gap; the row ends
    with the token that completes it. Text is decoded on the host, once for each row whose text has changed.

    Attributes:
        active: whether anything can end a row.
        has_strings: whether stop strings can.
    """

    def __init__(
        self,
        eos_token_ids: Sequence[int],
        device: torch.device,
        stop_strings: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        if stop_strings and not hasattr(tokenizer, "decode"):
            raise DlmBridgeError("stop_strings are searched in decoded text: pass tokenizer= as well")
        self._eos_ids = frozenset(eos_token_ids)
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
        self._stop_strings = tuple(stop_strings)
        self._tokenizer = tokenizer
        self.has_strings = bool(self._stop_strings)
        self.active = bool(self._eos_ids) or self.has_strings
        self._tokens_to_string = functools.lru_cache(maxsize=KNOWN_TEXTS)(self._search)

    def marks(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[A, N] bool, True at the new tokens that end a row, possibly several of one row. With stop strings the
        tokens are read: that syncs."""
        marks_AN = self.by_token(tokens_AN, new_AN)
        if not self.has_strings:
            return marks_AN
        ends = [self.string_end(text) for text in self.texts(tokens_AN, new_AN, mask_token_id).tolist()]
        columns_N = torch.arange(tokens_AN.shape[1], device=tokens_AN.device)
        return marks_AN | (columns_N == torch.tensor(ends, device=tokens_AN.device)[:, None])

    def by_token(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor) -> torch.Tensor:
        """[A, N] bool, True at the new tokens that are end-of-sequence tokens."""
        return torch.isin(tokens_AN, self._eos) & new_AN

    def texts(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[A, 2 + N], what `string_end` takes of each row: where its new tokens begin, how many are committed without
        a gap, and all tokens."""
        gapless_AN = (~new_AN | (tokens_AN != mask_token_id)).cumprod(dim=1).bool() & new_AN
        counts_A2 = torch.stack([new_AN.int().argmax(dim=1), gapless_AN.sum(dim=1)], dim=1)
        return torch.cat([counts_A2, tokens_AN], dim=1)

    def string_end(self, text: Sequence[int]) -> int:
        """The column of the token that completes a row's first stop string; -1 without one. A row of `texts`."""
        first, count, *tokens = text
        length = self._tokens_to_string(tuple(tokens[first : first + count]))
        return first + length - 1 if length else -1

    def read_ended(self, tokens_AN: torch.Tensor, new_AN: torch.Tensor, mask_token_id: int, read: Read) -> list[bool]:
        """Whether one of the new tokens ends the row."""
        ended_A = self.by_token(tokens_AN, new_AN).any(dim=1)
        if not self.has_strings:
            return read(ended_A)
        rows = read(torch.cat([ended_A[:, None], self.texts(tokens_AN, new_AN, mask_token_id)], dim=1))
        return [bool(ended) or self.string_end(text) >= 0 for ended, *text in rows]

    def end_of(self, tokens: Sequence[int]) -> int | None:
        """The number of these new tokens up to and including the first that ends the row; None: none does."""
        ends = [place + 1 for place, token in enumerate(tokens) if token in self._eos_ids][:1]
        if self.has_strings and (length := self._tokens_to_string(tuple(tokens))):
            ends.append(length)
        return min(ends, default=None)

    def _search(self, tokens: tuple[int, ...]) -> int:
        """How many tokens complete the first stop string; 0 without one."""

        def stopped(length: int) -> bool:
            text = self._tokenizer.decode(list(tokens[:length]))
            return any(string in text for string in self._stop_strings)

        if not tokens or not stopped(len(tokens)):
            return 0
        return 1 + bisect_left(range(1, len(tokens) + 1), True, key=stopped)


def check_stop_strings(value: Any) -> tuple[str, ...]:
    """`stop_strings` as a tuple. Raises DlmBridgeError for what is not strings."""
    strings = tuple(value or ()) if value is None or isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(string, str) and string for string in strings):
        raise DlmBridgeError(f"stop_strings must be a string or a list of them, none empty, not {value!r}")
    return strings


class RowMemory:
    """Values of each of B rows by name. A row that begins a block has zeros, in lists None.

    They follow their rows where others enter or leave the canvas.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, list[Any]] = {}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """[B, *shape], to read and to write to. Of another shape than before it is padded with zeros, or is a part."""
        stored = self._tensors.get(name)
        if stored is None:
            stored = torch.zeros(self._rows, *shape, dtype=dtype, device=self._device)
        added = [max(0, size - old) for size, old in zip(shape, stored.shape[1:], strict=True)]
        if any(added):
            stored = torch.nn.functional.pad(stored, [side for size in reversed(added) for side in (0, size)])
        self._tensors[name] = stored
        for axis, size in enumerate(shape, 1):
            stored = stored.narrow(axis, 0, size)
        return stored

    def values(self, name: str) -> list[Any]:
        """B values on the host, to read and to write to."""
        return self._values.setdefault(name, [None] * self._rows)

    def forget(self, rows: list[int]) -> None:
        """These rows have completed their block."""
        if len(rows) == self._rows:
            self._tensors.clear()
            self._values.clear()
        if self._tensors:
            rows_A = to_device(rows, self._device)
            for stored in self._tensors.values():
                stored.index_fill_(0, rows_A, 0)
        for values in self._values.values():
            for row in rows:
                values[row] = None

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self._rows = len(rows)
        if self._tensors:
            rows_A = to_device(rows, self._device)
            self._tensors = {name: stored[rows_A] for name, stored in self._tensors.items()}
        self._values = {name: [values[row] for row in rows] for name, values in self._values.items()}

    def admit(self, count: int) -> None:
        """So many rows enter, in front of the others."""
        self.select_rows(order_behind(count, self._rows))
        self._rows += count
        for name, stored in self._tensors.items():
            self._tensors[name] = torch.cat([stored.new_zeros(count, *stored.shape[1:]), stored])
        self._values = {name: [None] * count + values for name, values in self._values.items()}


def order_behind(count: int, others: int) -> list[int]:
    """The order of the other rows when so many enter in front of them: the first make room behind the rest, so that
    few have to move in a KV cache."""
    return [*range(count, others), *range(min(count, others))]


def order_without(rows: set[int], total: int) -> list[int]:
    """The order of the rows of `total` that stay when these leave: the last take their places."""
    left = total - len(rows)
    last = (row for row in range(left, total) if row not in rows)
    return [next(last) if row in rows else row for row in range(left)]
