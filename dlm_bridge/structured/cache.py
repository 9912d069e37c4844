"""Compiled automata in memory, and in the user's cache folder.

The folder is `$XDG_CACHE_HOME/dlm_bridge/structured`, or `~/.cache/dlm_bridge/structured`. A file that is damaged, or
was written by another version, is compiled again and replaced. The oldest files are removed beyond `DISK_BYTES`.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dlm_bridge import __version__
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.structured.automaton import TokenAutomaton

MEMORY_BYTES = 1 << 30
DISK_BYTES = 1 << 30
_FORMAT = 1  # raised whenever the same constraint would compile to another automaton
_TENSORS = ("classes", "transitions", "accepting", "distances")

_memory: OrderedDict[str, TokenAutomaton] = OrderedDict()
_lock = threading.Lock()


def cache_key(*values: object) -> str:
    """Name of an automaton, by everything that it depends on."""
    return xxhash.xxh3_128_hexdigest(json.dumps([_FORMAT, __version__, *values]).encode())


def cached(key: str) -> TokenAutomaton | None:
    """The automaton of a key, from memory or from its file."""
    with _lock:
        if key in _memory:
            _memory.move_to_end(key)
            return _memory[key]
    automaton = _read(_folder() / f"{key}.safetensors")
    if automaton is not None:
        _remember(key, automaton)
    return automaton


def store(key: str, automaton: TokenAutomaton) -> None:
    """Keep an automaton in memory and in a file. A disk that cannot be written is no error."""
    _remember(key, automaton)
    with suppress(OSError, SafetensorError):
        _write(_folder(), key, automaton)


def forget() -> None:
    """Remove all automata from memory."""
    with _lock:
        _memory.clear()


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dlm_bridge" / "structured"


def _remember(key: str, automaton: TokenAutomaton) -> None:
    with _lock:
        _memory[key] = automaton
        _memory.move_to_end(key)
        size = sum(map(_size, _memory.values()))
        while size > MEMORY_BYTES and len(_memory) > 1:
            size -= _size(_memory.popitem(last=False)[1])


def _size(automaton: TokenAutomaton) -> int:
    return sum(getattr(automaton, name).nbytes for name in _TENSORS)


def _write(folder: Path, key: str, automaton: TokenAutomaton) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(automaton, name) for name in _TENSORS}
    tensors = {name: each.to(torch.int32) if each.dtype == torch.int64 else each for name, each in tensors.items()}
    facts = {"end": automaton.end, "ends": list(automaton.ends), "digest": _digest(tensors)}
    with temporary_folder(".writing-", folder) as place:
        save_file(tensors, place / key, {"automaton": json.dumps(facts)})
        os.replace(place / key, folder / f"{key}.safetensors")
    files = [(each.stat(), each) for each in folder.glob("*.safetensors")]
    size = sum(status.st_size for status, _ in files)
    for status, path in sorted(files, key=lambda each: each[0].st_mtime):
        if size <= DISK_BYTES:
            break
        path.unlink(missing_ok=True)
        size -= status.st_size


def _read(path: Path) -> TokenAutomaton | None:
    """The automaton of a file; None if there is none or it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})["automaton"])
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
        if facts["digest"] != _digest(tensors):
            return None
        os.utime(path)
        wide = {name: each.to(torch.int64) if each.dtype == torch.int32 else each for name, each in tensors.items()}
        return TokenAutomaton(**wide, end=int(facts["end"]), ends=tuple(map(int, facts["ends"])))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in _TENSORS:
        digest.update(str(tuple(tensors[name].shape)).encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
