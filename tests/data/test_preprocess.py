"""preprocess: the same tokens as packing gives, from every kind of source, on any number of processes; killed runs."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dlm_bridge.cli.app import app
from dlm_bridge.data import documents
from dlm_bridge.data import preprocess as module
from dlm_bridge.data.documents import find_files, pack
from dlm_bridge.data.indexed import IndexedWriter, check_fingerprint, fingerprint_file, open_indexed
from dlm_bridge.data.options import PreprocessOptions
from dlm_bridge.data.preprocess import PreprocessReport
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.train.config import TrainConfig
from tests.refusals import refused
from tests.train.conftest import Run


def preprocess(inputs: list[str], output: Any, tokenizer: Any, progress: Any = None, **given: Any) -> PreprocessReport:
    given = {"workers": 1, **given}
    options = PreprocessOptions(inputs=inputs, output=str(output), tokenizer=tokenizer.name_or_path, **given)
    return module.preprocess(options, tokenizer, progress)


DOCUMENTS = ["def f(x):\n    return x\n", "x + 1\r\n", "", "é = 3\n" * 30, "x"]


def _encode(tokenizer: Any, eod: bool) -> list[list[int]]:
    end = [tokenizer.eos_token_id] if eod else []
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], *end] for text in DOCUMENTS if text]


def _read(prefix: Path) -> list[list[int]]:
    opened = open_indexed(prefix)
    bounds = opened.starts().tolist()
    return [opened.tokens[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]


def _jsonl(path: Path, key: str = "text", copies: int = 1) -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in DOCUMENTS * copies))
    return str(path)


@pytest.mark.parametrize("eod", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset", "text"])
def test_every_kind_of_source_gives_its_documents(tmp_path: Path, tokenizer: Any, kind: str, eod: bool) -> None:
    source = str(tmp_path / f"a.{kind}")
    if kind == "jsonl":
        _jsonl(Path(source), "body")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS}), source)
    elif kind == "dataset":
        datasets.Dataset.from_dict({"body": DOCUMENTS}).save_to_disk(source)
    else:
        Path(source).mkdir()
        for number, text in enumerate(DOCUMENTS):
            (Path(source) / f"{number}.txt").write_bytes(text.encode())
    done: list[tuple[int, int]] = []
    given = {"append_eod": eod, "json_key": "body"}
    report = preprocess([source], tmp_path / "out", tokenizer, lambda *step: done.append(step), **given)
    wanted = _encode(tokenizer, eod)
    assert _read(tmp_path / "out") == wanted
    assert (report.documents, report.tokens) == (4, sum(map(len, wanted)))
    assert report.dtype == "uint16"
    assert sum(step for step, _ in done) <= done[0][1] == report.bytes


def test_processes_and_pieces_change_nothing(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, with documents cut into pieces that go to different ones, write what one writes."""
    (tmp_path / "long.txt").write_text("x = 1\n" * 500)
    inputs = [_jsonl(tmp_path / "a.jsonl", copies=40), str(tmp_path / "long.txt")]
    preprocess(inputs, tmp_path / "one", tokenizer, append_eod=True)
    monkeypatch.setattr(module, "CHUNK", 200)
    monkeypatch.setattr(documents, "PART_CHARACTERS", 90)
    preprocess(inputs, tmp_path / "three", tokenizer, append_eod=True, workers=3)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"three{suffix}").read_bytes()
    assert len(_read(tmp_path / "three")) == 161


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_resumes(
    tmp_path: Path, tokenizer: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its last checkpoint, in the middle of a document."""
    monkeypatch.setattr(module, "CHUNK", 200)
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr(documents, "PART_CHARACTERS", 90)
    (tmp_path / "long.txt").write_text("x = 1\n" * 500)
    inputs = [_jsonl(tmp_path / "a.jsonl", copies=5), str(tmp_path / "long.txt"), _jsonl(tmp_path / "b.jsonl")]
    whole = preprocess(inputs, tmp_path / "whole", tokenizer, append_eod=True)
    added: list[int] = []
    add = IndexedWriter.add

    def interrupted(writer: IndexedWriter, *args: Any) -> None:
        if len(added) == 8:
            raise KeyboardInterrupt
        added.append(writer.parts)
        add(writer, *args)

    monkeypatch.setattr(IndexedWriter, "add", interrupted)
    before = set(tmp_path.iterdir())
    for _ in range(2):
        added.clear()
        with pytest.raises(KeyboardInterrupt, match="resume"):
            preprocess(inputs, tmp_path / "out", tokenizer, append_eod=True, workers=workers, resume=True)
        assert not {path.name for path in set(tmp_path.iterdir()) - before if not path.name.startswith(".")}
        # Other options do not go on from it, and leave it as it is.
        with refused(SettingError, "resume", str(tmp_path / "out")):
            preprocess(inputs, tmp_path / "out", tokenizer, resume=True)
    monkeypatch.setattr(IndexedWriter, "add", lambda writer, *args: (added.append(writer.parts), add(writer, *args)))
    added.clear()
    report = preprocess(inputs, tmp_path / "out", tokenizer, append_eod=True, workers=workers, resume=True)
    assert added[0] == 12  # six of the eight of each interrupted run
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens)
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_an_interrupted_run_left_is_not_taken_without_being_asked(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 200)
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 1)
    source = _jsonl(tmp_path / "a.jsonl", copies=5)
    add = IndexedWriter.add

    def interrupted(writer: IndexedWriter, *args: Any) -> None:
        if writer.parts == 2:
            raise KeyboardInterrupt
        add(writer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            preprocess([source], tmp_path / "out", tokenizer)
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(".")]) == 3
    preprocess([source], tmp_path / "out", tokenizer)
    assert _read(tmp_path / "out") == _encode(tokenizer, False) * 5
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_training_on_the_pair_needs_no_tokenizer(tmp_path: Path, tokenizer: Any, corpus: Path, run: Run) -> None:
    """The loss of the first step is that of the text, whose only document is cut into the same blocks."""
    preprocess([str(corpus)], tmp_path / "pair", tokenizer, append_eod=True)
    packed = pack(find_files([str(corpus)]), tokenizer, 16, with_documents=True).rows([0, 1])
    assert open_indexed(tmp_path / "pair").tokens[:32].tolist() == packed.input_ids.flatten().tolist()
    bare = tmp_path / "bare"  # a config.json alone
    bare.mkdir()
    options = {"steps": 2, "save_interval": 0, "eval_interval": 2, "document_attention": True}
    text = run(tmp_path / "text", data=[str(corpus)], **options)
    (bare / "config.json").write_bytes((Path(tmp_path / "text/checkpoints/step-0000002/config.json")).read_bytes())
    pair = run(tmp_path / "paired", data=[str(tmp_path / "pair")], model=str(bare), **options)
    assert [row["loss"] for row in pair] == [row["loss"] for row in text]
    assert pair[-1]["eval_loss"] == text[-1]["eval_loss"]


def test_a_resumed_blend_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, tokenizer: Any, corpus: Path, run: Run
) -> None:
    """A pair and text, each begun anew several times, with a stop in the middle."""
    preprocess([_jsonl(tmp_path / "a.jsonl", copies=3)], tmp_path / "pair", tokenizer)
    blend = {"data": ["0.7", str(tmp_path / "pair"), "0.3", str(corpus)], "eval_interval": 3, "split": "80,20,0"}
    whole = run(tmp_path / "whole", steps=6, lr_schedule="constant", **blend)
    run(tmp_path / "halves", steps=3, lr_schedule="constant", **blend)
    halves = run(tmp_path / "halves", resume=True, steps=6, lr_schedule="constant", **blend)
    assert [row["loss"] for row in halves] == [row["loss"] for row in whole]
    assert [row.get("eval_loss") for row in halves] == [row.get("eval_loss") for row in whole]


def test_documents_of_packed_text_end_with_eos(tmp_path: Path, tokenizer: Any) -> None:
    path = Path(_jsonl(tmp_path / "a.jsonl"))
    rows = pack([path], tokenizer, 7, with_documents=True).rows(range(5))
    assert rows.documents is not None
    numbers, ids = rows.documents, rows.input_ids
    assert torch.equal(numbers[:, 1:] - numbers[:, :-1], (ids[:, :-1] == tokenizer.eos_token_id).long())
    assert numbers.max() > 0
    assert pack([path], tokenizer, 7).rows([0]).documents is None


@pytest.mark.parametrize(
    ("name", "content", "options", "line", "named"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', {"workers": 2}, ":2", "JSON"),
        ("a.jsonl", b'{"text": "ok"}\n', {"json_key": "body"}, ":1", "'text'"),
        ("a.jsonl", b'{"text": ""}\n\n', {}, "", "no text"),
        ("a.txt", b"", {"workers": 2}, "", "no text"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes, options: dict[str, Any], line: str, named: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with refused(InputFileError, f"{tmp_path / name}{line}", named) as raised:
        preprocess([str(tmp_path / name)], tmp_path / "out", tokenizer, **options)
    assert "\n" not in str(raised.value)
    with refused(SettingError, "workers", "0"):
        preprocess([str(tmp_path / name)], tmp_path / "out", tokenizer, workers=0)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_already_tokenised_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    preprocess([_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    with refused(InputFileError, tmp_path / "out"):
        preprocess([str(tmp_path / "out")], tmp_path / "again", tokenizer)
    with refused(SettingError, "output", "out.bin", "overwrite"):
        preprocess([str(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)


def _other(folder: Path) -> Path:
    """A tokenizer whose ids are in range and mean other tokens."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["other words, of other things"], vocab_size=280, special_tokens=["<eos>", "<mask>"])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>", mask_token="<mask>").save_pretrained(
        folder
    )
    return folder


@pytest.mark.extension("plan")
def test_data_of_another_tokenizer_is_refused(tmp_path: Path, run: Run, tokenizer: Any, seed_folder: Path) -> None:
    """For training and for validation, also in a dry run; data without a record pass."""
    from dlm_bridge.plan.dry_run import dry_run

    other = AutoTokenizer.from_pretrained(_other(tmp_path / "other"))
    (tmp_path / "data").mkdir()
    corpus = _jsonl(tmp_path / "a.jsonl", copies=20)
    own, foreign = str(tmp_path / "data" / "own"), str(tmp_path / "foreign")
    preprocess([corpus], own, tokenizer)
    preprocess([corpus], foreign, other)
    changes = {"seq_length": 32, "steps": 1, "global_batch_size": 2, "split": "100,0,0", "eval_interval": 0}
    assert len(run(tmp_path / "run", data=[str(tmp_path / "data")], **changes)) == 1  # a folder with its record
    for bad in ({"data": [foreign]}, {"data": [own], "valid_data": [foreign], "split": "99,1,0"}):
        for _ in range(2):  # they leave nothing behind that a second try would stumble over
            with refused(InputFileError, f"{foreign}.bin", "tokenizer"):
                run(tmp_path / "refused", **{**changes, **bad})
    planned = {**changes, "model": str(seed_folder), "from_scratch": True, "output": str(tmp_path / "planned")}
    with refused(InputFileError, f"{foreign}.bin"):
        dry_run(TrainConfig.from_flags(**planned, data=[foreign]), 1)
    dry_run(TrainConfig.from_flags(**planned, data=[own]), 1)
    Path(f"{foreign}.tokenizer.json").unlink()
    assert len(run(tmp_path / "passes", **{**changes, "data": [foreign]})) == 1


def test_a_tokenizer_with_more_tokens_reads_the_same_data(tmp_path: Path, tokenizer: Any) -> None:
    """As one that was given a mask token afterwards; a record that is damaged is said."""
    preprocess([_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer)
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"additional_special_tokens": ["<more>"]})
    opened = open_indexed(tmp_path / "out")
    check_fingerprint(opened, more)
    preprocess([_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", more, overwrite=True)
    check_fingerprint(opened, more)
    with refused(InputFileError, tmp_path / "out.bin", tokenizer.name_or_path):
        check_fingerprint(opened, tokenizer)
    fingerprint_file(tmp_path / "out").write_text("{}")
    with refused(InputFileError, fingerprint_file(tmp_path / "out")):
        check_fingerprint(opened, more)


def _processes_with(word: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path: Path, seed_folder: Path) -> None:
    """SIGKILL while it writes: the old pair is as it was, no process lives on, and the next run goes through."""
    corpus, prefix = _jsonl(tmp_path / "a.jsonl", copies=200_000), tmp_path / "out"
    small = _jsonl(tmp_path / "small.jsonl")
    options = ["--output", str(prefix), "--tokenizer", str(seed_folder), "--workers", "2", "--overwrite", "--json"]
    first = CliRunner().invoke(app, ["preprocess", small, *options], catch_exceptions=False)
    assert json.loads(first.stdout)["documents"] == 4
    before = [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]
    command = [sys.executable, "-m", "dlm_bridge.cli", "preprocess", corpus, *options]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    growing = tmp_path / ".out.bin.tmp"
    while running.poll() is None and not (growing.exists() and growing.stat().st_size):
        time.sleep(0.02)
    assert running.poll() is None
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")] == before
    deadline = time.monotonic() + 20
    while _processes_with(str(corpus)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _processes_with(str(corpus)) == []
    again = CliRunner().invoke(app, ["preprocess", small, "--append-eod", *options], catch_exceptions=False)
    assert json.loads(again.stdout)["tokens"] == json.loads(first.stdout)["tokens"] + 4
    names = ["a.jsonl", "out.bin", "out.idx", "out.tokenizer.json", "small.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
