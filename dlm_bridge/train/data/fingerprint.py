"""The tokenizer of a Megatron pair, recorded beside it in PREFIX.tokenizer.json: data of another one would train in
silence as long as its token ids are in range."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlm_bridge.convert.atomic import atomic_file
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import read_config
from dlm_bridge.train.data.indexed import IndexedTokens, pair

SUFFIX = ".tokenizer.json"


def fingerprint_file(prefix: str | Path) -> Path:
    """Where the tokenizer of a pair is recorded."""
    return Path(f"{prefix}{SUFFIX}")


def without_fingerprints(files: Iterable[Path]) -> list[Path]:
    """The files that are not the records of pairs."""
    return [
        file
        for file in files
        if not (file.name.endswith(SUFFIX) and pair(str(file).removesuffix(SUFFIX))[1].is_file())
    ]


def write_fingerprint(prefix: str | Path, tokenizer: Any) -> None:
    """Record the tokenizer of a pair that was written just now."""
    count = _count(tokenizer)
    record = {"tokenizer": str(tokenizer.name_or_path), "tokens": count, "digest": _digest(tokenizer, count)}
    with atomic_file(fingerprint_file(prefix), overwrite=True) as file:
        file.write(json.dumps(record, indent=2) + "\n")


def check_fingerprint(source: IndexedTokens, tokenizer: Any) -> None:
    """Raise DlmBridgeError where a pair was made with another tokenizer than the run's: the same ids do not mean the
    same tokens. A run's may have tokens behind all of the recorded one's. Pairs without a record pass."""
    file = fingerprint_file(source.prefix)
    if not file.is_file():
        return
    record = read_config(file)
    count = record.get("tokens")
    if not isinstance(count, int):
        raise DlmBridgeError(f"{file}: damaged (no number of tokens): remove it, or preprocess anew")
    if _count(tokenizer) < count or _digest(tokenizer, count) != record.get("digest"):
        raise DlmBridgeError(
            f"{source.prefix}.bin was made with another tokenizer, {record.get('tokenizer')}, than the run's, "
            f"{tokenizer.name_or_path}: preprocess it with that one, or name the other with --tokenizer"
        )


def _count(tokenizer: Any) -> int:
    return 1 + max(tokenizer.get_vocab().values())


def _digest(tokenizer: Any, count: int) -> str:
    """Of the tokens with an id below `count`."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number < count)
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()
