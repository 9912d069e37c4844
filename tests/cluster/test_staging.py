"""`data_cache`: which files are copied, when copies are used again, and that a run reads them."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

from dlm_bridge.cluster import staging
from dlm_bridge.cluster.staging import stage
from dlm_bridge.data.indexed import IndexedTokens, IndexedWriter, fingerprint_file, token_dtype
from dlm_bridge.data.sources import find_data
from dlm_bridge.errors import InputFileError, ResourceError, SettingError
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.preview import preview
from dlm_bridge.train.setup import check_data
from tests import launcher
from tests.processes import environments
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

WORKER = "tests.cluster.staging_worker"


def copies(cache: Path) -> list[str]:
    """Files of the cache, with the paths of their sources."""
    return sorted(
        f"/{file.relative_to(cache)}" for file in cache.rglob("*") if file.is_file() and file.name != ".lock"
    )


def write_pair(prefix: Path, first: int) -> None:
    with IndexedWriter(prefix, token_dtype(1000)) as writer:
        writer.add(np.arange(first, first + 50), [20, 30])
    fingerprint_file(prefix).write_text("{}")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file of each kind, and files beside them that no item below names."""
    data = tmp_path / "data"
    (data / "texts" / "more").mkdir(parents=True)
    for name in ("one.jsonl", "texts/b.txt", "texts/a.md", "texts/more/c.txt", "texts/.hidden"):
        (data / name).write_text(f'{{"text": "{name}"}}\n')
    write_pair(data / "pair", 0)
    write_pair(data / "texts" / "inner", 50)
    rows = datasets.Dataset.from_dict({"text": ["x", "y"]})
    rows.save_to_disk(str(data / "saved"))
    datasets.DatasetDict(train=rows).save_to_disk(str(data / "splits"))
    return data


ITEMS = {
    "a file": (["one.jsonl"], ["one.jsonl"]),
    "the prefix of a pair": (["pair"], ["pair.bin", "pair.idx", "pair.tokenizer.json"]),
    "one file of a pair": (["pair.bin"], ["pair.bin", "pair.idx", "pair.tokenizer.json"]),
    "a folder": (
        ["texts"],
        ["texts/a.md", "texts/b.txt", *(f"texts/inner.{end}" for end in ("bin", "idx", "tokenizer.json")),
         "texts/more/c.txt"],
    ),
    "a glob": (["texts/**/*.txt"], ["texts/b.txt", "texts/more/c.txt"]),
    "a glob of one file of a pair": (
        ["texts/*.bin"], ["texts/inner.bin", "texts/inner.idx", "texts/inner.tokenizer.json"]
    ),
    "a blend": (["0.5", "pair", "2", "one.jsonl"], ["one.jsonl", "pair.bin", "pair.idx", "pair.tokenizer.json"]),
}  # fmt: skip


@pytest.mark.parametrize("items", ITEMS)
def test_the_files_of_an_item_are_copied_and_read_there(
    items: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    given, files = ITEMS[items]
    cache = tmp_path / "cache"
    local = stage(given, str(cache))
    assert copies(cache) == sorted(str(data / file) for file in files)
    sources = [str(source.prefix if isinstance(source, IndexedTokens) else source) for source in named(local)]
    here = [str(source.prefix if isinstance(source, IndexedTokens) else source) for source in named(given)]
    assert sources == [str(cache) + os.path.abspath(source) for source in here]


def named(items: list[str]) -> list[Any]:
    return [source for part in find_data(items).parts for source in part]


def test_saved_datasets_are_copied_and_names_of_datasets_are_not(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    local = stage([str(data / "saved"), f"{data / 'splits'}:train"], str(cache))
    assert len(copies(cache)) == 3 + 4
    for item in local:
        assert item.startswith(str(cache))
        (source,) = named([item])
        assert list(source.rows["text"]) == ["x", "y"]
    others = ["mock", "0.5", "org/dataset:en:train", "squad", str(data / "missing.jsonl")]
    assert stage(others, str(tmp_path / "other")) == others
    assert not (tmp_path / "other").exists()


def test_a_copy_is_used_until_its_source_changes(data: Path, tmp_path: Path) -> None:
    cache, source = tmp_path / "cache", data / "one.jsonl"
    (copy,) = stage([str(source)], str(cache))
    before = os.stat(copy)
    assert os.stat(stage([str(source)], str(cache))[0]).st_ino == before.st_ino
    os.utime(source, ns=(0, before.st_mtime_ns + 1))
    stage([str(source)], str(cache))
    assert os.stat(copy).st_mtime_ns == before.st_mtime_ns + 1
    source.write_text("longer than before\n")
    stage([str(source)], str(cache))
    assert Path(copy).read_text() == "longer than before\n"


def test_files_that_left_a_folder_leave_the_cache(data: Path, tmp_path: Path) -> None:
    """A run would read them as part of its data. The copies of other items stay."""
    cache, folder = tmp_path / "cache", data / "texts"
    stage([str(folder), str(data / "one.jsonl")], str(cache))
    shutil.rmtree(folder / "more")
    (folder / "b.txt").unlink()
    (local,) = stage([str(folder)], str(cache))
    assert named([local])[0] == Path(local) / "a.md"
    assert [copy for copy in copies(cache) if copy.endswith(".txt")] == []
    assert not (Path(local) / "more").exists()
    assert str(data / "one.jsonl") in copies(cache)
    shutil.rmtree(folder)
    write_pair(folder, 7)  # a pair where a folder was
    (local,) = stage([str(folder)], str(cache))
    assert isinstance(named([local])[0], IndexedTokens)


def test_too_little_room_is_found_before_anything_is_copied(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage(0, 0, 100))
    with refused(ResourceError, "data_cache", socket.gethostname()):
        stage([str(data / "pair")], str(tmp_path / "cache"))
    assert copies(tmp_path / "cache") == []


def test_a_file_that_changes_while_it_is_copied(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def copied(source: Path, target: Path) -> None:
        copyfile(source, target)
        with source.open("a") as file:
            file.write("one more line\n")

    monkeypatch.setattr(staging.shutil, "copyfile", copied)
    with refused(InputFileError, data / "one.jsonl"):
        stage([str(data / "one.jsonl")], str(tmp_path / "cache"))
    assert copies(tmp_path / "cache") == []


def test_a_copy_that_was_killed_is_no_data(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (local,) = stage([str(data / "texts")], str(cache))
    (Path(local) / ".a.md.part").write_text("half of a")
    assert Path(local) / ".a.md.part" not in named([local])


def test_a_cache_that_cannot_be_one(data: Path, tmp_path: Path) -> None:
    with refused(SettingError, "data_cache", str(data / "texts")):
        stage([str(data / "texts")], str(data / "texts" / "cache"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError):
        stage([str(data / "one.jsonl")], str(tmp_path / "file"))


def test_one_process_of_a_host_copies(data: Path, tmp_path: Path) -> None:
    """The other waits, and finds the copies."""
    logs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    words = ["host", str(tmp_path), str(data / "texts"), str(data / "pair")]
    ended = launcher.run(WORKER, words, [dict(os.environ)] * 2, logs, timeout_s=120)
    said = [log.read_text() for log in logs]
    assert ended, said
    (copies,) = {line for text in said for line in text.splitlines() if line.startswith("copies ")}
    assert str(tmp_path / "cache") in copies
    assert sorted(text.count("copying 9 files") for text in said) == [0, 1]


def test_a_run_reads_the_copies_and_gives_the_same_losses(
    run: Run, values: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    """The source is emptied, with its size and time, after the first run with a cache."""
    source, cache = tmp_path / "code.txt", tmp_path / "cache"
    shutil.copy2(corpus, source)
    changes = {"data": [str(source)], "steps": 4, "save_interval": 0}
    without = run(tmp_path / "without", **changes)
    cached = run(tmp_path / "with", data_cache=str(cache), **changes)
    assert without_speed(cached) == without_speed(without)
    recorded = yaml.safe_load((tmp_path / "with" / "config.yaml").read_text())["data"]
    assert (recorded["data"], recorded["data_cache"]) == ([str(source)], str(cache))
    found = source.stat()
    source.write_text("\n" * found.st_size)
    os.utime(source, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert without_speed(run(tmp_path / "again", data_cache=str(cache), **changes)) == without_speed(without)


def test_dry_runs_and_previews_copy_nothing(data: Path, seed_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    flags = {
        "model": str(seed_folder),
        "output": "o",
        "data_cache": str(cache),
        "seq_length": 64,
        "from_scratch": True,
    }
    check_data(TrainConfig.from_flags(data=[str(data / "one.jsonl")], **flags), load=False)
    chats = data / "chats.jsonl"
    chats.write_text('{"prompt": "a", "completion": "b"}\n')
    template = data / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}")
    assert (
        len(list(preview(TrainConfig.from_flags("sft", data=[str(chats)], chat_template=str(template), **flags), 1)))
        == 1
    )
    assert not cache.exists()


def test_a_host_that_is_ready_waits_for_the_others(data: Path, tmp_path: Path) -> None:
    """The time limit of a collective operation is shorter than a copy may take."""
    caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
    words, logs = ["hosts", str(tmp_path), str(data / "one.jsonl")], [tmp_path / "0.txt", tmp_path / "1.txt"]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(launcher.run, WORKER, words, environments(2), logs, timeout_s=240)
        deadline = time.monotonic() + 120
        while not copies(caches[0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        copied, waits = copies(caches[0]), not (tmp_path / "done-0").exists() and not ended.done()
        (tmp_path / "go").touch()
        assert ended.result(), [log.read_text() for log in logs]
    assert copied == [str(data / "one.jsonl")]
    assert waits
    assert copies(caches[1]) == copies(caches[0])
