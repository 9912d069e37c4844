"""Resolution of `--data`: files, folders, datasets, Megatron pairs and blends of them become the blocks of a run."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi, constants

from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.train.data.blocks import (
    MOCK,
    Blend,
    Blocks,
    Concatenated,
    Epochs,
    MockBlocks,
    Samples,
    blend_schedule,
    split,
)
from dlm_bridge.train.data.documents import JSON_SUFFIXES, NamedDataset, Source, check_tokenizer, find_files, pack
from dlm_bridge.train.data.indexed import IndexedTokens, TokenLimits, check_length, open_indexed, pair, split_stream

PAIR_SUFFIXES = (".bin", ".idx")
FILE_SUFFIXES = (*JSON_SUFFIXES, *PAIR_SUFFIXES, ".parquet", ".txt", ".md", ".csv", ".gz", ".zst")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class ReaderSettings:
    """Settings of a run's data that all sources share."""

    seq_length: int
    seed: int
    shares: tuple[float, float, float]  # of training, validation and test
    fit: TokenLimits
    with_documents: bool  # rows say which of their tokens are of one document


@dataclass(frozen=True)
class DataSources:
    """The parts of `--data`, found but not yet tokenised: one, or the weighted parts of a blend."""

    parts: tuple[tuple[Source | IndexedTokens | str, ...], ...]
    weights: tuple[float, ...]  # empty for one part

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return any(isinstance(source, Path | NamedDataset) for part in self.parts for source in part)

    def check(self, seq_length: int) -> None:
        """Raise DlmBridgeError where a pair holds less than one block."""
        for part in self.parts:
            for source in part:
                if isinstance(source, IndexedTokens):
                    check_length(source, seq_length)

    def sections(self, reader: ReaderSettings, tokenizer: Any) -> tuple[Samples, Samples]:
        """The training and the validation samples: the first shuffled, the second in the data's order, each source of
        a blend split on its own. `tokenizer` is not used without text. Raises DlmBridgeError for data that cannot
        be read, do not fit the model or are too short."""
        if self.has_text:
            check_tokenizer(tokenizer, reader.fit.vocabulary, reader.fit.mask_token_id)
        return self.mixed([_part(part, reader, tokenizer) for part in self.parts], reader.seed)

    def mixed(self, both: Sequence[tuple[Blocks, Blocks]], seed: int) -> tuple[Samples, Samples]:
        """The training and the validation samples of each part's blocks for both."""
        train, valid = ([pair[which] for pair in both] for which in (0, 1))
        if not self.weights:
            return Epochs(train[0], seed), Epochs(valid[0])
        shuffled = tuple(Epochs(blocks, seed, number) for number, blocks in enumerate(train))
        # A source without validation blocks leaves the others' proportions as they are.
        kept = [number for number, blocks in enumerate(valid) if len(blocks)]
        ordered = tuple(Epochs(valid[number]) for number in kept)
        weights = [self.weights[number] for number in kept]
        return Blend(shuffled, blend_schedule(self.weights)), Blend(
            ordered, blend_schedule(weights)
        ) if kept else Epochs(valid[0])


def find_data(items: Sequence[str], load: bool = True) -> DataSources:
    """The sources of `--data`: PATH... (one after the other), or W PATH W PATH ... (a blend). Raises DlmBridgeError
    for a path that names nothing, a weight without a path, a path without a weight and a weight that is not positive.
    Without `load` datasets that would be fetched and prepared are `NamedDataset`s without rows."""
    if _weight(items[0]) is None:
        return DataSources((tuple(source for item in items for source in find_sources(item, load)),), ())
    weights, parts = [], []
    for place in range(0, len(items), 2):
        weight = _weight(items[place])
        if weight is None:
            raise DlmBridgeError(f"--data {items[place]}: no weight before it: a blend is W PATH W PATH ...")
        if not (math.isfinite(weight) and weight > 0):
            raise DlmBridgeError(f"--data {items[place]}: a weight must be a positive number")
        if place + 1 == len(items) or _weight(items[place + 1]) is not None:
            raise DlmBridgeError(f"--data {items[place]}: no path after this weight: a blend is W PATH W PATH ...")
        weights.append(weight)
        parts.append(tuple(find_sources(items[place + 1], load)))
    blend_schedule(weights)
    return DataSources(tuple(parts), tuple(weights))


def find_sources(item: str, load: bool = True) -> list[Source | IndexedTokens | str]:
    """The sources that one path means: `mock`, a Megatron pair by its prefix or either file, a saved dataset, the
    files of a folder or a glob, or a dataset of the Hub. Raises DlmBridgeError where it means nothing."""
    path = Path(item)
    if item == MOCK:
        return [MOCK]
    if path.is_dir() and _is_saved(path):
        return [_saved(item, "")]
    if not path.exists():
        prefix = item.removesuffix(path.suffix) if path.suffix in PAIR_SUFFIXES else item
        if any(file.is_file() for file in pair(prefix)):
            return [open_indexed(prefix)]
        name, _, rest = item.partition(":")
        config, _, part = rest.partition(":")
        if rest and Path(name).is_dir():
            return [_saved(name, part or config) if _is_saved(Path(name)) else _loaded(name, config, part, load)]
        if HUB_ID.fullmatch(name) and path.suffix not in FILE_SUFFIXES and not _in_a_folder(name):
            return [_loaded(name, config, part, load)]
    files = find_files([item])
    prefixes = dict.fromkeys(str(file.with_suffix("")) for file in files if file.suffix in PAIR_SUFFIXES)
    text = [file for file in files if file.suffix not in PAIR_SUFFIXES]
    return [*text, *(open_indexed(prefix) for prefix in prefixes)]


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _in_a_folder(name: str) -> bool:
    """Whether a name that is not there begins with a folder that is: rather a mistyped path than a Hub id."""
    return "/" in name and Path(name).parent.is_dir()


def _weight(item: str) -> float | None:
    """The number that an item is, unless a file has that name."""
    if Path(item).exists():
        return None
    with contextlib.suppress(ValueError):
        return float(item)
    return None


def _part(
    sources: Sequence[Source | IndexedTokens | str], reader: ReaderSettings, tokenizer: Any
) -> tuple[Blocks, Blocks]:
    """Training and validation blocks: each source split on its own, all text together."""
    text = [source for source in sources if isinstance(source, Path | NamedDataset)]
    fit, shares = reader.fit, reader.shares
    cut: list[tuple[Blocks, Blocks, Blocks]] = []
    if text:
        packed = pack(text, tokenizer, reader.seq_length, fit.mask_token_id, reader.with_documents)
        cut.append(split(packed, shares))
    for source in sources:
        if isinstance(source, IndexedTokens):
            cut.append(split_stream(source, reader.seq_length, reader.seed, fit, shares, reader.with_documents))
        elif source == MOCK:
            if fit.mask_token_id is not None and fit.mask_token_id < 1:
                raise DlmBridgeError("--data mock needs a mask_token_id above 0: the ids below it are its tokens")
            tokens = fit.vocabulary if fit.mask_token_id is None else min(fit.vocabulary, fit.mask_token_id)
            cut.append(split(MockBlocks(reader.seq_length, tokens=tokens, seed=reader.seed), shares))
    train, valid = (tuple(sections[which] for sections in cut) for which in (0, 1))
    return (train[0], valid[0]) if len(cut) == 1 else (Concatenated(train), Concatenated(valid))


def _saved(folder: str, part: str) -> NamedDataset:
    """FOLDER[:SPLIT], which `save_to_disk` wrote."""
    name = f"{folder}:{part}".rstrip(":")
    return _one_split(name, _load_or_refuse(name, lambda: datasets.load_from_disk(folder)), part)


def _loaded(name: str, config: str, part: str, wanted: bool) -> NamedDataset:
    """NAME[:CONFIG][:SPLIT]: a dataset of the Hub, or of a folder laid out like one."""
    shown = f"{name}:{config}:{part}".rstrip(":")

    def load() -> Any:
        if not Path(name).is_dir() and not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(name, timeout=10)  # answers at once, where load_dataset tries again and again
        return datasets.load_dataset(name, config or None) if wanted else None

    found = _load_or_refuse(shown, load)
    return _one_split(shown, found, part) if wanted else NamedDataset(shown, None)


def _one_split(name: str, found: Any, part: str) -> NamedDataset:
    if not isinstance(found, dict):
        if part:
            raise DlmBridgeError(f"{name}: the dataset has no splits: leave :{part} out")
        return NamedDataset(name, found)
    if (part or "train") not in found:
        raise DlmBridgeError(f"{name}: no split '{part or 'train'}' (it has {', '.join(found)}): name one")
    return NamedDataset(name, found[part or "train"])


def _load_or_refuse(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # whatever a dataset's files can be wrong with
        raise DlmBridgeError(f"{name}: no such file or folder, nor a dataset that loads: {one_line(error)}") from error
