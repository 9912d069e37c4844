"""Resolution of a run's `data` (files, folders, datasets, Megatron pairs and blends) to blocks."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi, constants
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from dlm_bridge.data.blocks import (
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
from dlm_bridge.data.documents import JSON_SUFFIXES, NamedDataset, Source, check_tokenizer, find_files, pack
from dlm_bridge.data.indexed import (
    IndexedTokens,
    TokenLimits,
    check_fingerprint,
    check_length,
    fingerprint_file,
    open_indexed,
    pair,
    split_stream,
    without_fingerprints,
)
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.files.reading import parse_yaml, reading

PAIR_SUFFIXES = (".bin", ".idx")
FILE_SUFFIXES = (*JSON_SUFFIXES, *PAIR_SUFFIXES, ".parquet", ".txt", ".md", ".csv", ".gz", ".zst")
Part = tuple[Source | IndexedTokens | str, ...]
Shares = tuple[float, float, float]  # of training, validation and test
Cut = Callable[[Part, Shares], tuple[Blocks, Blocks]]
NOT_DATA = "not a file or folder, and not a dataset that can be loaded"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class ReaderSettings:
    """Data settings of a run, common to all sources."""

    seq_length: int
    seed: int
    shares: Shares  # of training, validation and test
    fit: TokenLimits
    with_documents: bool  # rows contain the document of each token


@dataclass(frozen=True)
class DataSources:
    """Sources of a run before tokenisation: one part, or the weighted parts of a blend."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...]  # empty for one part
    valid: DataSources | None = None  # separate validation data; None: a part of each source is held out

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """Parts for training and validation."""
        return self.parts if self.valid is None else (*self.parts, *self.valid.parts)

    @property
    def has_text(self) -> bool:
        """True if a tokenizer is needed."""
        return any(isinstance(source, Path | NamedDataset) for part in self.all_parts for source in part)

    def check(self, seq_length: int) -> None:
        """Raise SettingError if a pair has less than one block."""
        for source in self._pairs():
            check_length(source, seq_length)

    @property
    def has_fingerprints(self) -> bool:
        """True if some pair has a tokenizer fingerprint."""
        return any(fingerprint_file(source.prefix).is_file() for source in self._pairs())

    def check_fingerprints(self, tokenizer: Any) -> None:
        """Raise InputFileError if a pair was created with another tokenizer. A `tokenizer` of None is not compared."""
        for source in self._pairs() if tokenizer is not None else ():
            check_fingerprint(source, tokenizer)

    def _pairs(self) -> Iterator[IndexedTokens]:
        return (source for part in self.all_parts for source in part if isinstance(source, IndexedTokens))

    def sections(self, reader: ReaderSettings, tokenizer: Any) -> tuple[Samples, Samples]:
        """Training samples, shuffled, and validation samples, in the order of the data. Each source of a blend is
        split separately. `tokenizer` is only used for text. Raises InputFileError for data that cannot be read or do
        not fit the model, and SettingError for data that are too short or a tokenizer that does not fit the model."""
        if self.has_text:
            check_tokenizer(tokenizer, reader.fit.vocabulary, reader.fit.mask_token_id)
        self.check_fingerprints(tokenizer)
        return self.mixed(lambda part, shares: _part(part, shares, reader, tokenizer), reader.shares, reader.seed)

    def mixed(self, cut: Cut, shares: Shares, seed: int) -> tuple[Samples, Samples]:
        """Training and validation samples. `cut` splits a part into blocks for both, according to `shares`."""
        if self.valid is not None:
            train, valid = ([cut(part, (1, 0, 0))[0] for part in each.parts] for each in (self, self.valid))
            return self._shuffled(train, seed), self.valid._ordered(valid)
        both = [cut(part, shares) for part in self.parts]
        return self._shuffled([train for train, _ in both], seed), self._ordered([valid for _, valid in both])

    def _shuffled(self, parts: Sequence[Blocks], seed: int) -> Samples:
        if not self.weights:
            return Epochs(parts[0], seed)
        shuffled = tuple(Epochs(blocks, seed, number) for number, blocks in enumerate(parts))
        return Blend(shuffled, blend_schedule(self.weights))

    def _ordered(self, parts: Sequence[Blocks]) -> Samples:
        # A source without validation blocks does not change the proportions of the others.
        kept = [number for number, blocks in enumerate(parts) if len(blocks)]
        if not self.weights or not kept:
            return Epochs(parts[0])
        ordered = tuple(Epochs(parts[number]) for number in kept)
        return Blend(ordered, blend_schedule([self.weights[number] for number in kept]))


def find_run_data(items: Sequence[str], valid_items: Sequence[str], load: bool = True) -> DataSources:
    """Find the sources of a run's `data` and, if given, `valid_data`; see `find_data`."""
    found = find_data(items, load)
    return replace(found, valid=find_data(valid_items, load, "valid_data")) if valid_items else found


def find_data(items: Sequence[str], load: bool = True, setting: str = "data") -> DataSources:
    """Find the sources of PATH... (concatenated), or of W PATH W PATH ... (a blend).

    Args:
        load: False: datasets that would have to be downloaded and prepared become `NamedDataset`s without rows.
        setting: name of the setting in errors.

    Raises:
        InputFileError: a path does not exist or cannot be read.
        SettingError: a weight has no path, a path has no weight, or a weight is not positive.
    """
    if weight_of(items[0]) is None:
        return DataSources((tuple(source for item in items for source in find_sources(item, load)),), ())
    weights, parts = [], []
    for index in range(0, len(items), 2):
        weight = weight_of(items[index])
        has_path = index + 1 < len(items) and weight_of(items[index + 1]) is None
        if weight is None or not has_path or not (math.isfinite(weight) and weight > 0):
            missing = "no weight before" if weight is None else "no positive weight:" if has_path else "no path after"
            raise SettingError(
                setting, f"{missing} {items[index]}: a blend is W PATH W PATH ..., with weights above 0"
            )
        weights.append(weight)
        parts.append(tuple(find_sources(items[index + 1], load)))
    blend_schedule(weights)
    return DataSources(tuple(parts), tuple(weights))


def find_sources(item: str, load: bool = True) -> list[Source | IndexedTokens | str]:
    """Sources of one path: `mock`, a Megatron pair (given by its prefix or either file), a saved dataset, the files of
    a folder or a glob, or a dataset of the Hub. Raises InputFileError if the path is none of these."""
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
    files = files if len(files) == 1 else without_fingerprints(files)
    prefixes = dict.fromkeys(str(file.with_suffix("")) for file in files if file.suffix in PAIR_SUFFIXES)
    text = [file for file in files if file.suffix not in PAIR_SUFFIXES]
    return [*text, *(open_indexed(prefix) for prefix in prefixes)]


def _is_saved(folder: Path) -> bool:
    """True if `save_to_disk` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _in_a_folder(name: str) -> bool:
    """True if a name that does not exist begins with an existing folder: probably a mistyped path, not a Hub id."""
    return "/" in name and Path(name).parent.is_dir()


def weight_of(item: str) -> float | None:
    """Parse an item as a weight; None if it is not a number, or if a file has this name."""
    if Path(item).exists():
        return None
    with contextlib.suppress(ValueError):
        return float(item)
    return None


def _part(sources: Part, shares: Shares, reader: ReaderSettings, tokenizer: Any) -> tuple[Blocks, Blocks]:
    """Training and validation blocks of one part. Each pair is split separately, all text together."""
    text = [source for source in sources if isinstance(source, Path | NamedDataset)]
    fit = reader.fit
    cut: list[tuple[Blocks, Blocks, Blocks]] = []
    if text:
        packed = pack(text, tokenizer, reader.seq_length, fit.mask_token_id, reader.with_documents)
        cut.append(split(packed, shares))
    for source in sources:
        if isinstance(source, IndexedTokens):
            cut.append(split_stream(source, reader.seq_length, reader.seed, fit, shares, reader.with_documents))
        elif source == MOCK:
            if fit.mask_token_id is not None and fit.mask_token_id < 1:
                raise SettingError("data", "mock needs a mask token id above 0, because it uses the ids below it")
            tokens = fit.vocabulary if fit.mask_token_id is None else min(fit.vocabulary, fit.mask_token_id)
            cut.append(split(MockBlocks(reader.seq_length, tokens=tokens, seed=reader.seed), shares))
    train, valid = (tuple(sections[which] for sections in cut) for which in (0, 1))
    return (train[0], valid[0]) if len(cut) == 1 else (Concatenated(train), Concatenated(valid))


def _saved(folder: str, part: str) -> NamedDataset:
    """Load FOLDER[:SPLIT], written by `save_to_disk`."""
    name = f"{folder}:{part}".rstrip(":")
    with reading(name, NOT_DATA, kind=InputFileError):
        found = datasets.load_from_disk(folder)
    return _one_split(name, found, part)


def _loaded(name: str, config: str, part: str, wanted: bool) -> NamedDataset:
    """Load NAME[:CONFIG][:SPLIT]: a dataset of the Hub, or a folder with the same layout."""
    shown = f"{name}:{config}:{part}".rstrip(":")
    with reading(shown, NOT_DATA, kind=InputFileError):
        if not Path(name).is_dir() and not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(name, timeout=10)  # fails immediately, while load_dataset retries many times
        _check_card(Path(name))
        found = datasets.load_dataset(name, config or None) if wanted else None
    return _one_split(shown, found, part) if wanted else NamedDataset(shown, None)


def _check_card(folder: Path) -> None:
    """Raise ValueError for YAML, in a folder with the layout of a Hub dataset, whose aliases would expand without
    limit."""
    card, settings = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    if card.is_file() and (found := REGEX_YAML_BLOCK.search(card.read_text("utf-8"))):
        parse_yaml(found[2])
    if settings.is_file():
        parse_yaml(settings.read_text("utf-8"))


def _one_split(name: str, found: Any, part: str) -> NamedDataset:
    splits = found if isinstance(found, dict) else {"": found}
    chosen = part or ("train" if isinstance(found, dict) else "")
    if chosen not in splits:
        raise InputFileError(name, f"no split '{chosen}' (it has {', '.join(filter(None, splits)) or 'no splits'})")
    return NamedDataset(name, splits[chosen])
