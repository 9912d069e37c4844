"""Documents: text, JSONL and parquet files and Hugging Face datasets, read in chunks that can be parsed anywhere."""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

from dlm_bridge.errors import DlmBridgeError

TEXT_FIELD = "text"
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PIECE = 1 << 22  # characters; longer texts are tokenised in pieces that end with a line
TABLE_ROWS = 1024  # rows of a table read at once


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    text: str
    first: bool
    last: bool
    where: str  # file and line, for errors


@dataclass(frozen=True)
class Table:
    """A Hugging Face dataset with a name to show."""

    name: str
    rows: Any  # datasets.Dataset


Source = Path | Table


@dataclass(frozen=True)
class Pieces:
    """A chunk of documents that are read."""

    pieces: list[Piece]
    nbytes: int  # of the source, for progress

    def parsed(self, key: str) -> list[Piece]:
        return self.pieces


@dataclass(frozen=True)
class Lines:
    """A chunk of a JSONL file that is yet to be parsed: the slow half of reading it."""

    path: Path
    first: int  # number of the first line
    lines: list[bytes]
    nbytes: int

    def parsed(self, key: str) -> list[Piece]:
        """Raises DlmBridgeError for a line that is no JSON object with text under `key`."""
        found = []
        for number, line in enumerate(self.lines, self.first):
            if not line.strip():
                continue
            where = f"{self.path}, line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DlmBridgeError(f"{where}: not JSON, one object a line is needed ({error})") from None
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                has = f"it has {', '.join(map(repr, row)) or 'nothing'}" if isinstance(row, dict) else "not an object"
                raise DlmBridgeError(f"{where}: no '{key}' field with text ({has})")
            if row[key]:
                found.append(Piece(row[key], True, True, where))
        return found


Chunk = Pieces | Lines


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that some paths name: files, folders (everything in them but hidden files) and globs, in the order
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
            raise DlmBridgeError(f"{path}: no such file or folder")
        if not files:
            raise DlmBridgeError(f"{path}: no files there")
        found += files
    return found


def read_chunks(sources: Sequence[Source], key: str, size: int) -> Iterator[Chunk]:
    """The documents of some sources, in order, in chunks of about `size` bytes of text; those of a table are under
    `key`. Raises DlmBridgeError for a source that is not what its suffix says."""
    for lines, group in itertools.groupby(sources, _has_lines):
        if lines:
            yield from (chunk for path in group if isinstance(path, Path) for chunk in _lines(path, size))
        else:
            yield from _chunked((document for source in group for document in _documents(source, key)), size)


def source_bytes(source: Source) -> int:
    """What the chunks of a source add up to, for progress."""
    return source.rows.data.nbytes if isinstance(source, Table) else source.stat().st_size


def _has_lines(source: Source) -> bool:
    return isinstance(source, Path) and source.suffix in JSON_SUFFIXES


def _documents(source: Source, key: str) -> Iterator[tuple[Piece, float]]:
    """The pieces of a source that needs no parsing, each with its part of the source's bytes."""
    if isinstance(source, Table):
        return _table(source, key)
    return _parquet(source, key) if source.suffix == ".parquet" else _text(source)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _chunked(documents: Iterable[tuple[Piece, float]], size: int) -> Iterator[Pieces]:
    """Pieces, each with its part of the source's bytes, gathered."""
    pieces: list[Piece] = []
    length, nbytes = 0, 0.0
    for piece, cost in documents:
        if piece.text:
            pieces.append(piece)
        length += len(piece.text)
        nbytes += cost
        if length >= size:
            yield Pieces(pieces, round(nbytes))
            pieces, length, nbytes = [], 0, 0.0
    if pieces:
        yield Pieces(pieces, round(nbytes))


def _text(path: Path) -> Iterator[tuple[Piece, float]]:
    """A text file is one document."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text, first = "".join(file.readlines(PIECE)), True
            while text:
                following = "".join(file.readlines(PIECE))
                yield Piece(text, first, not following, str(path)), len(text.encode())
                text, first = following, False
    except UnicodeDecodeError as error:
        raise DlmBridgeError(
            f"{path}: not UTF-8 text (byte {error.start}): convert it, or leave it out by naming files with a glob"
        ) from None


def _lines(path: Path, size: int) -> Iterator[Lines]:
    number = 1
    with path.open("rb") as file:
        while lines := file.readlines(size):
            yield Lines(path, number, lines, sum(map(len, lines)))
            number += len(lines)


def _parquet(path: Path, key: str) -> Iterator[tuple[Piece, float]]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DlmBridgeError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
    with file:
        if key not in file.schema_arrow.names:
            raise DlmBridgeError(f"{path}: no '{key}' column (it has {', '.join(file.schema_arrow.names)})")
        cost = path.stat().st_size / max(file.metadata.num_rows, 1)
        batches = file.iter_batches(batch_size=TABLE_ROWS, columns=[key])
        columns = (batch.column(0).to_pylist() for batch in batches)
        yield from _column(columns, key, str(path), cost)


def _table(table: Table, key: str) -> Iterator[tuple[Piece, float]]:
    if key not in table.rows.column_names:
        raise DlmBridgeError(f"{table.name}: no '{key}' column (it has {', '.join(table.rows.column_names)})")
    cost = table.rows.data.nbytes / max(len(table.rows), 1)
    batches = table.rows.select_columns([key]).with_format(None).iter(batch_size=TABLE_ROWS)
    yield from _column((batch[key] for batch in batches), key, table.name, cost)


def _column(columns: Iterable[list[Any]], key: str, name: str, cost: float) -> Iterator[tuple[Piece, float]]:
    number = 0
    for column in columns:
        for text in column:
            number += 1
            where = f"{name}, row {number}"
            if not isinstance(text, str):
                raise DlmBridgeError(f"{where}: '{key}' is not text")
            yield Piece(text, True, True, where), cost
