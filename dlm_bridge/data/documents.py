"""Text documents: reading of text, JSONL, parquet and datasets in chunks, and packing of tokens into blocks."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import pyarrow.parquet
import torch
from datasets.exceptions import DatasetGenerationError

from dlm_bridge.data.blocks import LabelledTokens, check_block
from dlm_bridge.errors import CheckpointError, DlmBridgeError, InputFileError, SettingError
from dlm_bridge.files.reading import check_characters, check_readable, reading

TEXT_FIELD = "text"
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PART_CHARACTERS = 1 << 22  # characters; longer texts are tokenised in pieces that end with a line
TABLE_ROWS = 1024  # rows of a table read at once


@dataclass(frozen=True)
class DocumentPart:
    """A document, or a part of a long one."""

    text: str
    first: bool
    last: bool
    where: str  # file and line, for errors


@dataclass(frozen=True)
class NamedDataset:
    """A Hugging Face dataset with a name to show."""

    name: str
    rows: Any  # datasets.Dataset


Source = Path | NamedDataset


@dataclass(frozen=True)
class DocumentChunk:
    """Chunk of documents that are already parsed."""

    pieces: list[DocumentPart]
    nbytes: int  # of the source, for progress

    def parsed(self, key: str) -> list[DocumentPart]:
        return self.pieces


@dataclass(frozen=True)
class JsonlChunk:
    """Chunk of a JSONL file that is not parsed yet (parsing is the slow part of reading)."""

    path: Path
    first: int  # number of the first line
    lines: list[bytes]
    nbytes: int

    def parsed(self, key: str) -> list[DocumentPart]:
        """Parse the chunk. Raises InputFileError for a line that is not a JSON object with text under `key`."""
        found = []
        for number, line in enumerate(self.lines, self.first):
            if not line.strip():
                continue
            where = f"{self.path}:{number}"
            row = parse_object(line, where)
            if not isinstance(row.get(key), str):
                raise InputFileError(where, f"no '{key}' field with text (it has {fields_of(row)})")
            if row[key]:
                found.append(DocumentPart(row[key], True, True, where))
        return found


Chunk = DocumentChunk | JsonlChunk


def find_files(paths: Sequence[str]) -> list[Path]:
    """Files of the given paths, which may be files, folders (all files except hidden ones) and globs, in the given
    order and sorted within each path. Raises InputFileError for a path without files."""
    found: list[Path] = []
    for path in paths:
        if Path(path).is_file():
            files = [Path(path)]
        elif Path(path).is_dir():
            files = sorted(file for file in Path(path).rglob("*") if file.is_file() and not _hidden(file, Path(path)))
        else:
            files = sorted(Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file())
        if not files:
            raise InputFileError(path, "no files there" if Path(path).is_dir() else "no such file or folder")
        found += files
    return found


def read_chunks(sources: Sequence[Source], key: str, size: int) -> Iterator[Chunk]:
    """Read the documents of `sources` in order, in chunks of about `size` bytes of text. `key` is the text column of
    tables. Raises InputFileError for a source whose format does not match its suffix."""
    for lines, group in itertools.groupby(sources, has_json_lines):
        if lines:
            yield from (chunk for path in group if isinstance(path, Path) for chunk in _jsonl_chunks(path, size))
        else:
            yield from _chunked((document for source in group for document in _documents(source, key)), size)


def fields_of(row: Mapping[str, Any]) -> str:
    """Names of a row's fields, for errors."""
    return ", ".join(map(repr, row)) or "nothing"


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse the object in a line of JSONL. Raises InputFileError for anything else."""
    problem = ""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        row, problem = None, str(error)
    if not isinstance(row, dict):
        problem = problem or f"it is {type(row).__name__}"
        raise InputFileError(where, f"not JSON, one object per line is needed ({problem})")
    if b"\\ud" in line.lower():  # an escaped surrogate, which may be half of a valid pair
        check_characters(row, where)
    return row


@contextmanager
def open_data(path: Path, mode: str, **settings: Any) -> Iterator[IO[Any]]:
    """Open a file like `path.open`, and decompress compressed JSON lines. Raises InputFileError if the file cannot be
    read, at any point."""
    try:
        if path.suffix in COMPRESSIONS and has_json_lines(path):
            source: IO[Any] = io.BufferedReader(pyarrow.input_stream(str(path), COMPRESSIONS[path.suffix]))
        else:
            source = path.open(mode, **settings)
        with source as file:
            yield file
    except OSError as error:
        raise InputFileError(path, f"cannot be read: {error.strerror or error}") from None


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """Open a parquet file. Raises InputFileError if it is not one."""
    check_readable(path, InputFileError)
    with reading(path, "not a parquet file", kind=InputFileError):
        return pyarrow.parquet.ParquetFile(path)


def read_parquet(
    file: pyarrow.parquet.ParquetFile, path: Path, columns: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Read the rows of an open parquet file. Raises InputFileError if a part of it is damaged."""
    with reading(path, "truncated or damaged parquet file", kind=InputFileError):
        for batch in file.iter_batches(batch_size=TABLE_ROWS, columns=columns):
            yield from batch.to_pylist()


def source_bytes(source: Source) -> int:
    """Size of a source in bytes, for progress; the sum over its chunks."""
    return source.rows.data.nbytes if isinstance(source, NamedDataset) else source.stat().st_size


def has_json_lines(source: Source) -> bool:
    """True for a file of JSON lines, which may be compressed."""
    if not isinstance(source, Path):
        return False
    return (source.with_suffix("") if source.suffix in COMPRESSIONS else source).suffix in JSON_SUFFIXES


def _documents(source: Source, key: str) -> Iterator[tuple[DocumentPart, float]]:
    """Pieces of a source that needs no parsing, each with its number of bytes in the source."""
    if isinstance(source, NamedDataset):
        return _dataset_parts(source, key)
    return _parquet_parts(source, key) if source.suffix == ".parquet" else _text_parts(source)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _chunked(documents: Iterable[tuple[DocumentPart, float]], size: int) -> Iterator[DocumentChunk]:
    """Gather pieces, each with its number of bytes in the source, into chunks."""
    pieces: list[DocumentPart] = []
    length, nbytes = 0, 0.0
    for piece, cost in documents:
        if piece.text:
            pieces.append(piece)
        length += len(piece.text)
        nbytes += cost
        if length >= size:
            yield DocumentChunk(pieces, round(nbytes))
            pieces, length, nbytes = [], 0, 0.0
    if pieces:
        yield DocumentChunk(pieces, round(nbytes))


def _text_parts(path: Path) -> Iterator[tuple[DocumentPart, float]]:
    """Read a text file as one document."""
    try:
        with open_data(path, "r", encoding="utf-8-sig", newline="") as file:
            text, first = "".join(file.readlines(PART_CHARACTERS)), True
            while text:
                following = "".join(file.readlines(PART_CHARACTERS))
                yield DocumentPart(text, first, not following, str(path)), len(text.encode())
                text, first = following, False
    except UnicodeDecodeError as error:
        raise InputFileError(
            path, f"not UTF-8 text (byte {error.start}): convert it, or exclude it by selecting files with a glob"
        ) from None


def _jsonl_chunks(path: Path, size: int) -> Iterator[JsonlChunk]:
    number = 1
    with open_data(path, "rb") as file:
        while lines := file.readlines(size):
            yield JsonlChunk(path, number, lines, sum(map(len, lines)))
            number += len(lines)


def _parquet_parts(path: Path, key: str) -> Iterator[tuple[DocumentPart, float]]:
    with open_parquet(path) as file:
        _check_column(key, file.schema_arrow.names, path)
        cost = path.stat().st_size / max(file.metadata.num_rows, 1)
        yield from _column((row[key] for row in read_parquet(file, path, [key])), key, str(path), cost)


def _dataset_parts(table: NamedDataset, key: str) -> Iterator[tuple[DocumentPart, float]]:
    _check_column(key, table.rows.column_names, table.name)
    cost = table.rows.data.nbytes / max(len(table.rows), 1)
    with reading(table.name, "truncated or damaged dataset", kind=InputFileError):
        batches = table.rows.select_columns([key]).with_format(None).iter(batch_size=TABLE_ROWS)
        yield from _column((text for batch in batches for text in batch[key]), key, table.name, cost)


def _check_column(key: str, columns: Sequence[str], name: object) -> None:
    if key not in columns:
        raise InputFileError(name, f"no '{key}' column (it has {', '.join(columns)})")


def _column(texts: Iterable[Any], key: str, name: str, cost: float) -> Iterator[tuple[DocumentPart, float]]:
    for number, text in enumerate(texts, 1):
        where = f"{name}, row {number}"
        if not isinstance(text, str):
            raise InputFileError(where, f"'{key}' is not text")
        yield DocumentPart(text, True, True, where), cost


TOKENIZER_BATCH = 1 << 23  # bytes of text per tokenizer call, which distributes them over threads
PACKING_VERSION = 1  # part of the cache key: increment it when the packing below changes


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks from a memory-mapped Arrow table."""

    table: Any  # datasets.Dataset with the column input_ids
    separator: int | None = None  # token that ends a document; None: rows do not contain documents

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """Return the blocks `indices` as B = len(indices) rows."""
        tokens = torch.from_numpy(np.stack(self.table[list(indices)]["input_ids"]).astype(np.int64))
        if self.separator is None:
            return LabelledTokens(tokens)
        ends = tokens == self.separator  # the token belongs to the document that it ends
        return LabelledTokens(tokens, documents=ends.cumsum(dim=1) - ends.long())


def pack(
    sources: Sequence[Source],
    tokenizer: Any,
    seq_length: int,
    mask_token_id: int | None = None,
    with_documents: bool = False,
) -> PackedBlocks:
    """Tokenise the documents of `sources`, append EOS to each, and split the stream of tokens into blocks.

    The last, incomplete block is dropped. The result is cached in the `datasets` cache folder, keyed by the sources
    (path, size, time), the tokenizer and the length; processes that need the same key wait for each other. With
    `with_documents`, rows contain the document of each token, determined by the EOS tokens.

    Raises:
        InputFileError: a file does not match its suffix, a `text` field is missing, or a text contains the mask token.
        CheckpointError: the tokenizer has no EOS token.
        SettingError: there are fewer tokens than one block.
    """
    check_eos(tokenizer, "separates documents")
    arguments = {
        "sources": tuple(sources),  # with a list, each source would be packed separately
        "tokenizer": tokenizer,
        "seq_length": seq_length,
        "mask_token_id": mask_token_id,
    }
    table = cached(
        _packed_blocks,
        datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=seq_length)}),
        arguments,
        fingerprint(sources, tokenizer, PACKING_VERSION, mask_token_id, seq_length),
    )
    return PackedBlocks(table, tokenizer.eos_token_id if with_documents else None)


def check_eos(tokenizer: Any, use: str) -> None:
    """Raise CheckpointError for a tokenizer without an EOS token. `use`: purpose of the token, for the message."""
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            tokenizer.name_or_path or "tokenizer",
            f"no EOS token, which {use}: set eos_token in its tokenizer_config.json",
        )


def cached(
    generate: Callable[..., Iterator[dict[str, Any]]],
    features: datasets.Features,
    arguments: dict[str, Any],
    fingerprint: str,
) -> Any:
    """Table, as numpy arrays, of the rows that `generate` yields. A table with the same `fingerprint` is read from the
    cache. Raises the DlmBridgeErrors of `generate`."""
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
    """Digest of the inputs of a cached table: paths, sizes and times of the sources, vocabulary, and settings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    states = [
        source.rows._fingerprint
        if isinstance(source, NamedDataset)
        else (str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns)
        for source in sources
    ]
    key = [states, vocabulary, type(tokenizer).__name__, tokenizer.eos_token_id, *settings]
    return hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()


def check_tokenizer(tokenizer: Any, vocab_size: int, mask_token_id: int | None) -> None:
    """Raise SettingError if a tokenizer does not fit a model with `vocab_size` embedding rows."""
    own = getattr(tokenizer, "mask_token_id", None)
    if len(tokenizer) > vocab_size:
        problem = f"has {len(tokenizer)} tokens, more than the model's vocabulary of {vocab_size}"
    elif own is not None and mask_token_id is not None and own != mask_token_id:
        problem = f"has mask token id {own}, the model's config has {mask_token_id}"
    else:
        return
    raise SettingError("tokenizer", f"{tokenizer.name_or_path} {problem}: choose the model's own tokenizer")


def check_mask_token(ids: Sequence[int], mask_token_id: int | None, where: str) -> None:
    """Raise InputFileError for a text that contains the mask token."""
    if mask_token_id is not None and mask_token_id in ids:
        raise InputFileError(where, f"the text contains the mask token (id {mask_token_id}): remove it")


def _packed_blocks(
    sources: Sequence[Source], tokenizer: Any, seq_length: int, mask_token_id: int | None
) -> Iterator[dict[str, np.ndarray]]:
    rest = np.empty(0, dtype=np.int32)
    total = 0
    for chunk in read_chunks(sources, TEXT_FIELD, TOKENIZER_BATCH):
        pieces = chunk.parsed(TEXT_FIELD)
        if not pieces:
            continue
        encoded = tokenizer([piece.text for piece in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        parts = [rest]
        for piece, ids in zip(pieces, encoded, strict=True):
            check_mask_token(ids, mask_token_id, piece.where)
            parts.append(np.asarray([*ids, tokenizer.eos_token_id] if piece.last else ids, dtype=np.int32))
        tokens = np.concatenate(parts)
        whole = len(tokens) // seq_length
        total += len(tokens) - len(rest)
        rest = tokens[whole * seq_length :]
        for block in tokens[: whole * seq_length].reshape(whole, seq_length):
            yield {"input_ids": block}
    check_block(total, seq_length, ", ".join(map(str, sources)))
