"""Blocks cut from a Megatron pair: its documents, shuffled, one after another, read from the mapped file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.data.blocks import section_sizes
from dlm_bridge.train.data.indexed import IndexedTokens
from dlm_bridge.train.keyed import Purpose, stream
from dlm_bridge.train.rows import Rows

PLACES, WIDTH = 64, 16_384  # of a pair that are looked at before anything is built, and tokens at each


@dataclass(frozen=True)
class Fit:
    """What the tokens of a model's data must keep to."""

    vocabulary: int  # ids are below it
    mask_token_id: int | None  # which stands for a masked token and so is no token of the data


@dataclass(frozen=True)
class StreamBlocks:
    """Blocks of `seq_length` tokens from the documents between two tokens of a pair. The documents are shuffled by the
    seed, strung together without gaps and cut; a document that a bound cuts is a document on either side. Held in
    memory are two numbers a document."""

    source: IndexedTokens
    seq_length: int
    seed: int
    fit: Fit
    start: int  # tokens of the file, in its own order
    stop: int
    with_documents: bool = False  # say which tokens are of one document
    _begins: np.ndarray = field(init=False, repr=False, compare=False)  # first token of each document in the file
    _ends: np.ndarray = field(init=False, repr=False, compare=False)  # and the end of it in the stream

    def __post_init__(self) -> None:
        starts = self.source.starts()
        first = np.searchsorted(starts, self.start, side="right") - 1
        last = np.searchsorted(starts, self.stop, side="left")
        begins = np.maximum(starts[first:last], self.start)
        lengths = np.minimum(starts[first + 1 : last + 1], self.stop) - begins
        order = stream(self.seed, Purpose.DOCUMENT_ORDER).permutation(len(begins))
        object.__setattr__(self, "_begins", begins[order])
        object.__setattr__(self, "_ends", np.cumsum(lengths[order]))

    def __len__(self) -> int:
        return (self.stop - self.start) // self.seq_length

    def rows(self, indices: Sequence[int]) -> Rows:
        """The blocks `indices`. Raises DlmBridgeError for tokens that the model does not have."""
        tokens = np.empty((len(indices), self.seq_length), dtype=np.int64)
        documents = np.empty((len(indices), self.seq_length), dtype=np.int32)
        for row, index in enumerate(indices):
            self._read(index * self.seq_length, tokens[row], documents[row])
        _check_ids(self.source, tokens, self.fit)
        numbers = torch.from_numpy(documents) if self.with_documents else None
        return Rows(torch.from_numpy(tokens), documents=numbers)

    def _read(self, place: int, tokens: np.ndarray, numbers: np.ndarray) -> None:
        """Fill `tokens` from `place` of the stream on, and `numbers` with its documents', counted from 0."""
        document = int(np.searchsorted(self._ends, place, side="right"))
        filled = number = 0
        while filled < len(tokens):
            left = int(self._ends[document]) - place - filled
            if left:  # else a document without tokens
                length = int(self._ends[document] - (self._ends[document - 1] if document else 0))
                begin = int(self._begins[document]) + length - left
                count = min(left, len(tokens) - filled)
                tokens[filled : filled + count] = self.source.tokens[begin : begin + count]
                numbers[filled : filled + count] = number
                filled += count
                number += 1
            document += 1


def split_stream(
    source: IndexedTokens, seq_length: int, seed: int, fit: Fit, shares: tuple[float, float, float], documents: bool
) -> tuple[StreamBlocks, StreamBlocks, StreamBlocks]:
    """Training, validation and test blocks of a pair: each a contiguous part of the file, shuffled on its own, so that
    only a document that a bound cuts is in two of them. Raises DlmBridgeError for less than one block of tokens, and
    for tokens that are not the model's, see `check_fit`."""
    check_length(source, seq_length)
    check_fit(source, fit)
    parts, start = [], 0
    for size in section_sizes(len(source.tokens) // seq_length, shares):
        stop = start + size * seq_length
        parts.append(StreamBlocks(source, seq_length, seed, fit, start, stop, documents))
        start = stop
    return parts[0], parts[1], parts[2]


def check_length(source: IndexedTokens, seq_length: int) -> None:
    """Raise DlmBridgeError for less than one block of tokens."""
    total = len(source.tokens)
    if total < seq_length:
        raise DlmBridgeError(
            f"{source.prefix}.bin holds {total} tokens, fewer than one block of --seq-length {seq_length}: "
            "give more text or a shorter --seq-length"
        )


def check_fit(source: IndexedTokens, fit: Fit) -> None:
    """Raise DlmBridgeError where there are tokens that the model does not have, as another tokenizer leaves them all
    over a file: some are looked at, the rest as it is read."""
    for start in np.linspace(0, max(len(source.tokens) - WIDTH, 0), PLACES).astype(np.int64):
        _check_ids(source, source.tokens[start : start + WIDTH], fit)


def _check_ids(source: IndexedTokens, tokens: np.ndarray, fit: Fit) -> None:
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= fit.vocabulary:
        raise DlmBridgeError(
            f"{source.prefix}.bin holds token id {low if low < 0 else high}, the model has "
            f"{fit.vocabulary}: preprocess it with the model's tokenizer"
        )
    if fit.mask_token_id is not None and (tokens == fit.mask_token_id).any():
        raise DlmBridgeError(
            f"{source.prefix}.bin holds the mask token (id {fit.mask_token_id}): preprocess text without it"
        )
