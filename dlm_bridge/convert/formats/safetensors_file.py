"""The safetensors file format: a checked header to read by, and a header to write by before any tensor is there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dlm_bridge.convert.tensors import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from dlm_bridge.errors import DlmBridgeError, one_line


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `offset` counts bytes from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SafetensorsFile:
    """A file's header: its tensors in the order of their bytes."""

    path: Path
    metadata: dict[str, str] | None
    entries: tuple[TensorEntry, ...]
    start: int  # bytes before the tensors


FP8 = torch.float8_e4m3fn


def read_header(path: Path, fp8: bool = False) -> SafetensorsFile:
    """Read and check a header; safetensors' own reader judges it first. `fp8` lets FP8 tensors through.

    Raises DlmBridgeError naming the file.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise DlmBridgeError(f"{path}: not a whole safetensors file: {one_line(error)}") from None
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length)
    header: dict[str, Any] = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path))
    metadata = header.pop("__metadata__", None)
    entries = [_entry(path, name, item, 8 + length, fp8) for name, item in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return SafetensorsFile(path, metadata, tuple(entries), 8 + length)


def build_header(
    metadata: Mapping[str, str] | None, tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]
) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """The header bytes of a file that holds `tensors` (name, dtype, shape) in this order, and where each one goes.

    The bytes are those that safetensors' own writer makes: compact JSON, padded with spaces to 8 bytes.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, position = [], 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        places.append((name, dtype, tuple(shape), position))
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = tuple(TensorEntry(name, dtype, shape, start + offset) for name, dtype, shape, offset in places)
    return len(text).to_bytes(8, "little") + text, entries


def standard_order(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
) -> list[tuple[str, torch.dtype, Sequence[int]]]:
    """The order that safetensors' own writer gives: widest dtype first, then by name."""
    rank = {dtype: place for place, dtype in enumerate(SAFETENSORS_NAMES)}
    return sorted(tensors, key=lambda item: (rank[item[1]], item[0]))


def _entry(path: Path, name: str, item: dict[str, Any], start: int, fp8: bool) -> TensorEntry:
    dtype = FP8 if fp8 and item["dtype"] == "F8_E4M3" else SAFETENSORS_DTYPES.get(item["dtype"])
    if dtype is None and item["dtype"] == "F8_E4M3":
        raise DlmBridgeError(f"{path}: tensor {name} is FP8: dlm-bridge import takes it with --dequantize-fp8")
    if dtype is None:
        known = ", ".join(SAFETENSORS_DTYPES)
        raise DlmBridgeError(f"{path}: tensor {name} has dtype {item['dtype']}, a weight has one of {known}")
    return TensorEntry(name, dtype, tuple(item["shape"]), start + item["data_offsets"][0])


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise DlmBridgeError(f"{path}: '{twice}' stands twice in the header")
    return result
