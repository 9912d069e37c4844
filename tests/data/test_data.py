"""Packing, splitting and sampling: every token in its place, every block once an epoch, bad files named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from dlm_bridge.data import documents
from dlm_bridge.data.blocks import Epochs, MockBlocks, split
from dlm_bridge.data.documents import check_tokenizer, find_files, pack
from dlm_bridge.data.loader import BatchSampler
from dlm_bridge.errors import CheckpointError, InputFileError, SettingError
from tests.refusals import refused

DOCUMENTS = ["def f(x):\n    return x\n", "x + 1\r\n", "é = 3\n" * 30]


def _write(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(DOCUMENTS)]
        (folder / "a.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), folder / "a.parquet")
    else:
        for i, text in enumerate(DOCUMENTS):
            (folder / f"{i}.txt").write_bytes(text.encode())
    return folder


def _stream(tokenizer: Any) -> list[int]:
    return [
        token
        for text in DOCUMENTS
        for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_blocks_are_the_token_stream_cut(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    blocks = pack(find_files([str(_write(tmp_path / kind, kind))]), tokenizer, 7)
    expected = _stream(tokenizer)
    rows = blocks.rows(range(len(blocks))).input_ids
    assert len(blocks) == len(expected) // 7 > 5
    assert rows.dtype == torch.int64
    assert rows.flatten().tolist() == expected[: len(blocks) * 7]
    assert torch.equal(blocks.rows([3, 0, 3]).input_ids, rows[[3, 0, 3]])


def test_long_texts_in_pieces_give_the_same_stream(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(find_files([str(_write(tmp_path / "whole", "text"))]), tokenizer, 5)
    monkeypatch.setattr(documents, "PART_CHARACTERS", 20)
    monkeypatch.setattr(documents, "TOKENIZER_BATCH", 50)
    pieces = pack(find_files([str(_write(tmp_path / "pieces", "text"))]), tokenizer, 5)
    assert torch.equal(pieces.rows(range(len(pieces))).input_ids, whole.rows(range(len(whole))).input_ids)


def test_a_changed_file_is_packed_anew(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x = 1\n" * 20)
    first = pack([file], tokenizer, 4).rows([0]).input_ids
    file.write_text("y = 2\n" * 21)
    assert not torch.equal(pack([file], tokenizer, 4).rows([0]).input_ids, first)


def test_folders_globs_and_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/.hidden/3.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in find_files([str(tmp_path / "b"), str(tmp_path / "*.txt")])]
    assert names == ["b/1.txt", "b/2.txt", "a.txt"]
    (tmp_path / "empty").mkdir()
    for bad in ("empty", "*.jsonl", "nowhere.txt"):
        with refused(InputFileError, tmp_path / bad):
            find_files([str(tmp_path / bad)])


@pytest.mark.parametrize(
    ("name", "content", "line", "named"),
    [
        ("a.jsonl", b'{"text": "ok"}\n\n{"body": 1}\n', ":3", "'body'"),
        ("a.jsonl", b'{"text": 5}\n', ":1", "'text'"),
        ("a.jsonl", b"[1]\n", ":1", "list"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', ":2", "JSON"),
        ("a.txt", b"good \xff bad", "", "byte 5"),
        ("a.txt", b"x = 1 <mask> y", "", "id 1"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, tokenizer: Any, name: str, content: bytes, line: str, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(InputFileError, f"{tmp_path / name}{line}", named) as raised:
        pack([tmp_path / name], tokenizer, 8, tokenizer.mask_token_id)
    assert "\n" not in str(raised.value)


def test_data_shorter_than_a_block_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    for text in ("x", ""):
        (tmp_path / "a.txt").write_text(text)
        with refused(SettingError, "seq_length", "8", str(tmp_path / "a.txt")):
            pack([tmp_path / "a.txt"], tokenizer, 8)


def test_a_parquet_file_without_text_is_named(tmp_path: Path, tokenizer: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with refused(InputFileError, tmp_path / "a.parquet", "'text'", "body"):
        pack([tmp_path / "a.parquet"], tokenizer, 8)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with refused(InputFileError, f"{tmp_path / 'b.parquet'}, row 2", "'text'"):
        pack([tmp_path / "b.parquet"], tokenizer, 8)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 but not really")
    with refused(InputFileError, tmp_path / "c.parquet"):
        pack([tmp_path / "c.parquet"], tokenizer, 8)


def test_tokenizers_that_do_not_fit_are_refused(tokenizer: Any, corpus: Path) -> None:
    check_tokenizer(tokenizer, len(tokenizer), tokenizer.mask_token_id)
    with refused(SettingError, "tokenizer", "100"):
        check_tokenizer(tokenizer, 100, tokenizer.mask_token_id)
    with refused(SettingError, "tokenizer", "id 1", "5"):
        check_tokenizer(tokenizer, len(tokenizer), 5)
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    with refused(CheckpointError, tokenizer.name_or_path or "tokenizer"):
        pack([corpus], endless, 8)


@pytest.mark.parametrize(
    ("total", "shares", "sizes"),
    [
        (1000, (0.99, 0.01, 0.0), (990, 10, 0)),
        (50, (0.99, 0.01, 0.0), (49, 1, 0)),
        (1, (0.98, 0.01, 0.01), (1, 0, 0)),
        (2, (0.98, 0.01, 0.01), (1, 1, 0)),
        (100, (0.8, 0.1, 0.1), (80, 10, 10)),
        (10, (1.0, 0.0, 0.0), (10, 0, 0)),
    ],
)
def test_sections_cover_all_blocks_once(
    total: int, shares: tuple[float, float, float], sizes: tuple[int, int, int]
) -> None:
    sections = split(MockBlocks(4, 9, seed=0, length=total), shares)
    assert tuple(len(section) for section in sections) == sizes
    ends = [0, *(section.start + section.length for section in sections)]
    assert [section.start for section in sections] == ends[:-1]
    assert ends[-1] == total


def test_an_epoch_holds_every_block_once_and_the_next_another_order() -> None:
    blocks = MockBlocks(4, 9, seed=0, length=10)
    read = [g for step in range(1, 6) for micro in BatchSampler((4,)).samples(step, 0, 1, 2) for g in micro]
    drawn = [Epochs(blocks, seed=1).block(g) for g in read]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert drawn[:10] != [Epochs(blocks, seed=2).block(g) for g in range(10)]
    assert drawn[:10] != [Epochs(blocks, seed=1, source=1).block(g) for g in range(10)]
    assert [Epochs(blocks).block(g) for g in range(12)] == [*range(10), 0, 1]


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 2), (2, 4), (4, 1)])
def test_every_layout_reads_the_same_samples(processes: int, micro: int) -> None:
    sampler = BatchSampler((8,))
    read = [
        g for process in range(processes) for batch in sampler.samples(3, process, processes, micro) for g in batch
    ]
    assert read == list(range(16, 24))


def test_mock_blocks_repeat_their_motif_and_stay_below_the_limit() -> None:
    rows = MockBlocks(20, tokens=5, seed=0).rows([7, 8, 7]).input_ids
    assert rows.max() < 5
    assert torch.equal(rows[0, :8], rows[0, 8:16])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[1])
