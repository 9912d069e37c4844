"""Megatron's pair of `.bin` (token ids) and `.idx` (index), byte for byte as megatron-core's IndexedDataset.

The `.idx`, little-endian: `MMIDIDX\\0\\0`, version 1 (uint64), dtype code (uint8), number of sequences S (uint64),
number of document indices D (uint64), then S lengths in tokens (int32), S offsets in bytes into the `.bin` (int64) and
D document indices (int64): document d is the sequences from index d up to index d + 1. A multimodal file has S modes
(int8) after that. Blocks are cut from the shuffled documents and read from the memory-mapped file.

PREFIX.tokenizer.json beside a pair records its tokenizer: token ids of another tokenizer would be trained without an
error if they are in range.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from dlm_bridge.data.blocks import LabelledTokens, check_block, section_sizes
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.files.atomic import atomic_file, disk_errors, sync
from dlm_bridge.hub import read_config
from dlm_bridge.objectives.noise import Purpose, keyed_generator

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
LOCK_SECONDS = 2.0
TOKENIZER_SUFFIX = ".tokenizer.json"


def pair(prefix: str | Path) -> tuple[Path, Path]:
    """Paths of the `.bin` and the `.idx` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def token_dtype(vocabulary: int) -> np.dtype:
    """Dtype in which Megatron stores token ids for a vocabulary size."""
    return DTYPES[8] if vocabulary < UINT16_VOCABULARY else DTYPES[4]


@dataclass(frozen=True)
class IndexedTokens:
    """Memory-mapped pair."""

    prefix: str
    tokens: np.ndarray  # every token id, in file order
    lengths: np.ndarray  # int32, of each sequence
    pointers: np.ndarray  # int64, bytes, of each sequence
    document_indices: np.ndarray  # int64, the first sequence of each document, and the number of sequences

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    def starts(self) -> np.ndarray:
        """int64 [documents + 1]: index of the first token of each document, followed by the number of tokens."""
        firsts = self.document_indices[:-1]
        starts = np.full(self.documents + 1, len(self.tokens), dtype=np.int64)
        inside = firsts < len(self.pointers)  # documents without sequences may close the file
        starts[:-1][inside] = self.pointers[firsts[inside]] // self.tokens.itemsize
        return starts


def open_indexed(prefix: str | Path) -> IndexedTokens:
    """Open `PREFIX.bin` and `PREFIX.idx`, checking that every number in the index fits the other and the `.bin`.

    Raises:
        InputFileError: one file of the pair is missing; the index is not a Megatron index, is truncated, describes
            images or numbers that are not token ids, or does not match the `.bin`.
    """
    bin_path, idx_path = pair(prefix)
    for path, other in ((bin_path, idx_path), (idx_path, bin_path)):
        _check(path, path.is_file(), f"missing, it belongs to {other.name}: provide both, or run preprocess again")
    index = _map(idx_path, np.dtype("u1"))
    dtype, sequences, indices = _header(idx_path, index)
    offset = HEADER.size
    parts = []
    for part, count in (("<i4", sequences), ("<i8", sequences), ("<i8", indices)):
        parts.append(np.frombuffer(index, part, count, offset))
        offset += parts[-1].nbytes
    lengths, pointers, document_indices = parts
    _check_documents(idx_path, document_indices, sequences)
    described, found = _check_sequences(idx_path, lengths, pointers, dtype.itemsize), bin_path.stat().st_size
    _check(
        bin_path,
        described == found,
        f"{found} bytes, but {idx_path.name} describes {described}: one of them is truncated or belongs to another "
        "pair, run preprocess again",
    )
    return IndexedTokens(str(prefix), _map(bin_path, dtype), lengths, pointers, document_indices)


class IndexedWriter:
    """Atomic writer of a pair: both files get their names, the `.idx` last, when the `with` block ends without error.

    with IndexedWriter("corpus", token_dtype(len(tokenizer))) as writer:
        writer.add(token_ids, lengths)

    Args:
        call: digest of everything that determines the tokens. An interrupted or killed writer leaves its last
            `checkpoint`; a writer of the same call with `resume` continues from it, after `parts` calls of `add`.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, overwrite: bool = False, call: str = "", resume: bool = False
    ) -> None:
        """Raises SettingError if a file of the pair exists, without `overwrite`."""
        self.prefix = str(prefix)
        self.parts = 0
        self._call, self._resume, self._saved = call, resume, 0
        self.dtype = dtype
        existing = [path for path in pair(prefix) if path.exists()]
        if existing and not overwrite:
            raise SettingError("output", f"{existing[0]} exists: set `overwrite`, or choose another prefix")
        self._lengths = array.array("i")
        self._open = 0  # tokens of a document that goes on

    def __enter__(self) -> IndexedWriter:
        bin_path, _ = pair(self.prefix)
        temporary = _temporary(bin_path)
        with disk_errors(bin_path):
            bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(temporary, "ab")
        # Another writer may have renamed its finished file in the meantime.
        if not _locks(self._file) or not (
            temporary.exists() and os.path.samestat(os.stat(temporary), os.fstat(self._file.fileno()))
        ):
            self._file.close()
            raise SettingError("output", f"another process is writing {self.prefix}: wait, or choose another prefix")
        size = self._restore() if self._resume else 0
        self._file.truncate(size)  # remove what an interrupted writer left
        if not size:
            self._state.unlink(missing_ok=True)
        return self

    def checkpoint(self) -> None:
        """Save a checkpoint of the tokens written so far, for a resume after an interruption. Raises ResourceError
        for disk errors."""
        with disk_errors(Path(self.prefix)), _temporary(pair(self.prefix)[1]).open("ab") as lengths:
            lengths.truncate(self._saved * self._lengths.itemsize)
            lengths.write(self._lengths[self._saved :].tobytes())
            for file in (self._file, lengths):
                file.flush()
                os.fsync(file.fileno())
        self._saved = len(self._lengths)
        state = [self._call, self.parts, os.fstat(self._file.fileno()).st_size, self._saved, self._open]
        with atomic_file(self._state, overwrite=True) as stream:
            json.dump(state, stream)

    @property
    def _state(self) -> Path:
        return _temporary(Path(f"{self.prefix}.progress"))

    def _restore(self) -> int:
        """Load the checkpoint of an interrupted writer. Returns the size of its `.bin`; 0 without a checkpoint. Raises
        SettingError for a checkpoint of another call."""
        try:
            call, parts, size, documents, goes_on = json.loads(self._state.read_text())
            lengths = _temporary(pair(self.prefix)[1]).read_bytes()[: documents * self._lengths.itemsize]
        except (OSError, ValueError, TypeError):
            return 0
        if call != self._call:
            self._file.close()
            raise SettingError(
                "resume",
                f"the interrupted command that wrote {self.prefix} had other inputs or options: run it without "
                "`resume` to start again",
            )
        if os.fstat(self._file.fileno()).st_size < size or len(lengths) != documents * self._lengths.itemsize:
            return 0  # the machine has crashed
        self._lengths.frombytes(lengths)
        self.parts, self._saved, self._open = parts, documents, goes_on
        return int(size)

    @property
    def documents(self) -> int:
        """Number of documents added so far."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens added so far."""
        return int(np.frombuffer(self._lengths, np.int32).sum(dtype=np.int64)) + self._open

    def add(self, tokens: Any, lengths: Sequence[int], unfinished: bool = False) -> None:
        """Append the token ids of len(`lengths`) documents, one sequence each. If `unfinished`, the last document is
        continued by the next call. Raises InputFileError for an id that the dtype cannot represent, or a document that
        is too long."""
        ids = np.asarray(tokens)
        if len(ids):
            worst = int(ids.max() if ids.min() >= 0 else ids.min())
            if not 0 <= worst <= np.iinfo(self.dtype).max:
                raise InputFileError(self.prefix, f"token id {worst} does not fit {self.dtype}")
        self.parts += 1
        self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        for number, length in enumerate(lengths):
            total = self._open + int(length)
            if total > LONGEST:
                raise InputFileError(self.prefix, f"a document has {total} tokens, more than {LONGEST}: split it")
            goes_on = unfinished and number == len(lengths) - 1
            self._open = total if goes_on else 0
            if not goes_on:
                self._lengths.append(total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        bin_path, idx_path = pair(self.prefix)
        kept = kind is KeyboardInterrupt and self._state.exists()
        try:
            if kind is None:
                self._finish(bin_path, idx_path)
        except OSError as failure:
            error = failure
        finally:
            for path in () if kept else (_temporary(bin_path), _temporary(idx_path), self._state):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk complains once more about what is buffered
                self._file.close()
        if isinstance(error, OSError):
            with disk_errors(bin_path):
                raise error
        if kept:
            raise KeyboardInterrupt(
                f"interrupted: {self.prefix} was not written; the same command with `resume` continues from its last "
                "checkpoint, without it starts again"
            ) from None

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
        # A kill between these lines leaves half of a pair, which is refused, never an index of other tokens.
        idx_path.unlink(missing_ok=True)
        os.replace(_temporary(bin_path), bin_path)
        os.replace(_temporary(idx_path), idx_path)
        sync(bin_path.parent)


def _locks(file: BinaryIO) -> bool:
    """Lock the file; return True on success. Waits for the workers of a killed writer, which may hold the lock for a
    moment."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size < dtype.itemsize:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _header(path: Path, index: np.ndarray) -> tuple[np.dtype, int, int]:
    """Dtype of the tokens, number of sequences and number of document indices."""
    start = index[: HEADER.size].tobytes()
    _check(path, start[: len(MAGIC)] == MAGIC, "not a Megatron index (it does not begin with MMIDIDX)")
    _check(path, len(start) == HEADER.size, f"truncated, {len(start)} bytes: run preprocess again")
    _, version, code, sequences, indices = HEADER.unpack(start)
    _check(path, version == VERSION, f"version {version} of Megatron's index is not supported, only {VERSION}")
    _check(path, code in DTYPES and DTYPES[code].kind != "f", f"dtype code {code} is not that of token ids")
    needed = HEADER.size + 12 * sequences + 8 * indices
    multimodal = sequences > 0 and len(index) == needed + sequences
    _check(path, not multimodal, "a multimodal index (it has modes): only text is supported")
    _check(
        path,
        len(index) == needed,
        f"{len(index)} bytes, but {sequences} sequences and {indices} document indices take {needed}: truncated or "
        "damaged, run preprocess again",
    )
    return DTYPES[code], sequences, indices


def _check(path: object, valid: bool, problem: str) -> None:
    if not valid:
        raise InputFileError(path, problem)


def _check_documents(path: Path, indices: np.ndarray, sequences: int) -> None:
    whole = len(indices) > 0 and indices[0] == 0 and indices[-1] == sequences
    _check(path, whole, f"its document indices do not run from 0 to {sequences}, the file is damaged")
    for start in range(0, len(indices), CHECKED_AT_ONCE):
        part = indices[start : start + CHECKED_AT_ONCE + 1]
        if len(bad := np.flatnonzero(part[1:] < part[:-1])):
            raise InputFileError(path, f"document {start + bad[0]} ends before it begins, the file is damaged")


def _check_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Total size of the sequences in bytes; they must be contiguous. Reads the index in parts."""
    end = 0
    for start in range(0, len(lengths), CHECKED_AT_ONCE):
        part = lengths[start : start + CHECKED_AT_ONCE].astype(np.int64)
        ends = end + np.cumsum(part) * itemsize
        begins = pointers[start : start + CHECKED_AT_ONCE]
        if len(bad := np.flatnonzero((part < 0) | (begins != ends - part * itemsize))):
            sequence = f"sequence {start + bad[0]} of {part[bad[0]]} tokens begins at byte {begins[bad[0]]}"
            raise InputFileError(path, f"{sequence}, not at the end of the one before: the file is damaged")
        end = int(ends[-1])
    return end


CHECKED_PLACES, CHECKED_WIDTH = 64, 16_384  # samples of a pair that are checked when it is opened, tokens of each


@dataclass(frozen=True)
class TokenLimits:
    """Limits on the token ids of a model's data."""

    vocabulary: int  # upper bound (exclusive) of the ids
    mask_token_id: int | None  # token that the data must not contain

    def is_exceeded(self, tokens: np.ndarray) -> bool:
        """True if `tokens` contain ids outside the vocabulary or the mask token."""
        outside = tokens.size > 0 and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary)
        return outside or (self.mask_token_id is not None and bool((tokens == self.mask_token_id).any()))


@dataclass(frozen=True)
class StreamBlocks:
    """Blocks of `seq_length` tokens from a token range of a pair.

    The documents are shuffled with the seed, concatenated and split into blocks. A document that crosses a bound of
    the range is treated as a separate document on either side. Two numbers per document are held in memory.
    """

    source: IndexedTokens
    seq_length: int
    seed: int
    fit: TokenLimits
    start: int  # tokens of the file, in its own order
    stop: int
    with_documents: bool = False  # rows contain the document of each token
    _begins: np.ndarray = field(init=False, repr=False, compare=False)  # first token of each document in the file
    _ends: np.ndarray = field(init=False, repr=False, compare=False)  # and the end of it in the stream

    def __post_init__(self) -> None:
        starts = self.source.starts()
        first = np.searchsorted(starts, self.start, side="right") - 1
        last = np.searchsorted(starts, self.stop, side="left")
        begins = np.maximum(starts[first:last], self.start)
        lengths = np.minimum(starts[first + 1 : last + 1], self.stop) - begins
        order = keyed_generator(self.seed, Purpose.DOCUMENT_ORDER).permutation(len(begins))
        object.__setattr__(self, "_begins", begins[order])
        object.__setattr__(self, "_ends", np.cumsum(lengths[order]))

    def __len__(self) -> int:
        return (self.stop - self.start) // self.seq_length

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """Return the blocks `indices`. Raises InputFileError for tokens outside the model's vocabulary."""
        tokens = np.empty((len(indices), self.seq_length), dtype=np.int64)
        documents = np.empty((len(indices), self.seq_length), dtype=np.int32)
        for row, index in enumerate(indices):
            filled = 0
            for number, (begin, count) in enumerate(self._pieces(index * self.seq_length)):
                tokens[row, filled : filled + count] = self.source.tokens[begin : begin + count]
                documents[row, filled : filled + count] = number
                filled += count
        if self.fit.is_exceeded(tokens):
            for index in indices:
                for begin, count in self._pieces(index * self.seq_length):
                    _check_ids(self.source, begin, begin + count, self.fit)
        numbers = torch.from_numpy(documents) if self.with_documents else None
        return LabelledTokens(torch.from_numpy(tokens), documents=numbers)

    def _pieces(self, place: int) -> Iterator[tuple[int, int]]:
        """Parts of documents that form the block starting at `place` of the stream: (start in the file, length)."""
        document, end = int(np.searchsorted(self._ends, place, side="right")), place + self.seq_length
        while place < end:
            left = int(self._ends[document]) - place
            if left:  # else a document without tokens
                length = int(self._ends[document] - (self._ends[document - 1] if document else 0))
                count = min(left, end - place)
                yield int(self._begins[document]) + length - left, count
                place += count
            document += 1


def split_stream(
    source: IndexedTokens,
    seq_length: int,
    seed: int,
    fit: TokenLimits,
    shares: tuple[float, float, float],
    documents: bool,
) -> tuple[StreamBlocks, StreamBlocks, StreamBlocks]:
    """Training, validation and test blocks of a pair. Each is a contiguous range of the file and is shuffled
    separately, so only a document that crosses a bound is in two of them. Raises SettingError for less than one block
    of tokens, and InputFileError for tokens that do not fit the model (see `check_token_limits`)."""
    check_length(source, seq_length)
    check_token_limits(source, fit)
    parts, start = [], 0
    for size in section_sizes(len(source.tokens) // seq_length, shares):
        stop = start + size * seq_length
        parts.append(StreamBlocks(source, seq_length, seed, fit, start, stop, documents))
        start = stop
    return parts[0], parts[1], parts[2]


def check_length(source: IndexedTokens, seq_length: int) -> None:
    """Raise SettingError for less than one block of tokens."""
    check_block(len(source.tokens), seq_length, f"{source.prefix}.bin")


def check_token_limits(source: IndexedTokens, fit: TokenLimits) -> None:
    """Raise InputFileError if a token id exceeds the model's vocabulary, for example because of another tokenizer.
    Only a sample of the file is checked here, the rest when it is read."""
    for start in np.linspace(0, max(len(source.tokens) - CHECKED_WIDTH, 0), CHECKED_PLACES).astype(np.int64):
        _check_ids(source, int(start), int(start) + CHECKED_WIDTH, fit)


def _check_ids(source: IndexedTokens, start: int, stop: int, fit: TokenLimits) -> None:
    """Raise InputFileError if tokens `start` to `stop` of a pair exceed the limits."""
    tokens = source.tokens[start:stop]
    if not fit.is_exceeded(tokens):
        return
    worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
    problem = f"contains token id {worst}, the model has {fit.vocabulary}: preprocess it with the model's tokenizer"
    if 0 <= worst < fit.vocabulary:
        position = start + int((tokens == fit.mask_token_id).argmax())
        document = int(np.searchsorted(source.starts(), position, side="right"))
        problem = f"document {document} contains the mask token (id {fit.mask_token_id}): preprocess text without it"
    raise InputFileError(f"{source.prefix}.bin", problem)


def fingerprint_file(prefix: str | Path) -> Path:
    """Path of the tokenizer fingerprint of a pair."""
    return Path(f"{prefix}{TOKENIZER_SUFFIX}")


def without_fingerprints(files: Iterable[Path]) -> list[Path]:
    """Files without the tokenizer fingerprints of pairs."""
    return [
        file
        for file in files
        if not (file.name.endswith(TOKENIZER_SUFFIX) and pair(str(file).removesuffix(TOKENIZER_SUFFIX))[1].is_file())
    ]


def write_fingerprint(prefix: str | Path, tokenizer: Any) -> None:
    """Write the tokenizer fingerprint of a new pair."""
    count = _count(tokenizer)
    record = {"tokenizer": str(tokenizer.name_or_path), "tokens": count, "digest": _digest(tokenizer, count)}
    with atomic_file(fingerprint_file(prefix), overwrite=True) as file:
        file.write(json.dumps(record, indent=2) + "\n")


def check_fingerprint(source: IndexedTokens, tokenizer: Any) -> None:
    """Raise InputFileError if a pair was created with a tokenizer other than the run's, whose ids stand for other
    tokens. The run's tokenizer may have additional tokens after the recorded ones. Pairs without a fingerprint
    pass."""
    file = fingerprint_file(source.prefix)
    if not file.is_file():
        return
    record = read_config(file)
    count = record.get("tokens")
    if not isinstance(count, int):
        raise InputFileError(file, "damaged (no number of tokens): remove it, or run preprocess again")
    _check(
        f"{source.prefix}.bin",
        _count(tokenizer) >= count and _digest(tokenizer, count) == record.get("digest"),
        f"written with the tokenizer {record.get('tokenizer')}, but the run's is {tokenizer.name_or_path}: preprocess "
        "it with the run's, or set `tokenizer` to the other",
    )


def _count(tokenizer: Any) -> int:
    return 1 + max(tokenizer.get_vocab().values())


def _digest(tokenizer: Any, count: int) -> str:
    """Digest of the tokens with ids below `count`."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number < count)
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()
