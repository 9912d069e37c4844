"""Resolution of `--data`: files, folders, datasets, Megatron pairs and blends of them become the blocks of a run."""

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
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.files.reading import parse_yaml

PAIR_SUFFIXES = (".bin", ".idx")
FILE_SUFFIXES = (*JSON_SUFFIXES, *PAIR_SUFFIXES, ".parquet", ".txt", ".md", ".csv", ".gz", ".zst")
Part = tuple[Source | IndexedTokens | str, ...]
Shares = tuple[float, float, float]  # of training, validation and test
Cut = Callable[[Part, Shares], tuple[Blocks, Blocks]]
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class ReaderSettings:
    """Settings of a run's data that all sources share."""

    seq_length: int
    seed: int
    shares: Shares  # of training, validation and test
    fit: TokenLimits
    with_documents: bool  # rows say which of their tokens are of one document


@dataclass(frozen=True)
class DataSources:
    """The parts of `--data`, found but not yet tokenised: one, or the weighted parts of a blend."""

    parts: tuple[Part, ...]
    weights: tuple[float, ...]  # empty for one part
    valid: DataSources | None = None  # --valid-data; None: a part of each source

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts for training and for validation."""
        return self.parts if self.valid is None else (*self.parts, *self.valid.parts)

    @property
    def has_text(self) -> bool:
        """Whether a tokenizer is needed."""
        return any(isinstance(source, Path | NamedDataset) for part in self.all_parts for source in part)

    def check(self, seq_length: int) -> None:
        """Raise DlmBridgeError where a pair holds less than one block."""
        for source in self._pairs():
            check_length(source, seq_length)

    @property
    def has_fingerprints(self) -> bool:
        """Whether the tokenizer of a pair is recorded beside it."""
        return any(fingerprint_file(source.prefix).is_file() for source in self._pairs())

    def check_fingerprints(self, tokenizer: Any) -> None:
        """Raise DlmBridgeError where a pair was made with another tokenizer. None is not compared."""
        for source in self._pairs() if tokenizer is not None else ():
            check_fingerprint(source, tokenizer)

    def _pairs(self) -> Iterator[IndexedTokens]:
        return (source for part in self.all_parts for source in part if isinstance(source, IndexedTokens))

    def sections(self, reader: ReaderSettings, tokenizer: Any) -> tuple[Samples, Samples]:
        """The training and the validation samples: the first shuffled, the second in the data's order, each source of
        a blend split on its own. `tokenizer` is not used without text. Raises DlmBridgeError for data that cannot
        be read, do not fit the model or are too short."""
        if self.has_text:
            check_tokenizer(tokenizer, reader.fit.vocabulary, reader.fit.mask_token_id)
        self.check_fingerprints(tokenizer)
        return self.mixed(lambda part, shares: _part(part, shares, reader, tokenizer), reader.shares, reader.seed)

    def mixed(self, cut: Cut, shares: Shares, seed: int) -> tuple[Samples, Samples]:
        """The training and the validation samples: `cut` gives the blocks of a part for both, by their shares."""
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
        # A source without validation blocks leaves the others' proportions as they are.
        kept = [number for number, blocks in enumerate(parts) if len(blocks)]
        if not self.weights or not kept:
            return Epochs(parts[0])
        ordered = tuple(Epochs(parts[number]) for number in kept)
        return Blend(ordered, blend_schedule([self.weights[number] for number in kept]))


def find_run_data(items: Sequence[str], valid_items: Sequence[str], load: bool = True) -> DataSources:
    """The sources of a run's `--data` and, where there are any, of its `--valid-data`, as `find_data`."""
    found = find_data(items, load)
    return replace(found, valid=find_data(valid_items, load, "--valid-data")) if valid_items else found


def find_data(items: Sequence[str], load: bool = True, flag: str = "--data") -> DataSources:
    """The sources of `--data`: PATH... (one after the other), or W PATH W PATH ... (a blend). Raises DlmBridgeError
    for a path that names nothing, a weight without a path, a path without a weight and a weight that is not positive.
    Without `load` datasets that would be fetched and prepared are `NamedDataset`s without rows."""
    if _weight(items[0]) is None:
        return DataSources((tuple(source for item in items for source in find_sources(item, load)),), ())
    weights, parts = [], []
    for place in range(0, len(items), 2):
        weight = _weight(items[place])
        if weight is None:
            raise DlmBridgeError(f"{flag} {items[place]}: no weight before it: a blend is W PATH W PATH ...")
        if not (math.isfinite(weight) and weight > 0):
            raise DlmBridgeError(f"{flag} {items[place]}: a weight must be a positive number")
        if place + 1 == len(items) or _weight(items[place + 1]) is not None:
            raise DlmBridgeError(f"{flag} {items[place]}: no path after this weight: a blend is W PATH W PATH ...")
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
    files = files if len(files) == 1 else without_fingerprints(files)
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


def _part(sources: Part, shares: Shares, reader: ReaderSettings, tokenizer: Any) -> tuple[Blocks, Blocks]:
    """Training and validation blocks: each source split on its own, all text together."""
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
        _check_card(Path(name))
        return datasets.load_dataset(name, config or None) if wanted else None

    found = _load_or_refuse(shown, load)
    return _one_split(shown, found, part) if wanted else NamedDataset(shown, None)


def _check_card(folder: Path) -> None:
    """Raise ValueError for the YAML of a folder laid out like a dataset of the Hub whose aliases datasets would repeat
    without end."""
    card, settings = folder / datasets.config.REPOCARD_FILENAME, folder / datasets.config.REPOYAML_FILENAME
    if card.is_file() and (found := REGEX_YAML_BLOCK.search(card.read_text("utf-8"))):
        parse_yaml(found[2])
    if settings.is_file():
        parse_yaml(settings.read_text("utf-8"))


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
