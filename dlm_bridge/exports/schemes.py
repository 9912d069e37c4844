"""Quantisation schemes of weights: FP8 and INT8 per output channel, INT4 in groups of 128 input channels.

Values are rounded to the nearest code, with scales from the largest absolute value (round to nearest, no calibration).
The tensors are named and laid out as in compressed-tensors, which SGLang and vLLM load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dlm_bridge.errors import CheckpointError

GROUP = 128  # input channels per INT4 scale
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"  # suffixes of a weight's tensors
_ROWS = 1 << 22  # elements that are quantised at a time, which bounds the memory of temporaries
_CODES = 8  # 4-bit codes per int32
_EXACT = 1 + 1e-4  # of a bound: codes are computed in fp32


@dataclass(frozen=True)
class Scheme:
    """One value of the setting `quantize`.

    Args:
        name: "fp8", "int8" or "int4".
        format: compressed-tensors' name of the layout.
        bits: bits per weight.
        dtype: dtype of the stored values; int32 has eight 4-bit codes.
        largest: absolute value that the largest weight of a scale is mapped to.
        group: input channels per scale; None: all of a row.
        activations: True if engines also quantise the activations, per token.
    """

    name: str
    format: str
    bits: int
    dtype: torch.dtype
    largest: float
    group: int | None
    activations: bool

    def specs(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        """Dtypes and shapes of the stored tensors of a weight `name` [out, in] of `dtype`.

        Raises CheckpointError if the groups do not divide the input channels.
        """
        rows, columns = shape
        if self.group is None:
            return {name: (self.dtype, shape), name + SCALE: (dtype, (rows, 1))}
        self._check_groups(name, columns)
        return {
            name + PACKED: (self.dtype, (rows, columns // _CODES)),
            name + SCALE: (dtype, (rows, columns // self.group)),
            name + SHAPE: (torch.int64, (2,)),
        }

    def quantize(self, weight: torch.Tensor, name: str) -> QuantizedWeight:
        """Quantise a weight [out, in]. Raises CheckpointError for NaN or infinite values, and if groups do not divide
        the input channels."""
        rows, columns = weight.shape
        self._check_groups(name, columns)
        group = self.group or columns
        packed = columns // _CODES if self.dtype == torch.int32 else columns
        values = torch.empty(rows, packed, dtype=self.dtype, device=weight.device)
        scales = torch.empty(rows, columns // group, dtype=weight.dtype, device=weight.device)
        step = max(1, _ROWS // columns)
        for first in range(0, rows, step):
            block = weight[first : first + step].float().view(-1, columns // group, group)
            scale = _rounded_up(block.abs().amax(dim=-1) / self.largest, weight.dtype)
            if not scale.isfinite().all():
                raise CheckpointError(name, "has NaN or infinite values, which cannot be quantised")
            scales[first : first + step] = scale
            codes = (block / scale.float()[..., None]).flatten(1)
            values[first : first + step] = self._round(codes)
        return QuantizedWeight(values, scales, self.bits)

    def _check_groups(self, name: str, columns: int) -> None:
        if self.group is not None and columns % self.group:
            raise CheckpointError(
                name, f"has {columns} input channels, which groups of {self.group} do not divide: use fp8 or int8"
            )

    def _round(self, codes: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float8_e4m3fn:
            return codes.clamp(-448, 448).to(self.dtype)
        top = 2 ** (self.bits - 1)
        whole = codes.round().clamp(-top, top - 1).to(torch.int8)
        return pack(whole) if self.dtype == torch.int32 else whole

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config` of config.json. `ignored`: linear layers that stay in high precision."""
        kind = "float" if self.dtype == torch.float8_e4m3fn else "int"
        weights: dict[str, Any] = {"num_bits": self.bits, "type": kind, "symmetric": True, "dynamic": False}
        weights |= {"strategy": "channel" if self.group is None else "group", "group_size": self.group}
        activations = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": activations if self.activations else None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", "float-quantized", 8, torch.float8_e4m3fn, 448, None, True),
        Scheme("int8", "int-quantized", 8, torch.int8, 127.5, None, True),
        Scheme("int4", "pack-quantized", 4, torch.int32, 7.5, GROUP, False),
    )
}


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised weight [..., out, in] in memory.

    Args:
        values: float8_e4m3fn or int8 [..., out, in], or 4-bit codes packed into int32 [..., out, in / 8].
        scale: [..., out, groups]; group g scales the input channels g * group to (g + 1) * group.
        bits: bits per value.
        group: input channels per scale; None: `in / groups`, for groups that divide it.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bits: int
    group: int | None = None

    @property
    def columns(self) -> int:
        """Number of input channels."""
        return self.values.shape[-1] * (_CODES if self.values.dtype == torch.int32 else 1)

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """Output channels `first` to `last` of a matrix."""
        return replace(self, values=self.values[first:last], scale=self.scale[first:last])

    def codes(self) -> torch.Tensor:
        """Unscaled values [..., out, in] as stored: float8_e4m3fn, or int8."""
        return unpack(self.values) if self.values.dtype == torch.int32 else self.values

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`; products with the scales are computed in it."""
        codes, scale = self.codes().to(dtype), self.scale.to(dtype)
        groups = scale.shape[-1]
        if self.group is None and codes.shape[-1] % groups == 0:
            return (codes.unflatten(-1, (groups, -1)) * scale[..., None]).flatten(-2)
        assert self.group is not None
        return codes * scale.repeat_interleave(self.group, dim=-1)[..., : codes.shape[-1]]

    def error_bounds(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounding error of each value against the weight it was made from, and its bound, in fp32.

        The bound is half a unit in the last place: for FP8 2^-4 of the weight, or 2^-10 of the scale for subnormal
        codes; for INT8 and INT4 half of the scale.
        """
        weight = weight.float()
        error = (self.dequantize(torch.float32) - weight).abs()
        ones = QuantizedWeight(torch.ones_like(self.codes()), self.scale, 8, self.group).dequantize(torch.float32)
        is_float = self.values.dtype == torch.float8_e4m3fn
        bound = torch.maximum(weight.abs() / 16, ones / 1024) if is_float else ones / 2
        return error, bound * _EXACT


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int8 codes of 4 bits [out, in] into int32 [out, in / 8]: offset by 8, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, device=codes.device)
    words = ((codes.to(torch.int64) + 8).unflatten(-1, (-1, _CODES)) << shifts).sum(dim=-1)
    return words.to(torch.int32)  # wraps the highest bit into the sign


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (((words[..., None] >> shifts) & 15) - 8).to(torch.int8).flatten(-2)


def _rounded_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast positive fp32 scales to `dtype`, upwards, so that no value exceeds the largest code; 1 where they are 0."""
    scale = torch.where(scale == 0, 1.0, scale)
    found = scale.to(dtype)
    above = torch.nextafter(found, torch.full_like(found, torch.inf))
    return torch.where(found.float() < scale, above, found)
