"""Rows of conversations for fine-tuning: one a row, padded, or several packed; tokenised once and cached as Arrow."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.parquet
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.train.data.chat import Example, Record, encode
from dlm_bridge.train.data.documents import JSON_SUFFIXES, Source, Table
from dlm_bridge.train.data.packing import cached, fingerprint
from dlm_bridge.train.objectives import IGNORE
from dlm_bridge.train.rows import Rows

EosPadding = Literal["none", "block", "row"]
ROWS = 1024  # conversations tokenised at once
OPEN = 256  # rows that packing keeps open
VERSION = 1  # part of the cache's key: raise it when rows below are made differently

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """How conversations become rows of `seq_length` tokens."""

    seq_length: int
    mask_token_id: int | None  # which no row may hold
    packing: bool = False  # several in a row, which stand alone
    truncate: bool = False  # cut what is too long
    eos_padding: EosPadding = "none"  # EOS tokens after a conversation that are answer, up to a block's or row's end
    block_size: int = 1  # of eos_padding "block"
    train_on_prompt: bool = False


@dataclass(frozen=True)
class AnswerBlocks:
    """Rows from an Arrow table on disk. Right of a row's tokens is EOS: answer, or padding."""

    table: Any  # datasets.Dataset with the columns input_ids, answer, lengths (of the conversations)
    settings: Answers
    eos_token_id: int

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The rows `indices`, B = len(indices): labels are -100 outside answers."""
        shape = (len(indices), self.settings.seq_length)
        tokens = np.full(shape, self.eos_token_id, dtype=np.int64)
        counts_end = self.settings.eos_padding == "row"
        answer, real = (np.full(shape, counts_end) for _ in range(2))
        documents = np.zeros(shape, dtype=np.int32)
        found = self.table[list(indices)]
        for row, (ids, said, lengths) in enumerate(
            zip(found["input_ids"], found["answer"], found["lengths"], strict=True)
        ):
            tokens[row, : len(ids)] = ids
            answer[row, : len(ids)] = said
            real[row, : len(ids)] = True
            documents[row, : len(ids)] = np.repeat(np.arange(len(lengths)), lengths)
        return Rows(
            torch.from_numpy(tokens),
            labels=torch.from_numpy(np.where(answer, tokens, IGNORE)),
            attention_mask=None if real.all() else torch.from_numpy(real),
            documents=torch.from_numpy(documents) if self.settings.packing else None,
        )


def load_answers(sources: Sequence[Source], tokenizer: Any, settings: Answers) -> AnswerBlocks:
    """The conversations of `sources` as rows, in order, or packed where each fits best. Cached under the `datasets`
    cache folder, keyed by the sources, the tokenizer and its template, and the settings.

    Raises:
        DlmBridgeError: what `chat.encode` refuses; a row that is too long, or that holds the mask token, with its file
            and line; no rows at all; a tokenizer without EOS.
    """
    if tokenizer.eos_token_id is None:
        raise DlmBridgeError(
            f"tokenizer {tokenizer.name_or_path} has no EOS token, which fills rows: "
            "set eos_token in its tokenizer_config.json"
        )
    columns = {"input_ids": "int32", "answer": "bool", "lengths": "int32"}
    table = cached(
        _rows,
        datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in columns.items()}),
        {"sources": tuple(sources), "tokenizer": tokenizer, "settings": settings},
        fingerprint(sources, tokenizer, "answers", VERSION, tokenizer.chat_template, *vars(settings).values()),
    )
    return AnswerBlocks(table, settings, tokenizer.eos_token_id)


def check_sources(sources: Sequence[Any]) -> None:
    """Raise DlmBridgeError for a source that cannot hold conversations."""
    for source in sources:
        known = isinstance(source, Path) and source.suffix in (*JSON_SUFFIXES, ".parquet")
        if not (known or isinstance(source, Table)):
            name = source if isinstance(source, Path | str) else f"{source.prefix}.bin"
            raise DlmBridgeError(f"--data {name}: conversations are rows of JSONL, parquet or a dataset")


def read_records(source: Source) -> Iterator[Record]:
    """The rows of a JSONL or parquet file or a dataset. Raises DlmBridgeError for a line that is no JSON object."""
    if isinstance(source, Table):
        yield from (Record(row, f"{source.name}, row {number}") for number, row in enumerate(source.rows, 1))
    elif source.suffix == ".parquet":
        yield from _parquet(source)
    else:
        with source.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Record(_object(line, f"{source}, line {number}"), f"{source}, line {number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DlmBridgeError(f"{where}: not JSON, one object a line is needed ({error})") from None
    if not isinstance(row, dict):
        raise DlmBridgeError(f"{where}: not JSON, one object a line is needed (it is {type(row).__name__})")
    return row


def _parquet(path: Path) -> Iterator[Record]:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DlmBridgeError(f"{path}: not a parquet file ({str(error).splitlines()[0]})") from None
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=ROWS):
            for row in batch.to_pylist():
                number += 1
                yield Record(row, f"{path}, row {number}")


def _rows(sources: Sequence[Source], tokenizer: Any, settings: Answers) -> Iterator[dict[str, Any]]:
    examples = _fitting(sources, tokenizer, settings)
    rows = _packed(examples, settings.seq_length) if settings.packing else ([example] for example in examples)
    empty = True
    for row in rows:
        empty = False
        yield {
            "input_ids": list(itertools.chain.from_iterable(example.input_ids for example in row)),
            "answer": list(itertools.chain.from_iterable(example.answer for example in row)),
            "lengths": [len(example.input_ids) for example in row],
        }
    if empty:
        raise DlmBridgeError(f"--data {', '.join(map(str, sources))}: no rows to train on")


def _fitting(sources: Sequence[Source], tokenizer: Any, settings: Answers) -> Iterator[Example]:
    """The conversations, each short enough for a row, with the EOS tokens that fill its last block."""
    limit, dropped = settings.seq_length, 0
    records = itertools.chain.from_iterable(map(read_records, sources))
    while chunk := list(itertools.islice(records, ROWS)):
        for example in encode(chunk, tokenizer):
            ids, answer = example.input_ids, example.answer
            if settings.mask_token_id in ids:
                raise DlmBridgeError(
                    f"{example.where}: the text holds the mask token (id {settings.mask_token_id}): remove it"
                )
            if len(ids) > limit and not settings.truncate:
                raise DlmBridgeError(
                    f"{example.where}: {len(ids)} tokens are more than --seq-length {limit}: raise it, shorten the "
                    "row, or cut all such rows with --truncate"
                )
            if not (settings.train_on_prompt or any(answer[:limit])):
                dropped += 1
                continue
            filled = 0
            if settings.eos_padding == "block" and len(ids) < limit:
                filled = min(-len(ids) % settings.block_size, limit - len(ids))
            ids = ids[:limit] + [tokenizer.eos_token_id] * filled
            answer = [True] * len(ids) if settings.train_on_prompt else answer[:limit] + [True] * filled
            yield Example(ids, answer, example.where)
    if dropped:
        logger.warning("%d rows are left out: their prompts alone are longer than --seq-length %d", dropped, limit)


def _packed(examples: Iterator[Example], length: int) -> Iterator[list[Example]]:
    """Each conversation goes into the fullest open row that has room for it. When too many are open, the fullest is
    done."""
    rooms: list[int] = []  # left in the open rows, ascending
    rows: list[list[Example]] = []
    for example in examples:
        size = len(example.input_ids)
        place = bisect.bisect_left(rooms, size)
        room, row = (rooms.pop(place), rows.pop(place)) if place < len(rooms) else (length, [])
        row.append(example)
        place = bisect.bisect_left(rooms, room - size)
        rooms.insert(place, room - size)
        rows.insert(place, row)
        if len(rows) > OPEN:
            rooms.pop(0)
            yield rows.pop(0)
    yield from rows
