"""Hub folders whose weights are quantised, read as bfloat16: block-scaled FP8 (DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.hub_reader import HubReader
from dlm_bridge.convert.formats.safetensors_file import FP8, ShardRecord, TensorEntry
from dlm_bridge.errors import DlmBridgeError

SCALE = "_scale_inv"  # beside "weight" stands "weight_scale_inv", by which the stored values are multiplied


class DequantisedReader(HubReader):
    """A HubReader that gives FP8 weights multiplied by their scales, rounded to bfloat16, and no scales.

    `config` is config.json's dict. Raises DlmBridgeError as HubReader does, where there is no FP8 weight, and where
    weights and scales do not belong together.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(folder, fp8=True)
        self._raw = {entry.name: entry for file in self.files.values() for entry in file.entries}
        self.quantised = {name for name, entry in self._raw.items() if entry.dtype == FP8}
        if not self.quantised:
            raise DlmBridgeError(f"{folder}: no tensor is FP8: leave --dequantize-fp8 out")
        self._block = _block_size(folder, config)
        self._scales = {name + SCALE for name in self.quantised}
        for name in self.quantised:
            self._check(name)
        for name in self._raw:
            if name.endswith(SCALE) and name not in self._scales:
                raise DlmBridgeError(f"{folder}: tensor {name} is a scale, but {name.removesuffix(SCALE)} is not FP8")

    @property
    def names(self) -> list[str]:
        """The Hub names but for the scales."""
        return [name for name in self._raw if name not in self._scales]

    def entry(self, name: str) -> TensorEntry:
        """As in HubReader, with the dtype that `read` gives."""
        entry = self._raw[name]
        return replace(entry, dtype=torch.bfloat16) if entry.dtype == FP8 else entry

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised where it is FP8."""
        if name not in self.quantised:
            return super().read(name)
        return dequantise(super().read(name), super().read(name + SCALE), self._block)

    def shards(self) -> list[ShardRecord]:
        """None: the files that hold the dequantised weights are other ones."""
        return []

    def _check(self, name: str) -> None:
        if name + SCALE not in self._raw:
            raise DlmBridgeError(f"{self.folder}: tensor {name} is FP8, but its scales {name + SCALE} are missing")
        shape, scale = self._raw[name].shape, self._raw[name + SCALE]
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or scale.shape != blocks or scale.dtype != torch.float32:
            raise DlmBridgeError(
                f"{self.folder}: tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}, blocks of "
                f"{list(self._block)} in {list(shape)} ask for float32 {list(blocks)}"
            )


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """bfloat16 [R, C] of an FP8 weight [R, C] and its scales [R / block, C / block], rounded up."""
    factors = scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, factor in enumerate(factors):  # a row of blocks at a time stays in the processor's cache
        rows = slice(number * block[0], (number + 1) * block[0])
        result[rows] = weight[rows].float() * factor
    return result


def _block_size(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    found = config.get("quantization_config")
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise DlmBridgeError(
            f"{folder / 'config.json'}: --dequantize-fp8 needs quantization_config.weight_block_size, two numbers"
        )
    return block[0], block[1]
