"""Megatron's pair of `.bin` (token ids) and `.idx` (where they are), byte for byte as megatron-core's IndexedDataset.

The `.idx`, little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), dtype code (uint8), number of sequences S (uint64),
number of document indices D (uint64), then S lengths in tokens (int32), S offsets in bytes into the `.bin` (int64) and
D document indices (int64): document d is the sequences from index d up to index d + 1. A multimodal file has S modes
(int8) after that.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dlm_bridge.errors import DlmBridgeError

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
UINT16_VOCABULARY = 65500  # megatron-core's bound: larger vocabularies are stored as int32
LONGEST = 2**31 - 1  # tokens of a document, whose length is an int32
CHECKED_AT_ONCE = 1 << 20


def pair(prefix: str | Path) -> tuple[Path, Path]:
    """The `.bin` and the `.idx` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def token_dtype(vocabulary: int) -> np.dtype:
    """The dtype that Megatron stores a vocabulary of so many ids in."""
    return DTYPES[8] if vocabulary < UINT16_VOCABULARY else DTYPES[4]


@dataclass(frozen=True)
class IndexedTokens:
    """An open pair. Both files are memory-mapped: nothing is read before it is asked for."""

    prefix: str
    tokens: np.ndarray  # every token id, in file order
    lengths: np.ndarray  # int32, of each sequence
    pointers: np.ndarray  # int64, bytes, of each sequence
    document_indices: np.ndarray  # int64, the first sequence of each document, and the number of sequences

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.document_indices) - 1

    def starts(self) -> np.ndarray:
        """int64 [documents + 1]: the first token of each document, and the number of tokens."""
        firsts = self.document_indices[:-1]
        starts = np.full(self.documents + 1, len(self.tokens), dtype=np.int64)
        inside = firsts < len(self.pointers)  # documents without sequences may close the file
        starts[:-1][inside] = self.pointers[firsts[inside]] // self.tokens.itemsize
        return starts


def open_indexed(prefix: str | Path) -> IndexedTokens:
    """Open `PREFIX.bin` and `PREFIX.idx`, checking that every number in the index fits the other and the `.bin`.

    Raises:
        DlmBridgeError: half of the pair is missing; the index is no Megatron index, is cut short, describes images or
            numbers that are no token ids, or does not describe this `.bin`.
    """
    bin_path, idx_path = pair(prefix)
    for path, other in ((bin_path, idx_path), (idx_path, bin_path)):
        if not path.is_file():
            raise DlmBridgeError(f"{path}: missing, it belongs with {other.name}: give both, or preprocess anew")
    index = _map(idx_path, np.dtype("u1"))
    dtype, sequences, indices = _header(idx_path, index)
    offset = HEADER.size
    parts = []
    for part, count in (("<i4", sequences), ("<i8", sequences), ("<i8", indices)):
        parts.append(np.frombuffer(index, part, count, offset))
        offset += parts[-1].nbytes
    lengths, pointers, document_indices = parts
    _check_documents(idx_path, document_indices, sequences)
    described = _check_sequences(idx_path, lengths, pointers, dtype.itemsize)
    if described != bin_path.stat().st_size:
        raise DlmBridgeError(
            f"{bin_path}: {bin_path.stat().st_size} bytes, but {idx_path.name} describes {described}: one of them is "
            "cut short or belongs to another, preprocess anew"
        )
    return IndexedTokens(str(prefix), _map(bin_path, dtype), lengths, pointers, document_indices)


class IndexedWriter:
    """Writes a pair, whole or not at all: both files get their names, the `.idx` last, when the block ends well.

    with IndexedWriter("corpus", token_dtype(len(tokenizer))) as writer:
        writer.add(token_ids, lengths)
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, overwrite: bool = False) -> None:
        """Raises DlmBridgeError where a file of the pair exists and is not to be overwritten, or cannot be written."""
        self.prefix = str(prefix)
        self.dtype = dtype
        existing = [path for path in pair(prefix) if path.exists()]
        if existing and not overwrite:
            raise DlmBridgeError(f"{existing[0]} exists: add --overwrite, or choose another prefix")
        self._lengths = array.array("i")
        self._open = 0  # tokens of a document that goes on

    def __enter__(self) -> IndexedWriter:
        bin_path, _ = pair(self.prefix)
        temporary = _temporary(bin_path)
        try:
            bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(temporary, "ab")
        except OSError as error:
            raise DlmBridgeError(f"{temporary}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may have passed to the finished file while we opened it.
            locked = temporary.exists() and os.path.samestat(os.stat(temporary), os.fstat(self._file.fileno()))
        except BlockingIOError:
            locked = False
        if not locked:
            self._file.close()
            raise DlmBridgeError(f"{self.prefix}: another process is writing it: wait, or choose another prefix")
        self._file.truncate(0)  # what a killed writer left
        return self

    @property
    def documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, tokens: Any, lengths: Sequence[int], unfinished: bool = False) -> None:
        """Append the token ids of `lengths` documents, one sequence each. The last document goes on with the next
        call where it is `unfinished`. Raises DlmBridgeError for an id that the dtype cannot hold and too long a
        document."""
        ids = np.asarray(tokens)
        if len(ids) and not (ids.min() >= 0 and ids.max() <= np.iinfo(self.dtype).max):
            raise DlmBridgeError(
                f"{self.prefix}: token id {int(ids.max() if ids.min() >= 0 else ids.min())} does not fit {self.dtype}"
            )
        self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        for number, length in enumerate(lengths):
            total = self._open + int(length)
            if total > LONGEST:
                raise DlmBridgeError(f"{self.prefix}: a document has {total} tokens, more than {LONGEST}: cut it")
            goes_on = unfinished and number == len(lengths) - 1
            self._open = total if goes_on else 0
            if not goes_on:
                self._lengths.append(total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        bin_path, idx_path = pair(self.prefix)
        try:
            if kind is None:
                self._finish(bin_path, idx_path)
        except OSError as failure:
            error = failure
        finally:
            for path in (bin_path, idx_path):
                _temporary(path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk complains once more about what is buffered
                self._file.close()
        if isinstance(error, OSError):
            raise DlmBridgeError(f"{self.prefix}: cannot be written: {error.strerror or error}") from error

    def _finish(self, bin_path: Path, idx_path: Path) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        lengths = np.frombuffer(self._lengths, np.int32)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        with open(_temporary(idx_path), "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
            index.write(lengths.astype("<i4", copy=False).data)
            index.write(pointers.data)
            index.write(np.arange(len(lengths) + 1, dtype="<i8").data)
            index.flush()
            os.fsync(index.fileno())
        # Between these lines a kill leaves half a pair, which nobody reads, never an index of other tokens.
        idx_path.unlink(missing_ok=True)
        os.replace(_temporary(bin_path), bin_path)
        os.replace(_temporary(idx_path), idx_path)
        folder = os.open(bin_path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size < dtype.itemsize:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _header(path: Path, index: np.ndarray) -> tuple[np.dtype, int, int]:
    """The tokens' dtype, the number of sequences and that of document indices."""
    start = index[: HEADER.size].tobytes()
    if start[: len(MAGIC)] != MAGIC:
        raise DlmBridgeError(f"{path}: not a Megatron index (it does not begin with MMIDIDX)")
    if len(start) < HEADER.size:
        raise DlmBridgeError(f"{path}: cut short, {len(start)} bytes: preprocess anew")
    _, version, code, sequences, indices = HEADER.unpack(start)
    if version != VERSION:
        raise DlmBridgeError(f"{path}: version {version} of Megatron's index, only {VERSION} is known")
    if code not in DTYPES:
        raise DlmBridgeError(f"{path}: unknown dtype code {code}, the file is damaged")
    if DTYPES[code].kind == "f":
        raise DlmBridgeError(f"{path}: its numbers are {DTYPES[code]}, not token ids")
    needed = HEADER.size + 12 * sequences + 8 * indices
    if len(index) == needed + sequences and sequences:
        raise DlmBridgeError(f"{path}: a multimodal index (it has modes): only text is read")
    if len(index) != needed:
        raise DlmBridgeError(
            f"{path}: {len(index)} bytes, but {sequences} sequences and {indices} document indices take {needed}: cut "
            "short or damaged, preprocess anew"
        )
    return DTYPES[code], sequences, indices


def _check_documents(path: Path, indices: np.ndarray, sequences: int) -> None:
    if len(indices) == 0 or indices[0] != 0 or indices[-1] != sequences:
        raise DlmBridgeError(f"{path}: its document indices do not run from 0 to {sequences}, the file is damaged")
    for start in range(0, len(indices), CHECKED_AT_ONCE):
        part = indices[start : start + CHECKED_AT_ONCE + 1]
        if len(bad := np.flatnonzero(part[1:] < part[:-1])):
            raise DlmBridgeError(f"{path}: document {start + bad[0]} ends before it begins, the file is damaged")


def _check_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """The bytes that the sequences take, one after another, as every writer lays them. Reads a part at a time."""
    end = 0
    for start in range(0, len(lengths), CHECKED_AT_ONCE):
        part = lengths[start : start + CHECKED_AT_ONCE].astype(np.int64)
        if len(bad := np.flatnonzero(part < 0)):
            raise DlmBridgeError(f"{path}: sequence {start + bad[0]} has length {part[bad[0]]}, the file is damaged")
        ends = end + np.cumsum(part) * itemsize
        wrong = np.flatnonzero(pointers[start : start + CHECKED_AT_ONCE] != ends - part * itemsize)
        if len(wrong):
            raise DlmBridgeError(
                f"{path}: sequence {start + wrong[0]} points to byte {pointers[start + wrong[0]]}, not the end of the "
                "one before, the file is damaged"
            )
        end = int(ends[-1])
    return end
