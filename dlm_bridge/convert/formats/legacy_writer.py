"""Writer of Megatron's legacy format, and parameter names within a rank.

Every rank's `model_optim_rng.pt` is planned by `torch.save` with `skip_data`, which yields its pickle, its headers and
the tensors' offsets. The tensors are then written in any order. The result is a plain `torch.save` file with valid
checksums.

Within a rank, in this format and in Megatron FSDP's, names depend on the layer spec (`KEY_STYLES`). Transformer
Engine's has a norm in the linear layer that follows it (`linear_qkv.layer_norm_weight`), the local one in a module
(`input_layernorm.weight`). Experts are grouped (`experts.linear_fc1.weight3`) or sequential
(`experts.local_experts.3.linear_fc1.weight`).
"""

from __future__ import annotations

import argparse
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import xxhash

from dlm_bridge.convert.settings import KEY_STYLES
from dlm_bridge.convert.streaming import (
    Bands,
    Sink,
    SliceRange,
    SparseFile,
    allocate,
    distribute,
    in_rows,
    slice_range,
    write_at,
)
from dlm_bridge.errors import LayoutError
from dlm_bridge.files.pickles import ArchiveRecord, read_records
from dlm_bridge.files.reading import file_digest
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import ParamMapping

RANK_FILE = "model_optim_rng.pt"
_EMBEDDING = "embedding.word_embeddings.weight"
_CRC_IN_DESCRIPTOR, _CRC_IN_DIRECTORY = 4, 16  # offsets in bytes
LAYER_OF = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.experts\.\{expert\}\.(linear_fc[12])\.(weight|bias)$")
# The local spec's module by the fused norm's name, both relative to the layer.
_LOCAL_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_LINEAR = {  # modules with an `_extra_state`, as Transformer Engine's norms
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer", "eh_proj",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
}  # fmt: skip
_TE_NORMS = {"q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm", "input_layernorm", "enorm", "hnorm"}


@dataclass(frozen=True)
class RankTensor:
    """Location of one rank's part of a parameter's slice: `length` bytes of `file` from `start`."""

    file: str
    start: int
    length: int
    part: SliceRange


@dataclass
class LegacyItems:
    """Planned files and tensor locations, before any tensor is read."""

    files: dict[str, int]  # bytes by path below the iteration
    targets: dict[str, list[RankTensor]]  # by ParamMapping.megatron_name
    segments: dict[str, list[tuple[int, bytes]]]  # bytes around the tensors, by file: (offset, bytes)
    directories: dict[str, dict[int, int]]  # offsets of the archive's directory entries, by file and tensor start


@dataclass
class _RankState:
    chunks: list[dict[str, torch.Tensor | None]]
    places: list[tuple[int, str, str, SliceRange]] = field(default_factory=list)  # chunk, key, parameter, part


def plan_legacy(
    params: Iterable[ParamMapping],
    layout: Layout,
    dtypes: dict[str, torch.dtype],
    args: dict[str, Any],
    style: str,
    iteration: int,
) -> LegacyItems:
    """Plan the files of the layout's ranks.

    Args:
        params: parameters with the padded vocabulary.
        dtypes: by `megatron_key`.

    Raises:
        LayoutError: the folder names do not distinguish the expert tensor parallel ranks.
    """
    ranks = _ranks(layout)
    states = {(pp, tp, ep): _RankState([{} for _ in range(layout.vp)]) for pp in range(layout.pp) for tp, ep in ranks}
    local: dict[int, tuple[int, int, int]] = {}
    for whole, param, first in in_rows(params):
        if not local:
            local = _local_layers(layout, param.dims.layers)
        for pp, vp, name in _names(param, layout, local, style):
            expert_rank = None if param.expert is None else param.expert // (param.dims.experts // layout.ep)
            for (tp, ep), etp_rank in ranks.items():
                if expert_rank not in (None, ep):
                    continue
                rank, size = (tp, layout.tp) if expert_rank is None else (etp_rank, layout.expert_tp)
                rank_state = states[pp, tp, ep]
                tensor = torch.empty(_local_shape(param, rank, size), dtype=dtypes[param.megatron_key])
                rank_state.chunks[vp][name] = tensor
                rank_state.places.append(
                    (vp, name, whole.megatron_name, _part(param, rank, size, tensor.itemsize, first))
                )
                if extra := extra_state_of(name, style):
                    rank_state.chunks[vp][extra] = None
    result = LegacyItems({}, {}, {}, {})
    for (pp, tp, ep), rank_state in states.items():
        if pp == layout.pp - 1:  # an output layer tied to the embedding has an extra state, too
            rank_state.chunks[-1].setdefault("output_layer._extra_state", None)
        rest = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration}
        _lay_out(f"{_folder(layout, pp, tp, ep)}/{RANK_FILE}", rank_state, rest, result)
    return result


class LegacyWriter:
    """Writer of planned tensors, in any order and from any thread; `finish` completes the files' checksums."""

    def __init__(self, folder: Path, items: LegacyItems) -> None:
        self._folder, self._items = folder, items
        self._missing = set(items.targets)
        self._written: dict[tuple[str, int], tuple[bytes, int]] = {}  # (file, start) -> digest, checksum
        allocate(folder, items.files)

    def write(self, param: ParamMapping, bands: Bands) -> list[str]:
        """Write a parameter's slice into the files of its ranks. Returns the items' digests."""
        parts, sinks = [], []
        with ExitStack() as stack:
            for target in self._items.targets[param.megatron_name]:
                sink = Sink(self._folder / target.file, target.start, checksum=True)
                sinks.append(stack.enter_context(sink))
                parts.append(target.part)
            distribute(bands, parts, sinks)
        for target, sink in zip(self._items.targets[param.megatron_name], sinks, strict=True):
            taken = sink.position - target.start
            assert taken == target.length, f"{target} took {taken} bytes"
        return [f"{sink.digest.hexdigest()}:{sink.checksum:08x}" for sink in sinks]

    def has(self, param: ParamMapping, digests: Sequence[str]) -> bool:
        """True if an interrupted run has written the parameter's items already."""
        targets = self._items.targets[param.megatron_name]
        return len(targets) == len(digests) and all(
            file_digest(self._folder / target.file, target.start, target.length) == text.partition(":")[0]
            for target, text in zip(targets, digests, strict=True)
        )

    def note(self, param: ParamMapping, digests: Sequence[str]) -> None:
        """Mark a parameter as written, with the digests that `write` returned or `has` confirmed."""
        for target, text in zip(self._items.targets[param.megatron_name], digests, strict=True):
            digest, _, checksum = text.partition(":")
            self._written[target.file, target.start] = bytes.fromhex(digest), int(checksum, 16)
        self._missing.remove(param.megatron_name)

    def finish(self, iteration: int) -> dict[str, str]:
        """Write the bytes around the tensors, after all planned slices. The plan contains `iteration` already.

        Returns the digests by file that `legacy_file_digest` computes.
        """
        assert not self._missing, f"planned but not written: {sorted(self._missing)[:3]}"
        targets: dict[str, dict[int, RankTensor]] = {}
        for target in (target for several in self._items.targets.values() for target in several):
            targets.setdefault(target.file, {})[target.start] = target
        found = {}
        for file, segments in self._items.segments.items():
            path = self._folder / file
            fd = os.open(path, os.O_WRONLY)
            try:
                for offset, data in segments:
                    write_at(fd, data, offset)
                for start, target in targets[file].items():
                    checksum = self._written[file, start][1].to_bytes(4, "little")
                    write_at(fd, checksum, start + target.length + _CRC_IN_DESCRIPTOR)
                    write_at(fd, checksum, self._items.directories[file][start] + _CRC_IN_DIRECTORY)
            finally:
                os.close(fd)
            found[file] = legacy_file_digest(path, {start: self._written[file, start][0] for start in targets[file]})
        return found


def legacy_file_digest(path: Path, known: dict[int, bytes] | None = None) -> str:
    """Digest of a rank's file, of its tensors' digests (`known` by start, else read) and all other bytes."""
    state, position = xxhash.xxh3_128(), 0
    with path.open("rb") as stream:
        records = [record for record in read_records(stream) if record.name.startswith("data/")]
        for record in sorted(records, key=lambda record: record.start):
            stream.seek(position)
            state.update(stream.read(record.start - position))
            digest = (known or {}).get(record.start)
            if digest is None:
                digest = bytes.fromhex(file_digest(path, record.start, record.length))
            state.update(digest)
            position = record.start + record.length
        stream.seek(position)
        state.update(stream.read())
    return state.hexdigest()


def _ranks(layout: Layout) -> dict[tuple[int, int], int]:
    """Expert tensor parallel rank in each folder of a stage, by (tp rank, ep rank)."""
    found: dict[tuple[int, int], int] = {}
    for rank in range(layout.world_size // layout.pp):
        place = rank % layout.tp, rank // layout.expert_tp % layout.ep
        if found.setdefault(place, rank % layout.expert_tp) != rank % layout.expert_tp:
            raise LayoutError(
                "etp",
                f"{layout.expert_tp} with `format=torch` and `tp={layout.tp}`: folders named by tensor and expert "
                "parallel rank do not distinguish the parts of an expert: use `format=torch_dist`",
            )
    return found


def _folder(layout: Layout, pp: int, tp: int, ep: int) -> str:
    name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "")
    return name + (f"_{ep:03d}" if layout.ep > 1 else "")


def _local_layers(layout: Layout, layers: int) -> dict[int, tuple[int, int, int]]:
    return {
        layer: (pp, vp, number)
        for pp, chunks in enumerate(layout.stages(layers))
        for vp, chunk in enumerate(chunks)
        for number, layer in enumerate(chunk)
    }


def _names(
    param: ParamMapping, layout: Layout, local: dict[int, tuple[int, int, int]], style: str
) -> list[tuple[int, int, str]]:
    """(stage, chunk, name) of every copy of a parameter. The embedding has one on the last stage if the output layer
    is tied to it or multi-token prediction needs it."""
    template, last = param.rule.megatron, (layout.pp - 1, layout.vp - 1)
    expert = None if param.expert is None else param.expert % (param.dims.experts // layout.ep)
    if param.layer is not None and not param.is_mtp:
        pp, vp, layer = local[param.layer]
        return [(pp, vp, rank_name(template, layer, expert, style))]
    mtp = param.layer - param.dims.layers if param.layer is not None else None
    if template != _EMBEDDING:
        place = (0, 0) if param.on_first_stage else last
        return [(*place, rank_name(template, 0, expert, style, mtp))]
    again = [(*last, "output_layer.weight")] if param.dims.tied and last != (0, 0) else []
    again += [(*last, template)] if param.dims.mtp and last != (0, 0) else []
    return [(0, 0, template), *again]


def _local_shape(param: ParamMapping, rank: int, size: int) -> tuple[int, ...]:
    axis = param.rule.tp_axis
    if axis is None:
        return param.megatron_shape
    shape = list(param.megatron_shape)
    shape[axis] = sum(length for _, length in param.tp_slices(rank, size))
    return tuple(shape)


def _part(param: ParamMapping, rank: int, size: int, itemsize: int, first: int) -> SliceRange:
    """Part of a slice on a tensor parallel rank; the parameter's rows begin at row `first` of the slice."""
    return slice_range(param.megatron_shape, itemsize, param.rule.tp_axis, param.tp_slices(rank, size), first)


def _lay_out(file: str, state: _RankState, rest: dict[str, Any], result: LegacyItems) -> None:
    """Plan a file with `torch.save`, and add its tensors' locations to `result`."""
    keys = ["model"] if len(state.chunks) == 1 else [f"model{number}" for number in range(len(state.chunks))]
    sparse = SparseFile()
    with torch.serialization.skip_data():
        torch.save(rest | dict(zip(keys, state.chunks, strict=True)), sparse)  # type: ignore[arg-type]
    result.files[file], result.segments[file] = sparse.size, sparse.segments
    # torch numbers the storages in the order of the dicts.
    order = [id(tensor) for chunk in state.chunks for tensor in chunk.values() if tensor is not None]
    number = {found: place for place, found in enumerate(order)}
    records: dict[str, ArchiveRecord] = {record.name: record for record in read_records(cast(BinaryIO, sparse))}
    for vp, key, name, part in state.places:
        tensor = state.chunks[vp][key]
        record = records[f"data/{number[id(tensor)]}"]
        assert tensor is not None
        assert record.length == tensor.nbytes, f"{file}: {key} is not at the expected offset"
        result.targets.setdefault(name, []).append(RankTensor(file, record.start, record.length, part))
    result.directories[file] = _directory(sparse, records)


def _directory(sparse: SparseFile, records: dict[str, ArchiveRecord]) -> dict[int, int]:
    """Offset of each tensor's entry in the archive's central directory, by the start of the tensor's bytes."""
    with zipfile.ZipFile(cast(BinaryIO, sparse)) as archive:
        position, infos = archive.start_dir, archive.infolist()
    found = {}
    for info in infos:
        found[records[info.filename.partition("/")[2]].start] = position
        sparse.seek(position + 28)
        lengths = sparse.read(6)
        position += 46 + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2, 4))
    return found


def rank_names(template: str, layer: int | None, expert: int | None, mtp: int | None = None) -> tuple[str, ...]:
    """Names of a mapping's Megatron tensor in all styles, as in `rank_name`."""
    return tuple(dict.fromkeys(rank_name(template, layer, expert, style, mtp) for style in KEY_STYLES))


def rank_name(template: str, layer: int | None, expert: int | None, style: str, mtp: int | None = None) -> str:
    """Name of a Megatron tensor within a rank in one style. `template` is `Rule.megatron`; `layer` and `expert` count
    within the rank."""
    if _EXPERT.search(template):
        grouped = r"experts.\1.\2{expert}" if style == "te" else r"experts.local_experts.{expert}.\1.\2"
        template = _EXPERT.sub(grouped, template)
    if style == "local":
        for fused, module in _LOCAL_NORMS.items():
            template = template.replace(fused, module)
    return template.format(layer=layer, expert=expert, mtp=mtp)


def extra_state_of(name: str, style: str) -> str | None:
    """Key of the `_extra_state` beside a weight; None if its module has none. Its value is None without FP8
    history."""
    module, _, last = name.rpartition(".")
    if not last.startswith("weight"):
        return None
    kind = module.rpartition(".")[2]
    return f"{module}._extra_state" if kind in _LINEAR or (style != "local" and kind in _TE_NORMS) else None
