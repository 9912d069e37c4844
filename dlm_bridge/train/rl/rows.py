"""Data rows of reinforcement learning: prompts, and pairs of a chosen and a rejected answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from dlm_bridge.data.chat_template import render_prompt
from dlm_bridge.data.conversations import Example, encode_conversations
from dlm_bridge.data.messages import DataRecord, check_sources, read_data_rows, read_prompt
from dlm_bridge.data.sources import DataSources, find_data
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.objectives.noise import Purpose, keyed_generator

T = TypeVar("T")

CHUNK = 1024  # rows encoded at once


@dataclass(frozen=True)
class Problem:
    """A prompt to be answered."""

    prompt: Any  # as in the row: a text, or a list of messages
    text: str  # the rendered prompt
    input_ids: list[int]
    fields: Mapping[str, Any]  # the whole row, for its reward
    where: str  # file and line, for errors


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to a prompt."""

    chosen: Example
    rejected: Example
    where: str


@dataclass
class Shuffled(Generic[T]):
    """Endless sequence over N items: number n is at position n mod N of epoch n // N, shuffled by (seed, epoch)."""

    items: Sequence[T]
    seed: int
    _epoch: int = field(default=-1, init=False)
    _order: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), init=False)

    def __getitem__(self, number: int) -> T:
        epoch, position = divmod(number, len(self.items))
        if epoch != self._epoch:
            self._order = keyed_generator(self.seed, Purpose.SHUFFLE, epoch).permutation(len(self.items))
            self._epoch = epoch
        return self.items[int(self._order[position])]


def load_problems(
    items: Sequence[str], tokenizer: Any, longest: int, mask_token_id: int | None, field: str = "data"
) -> list[Problem]:
    """Read prompts from `items`, paths and names given by the setting `field`. A row is {"prompt": text or list of
    messages}, or {"messages": [...]}, of which a last assistant message is dropped.

    Raises:
        InputFileError: a row without these fields, or a prompt that is empty, longer than `longest` tokens, contains
            the mask token or is refused by the chat template; `field` is the file and line.
        SettingError: there are no rows.
    """
    problems = []
    for record in read_rows(items, field):
        found = read_prompt(record)
        prompt = found if isinstance(found, str) else found.messages
        text = found if isinstance(found, str) else render_prompt(found, tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputFileError(record.where, "the prompt has no tokens")
        _check_tokens(ids, longest, "the prompt", record.where, mask_token_id)
        problems.append(Problem(prompt, text, ids, record.fields, record.where))
    if not problems:
        raise SettingError(field, f"{', '.join(items)}: no rows")
    return problems


def load_pairs(
    items: Sequence[str], tokenizer: Any, longest: int, mask_token_id: int | None, field: str = "data"
) -> list[PreferencePair]:
    """Read pairs from `items`: rows {"prompt", "chosen", "rejected"} of three texts or three lists of messages. Raises
    as `load_problems`."""
    pairs = []
    records = read_rows(items, field)
    while chunk := list(itertools.islice(records, CHUNK)):
        for record in chunk:
            if missing := [name for name in ("prompt", "chosen", "rejected") if record.fields.get(name) is None]:
                has = ", ".join(map(repr, record.fields)) or "nothing"
                raise InputFileError(record.where, f"no '{missing[0]}' (it has {has})")
        both = [
            list(encode_conversations([_completed(record, name) for record in chunk], tokenizer))
            for name in ("chosen", "rejected")
        ]
        for record, chosen, rejected in zip(chunk, *both, strict=True):
            for name, example in (("the chosen answer", chosen), ("the rejected answer", rejected)):
                _check_tokens(example.input_ids, longest, f"{name} with its prompt", record.where, mask_token_id)
            pairs.append(PreferencePair(chosen, rejected, record.where))
    if not pairs:
        raise SettingError(field, f"{', '.join(items)}: no rows")
    return pairs


def read_rows(items: Sequence[str], field: str = "data") -> Iterator[DataRecord]:
    """Rows of paths and names, in order."""
    (sources,) = find_rows(items, field).parts
    return itertools.chain.from_iterable(map(read_data_rows, sources))  # type: ignore[arg-type]  # as checked


def find_rows(items: Sequence[str], field: str = "data", load: bool = True) -> DataSources:
    """Sources of rows that paths and names refer to; `load` as in `find_data`. Raises SettingError for a blend, and
    for sources without rows."""
    found = find_data(items, load, field)
    if found.weights:
        raise SettingError(field, f"{' '.join(items)}: rows cannot be blended: omit the weights")
    check_sources(found.parts[0])
    return found


def _completed(record: DataRecord, name: str) -> DataRecord:
    fields = {"prompt": record.fields["prompt"], "completion": record.fields[name]}
    return DataRecord(fields | {"tools": record.fields.get("tools")}, f"{record.where}, '{name}'")


def _check_tokens(ids: Sequence[int], longest: int, what: str, where: str, mask_token_id: int | None) -> None:
    if len(ids) > longest:
        raise InputFileError(
            where, f"{what} has {len(ids)} tokens, more than {longest}: raise `seq_length` or shorten it"
        )
    if mask_token_id is not None and mask_token_id in ids:
        raise InputFileError(where, f"{what} contains the mask token (id {mask_token_id}): remove it")
