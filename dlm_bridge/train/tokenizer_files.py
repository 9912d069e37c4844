"""A checkpoint's tokenizer: the very files that it was read from, which every program that read those reads too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer. Where it is still what its files say, they are copied byte for byte, with the code that they
    name: transformers 5 writes names of its own into what it saves, which older versions do not know."""
    sources = _sources(tokenizer.name_or_path)
    if "tokenizer_config.json" in sources and _unchanged(tokenizer):
        for name, path in sources.items():
            shutil.copyfile(path, folder / name)
    else:
        tokenizer.save_pretrained(folder)


def _sources(place: str) -> dict[str, str]:
    """The tokenizer's files at a folder or in the Hub's cache, by name."""
    if not place:
        return {}
    found = {name: _find(place, name) for name in FILES}
    if (config := found["tokenizer_config.json"]) is not None:
        auto_map = json.loads(Path(config).read_text("utf-8")).get("auto_map") or {}
        references = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
        for reference in references if isinstance(references, list) else [references]:
            if isinstance(reference, str):
                name = reference.split("--")[-1].split(".")[0] + ".py"
                found[name] = _find(place, name)
    return {name: path for name, path in found.items() if path is not None}


def _find(place: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        return cached_file(place, name, local_files_only=True)
    except OSError:
        return None


def _unchanged(tokenizer: Any) -> bool:
    """Whether a tokenizer does what the one of its files does."""
    from transformers import AutoTokenizer

    try:
        original: Any = AutoTokenizer.from_pretrained(
            tokenizer.name_or_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError):
        return False
    facts = [(each.get_vocab(), each.special_tokens_map, each.chat_template) for each in (tokenizer, original)]
    return type(tokenizer) is type(original) and facts[0] == facts[1]
