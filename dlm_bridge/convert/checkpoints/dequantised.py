"""Hub folders whose weights are quantised, read as bfloat16: block-scaled FP8 (DeepSeek-V3), MXFP4 (gpt-oss)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dlm_bridge.convert.formats.hub_weights import FP8, MXFP4_PARTS, HubReader, ShardRecord, TensorEntry
from dlm_bridge.errors import DlmBridgeError

SCALE = "_scale_inv"  # beside "weight" stands "weight_scale_inv", by which the stored values are multiplied
# The values of a 4-bit code, OCP's E2M1: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
BLOCK = 32  # values of a scale
BLOCKS, SCALES = MXFP4_PARTS


class DequantisedReader(HubReader):
    """A HubReader that gives quantised weights as bfloat16, and none of the tensors that they are made of."""

    kind: ClassVar[str]  # in words
    flag: ClassVar[str]
    stored: ClassVar[str]  # the dtype in a safetensors header, of quantised weights only

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self.stored)
        self._raw = {entry.name: entry for file in self.files.values() for entry in file.entries}
        self.quantised = self._quantised()  # the weights, with the dtype and shape that `read` gives
        if not self.quantised:
            raise DlmBridgeError(f"{folder}: no tensor is {self.kind}: leave {self.flag} out")
        self._parts = {part for name in self.quantised for part in self._parts_of(name)}

    @property
    def names(self) -> list[str]:
        """The Hub names, with those of the quantised weights in place of their parts'."""
        return [*(name for name in self._raw if name not in self._parts), *self.quantised]

    def entry(self, name: str) -> TensorEntry:
        """As in HubReader, with the dtype and shape that `read` gives."""
        return self.quantised.get(name) or self._raw[name]

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As in HubReader; a quantised weight is read whole."""
        if name in self.quantised:
            return self.read(name).view(-1)[start:stop]
        return super().read_elements(name, start, stop)

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor's bytes in its file."""
        return self._raw[self._parts_of(name)[0] if name in self.quantised else name].dtype

    def shards(self) -> list[ShardRecord]:
        """None: the files that hold the dequantised weights are other ones."""
        return []

    @abstractmethod
    def _quantised(self) -> dict[str, TensorEntry]:
        """Every quantised weight. Raises DlmBridgeError for parts that do not belong together."""

    @abstractmethod
    def _parts_of(self, name: str) -> tuple[str, str]:
        """The tensors of a quantised weight: values and scales."""


class FP8Reader(DequantisedReader):
    """FP8 weights multiplied by their scales, rounded to bfloat16.

    `config` is config.json's dict. Raises DlmBridgeError as HubReader does, where there is no FP8 weight, and where
    weights and scales do not belong together.
    """

    kind, flag, stored = "FP8", "--dequantize-fp8", FP8

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._config = config
        super().__init__(folder)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised where it is FP8."""
        if name not in self.quantised:
            return super().read(name)
        return dequantise(super().read(name), super().read(name + SCALE), self._block)

    def _parts_of(self, name: str) -> tuple[str, str]:
        return name, name + SCALE

    def _quantised(self) -> dict[str, TensorEntry]:
        found = {name: entry for name, entry in self._raw.items() if entry.stored == self.stored}
        if found:
            self._block = _block_size(self.folder, self._config)
        for name in found:
            self._check(name)
        for name in self._raw:
            if name.endswith(SCALE) and found and name.removesuffix(SCALE) not in found:
                raise DlmBridgeError(
                    f"{self.folder}: tensor {name} is a scale, but {name.removesuffix(SCALE)} is not FP8"
                )
        return {name: replace(entry, stored="BF16") for name, entry in found.items()}

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


class MXFP4Reader(DequantisedReader):
    """Experts in MXFP4 as the bfloat16 tensors of transformers' layout.

    The Hub has [experts, rows, columns / 32, 16] bytes of two 4-bit values, the first in the low bits, and [experts,
    rows, columns / 32] exponents; the weight is [experts, columns, rows]. Raises DlmBridgeError as HubReader does,
    where there is no such weight, and where blocks and scales do not belong together.
    """

    kind, flag, stored = "MXFP4", "--dequantize-mxfp4", "U8"

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised where it is MXFP4."""
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
            if blocks is None or scales is None or name in self._raw:
                raise DlmBridgeError(
                    f"{self.folder}: tensor {part} is uint8: an MXFP4 weight is {name + BLOCKS} and {name + SCALES}, "
                    "and nothing besides"
                )
            if (
                len(blocks.shape) != 4
                or (*scales.shape, BLOCK // 2) != blocks.shape
                or {blocks.dtype, scales.dtype} != {torch.uint8}
            ):
                raise DlmBridgeError(
                    f"{self.folder}: tensor {name + SCALES} is {scales.dtype} {list(scales.shape)}, which does not "
                    f"fit {name + BLOCKS} of {blocks.dtype} {list(blocks.shape)}"
                )
            experts, rows, count, _ = blocks.shape
            found[name] = replace(blocks, name=name, stored="BF16", shape=(experts, count * BLOCK, rows))
        return found


def dequantise(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """bfloat16 [R, C] of an FP8 weight [R, C] and its scales [R / block, C / block], rounded up."""
    factors = scale.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, factor in enumerate(factors):  # a row of blocks at a time stays in the processor's cache
        rows = slice(number * block[0], (number + 1) * block[0])
        result[rows] = weight[rows].float() * factor
    return result


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, C, R] of bytes [E, R, C / 32, 16] and exponents [E, R, C / 32]."""
    experts, rows, count, _ = blocks.shape
    pairs = torch.tensor([(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)])
    result = torch.empty(experts, count * BLOCK, rows, dtype=torch.bfloat16)
    for expert in range(experts):  # temporaries of one expert's size
        exponents = scales[expert].int() - E8M0_BIAS
        values = torch.ldexp(pairs[blocks[expert].int()].flatten(-2), exponents[..., None])
        result[expert] = values.view(rows, -1).T
    return result


def _block_size(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    found = config.get("quantization_config")
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise DlmBridgeError(
            f"{folder / 'config.json'}: --dequantize-fp8 needs quantization_config.weight_block_size, two numbers"
        )
    return block[0], block[1]
