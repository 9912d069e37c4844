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
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.noise import Purpose, keyed_generator

T = TypeVar("T")

CHUNK = 1024  # rows encoded at once


@dataclass(frozen=True)
class Problem:
    """A prompt to be answered."""

    prompt: Any  # as in the row: a text, or a list of messages
    text: str  # what the model reads
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
    """Items over and over: number n is at position n mod N of epoch n // N's order, shuffled by (seed, epoch)."""

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
    items: Sequence[str], tokenizer: Any, longest: int, mask_token_id: int | None, flag: str = "--data"
) -> list[Problem]:
    """The prompts of `items` (paths and names as `flag` takes them), each row {"prompt": a text, or a list of
    messages} or {"messages": [...]}, of which a last one of the assistant is left out.

    Raises:
        DlmBridgeError: a row without these fields, a prompt without tokens, with more than `longest` or with the mask
            token, a template that refuses it, each with its file and line; no rows at all.
    """
    problems = []
    for record in read_rows(items, flag):
        found = read_prompt(record)
        prompt = found if isinstance(found, str) else found.messages
        text = found if isinstance(found, str) else render_prompt(found, tokenizer)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise DlmBridgeError(f"{record.where}: the prompt has no tokens")
        _check_tokens(ids, longest, "the prompt", record.where, mask_token_id)
        problems.append(Problem(prompt, text, ids, record.fields, record.where))
    if not problems:
        raise DlmBridgeError(f"{flag} {', '.join(items)}: no rows")
    return problems


def load_pairs(
    items: Sequence[str], tokenizer: Any, longest: int, mask_token_id: int | None, flag: str = "--data"
) -> list[PreferencePair]:
    """The pairs of `items`: rows {"prompt", "chosen", "rejected"}, three texts or three lists of messages. Raises
    DlmBridgeError as `load_problems` does."""
    pairs = []
    records = read_rows(items, flag)
    while chunk := list(itertools.islice(records, CHUNK)):
        for record in chunk:
            if missing := [name for name in ("prompt", "chosen", "rejected") if record.fields.get(name) is None]:
                has = ", ".join(map(repr, record.fields)) or "nothing"
                raise DlmBridgeError(f"{record.where}: no '{missing[0]}' (it has {has})")
        both = [
            list(encode_conversations([_completed(record, name) for record in chunk], tokenizer))
            for name in ("chosen", "rejected")
        ]
        for record, chosen, rejected in zip(chunk, *both, strict=True):
            for name, example in (("the chosen answer", chosen), ("the rejected answer", rejected)):
                _check_tokens(example.input_ids, longest, f"{name} with its prompt", record.where, mask_token_id)
            pairs.append(PreferencePair(chosen, rejected, record.where))
    if not pairs:
        raise DlmBridgeError(f"{flag} {', '.join(items)}: no rows")
    return pairs


def read_rows(items: Sequence[str], flag: str = "--data") -> Iterator[DataRecord]:
    """The rows that some paths and names mean, in order. Raises DlmBridgeError for what cannot be read as rows."""
    (sources,) = find_rows(items, flag).parts
    return itertools.chain.from_iterable(map(read_data_rows, sources))  # type: ignore[arg-type]  # as checked


def find_rows(items: Sequence[str], flag: str = "--data", load: bool = True) -> DataSources:
    """The one list of sources that some paths and names mean; `load` as of `find_data`. Raises DlmBridgeError for what
    is not rows, or a blend of them."""
    found = find_data(items, load, flag)
    if found.weights:
        raise DlmBridgeError(f"{flag} {' '.join(items)}: rows are not blended: leave the weights out")
    check_sources(found.parts[0])
    return found


def _completed(record: DataRecord, name: str) -> DataRecord:
    fields = {"prompt": record.fields["prompt"], "completion": record.fields[name]}
    return DataRecord(fields | {"tools": record.fields.get("tools")}, f"{record.where}, '{name}'")


def _check_tokens(ids: Sequence[int], longest: int, what: str, where: str, mask_token_id: int | None) -> None:
    if len(ids) > longest:
        raise DlmBridgeError(
            f"{where}: {what} has {len(ids)} tokens, there is room for {longest}: raise --seq-length or shorten it"
        )
    if mask_token_id is not None and mask_token_id in ids:
        raise DlmBridgeError(f"{where}: {what} holds the mask token (id {mask_token_id}): remove it")
