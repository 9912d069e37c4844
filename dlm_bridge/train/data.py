"""Training data: files of text become blocks of `seq_length` token ids, packed without gaps and cached as Arrow."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow.parquet
import torch
from datasets.exceptions import DatasetGenerationError

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.keyed import Purpose, stream
from dlm_bridge.train.rows import Rows

MOCK = "mock"
TEXT_FIELD = "text"
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PIECE = 1 << 22  # characters; longer texts are tokenised in pieces that end with a line
BATCH = 1 << 23  # characters handed to the tokenizer at once, which spreads them over threads
PACKING = 1  # part of the cache's key: raise it when the packing below changes


class Blocks(Protocol):
    """A source of equally long token sequences."""

    def __len__(self) -> int: ...

    def rows(self, indices: Sequence[int]) -> Rows:
        """The blocks `indices`, B = len(indices) rows of seq_length tokens."""
        ...


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks from an Arrow table on disk, read through the page cache."""

    table: Any  # datasets.Dataset with the column input_ids

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, indices: Sequence[int]) -> Rows:
        return Rows(torch.from_numpy(np.stack(self.table[list(indices)]["input_ids"]).astype(np.int64)))


@dataclass(frozen=True)
class MockBlocks:
    """Made-up blocks that a model can learn: each repeats a random motif of 8 tokens. Nothing is read or stored."""

    seq_length: int
    tokens: int  # ids below this number are used
    seed: int
    length: int = 100_000

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> Rows:
        motifs = [stream(self.seed, Purpose.MOCK_DATA, index).integers(0, self.tokens, 8) for index in indices]
        blocks = np.stack([np.resize(motif, self.seq_length) for motif in motifs])
        return Rows(torch.from_numpy(blocks.astype(np.int64)))


@dataclass(frozen=True)
class Section:
    """A contiguous part of some blocks: the training, the validation or the test split."""

    blocks: Blocks
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: Sequence[int]) -> Rows:
        return self.blocks.rows([self.start + index for index in indices])


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that `--data` names: files, folders (everything in them but hidden files) and globs, in the order
    given, sorted within each. Raises DlmBridgeError for a path that names nothing."""
    found: list[Path] = []
    for path in paths:
        if Path(path).is_file():
            files = [Path(path)]
        elif Path(path).is_dir():
            files = sorted(file for file in Path(path).rglob("*") if file.is_file() and not _hidden(file, Path(path)))
        elif glob.has_magic(path):
            files = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
        else:
            raise DlmBridgeError(f"--data {path}: no such file or folder")
        if not files:
            raise DlmBridgeError(f"--data {path}: no files there")
        found += files
    return found


def pack(files: Sequence[Path], tokenizer: Any, seq_length: int, mask_token_id: int | None = None) -> PackedBlocks:
    """Tokenise the documents of `files`, put EOS after each, and cut the stream of tokens into blocks.

    The last, incomplete block is dropped. The result is cached under the `datasets` cache folder, keyed by the files
    (path, size, time), the tokenizer and the length; processes that ask for the same key wait for one another.

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
        "files": tuple(str(file) for file in files),  # a list would be packed file by file
        "tokenizer": tokenizer,
        "seq_length": seq_length,
        "mask_token_id": mask_token_id,
    }
    try:
        table = datasets.Dataset.from_generator(
            _packed,
            features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=seq_length)}),
            gen_kwargs=arguments,
            fingerprint=_fingerprint(files, tokenizer, seq_length, mask_token_id),
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DlmBridgeError):
            raise error.__cause__ from None
        raise
    return PackedBlocks(table.with_format("numpy"))


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


def split(blocks: Blocks, shares: tuple[float, float, float]) -> tuple[Section, Section, Section]:
    """Contiguous training, validation and test sections. A positive share gets at least one block where there are
    enough of them."""
    total = len(blocks)
    valid, test = (max(1, int(share * total)) if share > 0 else 0 for share in shares[1:])
    while valid + test >= total and valid + test > 0:
        valid, test = (valid, test - 1) if test else (valid - 1, test)
    train = total - valid - test
    return Section(blocks, 0, train), Section(blocks, train, valid), Section(blocks, train + valid, test)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _fingerprint(files: Sequence[Path], tokenizer: Any, seq_length: int, mask_token_id: int | None) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = [PACKING, stats, vocabulary, type(tokenizer).__name__, tokenizer.eos_token_id, mask_token_id, seq_length]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class _Piece:
    """A document, or a part of a long one."""

    text: str
    last: bool
    where: str  # file and line, for errors


def _packed(
    files: Sequence[str], tokenizer: Any, seq_length: int, mask_token_id: int | None
) -> Iterator[dict[str, np.ndarray]]:
    rest = np.empty(0, dtype=np.int32)
    total = 0
    for pieces in _batches(_pieces(files)):
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


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(files: Sequence[str]) -> Iterator[_Piece]:
    for name in files:
        path = Path(name)
        if path.suffix in JSON_SUFFIXES:
            documents = _json_lines(path)
        elif path.suffix == ".parquet":
            documents = _parquet(path)
        else:
            yield from _text(path)
            continue
        yield from (_Piece(text, True, where) for text, where in documents if text)


def _text(path: Path) -> Iterator[_Piece]:
    """A text file is one document."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = "".join(file.readlines(PIECE))
            while text:
                following = "".join(file.readlines(PIECE))
                yield _Piece(text, not following, str(path))
                text = following
    except UnicodeDecodeError as error:
        raise DlmBridgeError(
            f"{path}: not UTF-8 text (byte {error.start}): convert it, or leave it out by naming files with a glob"
        ) from None


def _json_lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DlmBridgeError(f"{where}: not JSON, one object a line is needed ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get(TEXT_FIELD), str):
                has = f"it has {', '.join(map(repr, row)) or 'nothing'}" if isinstance(row, dict) else "not an object"
                raise DlmBridgeError(f"{where}: no '{TEXT_FIELD}' field with text ({has})")
            yield row[TEXT_FIELD], where


def _parquet(path: Path) -> Iterator[tuple[str, str]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DlmBridgeError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
    with file:
        if TEXT_FIELD not in file.schema_arrow.names:
            raise DlmBridgeError(f"{path}: no '{TEXT_FIELD}' column (it has {', '.join(file.schema_arrow.names)})")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[TEXT_FIELD]):
            for text in batch.column(0).to_pylist():
                number += 1
                if not isinstance(text, str):
                    raise DlmBridgeError(f"{path}, row {number}: '{TEXT_FIELD}' is not text")
                yield text, f"{path}, row {number}"
