"""Quantised Hub folders: those of compressed-tensors, and FP8 folders with `quant_method: fp8`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import checked_dims
from dlm_bridge.convert.checkpoints.dequantised import DequantisedReader
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint
from dlm_bridge.convert.formats.hub_weights import HubReader, TensorEntry
from dlm_bridge.errors import CheckpointError
from dlm_bridge.exports.schemes import PACKED, SCALE, SHAPE, QuantizedWeight
from dlm_bridge.exports.stacked import ExpertStack, expert_stacks
from dlm_bridge.files.reading import reading
from dlm_bridge.hub import CONFIG_FILE, read_config
from dlm_bridge.mapping.dtypes import QUANTISED_DTYPES, header_name
from dlm_bridge.models.families import find_family

INVERSE = "_scale_inv"  # suffix of the scales of block-quantised FP8 weights
# Formats of compressed-tensors whose groups may be quantised as in `_check_group`.
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_ACTIVATION_SCALES = (".input_scale", ".input_zero_point")  # of static schemes; activations are quantised dynamically


@dataclass(frozen=True)
class Parts:
    """Stored tensors of a quantised weight, and the block of weights of each scale."""

    values: str
    scale: str
    shape: tuple[int, int]
    bits: int
    block: tuple[int, int]

    @property
    def names(self) -> tuple[str, str]:
        return self.values, self.scale


class CompressedReader(DequantisedReader):
    """Reader that returns quantised weights in `dtype`, by default that of their scales, and hides their parts.

    Raises:
        CheckpointError: as HubReader, for a scheme that is not supported, and for values and scales that do not match.
    """

    kind, setting, stored = "quantised", "quantize", ""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        found = read_config(folder / CONFIG_FILE).get("quantization_config")
        self.config: dict[str, Any] = found if isinstance(found, dict) else {}
        where = folder / CONFIG_FILE
        self.stacks: dict[str, ExpertStack] = {}
        HubReader.__init__(self, folder, QUANTISED_DTYPES)
        with reading(where, "quantization_config and the tensors do not match"):
            check = _check_compressed if self.config.get("quant_method") == "compressed-tensors" else _check_fp8
            check(self.config, where)
            self._find_weights(folder)

    def _find_weights(self, folder: Path) -> None:
        """List the quantised weights and their parts. Raises CheckpointError for a part without the others."""
        self._raw = {entry.name: entry for file in self.files.values() for entry in file.entries}
        self.parts = {name: parts for entry in self._raw if (parts := self._found(entry)) for name in [_weight(entry)]}
        if not self.parts:
            raise CheckpointError(folder, "has a quantization_config, but no quantised weight")
        for name, found in self.parts.items():
            if name in self._raw and found.values != name:
                raise CheckpointError(folder, f"tensor {name} is stored twice: also as {found.values}")
        self.quantised = self._quantised()
        hidden = {part for name in self.parts for part in (*self.parts[name].names, _weight(name) + SHAPE)}
        self._parts = hidden | {name for name in self._raw if name.endswith(_ACTIVATION_SCALES)}
        for name, entry in self._raw.items():
            if entry.stored in QUANTISED_DTYPES and name not in self._parts:
                raise CheckpointError(folder, f"tensor {name} has dtype {entry.dtype_name}, but no scale")
            if name.endswith((".weight" + SCALE, ".weight" + INVERSE)) and name not in self._parts:
                raise CheckpointError(folder, f"tensor {name} has no quantised weight")

    def add_stacks(self, stacks: dict[str, ExpertStack]) -> None:
        """Present the quantised matrices of experts as the Hub tensors that stack them. Raises CheckpointError for a
        missing matrix, and for matrices that differ in shape or scheme."""
        for name, stack in stacks.items():
            found = [self.parts[matrix] for matrix in stack.names if matrix in self.parts]
            if not found:
                continue
            if name in self._raw:
                raise CheckpointError(self.folder, f"tensor {name} is stored twice: also as {stack.names[0]}")
            if len(found) < len(stack.names):
                missing = next(matrix for matrix in stack.names if matrix not in self.parts)
                raise CheckpointError(self.folder, f"tensor {missing} is missing: other experts of its layer are not")
            first, shape = self.quantised[stack.names[0]], (stack.rows, stack.shape[1])
            for matrix, parts in zip(stack.names, found, strict=True):
                scheme = (parts.shape, parts.bits, parts.block, self.quantised[matrix].stored)
                if scheme != (shape, found[0].bits, found[0].block, first.stored):
                    raise CheckpointError(
                        self.folder,
                        f"tensor {parts.values} [{parts.shape[0]}, {parts.shape[1]}] of the experts {name} needs the "
                        f"shape {list(shape)}, and the scheme of {found[0].values}",
                    )
            for matrix in stack.names:
                del self.quantised[matrix]
            self.quantised[name] = replace(first, name=name, shape=stack.param.hub_shapes[0])
            self.stacks[name] = stack

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised in fp32 and rounded if it is quantised."""
        if name not in self.quantised:
            return HubReader.read(self, name)
        found = self.read_quantized(name).dequantize(torch.float32).to(self.quantised[name].dtype)
        return self.stacks[name].tensor(found) if name in self.stacks else found

    def read_quantized(self, name: str) -> QuantizedWeight:
        """One quantised weight as stored, with the scales of each row; of an expert stack its matrix."""
        if name in self.stacks:
            each = [self._read_quantized(matrix) for matrix in self.stacks[name].names]
            return replace(
                each[0], values=torch.cat([one.values for one in each]), scale=torch.cat([one.scale for one in each])
            )
        return self._read_quantized(name)

    def _read_quantized(self, name: str) -> QuantizedWeight:
        parts = self.parts[name]
        rows, columns = parts.shape
        if parts.values.endswith(PACKED) and (shape := _weight(parts.values) + SHAPE) in self._raw:
            found = HubReader.read(self, shape).tolist()
            if found != [rows, columns]:
                raise CheckpointError(self.folder, f"tensor {shape} is {found}, its values are {[rows, columns]}")
        scale = HubReader.read(self, parts.scale).reshape(-(-rows // parts.block[0]), -1)
        if not scale.isfinite().all():
            raise CheckpointError(self.folder, f"tensor {parts.scale} has NaN or infinite values")
        if parts.block[0] > 1:
            scale = scale.repeat_interleave(parts.block[0], dim=0)[:rows].contiguous()
        group = parts.block[1] if columns % parts.block[1] else None
        return QuantizedWeight(HubReader.read(self, parts.values), scale, parts.bits, group)

    def _parts_of(self, name: str) -> tuple[str, str]:
        return self.parts[self.stacks[name].names[0] if name in self.stacks else name].names

    def _found(self, name: str) -> Parts | None:
        """Parts of the quantised weight whose values are the tensor `name`; None for another tensor."""
        entry = self._raw[name]
        if name.endswith(PACKED) and entry.stored == "I32":
            return self._checked(name, entry, 4, entry.shape[-1] * 8)
        if name.endswith(".weight") and entry.stored in ("F8_E4M3", "I8"):
            return self._checked(name, entry, 8, entry.shape[-1])
        return None

    def _checked(self, name: str, entry: TensorEntry, bits: int, columns: int) -> Parts:
        """Parts of a weight, whose scales must be of one block size."""
        suffix = INVERSE if _weight(name) + INVERSE in self._raw else SCALE
        scale = self._raw.get(_weight(name) + suffix)
        if scale is None:
            raise CheckpointError(self.folder, f"tensor {_weight(name) + SCALE} is missing: its weight is quantised")
        if len(entry.shape) != 2:
            raise CheckpointError(self.folder, f"tensor {name} has {len(entry.shape)} dimensions: only matrices load")
        if _weight(name) + "_zero_point" in self._raw:
            raise CheckpointError(self.folder, f"tensor {_weight(name)}_zero_point: asymmetric schemes do not load")
        rows = entry.shape[0]
        block = self._block(rows, columns, scale)
        if block is None or scale.stored not in ("F32", "BF16", "F16"):
            raise CheckpointError(
                self.folder,
                f"tensor {scale.name} is {scale.dtype_name} {list(scale.shape)}, which does not fit a weight "
                f"{[rows, columns]} of this quantization_config",
            )
        return Parts(name, scale.name, (rows, columns), bits, block)

    def _block(self, rows: int, columns: int, scale: TensorEntry) -> tuple[int, int] | None:
        """Block of weights per scale, from the config's block or group size and the shape of the scales."""
        count = 1
        for size in scale.shape:
            count *= size
        sizes = [self.config.get("weight_block_size")] + [
            group.get("weights", {}).get("block_structure") or [1, group.get("weights", {}).get("group_size")]
            for group in _groups(self.config)
        ]
        known = [tuple(size) for size in sizes if size and all(type(one) is int and one > 0 for one in size)]
        for block in (*known, (1, columns), (rows, columns)):
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            if tuple(scale.shape) == shape or (count == shape[0] and shape[1] == 1):
                return block
        return None

    def _quantised(self) -> dict[str, TensorEntry]:
        found = {}
        for name, parts in self.parts.items():
            stored = self._raw[parts.scale].stored if self._dtype is None else header_name(self._dtype)
            found[name] = replace(self._raw[parts.values], name=name, stored=stored, shape=parts.shape)
        return found


class QuantizedCheckpoint(HubCheckpoint):
    """Quantised Hub folder whose weights are read dequantised. `reader.read_quantized` reads them as stored."""

    reader: CompressedReader

    def __init__(self, folder: Path, family: str | None = None, dtype: torch.dtype | None = None) -> None:
        reader, config = CompressedReader(folder, dtype), read_config(folder / CONFIG_FILE)
        try:
            mapping = find_family(config, family).mapping
        except CheckpointError:  # a model of transformers without a family here
            pass
        else:
            reader.add_stacks(expert_stacks(mapping.params(checked_dims(mapping, config, str(folder)))))
        super().__init__(folder, family, reader=reader)


def _weight(name: str) -> str:
    """Name of the weight that a stored tensor of values belongs to."""
    return name.removesuffix(PACKED)


def _groups(config: dict[str, Any]) -> list[dict[str, Any]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _check_compressed(config: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError for a scheme of compressed-tensors that is not supported."""
    groups = _groups(config)
    if not groups:
        raise CheckpointError(where, "quantization_config has no config_groups")
    for group in groups:
        form = group.get("format") or config.get("format")
        weights = group.get("weights") or {}
        kind = (form, weights.get("num_bits"), weights.get("type"))
        known = [("pack-quantized", 4, "int")]
        known += [(one, 8, word) for one in FORMATS[:3] for word in ("float", "int")]
        if kind not in known or not weights.get("symmetric", True) or weights.get("actorder"):
            raise CheckpointError(
                where,
                f"quantization_config: format {form} with {kind[1]}-bit {kind[2]} weights does not load: only "
                "symmetric FP8, INT8, and INT4 in groups",
            )
    if config.get("sparsity_config") or config.get("transform_config"):
        raise CheckpointError(where, "quantization_config: sparse and transformed weights do not load")


def _check_fp8(config: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError unless `quant_method: fp8` stores weights as float8_e4m3fn."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(where, f"quantization_config: fmt {config['fmt']} does not load, only e4m3")
