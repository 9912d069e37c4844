"""`export --quantize`: quantised Hub folders in the layout of compressed-tensors, one parameter at a time.

The linear layers of attention, MLPs and experts are quantised, also of experts that the Hub stacks in one tensor
(`stacked.py`). Embeddings, the output layer (also a tied one), norms,
routers and multi-token prediction layers keep their dtype.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import torch

from dlm_bridge.convert.card import CARD, folder_card
from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.checkpoints.huggingface import json_bytes, write_side_files
from dlm_bridge.convert.formats.hub_weights import SAFETENSORS_INDEX, HubWriter, ShardRecord, index_text, plan_by_size
from dlm_bridge.convert.journal import Journal, JournalEntry
from dlm_bridge.convert.manifest import Manifest, record_of
from dlm_bridge.convert.planning import SHARD_SIZE, ConversionReport, HubOutput, plan_hub
from dlm_bridge.convert.settings import ExportSettings
from dlm_bridge.convert.transfer import HubTransfer, is_finished, unfinished_output
from dlm_bridge.errors import SettingError, counted
from dlm_bridge.exports.schemes import PACKED, SCALE, SCHEMES, SHAPE, Scheme
from dlm_bridge.exports.stacked import ExpertStack, expert_stacks
from dlm_bridge.files.reading import bytes_digest
from dlm_bridge.hub import CONFIG_FILE
from dlm_bridge.mapping.rules import ParamMapping

_LINEAR = re.compile(r"\.linear_\w+\.weight")  # Megatron names of linear layers of attention, MLPs and experts
_LAYER = re.compile(r"^.*?\.\d+\.(?=\D)")  # everything up to a layer's number in a Hub name


def write_quantized(source: Checkpoint, output: Path, settings: ExportSettings) -> ConversionReport:
    """Write `source` as a quantised Hub folder; with `dry_run`, only return the report.

    Raises the errors of `write_hub`, SettingError for a family whose layers cannot be quantised, and CheckpointError
    for a weight that the groups of a scheme do not divide.
    """
    started = time.monotonic()
    assert settings.quantize is not None
    scheme = SCHEMES[settings.quantize]
    if source.config.get("quantization_config"):
        raise SettingError("quantize", f"{source.where} is quantised already: use the checkpoint it was made from")
    logical = plan_hub(source, output, settings)
    report, quantised, stacks = logical.report, quantized_names(source), expert_stacks(source.params)
    for name, entry in source.passthrough.items():
        if entry.copy_of in quantised:
            raise SettingError(
                "quantize", f"{source.where} has {entry.copy_of} twice, also as {name}: remove the copy"
            )
    outputs: dict[str, TensorSpec] = {}
    for name, (dtype, shape) in logical.specs.items():
        if name not in quantised:
            outputs[name] = dtype, shape
        elif name in stacks:
            for matrix in stacks[name].names:
                outputs |= scheme.specs(matrix, (stacks[name].rows, stacks[name].shape[1]), dtype)
        else:
            outputs |= scheme.specs(name, shape, dtype)
    shards = plan_by_size(outputs, settings.shard_bytes or SHARD_SIZE)
    # A weight has its source's dtype here, and its parts have theirs: both are read or written, and recorded.
    plan = HubOutput(report, outputs | logical.specs, shards)
    report.files = {shard.file: shard.nbytes for shard in shards}
    report.bytes = sum(report.files.values())
    report.side_files = [name for name in report.side_files if name != SAFETENSORS_INDEX]
    report.notes.append(
        f"{counted(len(quantised), 'weight')} quantised to {scheme.name}; embeddings, output layer, norms and routers "
        f"keep their dtype"
    )
    if is_finished(source, output, plan, settings) or settings.dry_run:
        return report
    config = json.loads(source.hub.config_bytes(settings.cast_dtype))
    config["quantization_config"] = scheme.config(ignored_layers(source, quantised))
    with unfinished_output(source, output, plan, settings) as (folder, journal):
        writer = HubWriter(folder, shards)
        transfer = QuantizedTransfer(source, plan, journal, settings, writer, scheme, quantised, stacks)
        transfer.run()
        writer.finish()
        index = index_text(shards).encode() if len(shards) > 1 else None
        write_side_files(source, folder, settings.cast_dtype, index)
        (folder / CONFIG_FILE).write_bytes(json_bytes(config))
        manifest = transfer.manifest("huggingface", folder)
        manifest.config = config
        manifest.files = {shard.file: bytes_digest(shard.header) for shard in shards}
        manifest.shards = [
            ShardRecord(shard.file, shard.metadata, tuple(entry.name for entry in shard.entries)) for shard in shards
        ]
        manifest.write(folder)
        if not (folder / CARD).exists():
            (folder / CARD).write_text(folder_card(source.family, manifest), "utf-8")
    report.notes += manifest.notes()
    report.seconds = time.monotonic() - started
    return report


def quantized_names(source: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights to quantise, by Hub name. Raises SettingError for a family without linear layers."""
    found: dict[str, tuple[int, ...]] = {}
    stacks = expert_stacks(source.params)
    for param in source.params:
        if param.is_mtp or not _LINEAR.search(param.rule.megatron):
            continue
        for name, shape in zip(param.hub_names, param.hub_shapes, strict=True):
            if name in stacks or (len(shape) == 2 and name.endswith(".weight")):
                found[name] = shape
    if not found:
        raise SettingError("quantize", f"does not support {source.family.name}: no linear layer is known")
    return found


def ignored_layers(source: Checkpoint, quantised: dict[str, tuple[int, ...]]) -> list[str]:
    """Layers with a weight of several dimensions that stay in high precision: names, and one expression for the same
    layer of all decoder layers."""
    found = {"lm_head": None}
    for name, (_, shape) in source.stored_specs().items():
        if name in quantised or len(shape) < 2 or not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        inner = _LAYER.sub("", layer)
        found[layer if inner == layer else f"re:.*\\.{re.escape(inner)}$"] = None
    return list(found)


class QuantizedTransfer(HubTransfer):
    """Conversion of Hub tensors to quantised ones. `writer` has the stored tensors; `plan.specs` also the weights that
    they are made from."""

    def __init__(
        self,
        source: Checkpoint,
        plan: HubOutput,
        journal: Journal,
        settings: ExportSettings,
        writer: HubWriter,
        scheme: Scheme,
        quantised: dict[str, tuple[int, ...]],
        stacks: dict[str, ExpertStack],
    ) -> None:
        super().__init__(source, plan, journal, settings, writer)
        self._scheme, self._quantised, self._stacks = scheme, quantised, stacks

    def manifest(self, format_: str, folder: Path) -> Manifest:
        """Extends Transfer: the tensors are the stored ones."""
        own = set(self.source.hub_names())
        parts = {name: record for name, record in self.records.written.items() if name not in own}
        for name in parts:  # not of the source
            del self.records.read[name]
        made = super().manifest(format_, folder)
        gone = {name for name in self._quantised if name in self._stacks or name + PACKED in parts}
        kept = {name: record for name, record in made.tensors.items() if name not in gone}
        return replace(made, tensors=kept | parts)

    def _names(self, param: ParamMapping) -> tuple[str, ...]:
        """Extends HubTransfer: with the parts of quantised weights."""
        names = super()._names(param)
        return (*names, *(part for name in names for part in self._parts(name) if part != name))

    def _parts(self, name: str) -> tuple[str, ...]:
        """Stored tensors of a Hub tensor."""
        if name not in self._quantised:
            return (name,)
        ends = (PACKED, SCALE, SHAPE) if self._scheme.group else ("", SCALE)
        return tuple(matrix + end for matrix in self._matrices(name) for end in ends)

    def _matrices(self, name: str) -> tuple[str, ...]:
        """Quantised weights of a Hub tensor."""
        return self._stacks[name].names if name in self._stacks else (name,)

    def _stored(self, param: ParamMapping) -> list[str]:
        return [part for name in super()._names(param) for part in self._parts(name)]

    def _is_written(self, number: int, entry: JournalEntry) -> bool:
        param = self.source.params[number]
        names = self._names(param)
        if len(entry.tensors) != len(names):
            return False
        written = {name: record.digest for name, (_, record) in zip(names, entry.tensors, strict=True)}
        return self._writer.has({name: written[name] for name in self._stored(param)})

    def _write(self, number: int) -> JournalEntry:
        param = self.source.params[number]
        if not any(name in self._quantised for name in param.hub_names):
            return super()._write(number)
        for name, tensor in zip(param.hub_names, self.source.read_each(param), strict=True):
            if name in self._quantised:
                self._quantize(name, tensor)
            else:
                self._put(name, tensor)
        return JournalEntry(tuple(self.records.entry(self._names(param))), ())

    def _quantize(self, name: str, tensor: torch.Tensor) -> None:
        """Quantise one weight, write its parts, and record them beside the weight that was read."""
        converted = self.records.convert(name, tensor, self.source.stored_record(name))
        matrix = self._stacks[name].matrix(converted) if name in self._stacks else converted
        made = self._scheme.quantize(matrix, name)
        count = len(matrix) // len(self._matrices(name))
        parts = []
        for first in range(0, len(matrix), count):
            rows = made.rows(first, first + count)
            parts += [
                rows.values,
                rows.scale,
                *([torch.tensor([count, matrix.shape[1]])] if self._scheme.group else []),
            ]
        for part, values in zip(self._parts(name), parts, strict=True):
            self._writer.put(part, values)
            record = record_of(values)
            self.records.written[part] = record
            if part != name:
                self.records.read[part] = record

    def _note_written(self, number: int, entry: JournalEntry) -> None:
        self._writer.note(self._stored(self.source.params[number]))
