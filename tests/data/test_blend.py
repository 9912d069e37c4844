"""Blends: every source has its share at every moment, each sample a pure function of its index; what --data names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import constants

from dlm_bridge.data.blocks import (
    LONGEST_PERIOD,
    Blend,
    Concatenated,
    Epochs,
    LabelledTokens,
    MockBlocks,
    blend_schedule,
)
from dlm_bridge.data.indexed import IndexedWriter, TokenLimits, token_dtype
from dlm_bridge.data.sources import ReaderSettings, find_data
from dlm_bridge.errors import InputFileError, SettingError
from tests.refusals import refused

READER = ReaderSettings(
    seq_length=4, seed=0, shares=(0.8, 0.2, 0.0), fit=TokenLimits(1000, None), with_documents=False
)


def _counts(weights: list[float], samples: int) -> np.ndarray:
    """[samples + 1, sources]: how many of the first n samples came from each source."""
    plan = blend_schedule(weights)
    counts = np.zeros((samples + 1, len(weights)), dtype=int)
    for sample in range(samples):
        source, own = plan.at(sample)
        assert own == counts[sample, source]  # a source's samples come in order, none left out
        counts[sample + 1] = counts[sample]
        counts[sample + 1, source] += 1
    return counts


@pytest.mark.parametrize(
    "weights",
    [
        [1.0],
        [1, 1],
        [0.7, 0.3],
        [0.5, 0.25, 0.125, 0.125],
        [0.9, *[0.005] * 20],  # where taking the largest deficit first would leave the small ones behind
        [3, 2, 2, 1, 1, 1, 0.5, 17],
        [12.5, 0.37, 8.25, 1e-2],
    ],
)
def test_no_source_is_ever_a_whole_sample_off(weights: list[float]) -> None:
    counts = _counts(weights, 3000)
    wanted = np.arange(3001)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - wanted).max() < 1


def test_weights_that_are_no_short_decimals_are_rounded_to_a_millionth() -> None:
    weights = [1 / 3, 2**0.5, 0.123456789]
    plan = blend_schedule(weights)
    assert plan.period == LONGEST_PERIOD
    exact = np.array(weights) / sum(weights)
    assert np.abs(np.array(plan.shares) / plan.period - exact).max() < 1 / LONGEST_PERIOD
    assert blend_schedule([0.3, 0.7]).shares == blend_schedule([3, 7]).shares == (3, 7)
    with refused(SettingError, "data", "1e-09"):
        blend_schedule([1e-9, 1.0])


def test_samples_far_ahead_need_nothing_of_those_before() -> None:
    plan = blend_schedule([0.3, 0.7])
    assert [plan.at(10**15 + n) for n in range(10)] == [
        (source, own + 10**14 * (3, 7)[source]) for source, own in map(plan.at, range(10))
    ]


def test_a_blend_reads_each_sources_own_order() -> None:
    sources = tuple(Epochs(MockBlocks(6, 50, seed=seed, length=length), 3, seed) for seed, length in enumerate((5, 9)))
    blend = Blend(sources, blend_schedule([1, 3]))
    samples = [11, 2, 40, 3, 0, 39]
    rows = blend.rows(samples)
    for row, sample in enumerate(samples):
        source, own = blend.schedule.at(sample)
        assert torch.equal(rows.input_ids[row], sources[source].rows([own]).input_ids[0])
    assert {blend.schedule.at(sample)[0] for sample in samples} == {0, 1}
    assert len(blend) == 14


def test_what_only_one_source_knows_is_filled_in() -> None:
    class Packed:
        def __len__(self) -> int:
            return 2

        def rows(self, indices: Any) -> LabelledTokens:
            ids = torch.tensor([[100 + index, 101, 102] for index in indices])
            return LabelledTokens(ids, documents=torch.tensor([[0, 1, 1]] * len(indices)))

    rows = Concatenated((MockBlocks(3, 50, seed=0, length=4), Packed())).rows([5, 0, 4])
    assert rows.input_ids[:, 0].tolist()[::2] == [101, 100]
    assert rows.documents is not None
    assert rows.documents.tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 1]]
    assert rows.labels is None


def _pair(prefix: Path, ids: range, documents: int) -> str:
    with IndexedWriter(prefix, token_dtype(1000)) as writer:
        for _ in range(documents):
            writer.add(list(ids), [len(ids)])
    return str(prefix)


def test_each_source_of_a_blend_is_split_on_its_own(tmp_path: Path) -> None:
    low, high = _pair(tmp_path / "low", range(10), 20), _pair(tmp_path / "high", range(500, 510), 100)
    train, valid = find_data(["0.75", low, "0.25", high]).sections(READER, None)
    assert (len(train), len(valid)) == (40 + 200, 10 + 50)
    for samples, size in ((train, 160), (valid, 40)):
        first = samples.rows(range(size)).input_ids
        assert int((first < 500).all(dim=1).sum()) == size * 3 // 4
        assert torch.equal(samples.rows([7, 3]).input_ids, first[[7, 3]])
    both, _ = find_data([low, high]).sections(READER, None)  # without weights: everything once an epoch
    ids, counts = both.rows(range(240)).input_ids.unique(return_counts=True)
    assert len(ids) == 20
    assert int(counts.sum()) == 960
    assert int(counts[:10].sum()) == 160


@pytest.mark.parametrize(
    ("items", "named"),
    [
        (["0.5", "{a}", "0.5"], "0.5"),
        (["0.5", "0.5", "{a}", "{a}"], "0.5"),
        (["0.5", "{a}", "{a}"], "a.txt"),
        (["0", "{a}"], "0"),
        (["nan", "{a}"], "nan"),
        (["inf", "{a}", "1", "{a}"], "inf"),
        (["1e-9", "{a}", "1", "{a}"], "1e-09"),
    ],
)
def test_bad_blends_are_named(tmp_path: Path, items: list[str], named: str) -> None:
    (tmp_path / "a.txt").write_text("x")
    with refused(SettingError, "valid_data" if named != "1e-09" else "data", named):
        find_data([item.format(a=tmp_path / "a.txt") for item in items], setting="valid_data")
    for item in (f"{tmp_path}/nowhere.jsonl", f"{tmp_path}/a.txt.bin"):
        with refused(InputFileError, item):
            find_data(["1", item])


def test_datasets_by_folder_name_and_split(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"train": ["x = 1\n" * 30, "y = 2\n" * 30], "held": ["z = 3\n" * 90]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in texts.items()})
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    saved["held"].to_parquet(tmp_path / "hub/test-0.parquet")
    fit = TokenLimits(len(tokenizer), None)
    reader = ReaderSettings(seq_length=8, seed=0, shares=(1.0, 0.0, 0.0), fit=fit, with_documents=False)

    def text(item: str) -> str:
        blocks = find_data([item]).sections(reader, tokenizer)[0]
        assert isinstance(blocks, Epochs)
        return tokenizer.decode(blocks.blocks.rows(range(len(blocks))).input_ids.flatten())

    assert text(str(tmp_path / "saved")).startswith("x = 1\n")
    assert text(f"{tmp_path}/saved:held").startswith("z = 3\n")
    assert text(f"{tmp_path}/hub::test").startswith("z = 3\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config: saved if (name, config) == ("a/b", "c") else 1 / 0
    )
    assert text("a/b:c:held").startswith("z = 3\n")
    for item, named in {f"{tmp_path}/saved:nope": "train, held", "a/b:c:nope": "nope", "a/wrong": ""}.items():
        with refused(InputFileError, item, named):
            find_data([item])
