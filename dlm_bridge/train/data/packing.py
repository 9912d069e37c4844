"""Packing: the tokens of documents, EOS after each, cut into blocks and cached as Arrow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from datasets.exceptions import DatasetGenerationError

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.data.documents import TEXT_FIELD, Source, Table, read_chunks
from dlm_bridge.train.rows import Rows

BATCH = 1 << 23  # bytes of text handed to the tokenizer at once, which spreads them over threads
PACKING = 1  # part of the cache's key: raise it when the packing below changes


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks from an Arrow table on disk, read through the page cache."""

    table: Any  # datasets.Dataset with the column input_ids
    separator: int | None = None  # the token that ends a document, where rows shall say which are of one

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The blocks `indices`, B = len(indices) rows."""
        tokens = torch.from_numpy(np.stack(self.table[list(indices)]["input_ids"]).astype(np.int64))
        if self.separator is None:
            return Rows(tokens)
        ends = tokens == self.separator  # the token belongs to the document that it ends
        return Rows(tokens, documents=ends.cumsum(dim=1) - ends.long())


def pack(
    sources: Sequence[Source],
    tokenizer: Any,
    seq_length: int,
    mask_token_id: int | None = None,
    with_documents: bool = False,
) -> PackedBlocks:
    """Tokenise the documents of `sources`, put EOS after each, and cut the stream of tokens into blocks.

    The last, incomplete block is dropped. The result is cached under the `datasets` cache folder, keyed by the sources
    (path, size, time), the tokenizer and the length; processes that ask for the same key wait for one another. Rows
    tell documents apart, by the EOS between them, where they are to be `with_documents`.

    Raises:
        DlmBridgeError: a file that is not what its suffix says, a missing `text` field (with file and line), a
            tokenizer without EOS, text that holds the mask token, fewer tokens than one block.
    """
    if tokenizer.eos_token_id is None:
        raise DlmBridgeError(
            f"tokenizer {tokenizer.name_or_path} has no EOS token, which separates documents: "
            "set eos_token in its tokenizer_config.json"
        )
    arguments = {
        "sources": tuple(sources),  # a list would be packed source by source
        "tokenizer": tokenizer,
        "seq_length": seq_length,
        "mask_token_id": mask_token_id,
    }
    table = cached(
        _packed,
        datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=seq_length)}),
        arguments,
        fingerprint(sources, tokenizer, PACKING, mask_token_id, seq_length),
    )
    return PackedBlocks(table, tokenizer.eos_token_id if with_documents else None)


def cached(
    generate: Callable[..., Iterator[dict[str, Any]]],
    features: datasets.Features,
    arguments: dict[str, Any],
    fingerprint: str,
) -> Any:
    """The table, as numpy arrays, of the rows that `generate` gives, or the one that was made of the same
    `fingerprint` before. Raises the DlmBridgeError of `generate`."""
    try:
        table = datasets.Dataset.from_generator(
            generate, features=features, gen_kwargs=arguments, fingerprint=fingerprint
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DlmBridgeError):
            raise error.__cause__ from None
        raise
    return table.with_format("numpy")


def fingerprint(sources: Sequence[Source], tokenizer: Any, *settings: Any) -> str:
    """What a cached table is made of: the sources' paths, sizes and times, the vocabulary, and settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    states = [
        source.rows._fingerprint
        if isinstance(source, Table)
        else (str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns)
        for source in sources
    ]
    key = [states, vocabulary, type(tokenizer).__name__, tokenizer.eos_token_id, *settings]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def check_tokenizer(tokenizer: Any, vocab_size: int, mask_token_id: int | None) -> None:
    """Raise DlmBridgeError where a tokenizer does not fit a model with `vocab_size` embedding rows."""
    if len(tokenizer) > vocab_size:
        raise DlmBridgeError(
            f"tokenizer {tokenizer.name_or_path} has {len(tokenizer)} tokens, more than the model's vocabulary of "
            f"{vocab_size}: choose the model's own tokenizer or a larger vocab_size"
        )
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and mask_token_id is not None and own != mask_token_id:
        raise DlmBridgeError(
            f"tokenizer {tokenizer.name_or_path} has mask token id {own}, the model's config has {mask_token_id}: "
            "make them agree"
        )


def _packed(
    sources: Sequence[Source], tokenizer: Any, seq_length: int, mask_token_id: int | None
) -> Iterator[dict[str, np.ndarray]]:
    rest = np.empty(0, dtype=np.int32)
    total = 0
    for chunk in read_chunks(sources, TEXT_FIELD, BATCH):
        pieces = chunk.parsed(TEXT_FIELD)
        if not pieces:
            continue
        encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        parts = [rest]
        for piece, ids in zip(pieces, encoded, strict=True):
            if mask_token_id is not None and mask_token_id in ids:
                raise DlmBridgeError(f"{piece.where}: the text holds the mask token (id {mask_token_id}): remove it")
            parts.append(np.asarray([*ids, tokenizer.eos_token_id] if piece.last else ids, dtype=np.int32))
        tokens = np.concatenate(parts)
        whole = len(tokens) // seq_length
        total += len(tokens) - len(rest)
        rest = tokens[whole * seq_length :]
        for block in tokens[: whole * seq_length].reshape(whole, seq_length):
            yield {"input_ids": block}
    if total < seq_length:
        raise DlmBridgeError(
            f"--data holds {total} tokens, fewer than one block of --seq-length {seq_length}: "
            "give more text or a shorter --seq-length"
        )
