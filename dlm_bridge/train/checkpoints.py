"""Checkpoints of a run: a Hub folder each, with trainer state and tokenizer files, written atomically."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.atomic import atomic_folder
from dlm_bridge.errors import DlmBridgeError

STATE = "trainer_state.pt"
NAME = re.compile(r"step-(\d{7,})")


def step_folder(output: Path, step: int) -> Path:
    """DIR/checkpoints/step-0000010."""
    return output / "checkpoints" / f"step-{step:07d}"


def find_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a run, oldest first."""
    root = output / "checkpoints"
    if not root.is_dir():
        return []
    named = [(NAME.fullmatch(folder.name), folder) for folder in root.iterdir()]
    return sorted((int(match[1]), folder) for match, folder in named if match and (folder / STATE).is_file())


def temporary_folder(output: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, until it is complete."""
    folder = step_folder(output, step)
    return folder.with_name(f".{folder.name}.tmp")


def atomic_checkpoint(output: Path, step: int) -> AbstractContextManager[Path]:
    """The empty `temporary_folder`, which becomes the checkpoint of `step` when the block ends without an exception.
    A kill leaves no folder of this name or a complete one. Raises DlmBridgeError where the disk refuses."""
    return atomic_folder(step_folder(output, step), temporary_folder(output, step))


def save_checkpoint(output: Path, step: int, model: Any, tokenizer: Any, state: dict[str, Any]) -> Path:
    """Write a `save_pretrained` folder of a model or an adapter, with the tokenizer and `state`, atomically."""
    with atomic_checkpoint(output, step) as folder:
        model.save_pretrained(folder)
        write_state(folder, step, tokenizer, state)
    return step_folder(output, step)


def write_state(folder: Path, step: int, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write what a checkpoint has beside the weights; `state` is what `load_state` returns."""
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    torch.save({"step": step, **state}, folder / STATE)


def load_state(folder: Path) -> dict[str, Any]:
    """The trainer's state, with tensors on the CPU. Raises DlmBridgeError where the file is damaged."""
    try:
        return torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DlmBridgeError(
            f"{folder / STATE}: damaged ({line}): remove {folder} to resume from before it"
        ) from error


def remove_old_checkpoints(output: Path, keep_last: int = 0) -> None:
    """Remove what killed writers left, and all but the newest `keep_last` checkpoints (0: keep all)."""
    root = output / "checkpoints"
    if root.is_dir():
        for leftover in root.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        for _, folder in find_checkpoints(output)[:-keep_last]:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, renamed first, so that a kill in the middle leaves nothing that looks like one."""
    hidden = folder.with_name(f".{folder.name}.old")
    os.replace(folder, hidden)
    shutil.rmtree(hidden)


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer. Unless it was changed, its files are copied byte for byte, with the code files that they
    name: transformers 5 saves class names that older versions do not know."""
    sources = _tokenizer_sources(tokenizer.name_or_path)
    if "tokenizer_config.json" in sources and _is_unchanged(tokenizer):
        for name, path in sources.items():
            shutil.copyfile(path, folder / name)
    else:
        tokenizer.save_pretrained(folder)


def _tokenizer_sources(place: str) -> dict[str, str]:
    """The tokenizer's files in a folder or in the Hub's cache, by name."""
    if not place:
        return {}
    found = {name: _find_cached(place, name) for name in TOKENIZER_FILES}
    if (config := found["tokenizer_config.json"]) is not None:
        auto_map = json.loads(Path(config).read_text("utf-8")).get("auto_map") or {}
        references = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
        for reference in references if isinstance(references, list) else [references]:
            if isinstance(reference, str):
                name = reference.split("--")[-1].split(".")[0] + ".py"
                found[name] = _find_cached(place, name)
    return {name: path for name, path in found.items() if path is not None}


def _find_cached(place: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    try:
        return cached_file(place, name, local_files_only=True)
    except OSError:
        return None


def _is_unchanged(tokenizer: Any) -> bool:
    """Whether a tokenizer behaves as the one that its files make."""
    from transformers import AutoTokenizer

    try:
        original: Any = AutoTokenizer.from_pretrained(
            tokenizer.name_or_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError):
        return False
    facts = [(each.get_vocab(), each.special_tokens_map, each.chat_template) for each in (tokenizer, original)]
    return type(tokenizer) is type(original) and facts[0] == facts[1]
