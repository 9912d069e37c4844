"""Megatron's .bin/.idx: byte for byte megatron-core's, read as it reads; damaged ones named; blocks cut from it."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dlm_bridge.data import indexed as data_stream
from dlm_bridge.data.indexed import (
    IndexedTokens,
    IndexedWriter,
    StreamBlocks,
    TokenLimits,
    open_indexed,
    split_stream,
    token_dtype,
)
from dlm_bridge.errors import InputFileError, ResourceError, SettingError
from tests.refusals import refused

DOCUMENTS = [[5, 6, 7], [8], list(range(100, 140)), [9, 9], [3] * 17, list(range(200, 209))]
ALL = TokenLimits(1000, None)


def _write(prefix: Path, documents: list[list[int]] = DOCUMENTS, vocabulary: int = 1000) -> IndexedTokens:
    with IndexedWriter(prefix, token_dtype(vocabulary)) as writer:
        writer.add([token for document in documents for token in document], [len(document) for document in documents])
    return open_indexed(prefix)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65499, np.uint16), (65500, np.int32)])
def test_files_equal_megatron_cores_and_are_read_by_it(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    """Its builder's two files equal ours byte for byte, its reader reads ours, ours reads its."""
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert token_dtype(vocabulary) == peer.DType.optimal_dtype(vocabulary) == dtype
    documents = [*DOCUMENTS, [vocabulary - 1]]
    _write(tmp_path / "ours", documents, vocabulary)
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "peer.bin"), dtype=peer.DType.optimal_dtype(vocabulary))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "peer.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"peer{suffix}").read_bytes()
    theirs = peer.IndexedDataset(str(tmp_path / "ours"))
    assert [sequence.tolist() for sequence in theirs[:]] == documents
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_megatron_cores_files_of_every_integer_type_are_read(tmp_path: Path, dtype: type) -> None:
    """With documents of several sequences, as --split-sentences makes them, of none, and merged files."""
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
    builder.add_item(torch.tensor([1, 2, 3]))
    builder.add_item(torch.tensor([4]))
    builder.end_document()
    builder.end_document()
    builder.add_document(torch.tensor([5, 6]), [1, 1])
    builder.finalize(str(tmp_path / "a.idx"))
    both = peer.IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=dtype)
    both.add_index(str(tmp_path / "a"))
    both.add_index(str(tmp_path / "a"))
    both.end_document()
    both.finalize(str(tmp_path / "b.idx"))
    once, twice = open_indexed(tmp_path / "a"), open_indexed(tmp_path / "b")
    assert once.tokens.dtype == dtype
    assert once.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert once.starts().tolist() == [0, 4, 4, 6]
    assert twice.starts().tolist() == [0, 4, 4, 6, 10, 10, 12, 12]


def test_multimodal_files_of_megatron_core_are_refused(tmp_path: Path) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = peer.IndexedDatasetBuilder(str(tmp_path / "a.bin"), multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    with refused(InputFileError, tmp_path / "a.idx", "multimodal"):
        open_indexed(tmp_path / "a")


def test_documents_may_come_in_parts(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", token_dtype(1000)) as writer:
        writer.add([1, 2, 3], [1, 2], unfinished=True)
        writer.add([4], [1], unfinished=True)
        writer.add([], [])
        writer.add([5, 6], [1, 1])
    assert open_indexed(tmp_path / "a").lengths.tolist() == [1, 4, 1]


def _damage(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        data = bytearray(prefix.with_suffix(".idx").read_bytes())
        change(data)
        prefix.with_suffix(".idx").write_bytes(data)

    return damage


def _put(form: str, offset: int, value: int) -> Callable[[Path], None]:
    return _damage(lambda data: struct.pack_into(form, data, offset, value))


LENGTHS, POINTERS, INDICES = 34, 34 + 6 * 4, 34 + 6 * 12


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (lambda prefix: prefix.with_suffix(".idx").unlink(), "a.idx", "a.bin"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), "a.bin", "a.idx"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b""), "a.idx", "not a Megatron index"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b'{"a": 1}\n' * 9), "a.idx", "not a Megatron index"),
        (_damage(lambda data: data.__delitem__(slice(20, None))), "a.idx", "20 bytes"),
        (_damage(lambda data: data.__delitem__(slice(-3, None))), "a.idx", "6 sequences"),
        (_damage(lambda data: data.extend(b"\0\0\0")), "a.idx", "6 sequences"),
        (_put("<Q", 9, 2), "a.idx", "version 2"),
        (_put("<B", 17, 77), "a.idx", "code 77"),
        (_put("<B", 17, 7), "a.idx", "code 7"),
        (_put("<Q", 18, 2**60), "a.idx", f"{2**60} sequences"),
        (_put("<Q", 26, 2**63), "a.idx", f"{2**63} document indices"),
        (_put("<i", LENGTHS + 4, -1), "a.idx", "sequence 1 of -1 tokens"),
        (_put("<i", LENGTHS, 2**30), "a.idx", "sequence 1 of 1 tokens begins at byte 6"),
        (_put("<q", POINTERS + 8, 2**50), "a.idx", f"sequence 1 of 1 tokens begins at byte {2**50}"),
        (_put("<q", POINTERS + 8, -2), "a.idx", "sequence 1 of 1 tokens begins at byte -2"),
        (_put("<q", INDICES + 8, 5), "a.idx", "document 1"),
        (_put("<q", INDICES + 6 * 8, 2**40), "a.idx", "from 0 to 6"),
        (lambda prefix: prefix.with_suffix(".bin").write_bytes(b"\0" * 143), "a.bin", "143 bytes"),
        (lambda prefix: prefix.with_suffix(".bin").write_bytes(b""), "a.bin", "0 bytes"),
        (lambda prefix: prefix.with_suffix(".bin").write_bytes(b"\0" * 146), "a.bin", "146 bytes"),
    ],
)
def test_damaged_pairs_are_named(tmp_path: Path, damage: Callable[[Path], None], file: str, message: str) -> None:
    assert len(_write(tmp_path / "a").tokens) == 72
    damage(tmp_path / "a")
    with refused(InputFileError, tmp_path / file, message):
        open_indexed(tmp_path / "a")


def test_a_pair_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_stream, "LOCK_SECONDS", 0.1)
    _write(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with refused(SettingError, "output", "a.bin", "overwrite"):
        IndexedWriter(tmp_path / "a", token_dtype(9))
    interrupted = IndexedWriter(tmp_path / "a", token_dtype(9), overwrite=True)
    with contextlib.suppress(KeyboardInterrupt), interrupted as writer:
        writer.add([1], [1])
        raise KeyboardInterrupt
    with IndexedWriter(tmp_path / "b", token_dtype(9)) as writer:
        writer.add([1], [1])
        with refused(SettingError, "output", str(tmp_path / "b")):
            IndexedWriter(tmp_path / "b", token_dtype(9)).__enter__()
        for tokens, bad in (([65536], "65536"), ([2, -1], "-1")):
            with refused(InputFileError, tmp_path / "b", bad, "uint16"):
                writer.add(tokens, [len(tokens)])
    assert open_indexed(tmp_path / "b").tokens.tolist() == [1]
    for path in tmp_path.glob("b.*"):
        path.unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with refused(ResourceError, "/proc/nowhere"):
        IndexedWriter("/proc/nowhere/a", token_dtype(9)).__enter__()


def test_a_full_disk_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = IndexedWriter(tmp_path / "a", token_dtype(9), overwrite=True)
    with refused(ResourceError, tmp_path / "a.bin"), writer:
        writer.add([1], [1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _rows(blocks: StreamBlocks) -> torch.Tensor:
    return blocks.rows(range(len(blocks))).input_ids


def test_blocks_are_the_shuffled_documents_one_after_another(tmp_path: Path) -> None:
    """Every token of the split once, documents whole and in an order that the seed decides."""
    source = _write(tmp_path / "a")
    blocks, _, _ = split_stream(source, 8, 3, ALL, (1.0, 0.0, 0.0), True)
    assert len(blocks) == 9
    rows = blocks.rows(range(9))
    stream = rows.input_ids.flatten().tolist()
    left = [list(document) for document in DOCUMENTS]
    found = []
    while stream:
        document = next(d for d in left if stream[: len(d)] == d)
        left.remove(document)
        found.append(document)
        del stream[: len(document)]
    assert left == []
    assert found != DOCUMENTS
    # Numbers change exactly where a document ends.
    ends = set(np.cumsum([len(document) for document in found]).tolist())
    assert rows.documents is not None
    for row, numbers in enumerate(rows.documents.tolist()):
        for column in range(1, 8):
            assert (numbers[column] != numbers[column - 1]) == (row * 8 + column in ends)
    again = split_stream(open_indexed(tmp_path / "a"), 8, 3, ALL, (1.0, 0.0, 0.0), True)[0]
    assert torch.equal(again.rows([4, 0, 4]).input_ids, rows.input_ids[[4, 0, 4]])
    other = split_stream(source, 8, 4, ALL, (1.0, 0.0, 0.0), False)[0]
    assert not torch.equal(_rows(other), rows.input_ids)
    assert other.rows([0]).documents is None


def test_splits_hold_every_token_once(tmp_path: Path) -> None:
    """Also where one document is all there is, or one lies across a bound."""
    for name, documents in {
        "one": [list(range(64))],
        "many": [list(range(n, n + 4)) for n in range(0, 64, 4)],
    }.items():
        source = _write(tmp_path / name, documents)
        sections = split_stream(source, 6, 0, ALL, (0.6, 0.2, 0.2), False)
        assert [len(section) for section in sections] == [6, 2, 2]
        held = [set(_rows(section).flatten().tolist()) for section in sections]
        assert held == [set(range(36)), set(range(36, 48)), set(range(48, 60))]


def test_tokens_that_do_not_fit_the_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are many before anything is read, one of them when it is."""
    source = _write(tmp_path / "a")
    whole = (1.0, 0.0, 0.0)
    assert _rows(split_stream(source, 8, 0, TokenLimits(209, 4), whole, False)[0]).max() == 208
    for fit, named in {TokenLimits(208, None): ("id 208",), TokenLimits(209, 9): ("id 9", "document 4")}.items():
        with refused(InputFileError, tmp_path / "a.bin", *named):
            split_stream(source, 8, 0, fit, whole, False)
        with monkeypatch.context() as patch:
            patch.setattr(data_stream, "CHECKED_WIDTH", 1)
            patch.setattr(data_stream, "CHECKED_PLACES", 1)
            section = split_stream(source, 8, 0, fit, whole, False)[0]
        with refused(InputFileError, tmp_path / "a.bin", *named):
            _rows(section)
    for short in (source, _write(tmp_path / "b", [])):
        with refused(SettingError, "seq_length", "73", f"{short.prefix}.bin"):
            split_stream(short, 73, 0, ALL, whole, False)
