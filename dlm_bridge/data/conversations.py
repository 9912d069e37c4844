"""Conversations for fine-tuning: tokenisation into prompt and answer, and packing into rows."""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import torch

from dlm_bridge.data.blocks import LabelledTokens
from dlm_bridge.data.chat_template import RenderedConversation, render_answers
from dlm_bridge.data.documents import Source, cached, check_eos, check_mask_token, fingerprint
from dlm_bridge.data.messages import Conversation, DataRecord, read_conversation, read_data_rows
from dlm_bridge.errors import CheckpointError, InputFileError, counted
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.trajectory import NOT_RECORDED

RECORDED = ("prompt_token_ids", "token_ids", "commit_steps")  # fields that `generate --commit-steps` writes


@dataclass(frozen=True)
class Example:
    """Tokenised conversation."""

    input_ids: list[int]
    answer: list[bool]  # True at tokens that are trained
    where: str
    steps: list[int] | None = None  # commit step of each token, -1 in the prompt; None: not recorded


def encode_conversations(records: Sequence[DataRecord], tokenizer: Any) -> Iterator[Example]:
    """Tokenise conversations, in order, in any format that `read_conversation` supports.

    An answer that does not end with a stop token gets an EOS token, which is trained. A row with `commit_steps`
    already contains tokens; see `RECORDED`.

    Raises:
        InputFileError: an invalid row, a row that the template refuses, or a row without an answer, each with its file
            and line.
        CheckpointError: a tokenizer without a chat template, or one that is not from the `tokenizers` library.
    """
    if not tokenizer.is_fast:
        raise CheckpointError(
            tokenizer.name_or_path or "tokenizer", "the tokenizer has no token offsets: use a fast tokenizer"
        )
    found = [_read(record, tokenizer) for record in records]
    texts = [item for item in found if isinstance(item, RenderedConversation)]
    encoded: Any = {"input_ids": [], "offset_mapping": []}
    if texts:
        encoded = tokenizer(
            [item.text for item in texts], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for item in found:
        example = item if isinstance(item, Example) else _labelled(item, *next(tokens), tokenizer, special)
        if not any(example.answer):
            raise InputFileError(example.where, "this row has no answer")
        yield example


def _read(record: DataRecord, tokenizer: Any) -> RenderedConversation | Example:
    if record.fields.get("commit_steps") is not None:
        return _recorded(record.fields, record.where)
    conversation = read_conversation(record)
    if isinstance(conversation, Conversation):
        return render_answers(conversation, tokenizer)
    prompt, completion = conversation
    return RenderedConversation(prompt + completion, [(len(prompt), len(prompt + completion))], record.where, False)


def _recorded(fields: Mapping[str, Any], where: str) -> Example:
    """Read a sampled answer with its recorded tokens."""
    for name in RECORDED:
        values = fields.get(name)
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**31 for value in values):
            raise InputFileError(where, f"'{name}' is not a list of non-negative integers, which 'commit_steps' needs")
    prompt, answer, steps = (fields[name] for name in RECORDED)
    if len(answer) != len(steps):
        raise InputFileError(
            where, f"'commit_steps' has {counted(len(steps), 'number')}, 'token_ids' has {len(answer)}"
        )
    return Example(
        [*prompt, *answer],
        [*[False] * len(prompt), *[True] * len(answer)],
        where,
        [*[NOT_RECORDED] * len(prompt), *steps],
    )


def _labelled(
    item: RenderedConversation, ids: list[int], offsets: list[tuple[int, int]], tokenizer: Any, special: set[int]
) -> Example:
    """Label tokens. A token belongs to an answer if any of its characters does, so that no part of an answer is
    labelled as prompt."""
    starts, stops = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    answer = np.zeros(len(ids), dtype=bool)
    for begin, end in item.answers:
        answer |= (starts < end) & (stops > begin)
    if item.answers and item.answers[-1][1] == len(item.text):
        backwards = zip(ids[::-1], offsets[::-1], strict=True)
        last = next((token for token, (begin, end) in backwards if item.text[begin:end].strip()), None)
        if last != tokenizer.eos_token_id and not (item.templated and last in special):
            check_eos(tokenizer, "ends an answer")
            return Example([*ids, tokenizer.eos_token_id], [*answer.tolist(), True], item.where)
    return Example(ids, answer.tolist(), item.where)


EosPadding = Literal["none", "block", "row"]
CONVERSATIONS_AT_ONCE = 1024  # conversations tokenised at once
OPEN_ROWS = 256  # maximum number of open rows while packing
ROWS_VERSION = 2  # part of the cache key: increment it when the construction of rows below changes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConversationSettings:
    """Settings for rows of `seq_length` tokens."""

    seq_length: int
    mask_token_id: int | None  # token that no row may contain
    packing: bool = False  # several conversations per row, which do not attend to each other
    truncate: bool = False  # truncate conversations that are too long
    eos_padding: EosPadding = "none"  # EOS padding that counts as answer: none, to the end of a block, or of the row
    block_size: int = 1  # for eos_padding "block"
    train_on_prompt: bool = False
    answer_blocks: bool = False  # blocks are counted from the start of a row's last answer, the only one trained
    trajectories: bool = False  # read the commit steps of rows
    vocabulary_size: int | None = None  # vocabulary size of the model, for a check of the token ids
    image_token_ids: tuple[int, ...] = ()  # further tokens that no row may contain


@dataclass(frozen=True)
class ConversationBlocks:
    """Rows from a memory-mapped Arrow table, filled with EOS tokens on the right (answer or padding)."""

    table: Any  # datasets.Dataset with the columns input_ids, answer, lengths (of the conversations)
    settings: ConversationSettings
    eos_token_id: int

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, indices: Sequence[int]) -> LabelledTokens:
        """Return the rows `indices`, B = len(indices). Labels are -100 outside answers."""
        shape = (len(indices), self.settings.seq_length)
        tokens = np.full(shape, self.eos_token_id, dtype=np.int64)
        counts_end = self.settings.eos_padding == "row"
        answer, real = (np.full(shape, counts_end) for _ in range(2))
        documents = np.zeros(shape, dtype=np.int32)
        steps = np.full(shape, NOT_RECORDED, dtype=np.int64) if self.settings.trajectories else None
        found = self.table[list(indices)]
        for row, (ids, answered, lengths) in enumerate(
            zip(found["input_ids"], found["answer"], found["lengths"], strict=True)
        ):
            tokens[row, : len(ids)] = ids
            answer[row, : len(ids)] = answered
            real[row, : len(ids)] = True
            documents[row, : len(ids)] = np.repeat(np.arange(len(lengths)), lengths)
            if steps is not None:
                recorded = found["steps"][row]
                steps[row, : len(ids)] = recorded
                steps[row, len(ids) :] = recorded[-1] if counts_end else NOT_RECORDED
        return LabelledTokens(
            torch.from_numpy(tokens),
            labels=torch.from_numpy(np.where(answer, tokens, IGNORE_INDEX)),
            attention_mask=None if real.all() else torch.from_numpy(real),
            documents=torch.from_numpy(documents) if self.settings.packing else None,
            commit_steps=None if steps is None else torch.from_numpy(steps),
        )


def load_conversation_blocks(
    sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings
) -> ConversationBlocks:
    """Load the conversations of `sources` as rows, in order or with best-fit packing.

    The result is cached in the `datasets` cache folder, keyed by the sources, the tokenizer and its template, and the
    settings.

    Raises:
        InputFileError: as in `encode_conversations`; a row that is too long or contains the mask token, with its file
            and line; no rows.
        CheckpointError: as in `encode_conversations`; a tokenizer without an EOS token.
    """
    check_eos(tokenizer, "fills rows")
    table = cached(
        _conversation_rows,
        _columns(settings),
        {"sources": tuple(sources), "tokenizer": tokenizer, "settings": settings},
        fingerprint(sources, tokenizer, "answers", ROWS_VERSION, tokenizer.chat_template, *vars(settings).values()),
    )
    return ConversationBlocks(table, settings, tokenizer.eos_token_id)


def longest_conversation(sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings) -> int:
    """Number of tokens of the longest conversation, at most `settings.seq_length`, cached like
    `load_conversation_blocks`. Raises the same errors."""
    check_eos(tokenizer, "fills rows")
    table = cached(
        _longest,
        datasets.Features({"length": datasets.Value("int64")}),
        {"sources": tuple(sources), "tokenizer": tokenizer, "settings": settings},
        fingerprint(sources, tokenizer, "longest", ROWS_VERSION, tokenizer.chat_template, *vars(settings).values()),
    )
    return int(table[0]["length"])


def first_conversation_blocks(
    sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings, count: int
) -> ConversationBlocks:
    """Load the first `count` rows of `load_conversation_blocks` without the cache. Raises the same errors."""
    check_eos(tokenizer, "fills rows")
    rows = list(itertools.islice(_conversation_rows(sources, tokenizer, settings), count))
    table = datasets.Dataset.from_list(rows, features=_columns(settings)).with_format("numpy")
    return ConversationBlocks(table, settings, tokenizer.eos_token_id)


def _columns(settings: ConversationSettings) -> datasets.Features:
    columns = {"input_ids": "int32", "answer": "bool", "lengths": "int32"}
    if settings.trajectories:
        columns["steps"] = "int32"
    return datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in columns.items()})


def _conversation_rows(
    sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings
) -> Iterator[dict[str, Any]]:
    examples = _fitting(sources, tokenizer, settings)
    rows = _pack_best_fit(examples, settings.seq_length) if settings.packing else ([example] for example in examples)
    empty, traced = True, settings.trajectories
    for row in rows:
        empty = False
        yield {
            "input_ids": list(itertools.chain.from_iterable(example.input_ids for example in row)),
            "answer": list(itertools.chain.from_iterable(example.answer for example in row)),
            "lengths": [len(example.input_ids) for example in row],
            **({"steps": list(itertools.chain(*(example.steps or () for example in row)))} if traced else {}),
        }
    if empty:
        raise InputFileError(", ".join(map(str, sources)), "no rows to train on")


def _longest(sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings) -> Iterator[dict[str, Any]]:
    lengths = (len(example.input_ids) for example in _fitting(sources, tokenizer, settings))
    if longest := max(lengths, default=0):
        yield {"length": longest}
    else:
        raise InputFileError(", ".join(map(str, sources)), "no rows to train on")


def _fitting(sources: Sequence[Source], tokenizer: Any, settings: ConversationSettings) -> Iterator[Example]:
    """Yield the conversations that fit into a row, with EOS tokens up to the end of their last block."""
    limit, dropped, several = settings.seq_length, 0, 0
    records = itertools.chain.from_iterable(map(read_data_rows, sources))
    while chunk := list(itertools.islice(records, CONVERSATIONS_AT_ONCE)):
        if settings.trajectories:
            _check_recorded(chunk)
        for example in encode_conversations(chunk, tokenizer):
            ids, answer, steps = example.input_ids, example.answer, example.steps
            begins = 0
            if settings.answer_blocks and not settings.train_on_prompt:
                begins = _last_answer(answer)
                several += any(answer[:begins])
                answer = [False] * begins + answer[begins:]
            _check_tokens(ids, settings, example.where)
            if not (settings.train_on_prompt or any(answer[:limit])):
                dropped += 1
                continue
            filled = 0
            if settings.eos_padding == "block" and len(ids) < limit:
                filled = min((begins - len(ids)) % settings.block_size, limit - len(ids))
            ids = ids[:limit] + [tokenizer.eos_token_id] * filled
            answer = [True] * len(ids) if settings.train_on_prompt else answer[:limit] + [True] * filled
            if steps is not None:  # the EOS tokens that fill a block are part of the last step
                steps = steps[:limit] + steps[-1:] * filled
            yield Example(ids, answer, example.where, steps)
    if several:
        logger.warning("%d rows have several answers: the last of each is trained, the others are its prompt", several)
    if dropped:
        logger.warning("Skipped %d rows: their prompts alone are longer than the %d tokens of a row", dropped, limit)


def _check_tokens(ids: Sequence[int], settings: ConversationSettings, where: str) -> None:
    check_mask_token(ids, settings.mask_token_id, where)
    image = next((token for token in settings.image_token_ids if token in ids), None)
    size, limit = settings.vocabulary_size, settings.seq_length
    if image is not None:
        problem = f"the text contains an image (token id {image}): only text is trained, remove it"
    elif size is not None and max(ids) >= size:
        problem = f"token {max(ids)} is outside the model's vocabulary of {size}"
    elif len(ids) > limit and not settings.truncate:
        problem = f"{len(ids)} tokens exceed `seq_length={limit}`: increase it, shorten the row, or set `truncate`"
    else:
        return
    raise InputFileError(where, problem)


def _check_recorded(records: Sequence[DataRecord]) -> None:
    for record in records:
        if record.fields.get("commit_steps") is None:
            raise InputFileError(
                record.where,
                "no 'commit_steps', from which the objective derives its masks: record them (dlm-bridge generate with "
                "commit_steps)",
            )


def _last_answer(answer: Sequence[bool]) -> int:
    """Start of the last run of answer tokens."""
    end = max(place for place, counts in enumerate(answer) if counts)
    return max((place + 1 for place in range(end) if not answer[place]), default=0)


def _pack_best_fit(examples: Iterator[Example], length: int) -> Iterator[list[Example]]:
    """Best-fit packing: each conversation goes into the fullest open row that has enough space. If too many rows are
    open, the fullest is closed."""
    rooms: list[int] = []  # free space of the open rows, ascending
    rows: list[list[Example]] = []
    for example in examples:
        size = len(example.input_ids)
        place = bisect.bisect_left(rooms, size)
        room, row = (rooms.pop(place), rows.pop(place)) if place < len(rooms) else (length, [])
        row.append(example)
        place = bisect.bisect_left(rooms, room - size)
        rooms.insert(place, room - size)
        rows.insert(place, row)
        if len(rows) > OPEN_ROWS:
            rooms.pop(0)
            yield rows.pop(0)
    yield from rows
