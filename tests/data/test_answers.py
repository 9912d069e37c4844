"""Rows of conversations: what is padded, packed, counted, cut and cached."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dlm_bridge.data import conversations
from dlm_bridge.data.conversations import (
    ConversationSettings,
    encode_conversations,
    load_conversation_blocks,
)
from dlm_bridge.data.messages import DataRecord, check_sources, read_data_rows
from dlm_bridge.data.sources import find_data
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.objectives.batches import IGNORE_INDEX
from tests.data.chats import MARKED, chatty, conversation, write_rows
from tests.refusals import refused

ROWS = [conversation(number) for number in range(40)]


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerFast) -> Any:
    return chatty(tokenizer)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("chats") / "chats.jsonl", ROWS)


def _examples(chat: Any) -> list[tuple[list[int], list[bool]]]:
    found = encode_conversations([DataRecord(row, "") for row in ROWS], chat)
    return [(example.input_ids, example.answer) for example in found]


@pytest.mark.parametrize("eos_padding", ["none", "block", "row"])
def test_padding_counts_where_it_should(chat: Any, file: Path, eos_padding: Any) -> None:
    settings = ConversationSettings(128, chat.mask_token_id, eos_padding=eos_padding, block_size=32)
    rows = load_conversation_blocks([file], chat, settings).rows(range(40))
    assert rows.documents is None
    assert (rows.attention_mask is None) == (eos_padding == "row")
    for row, (ids, answer) in enumerate(_examples(chat)):
        until = {"none": len(ids), "block": -(-len(ids) // 32) * 32, "row": 128}[eos_padding]
        tokens = [*ids, *[chat.eos_token_id] * (128 - len(ids))]
        counted = [*answer, *[True] * (until - len(ids)), *[False] * (128 - until)]
        assert rows.input_ids[row].tolist() == tokens
        assert rows.labels is not None
        assert rows.labels[row].tolist() == [
            token if count else IGNORE_INDEX for token, count in zip(tokens, counted, strict=True)
        ]
        if rows.attention_mask is not None:
            assert rows.attention_mask[row].tolist() == [True] * until + [False] * (128 - until)


@pytest.mark.parametrize("eos_padding", ["none", "block"])
def test_packing_keeps_every_conversation_whole_and_fills_rows(chat: Any, file: Path, eos_padding: Any) -> None:
    settings = ConversationSettings(128, chat.mask_token_id, packing=True, eos_padding=eos_padding, block_size=8)
    blocks = load_conversation_blocks([file], chat, settings)
    rows = blocks.rows(range(len(blocks)))
    assert rows.labels is not None
    assert rows.documents is not None
    assert rows.attention_mask is not None
    found = []
    for row in range(len(blocks)):
        real = int(rows.attention_mask[row].sum())
        assert rows.attention_mask[row, :real].all()
        numbers = rows.documents[row, :real].tolist()
        assert numbers == sorted(numbers)
        for number in range(numbers[-1] + 1):
            places = [place for place in range(real) if numbers[place] == number]
            said = (rows.labels[row, places] != IGNORE_INDEX).tolist()
            found.append((rows.input_ids[row, places].tolist(), said))
    expected = _examples(chat)
    if eos_padding == "block":
        fill = [-len(ids) % 8 for ids, _ in expected]
        expected = [
            (ids + [chat.eos_token_id] * count, said + [True] * count)
            for (ids, said), count in zip(expected, fill, strict=True)
        ]
    assert sorted(found) == sorted(expected)
    lengths = sum(len(ids) for ids, _ in expected)
    assert len(blocks) < 1.2 * lengths / 128
    again = load_conversation_blocks([file], chat, settings).rows(range(len(blocks)))
    assert torch.equal(again.input_ids, rows.input_ids)


def test_packing_closes_the_fullest_row_when_many_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "OPEN_ROWS", 2)
    sizes = [5, 6, 7, 3, 4, 1, 9]
    examples = (conversations.Example([0] * size, [True] * size, "") for size in sizes)
    rows = [[len(example.input_ids) for example in row] for row in conversations._pack_best_fit(examples, 10)]
    assert sorted(itertools.chain(*rows)) == sorted(sizes)
    assert rows == [[7], [5, 4, 1], [9], [6, 3]]


def test_every_source_gives_the_same_rows(chat: Any, file: Path, tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "chats.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    settings = ConversationSettings(128, chat.mask_token_id)
    expected = load_conversation_blocks([file], chat, settings).rows(range(40))
    assert expected.labels is not None
    for place in (tmp_path / "chats.parquet", tmp_path / "saved"):
        (part,) = find_data([str(place)]).parts
        check_sources(part)
        rows = load_conversation_blocks(part, chat, settings).rows(range(40))  # type: ignore[arg-type]
        assert torch.equal(rows.input_ids, expected.input_ids)
        assert rows.labels is not None
        assert torch.equal(rows.labels, expected.labels)


def _calling(number: int, arguments: Any, **message: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], **message}
    return {"messages": [{"role": "user", "content": f"def f{number}"}, answer]}


# Each has keys that others lack, which Arrow gives to all of them.
CALLS = [
    _calling(0, {"place": "x"}),
    _calling(1, {"address": {"street": "y"}}, weight=1),
    _calling(2, {"address": {"street": "y", "house": 2}}, thought="x + 1"),
    {"messages": [*ROWS[1]["messages"], {"role": "user", "content": "x"}, {"role": "assistant", "content": None}]},
    {**ROWS[0], "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]},
]
WRITING_CALLS = (
    "{% for m in messages %}{{ m.role }}:\n{{ m.content }}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}"
    "{% endif %}{{ m.thought }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def write_containers(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """The same rows in every container."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (folder / "rows.jsonl").write_bytes(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "rows.jsonl.zst").write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(folder / "saved")
    names = list(dict.fromkeys(name for row in rows for name in row))
    json_type = datasets.Features({name: datasets.Json() for name in names})
    as_json = datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in rows], features=json_type)
    as_json.to_parquet(folder / "json.parquet")
    as_json.save_to_disk(folder / "saved_json")
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in rows)
    return sorted(folder.iterdir())


def test_a_row_is_the_same_in_every_container(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    chat = chatty(tokenizer, WRITING_CALLS)
    expected = list(encode_conversations([DataRecord(row, "") for row in CALLS], chat))
    assert "null" not in "".join(chat.decode(example.input_ids) for example in expected)
    places = write_containers(tmp_path, CALLS)
    assert len(places) == 8
    for place in places:
        (part,) = find_data([str(place)]).parts
        check_sources(part)
        found = list(encode_conversations(list(read_data_rows(part[0])), chat))  # type: ignore[arg-type]
        assert [one.input_ids for one in found] == [one.input_ids for one in expected], place
        assert [one.answer for one in found] == [one.answer for one in expected], place


def test_a_damaged_container_is_named(tmp_path: Path) -> None:
    whole = b'{"prompt": "a", "completion": "b"}\n' * 5000
    for name, data, line in (
        ("a.jsonl.gz", gzip.compress(whole)[:50], ""),
        ("b.jsonl.zst", b"garbage", ""),
        ("c.csv", b"prompt,completion\na,b,c\n", ":2"),
        ("d.csv", b"prompt,completion\na\n", ":2"),
        ("e.csv", b'prompt,completion\n"a,b\n', ":2"),
        ("f.csv", b"prompt,completion\n\xff,b\n", ":1"),
    ):
        (tmp_path / name).write_bytes(data)
        with refused(InputFileError, f"{tmp_path / name}{line}"):
            list(read_data_rows(tmp_path / name))
    datasets.Dataset.from_list(CALLS[:1], features=datasets.Features({"messages": datasets.Json()})).save_to_disk(
        tmp_path / "saved"
    )
    (stored,) = (tmp_path / "saved").glob("*.arrow")
    stored.write_bytes(stored.read_bytes().replace(b'"role"', b'"role:'))
    with refused(InputFileError, tmp_path / "saved"):
        list(read_data_rows(find_data([str(tmp_path / "saved")]).parts[0][0]))  # type: ignore[arg-type]
    rows = b'prompt,completion\n"a, ""b""\nc",007\n'
    (tmp_path / "g.csv").write_bytes(rows)
    (row,) = read_data_rows(tmp_path / "g.csv")
    assert row.fields == {"prompt": 'a, "b"\nc', "completion": "007"}


def test_a_file_that_cannot_be_read_is_an_error_of_the_file(chat: Any) -> None:
    memory = Path("/proc/self/mem")  # opens, and has nothing at its start to read
    if not memory.exists():
        pytest.skip("no such file on this system")
    with refused(InputFileError, memory):
        load_conversation_blocks([memory], chat, ConversationSettings(30, chat.mask_token_id))


def test_a_long_row_is_named_or_cut(chat: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [len(ids) for ids, _ in _examples(chat)]
    first = next(number for number, length in enumerate(lengths, 1) if length > 30)
    with refused(InputFileError, f"{file}:{first}", f"{lengths[first - 1]} tokens", "`seq_length=30`", "`truncate`"):
        load_conversation_blocks([file], chat, ConversationSettings(30, chat.mask_token_id))
    prompt = {"messages": [{"role": "user", "content": "def " * 60}, ROWS[0]["messages"][1]]}
    longer = write_rows(tmp_path / "longer.jsonl", [*ROWS, prompt])
    with caplog.at_level(logging.WARNING):
        blocks = load_conversation_blocks([longer], chat, ConversationSettings(30, chat.mask_token_id, truncate=True))
    assert [record.args for record in caplog.records] == [(1, 30)]
    assert len(blocks) == 40
    rows = blocks.rows([first - 1])
    assert rows.input_ids[0].tolist() == _examples(chat)[first - 1][0][:30]


def test_prompts_count_where_they_are_trained_on(chat: Any, file: Path) -> None:
    rows = load_conversation_blocks(
        [file], chat, ConversationSettings(128, chat.mask_token_id, train_on_prompt=True)
    ).rows([3])
    assert rows.labels is not None
    length = len(_examples(chat)[3][0])
    assert torch.equal(rows.labels[0, :length], rows.input_ids[0, :length])
    assert (rows.labels[0, length:] == IGNORE_INDEX).all()


def test_rows_are_made_once_for_each_template(
    chat: Any, tokenizer: PreTrainedTokenizerFast, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ConversationSettings(96, chat.mask_token_id)
    load_conversation_blocks([file], chat, settings)
    calls = []

    def counted(records: Any, tokenizer: Any) -> Any:
        calls.append(len(records))
        return encode_conversations(records, tokenizer)

    monkeypatch.setattr(conversations, "encode_conversations", counted)
    load_conversation_blocks([file], chat, settings)
    assert not calls
    load_conversation_blocks([file], chatty(tokenizer, MARKED), settings)
    assert calls == [40]


def damaged_parquet(path: Path) -> Path:
    """One whose first pages are zeros, and whose metadata, at its end, are whole."""
    column = [f"a text {number}" for number in range(200)]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column, "completion": column, "text": column}), path)
    data = bytearray(path.read_bytes())
    data[100 : len(data) // 2] = bytes(len(data) // 2 - 100)
    path.write_bytes(bytes(data))
    return path


def test_bad_data_are_named(chat: Any, tmp_path: Path) -> None:
    settings = ConversationSettings(128, chat.mask_token_id)
    for name, text, line in (
        ("a.jsonl", '{"prompt": "a", "completion": "b"}\n\n{"prompt"', ":3"),
        ("b.jsonl", "[1]\n", ":1"),
        ("c.jsonl", '{"prompt": "a", "completion": "<mask>"}', ":1"),
        ("d.jsonl", "\n", ""),
    ):
        path = tmp_path / name
        path.write_text(text)
        with refused(InputFileError, f"{path}{line}") as raised:
            load_conversation_blocks([path], chat, settings)
        assert "\n" not in str(raised.value)
    with refused(InputFileError, tmp_path / "damaged.parquet"):
        load_conversation_blocks([damaged_parquet(tmp_path / "damaged.parquet")], chat, settings)
    (tmp_path / "f.txt").write_text("text")
    for source in (tmp_path / "f.txt", "mock"):
        with refused(SettingError, "data", str(source)):
            check_sources([source])
