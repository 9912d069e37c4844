"""Readers that dequantise a Hub folder's weights to bfloat16: block-scaled FP8 (DeepSeek-V3), MXFP4 (gpt-oss)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlm_bridge.convert.formats.hub_weights import FP8, MXFP4_PARTS, HubReader, ShardRecord, TensorEntry
from dlm_bridge.errors import CheckpointError, SettingError

SCALE = "_scale_inv"  # suffix of an FP8 weight's scales: value = stored * scale_inv
# Values of the 4-bit codes of OCP's E2M1: a sign, two exponent bits, one mantissa bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
BLOCK = 32  # values per scale
BLOCKS, SCALES = MXFP4_PARTS


class DequantisedReader(HubReader):
    """HubReader that returns quantised weights as bfloat16 and hides their parts (values and scales)."""

    kind: ClassVar[str]  # name of the format
    setting: ClassVar[str]  # that asks for it
    stored: ClassVar[str]  # dtype of the quantised values in a safetensors header

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, (self.stored,))
        self._raw = {entry.name: entry for file in self.files.values() for entry in file.entries}
        self.quantised = self._quantised()  # with the dtype and shape that `read` returns
        if not self.quantised:
            raise SettingError(self.setting, f"{folder} has no {self.kind} tensor")
        self._parts = {part for name in self.quantised for part in self._parts_of(name)}

    @property
    def names(self) -> list[str]:
        """Hub names, with each quantised weight's in place of its parts'."""
        return [*(name for name in self._raw if name not in self._parts), *self.quantised]

    def entry(self, name: str) -> TensorEntry:
        """Dtype and shape that `read` returns, and location in the file."""
        return self.quantised.get(name) or self._raw[name]

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` in row-major order. A quantised weight is read whole."""
        if name in self.quantised:
            return self.read(name).view(-1)[start:stop]
        return super().read_elements(name, start, stop)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor's bytes in its file."""
        return self._raw[self._parts_of(name)[0] if name in self.quantised else name].dtype

    def shards(self) -> list[ShardRecord]:
        """Empty: dequantised weights need a shard map of their own."""
        return []

    @abstractmethod
    def _quantised(self) -> dict[str, TensorEntry]:
        """Quantised weights by name. Raises CheckpointError for values and scales that do not match."""

    @abstractmethod
    def _parts_of(self, name: str) -> tuple[str, str]:
        """Names of a quantised weight's tensors: values and scales."""


class FP8Reader(DequantisedReader):
    """FP8 weights multiplied by their scales, rounded to bfloat16.

    Args:
        config: contents of config.json, whose quantization_config has the block size.

    Raises:
        CheckpointError: as HubReader, and for weights and scales that do not match.
        SettingError: no weight is FP8.
    """

    kind, setting, stored = "FP8", "dequantize_fp8", FP8

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._config = config
        super().__init__(folder)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised if it is FP8."""
        if name not in self.quantised:
            return super().read(name)
        return dequantise(super().read(name), super().read(name + SCALE), self._block)

    def _parts_of(self, name: str) -> tuple[str, str]:
        return name, name + SCALE

    def _quantised(self) -> dict[str, TensorEntry]:
        found = {name: entry for name, entry in self._raw.items() if entry.stored == self.stored}
        if found:
            self._block = _block_size(self.folder, self._config)
        scales = {name for name in self._raw if name.endswith(SCALE)} if found else set()
        if alone := {name + SCALE for name in found} ^ scales:
            name = min(alone)
            why = "has no FP8 weight" if name in scales else "is missing: its weight is FP8"
            raise CheckpointError(self.folder, f"tensor {name} {why}")
        for name in found:
            shape, scale = self._raw[name].shape, self._raw[name + SCALE]
            blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
            if len(shape) != 2 or scale.shape != blocks or scale.dtype != torch.float32:
                raise CheckpointError(
                    self.folder,
                    f"tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}; blocks of {list(self._block)} in "
                    f"{list(shape)} need float32 {list(blocks)}",
                )
        return {name: replace(entry, stored="BF16") for name, entry in found.items()}


class MXFP4Reader(DequantisedReader):
    """MXFP4 experts as bfloat16 tensors in transformers' layout.

    The Hub has blocks [experts, rows, columns / 32, 16] of two 4-bit values per byte, the first in the low bits, and
    exponents [experts, rows, columns / 32]; the weight is [experts, columns, rows].

    Raises:
        CheckpointError: as HubReader, and for blocks and scales that do not match.
        SettingError: no weight is MXFP4.
    """

    kind, setting, stored = "MXFP4", "dequantize_mxfp4", "U8"

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised if it is MXFP4."""
        if name not in self.quantised:
            return super().read(name)
        blocks, scales = map(super().read, self._parts_of(name))
        return dequantise_mxfp4(blocks, scales)

    def _parts_of(self, name: str) -> tuple[str, str]:
        return name + BLOCKS, name + SCALES

    def _quantised(self) -> dict[str, TensorEntry]:
        found = {}
        for part, entry in self._raw.items():
            if entry.dtype != torch.uint8:
                continue
            name = part.removesuffix(BLOCKS).removesuffix(SCALES)
            blocks, scales = (self._raw.get(other) for other in self._parts_of(name))
            if (
                blocks is None
                or scales is None
                or name in self._raw
                or len(blocks.shape) != 4
                or (*scales.shape, BLOCK // 2) != blocks.shape
                or {blocks.dtype, scales.dtype} != {torch.uint8}
            ):
                raise CheckpointError(
                    self.folder,
                    f"tensor {part} is uint8, but not part of an MXFP4 weight: {name + BLOCKS} [E, R, C, "
                    f"{BLOCK // 2}] and {name + SCALES} [E, R, C], both uint8",
                )
            experts, rows, count, _ = blocks.shape
            found[name] = replace(blocks, name=name, stored="BF16", shape=(experts, count * BLOCK, rows))
        return found


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """bfloat16 [R, C] of an FP8 weight [R, C] and its scales [R / block, C / block], rounded up."""
    factors = scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, factor in enumerate(factors):  # one row of blocks at a time fits the CPU cache
        rows = slice(number * block[0], (number + 1) * block[0])
        result[rows] = weight[rows].float() * factor
    return result


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, C, R] of bytes [E, R, C / 32, 16] and exponents [E, R, C / 32]."""
    experts, rows, count, _ = blocks.shape
    pairs = torch.tensor([(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)])
    result = torch.empty(experts, count * BLOCK, rows, dtype=torch.bfloat16)
    for expert in range(experts):  # one at a time, to bound the size of temporaries
        exponents = scales[expert].int() - E8M0_BIAS
        values = torch.ldexp(pairs[blocks[expert].int()].flatten(-2), exponents[..., None])
        result[expert] = values.view(rows, -1).T
    return result


def _block_size(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    found = config.get("quantization_config")
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise CheckpointError(
            folder / "config.json", "quantization_config.weight_block_size must be two numbers for `dequantize_fp8`"
        )
    return block[0], block[1]
