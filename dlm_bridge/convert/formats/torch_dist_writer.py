"""Writing Megatron's distributed checkpoint (`torch_dist`) as megatron-core 0.16 does, one layer slice at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from dlm_bridge.convert.formats.dcp import (
    Chunk,
    Contents,
    Place,
    StoredTensor,
    combined_file_digests,
    write_metadata,
)
from dlm_bridge.convert.formats.torch_dist import BACKEND
from dlm_bridge.convert.formats.torch_items import ItemSink, object_item, tensor_item_length
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.streaming import Bands, allocate, distribute, part_of
from dlm_bridge.convert.tensors import dtype_name, range_digest

# Modules whose state has a Transformer Engine `_extra_state`; a missing one fails megatron-core's load.
_WITH_EXTRA_STATE = {
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
    "q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "input_layernorm", "eh_proj", "enorm", "hnorm", "linear_in", "linear_out",
}  # fmt: skip
_NO_STATE = [None]
CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a link's slice in one run: `length` along `axis` (None: all of it), as one item."""

    chunk: Chunk
    axis: int | None
    start: int
    length: int


@dataclass
class TorchDistPlan:
    """Every item of a checkpoint and where it goes, before any tensor is read."""

    contents: Contents
    pieces: dict[str, list[Piece]]  # by Link.megatron_name
    files: dict[str, int]  # name -> bytes


@dataclass
class _Planner:
    layout: Layout
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def place(self, rank: int, length: int) -> Place:
        file = f"__{rank}_0.distcp"
        offset = self.files.get(file, 0)
        self.files[file] = offset + length
        return Place(file, offset, length)


def plan_torch_dist(links: Iterable[Link], layout: Layout, dtypes: dict[str, torch.dtype]) -> TorchDistPlan:
    """Lay out the items of `links` over the files of the layout's ranks. `dtypes` goes by `Link.megatron_key`.

    A rank's file holds what that rank holds; what is replicated over tensor parallel ranks is in rank 0's.
    """
    planner = _Planner(layout)
    shapes: dict[str, tuple[int, ...]] = {}
    stage_of: dict[int, int] = {}
    empty = len(object_item(_NO_STATE))
    for link in links:
        key, dtype = link.megatron_key, dtypes[link.megatron_key]
        if not stage_of:
            stages = layout.stages(link.dims.layers)
            stage_of = {layer: p for p, chunks in enumerate(stages) for chunk in chunks for layer in chunk}
        pp_rank = _stage(link, layout, stage_of)
        ep_rank = None if link.expert is None else link.expert // (link.dims.experts // layout.ep)
        shapes[key] = (*(size for _, size in link.stack), *link.megatron_shape)
        module, _, last = key.rpartition(".")
        of_model = key.startswith(("decoder.", "mtp."))  # and not an optimizer's
        if of_model and last == "weight" and module.rpartition(".")[2] in _WITH_EXTRA_STATE:
            place = planner.place(layout.rank(pp_rank, 0, ep_rank), empty)
            planner.objects[f"{module}._extra_state/shard_{_shard(link)}"] = place
        pieces = planner.pieces.setdefault(link.megatron_name, [])
        for tp_rank, axis, start, length in _runs(link, layout.tp if ep_rank is None else layout.expert_tp):
            offsets, sizes = _box(link, axis, start, length)
            place = planner.place(layout.rank(pp_rank, tp_rank, ep_rank), tensor_item_length(dtype, sizes))
            chunk = Chunk(offsets, sizes, place)
            planner.chunks.setdefault(key, []).append(chunk)
            pieces.append(Piece(chunk, axis, start, length))
    tensors = {
        key: StoredTensor(dtypes[key], dtype_name(dtypes[key]), shapes[key], tuple(chunks))
        for key, chunks in planner.chunks.items()
    }
    return TorchDistPlan(Contents(tensors, planner.objects), planner.pieces, planner.files)


class TorchDistWriter:
    """Writes a plan's items in any order and from any thread; `finish` makes the folder a checkpoint."""

    def __init__(self, folder: Path, plan: TorchDistPlan) -> None:
        self._folder, self._plan = folder, plan
        self._missing = set(plan.pieces)
        self._digests: dict[Place, bytes] = {}
        folder.mkdir(exist_ok=True)
        allocate(folder, plan.files)

    def write(self, link: Link, bands: Bands) -> list[str]:
        """Put a link's whole slice into the files of the ranks that hold it. Returns its items' digests."""
        key = link.megatron_key
        dtype = self._plan.contents.tensors[key].dtype
        assert dtype is not None
        parts, sinks = [], []
        with ExitStack() as stack:
            for piece in self._plan.pieces[link.megatron_name]:
                place, ranges = piece.chunk.place, [(piece.start, piece.length)]
                sink = ItemSink(self._folder / place.file, place.offset, place.length, dtype, piece.chunk.sizes)
                sinks.append(stack.enter_context(sink))
                parts.append(part_of(link.megatron_shape, dtype.itemsize, piece.axis, ranges))
            distribute(bands, parts, sinks)
            return [sink.finish().hex() for sink in sinks]

    def has(self, link: Link, digests: Sequence[str]) -> bool:
        """Whether the link's items lie there already, from a run before this one."""
        places = self._places(link)
        return len(places) == len(digests) and all(
            range_digest(self._folder / place.file, place.offset, place.length) == digest
            for place, digest in zip(places, digests, strict=True)
        )

    def note(self, link: Link, digests: Sequence[str]) -> None:
        """The link's items are there: what `write` returned, or what `has` found."""
        self._missing.remove(link.megatron_name)
        self._digests.update(zip(self._places(link), map(bytes.fromhex, digests), strict=True))

    def finish(self, iteration: int) -> dict[str, str]:
        """Write the objects, `common.pt`, `metadata.json` and `.metadata`; every planned slice must be there.

        Returns a digest of every file of items, as `dcp.read_file_digests` finds it again.
        """
        assert not self._missing, f"planned but not written: {sorted(self._missing)[:3]}"
        data = object_item(_NO_STATE)
        by_file: dict[str, list[Place]] = {}
        for place in self._plan.contents.objects.values():
            by_file.setdefault(place.file, []).append(place)
        for file, places in by_file.items():
            with (self._folder / file).open("r+b") as stream:
                for place in places:
                    stream.seek(place.offset)
                    stream.write(data)
                    self._digests[place] = xxhash.xxh3_128_digest(data)
        common = {"iteration": iteration, "checkpoint_version": 3.0, "content_metadata": dict(CONTENT_METADATA)}
        torch.save(common, self._folder / "common.pt")
        (self._folder / "metadata.json").write_text(json.dumps(BACKEND))
        write_metadata(self._folder, self._plan.contents)
        return combined_file_digests(self._digests)

    def _places(self, link: Link) -> list[Place]:
        return [piece.chunk.place for piece in self._plan.pieces[link.megatron_name]]


def _stage(link: Link, layout: Layout, stage_of: dict[int, int]) -> int:
    """The pipeline rank that holds a link's tensor: the embedding is on the first; the final norm, the output layer
    and multi-token prediction are on the last."""
    if link.layer is not None and not link.is_mtp:
        return stage_of[link.layer]
    return 0 if link.rule.megatron.startswith("embedding.") else layout.pp - 1


def _runs(link: Link, tp: int) -> list[tuple[int, int | None, int, int]]:
    """(tensor parallel rank, axis, start, length) of every run that a rank writes."""
    axis = link.rule.tp_axis
    if axis is None:
        return [(0, None, 0, 0)]
    return [
        (tp_rank, axis, start, length)
        for tp_rank in range(tp)
        for start, length in link.tp_slices(tp_rank, tp)
        if length
    ]


def _box(link: Link, axis: int | None, start: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of a run in the global tensor."""
    offsets, sizes = [0] * len(link.megatron_shape), list(link.megatron_shape)
    if axis is not None:
        offsets[axis], sizes[axis] = start, length
    return (*(index for index, _ in link.stack), *offsets), (*(1 for _ in link.stack), *sizes)


def _shard(link: Link) -> str:
    """How megatron-core numbers an object of a stacked module: "3_32", "3.17_32.256", or "0_1" where nothing is."""
    stack = link.stack or ((0, 1),)
    return ".".join(str(index) for index, _ in stack) + "_" + ".".join(str(size) for _, size in stack)
