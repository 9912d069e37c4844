"""Megatron's legacy format (`torch`): one `model_optim_rng.pt` per tensor, pipeline and expert parallel rank.

The folders are mp_rank_TT, with _PPP if there are several pipeline stages, and _EEE with expert parallelism. Each
rank's tensor is a chunk of the global one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import OutputRequest, RawTensor
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint
from dlm_bridge.convert.formats.dcp import Chunk, ChunkedReader, Contents, StorageLocation, StoredTensor
from dlm_bridge.convert.formats.legacy_writer import (
    LAYER_OF,
    RANK_FILE,
    LegacyWriter,
    legacy_file_digest,
    plan_legacy,
    rank_names,
)
from dlm_bridge.convert.run_settings import megatron_args
from dlm_bridge.convert.streaming import FileRegion, read_tensor
from dlm_bridge.errors import CheckpointError
from dlm_bridge.files.pickles import FileTensor, Inert, read_torch_file, tensors_in
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, dtype_name, promote, same_bits
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(\d*)")
_COMPARED = 1 << 20  # bytes; larger copies are compared by `verify` only
# Names of models that are not supported, and what they are.
_UNSUPPORTED = (
    (re.compile(r"language_model\."), "a model of Megatron-LM before megatron-core"),
    (re.compile(r".*mlp\.experts\.weight[12]$"), "experts of the removed grouped-GEMM layer"),
)


@dataclass(frozen=True)
class RankFile:
    """Contents of one rank's folder."""

    name: str
    tp: int
    pp: int
    ep: int
    chunks: tuple[dict[str, FileTensor], ...]  # of the virtual pipeline, by the rank's own parameter names
    rest: dict[str, Any]
    histories: tuple[str, ...] = ()  # modules with an FP8 scaling history

    @property
    def file(self) -> str:
        return f"{self.name}/{RANK_FILE}"


@dataclass(frozen=True)
class LegacyFiles:
    """All ranks of an iteration, and the parallel sizes by the folders and the saved arguments."""

    folder: Path
    ranks: dict[tuple[int, int, int], RankFile]  # by (tp, pp, ep)
    tp: int
    pp: int
    ep: int
    vp: int

    @property
    def first(self) -> RankFile:
        return self.ranks[min(self.ranks)]


class LegacyCheckpoint(MegatronCheckpoint):
    """Checkpoint in Megatron's legacy format."""

    format = "torch"
    _ranks: LegacyFiles

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return folder.is_dir() and any(_RANK.fullmatch(path.name) and path.is_dir() for path in folder.iterdir())

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> LegacyCheckpoint:
        ranks = open_legacy(folder)
        common = dict(ranks.first.rest)
        if isinstance(common.get("args"), Inert):
            common["args"] = common["args"].fields
        checkpoint = cls(path, folder, common, family)
        checkpoint._ranks = ranks
        checkpoint.layout = {"tp": ranks.tp, "pp": ranks.pp, "vp": ranks.vp, "ep": ranks.ep}
        return checkpoint

    @classmethod
    def plan_output(cls, request: OutputRequest) -> tuple[dict[str, int], Callable[[Path], LegacyWriter]]:
        dtype = promote(list(request.dtypes.values()))
        args = megatron_args(request.source, request.params, request.layout, dtype, request.key_style)
        items = plan_legacy(request.params, request.layout, request.dtypes, args, request.key_style, request.iteration)
        return items.files, lambda folder: LegacyWriter(folder, items)

    def _reader(self, params: Iterable[ParamMapping], tied: bool) -> LegacyReader:
        return LegacyReader(self._ranks, params, tied)

    def stored_tensors(self) -> dict[str, RawTensor]:
        found = {}
        for rank in self._ranks.ranks.values():
            for number, chunk in enumerate(rank.chunks):
                part = f"model{number}." if len(rank.chunks) > 1 else ""
                for name, tensor in chunk.items():
                    raw = RawTensor(dtype_name(tensor.dtype), tensor.shape, tensor.nbytes)
                    found[f"{rank.name}/{part}{name}"] = raw
        return found

    def objects(self) -> Iterable[str]:
        """Names of the first rank's training state; the optimizer's begin with "optimizer."."""
        rank = self._ranks.first
        found = [f"optimizer.{key}" for key in ("optimizer", "opt_param_scheduler") if rank.rest.get(key)]
        found += [f"optimizer.{path.name}" for path in (self.folder / rank.name).glob("distrib_optim*.pt")]
        return [*found, *(["rng_state"] if rank.rest.get("rng_state") else [])]

    def scaling_histories(self) -> list[str]:
        return list(self._ranks.first.histories)

    def files(self) -> dict[str, int]:
        names = sorted(rank.file for rank in self._ranks.ranks.values())
        return {name: (self.folder / name).stat().st_size for name in names}

    def _embedding(self) -> tuple[int | None, str]:
        rows, dtype = super()._embedding()
        return (None if rows is None else rows * self._ranks.tp), dtype

    def differing_copies(self) -> list[tuple[str, str]]:
        assert isinstance(self.reader, LegacyReader)
        return self.reader.check_copies()

    def _file_digests(self) -> dict[str, str]:
        return {file: legacy_file_digest(self.folder / file) for file in self.files()}


def open_legacy(folder: Path) -> LegacyFiles:
    """Read every rank's pickle without its tensors.

    Raises:
        CheckpointError: a folder or file is missing, damaged, or not of the same run as the others.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if match := _RANK.fullmatch(path.name):
            found.append((path.name, [int(number) for number in match.groups() if number is not None]))
    ranks = [_read_rank(folder, name, numbers) for name, numbers in found]
    if len({len(numbers) for _, numbers in found}) > 1:
        raise CheckpointError(folder, f"has folders of two layouts, {found[0][0]} and {found[-1][0]}")
    numbered = [rank for rank, _ in ranks]
    if len(found[0][1]) == 2 and _is_whole_stage(numbered):  # the second number counts experts, not stages
        numbered = [replace(r, pp=0, ep=r.pp) for r in numbered]
    by_place = {(rank.tp, rank.pp, rank.ep): rank for rank in numbered}
    first = by_place[min(by_place)]
    for rank in numbered:
        for what, a, b in (
            ("iteration", first.rest.get("iteration"), rank.rest.get("iteration")),
            ("number of virtual pipeline chunks", len(first.chunks), len(rank.chunks)),
        ):
            if a != b:
                raise CheckpointError(folder / rank.file, f"its {what} is {b}, that of {first.name} is {a}")
    args = first.rest.get("args")
    saved = args.fields if isinstance(args, Inert) else {}
    tp, pp, ep = (
        max(_size(saved.get(name)), 1 + max(key[axis] for key in by_place))
        for axis, name in enumerate(
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        )
    )
    files = LegacyFiles(folder, by_place, tp, pp, ep, len(first.chunks))
    _check_whole(files, suffixes=len(found[0][1]) - 1)
    return files


def _read_rank(folder: Path, name: str, numbers: list[int]) -> tuple[RankFile, int]:
    path = folder / name / RANK_FILE
    if not path.is_file() or path.is_symlink() or (folder / name).is_symlink():
        raise CheckpointError(path, "does not exist or is a link")
    content = read_torch_file(path)
    keys = [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []
    models = sorted((int(match[1] or 0), key) for key in keys if (match := _MODEL.fullmatch(key)))
    if not models or [number for number, _ in models] != list(range(len(models))):
        raise CheckpointError(path, "has no model (or not every one of model0, model1, ...)")
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 3:
        raise CheckpointError(
            path,
            f"checkpoint version {version!r} has an old order of query, key and value rows: load and save it once "
            "with Megatron-LM",
        )
    chunks = tuple(_parameters(path, content[key]) for _, key in models)
    rest = {key: value for key, value in content.items() if not _MODEL.fullmatch(str(key))}
    tp, pp, ep = (*numbers, 0, 0)[:3]
    histories = tuple(
        part
        for _, key in models
        if isinstance(content[key], dict)
        for part, state in content[key].items()
        if str(part).endswith("_extra_state") and (isinstance(state, Inert) or getattr(state, "nbytes", 0) > 0)
    )
    return RankFile(name, tp, pp, ep, chunks, rest, histories), len(numbers)


def _parameters(path: Path, model: Any) -> dict[str, FileTensor]:
    found = {}
    for name, tensor in tensors_in(model):
        while name.startswith("module."):
            name = name.removeprefix("module.")
        for pattern, what in _UNSUPPORTED:
            if pattern.match(name):
                raise CheckpointError(path, f"{name}: {what}, not supported")
        if not name.endswith("_extra_state"):
            found[name] = tensor
    return found


def _is_whole_stage(ranks: list[RankFile]) -> bool:
    """True if every rank has both ends of the model, so that the second number of its folder is not a stage."""
    return all(
        any("embedding.word_embeddings.weight" in chunk for chunk in rank.chunks)
        and any("decoder.final_layernorm.weight" in chunk for chunk in rank.chunks)
        for rank in ranks
    )


def _check_whole(files: LegacyFiles, suffixes: int) -> None:
    """Raise CheckpointError if a stage lacks a tensor or expert parallel rank."""
    for pp in range(files.pp):
        present = [(tp, ep) for tp, p, ep in files.ranks if p == pp]
        for axis, size in ((0, files.tp), (1, files.ep)):
            for number in range(size):
                if number not in {place[axis] for place in present}:
                    tp, ep = (number, 0) if axis == 0 else (0, number)
                    parts = [f"{pp:03d}"] if suffixes == 2 or (suffixes == 1 and files.ep == 1) else []
                    parts += [f"{ep:03d}"] if suffixes == 2 or (suffixes == 1 and files.ep > 1) else []
                    name = "_".join([f"mp_rank_{tp:02d}", *parts])
                    raise CheckpointError(
                        files.folder / name,
                        f"is missing: the checkpoint has tensor parallel size {files.tp}, pipeline size {files.pp}, "
                        f"expert parallel size {files.ep}",
                    )


def _size(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else 1


class LegacyReader(ChunkedReader):
    """Reader of the unsharded tensors of `params` by `ParamMapping.megatron_name`.

    Raises:
        CheckpointError: ranks disagree in shape or dtype, or a tensor belongs to none of `params`.
    """

    def __init__(self, files: LegacyFiles, params: Iterable[ParamMapping], tied: bool) -> None:
        self._files, self._tied = files, tied
        self._holders: dict[tuple[int, int | None], list[RankFile]] = {}  # by stage and expert rank (None: all)
        for (_, pp, ep), rank in sorted(files.ranks.items()):
            self._holders.setdefault((pp, None), []).append(rank)
            self._holders.setdefault((pp, ep), []).append(rank)
        self._layers = _layer_starts(files)
        self._used: set[tuple[int, int, str]] = set()  # (stage, chunk, name)
        self.copies: dict[str, list[tuple[FileTensor, FileTensor]]] = {}
        tensors = {}
        for param in params:
            stored = self._store(param)
            if stored is not None:
                tensors[param.megatron_name] = stored
        self._check_all_used()
        super().__init__(files.folder, Contents(tensors, {}))

    def read_into(self, key: str, stack: tuple[int, ...], out: torch.Tensor) -> None:
        self._compare_small(key)
        super().read_into(key, stack, out)

    def regions(self, key: str, stack: tuple[int, ...], shape: Sequence[int]) -> list[FileRegion]:
        self._compare_small(key)
        return super().regions(key, stack, shape)

    def check_copies(self) -> list[tuple[str, str]]:
        """(parameter, difference) for every parameter whose copies on several ranks differ."""
        found = []
        for key, pairs in self.copies.items():
            for first, other in pairs:
                try:
                    self._compare(key, first, other)
                except CheckpointError as error:
                    found.append((key, str(error)))
        return found

    def _compare_small(self, key: str) -> None:
        for first, other in self.copies.get(key, []):
            if first.nbytes <= _COMPARED:
                self._compare(key, first, other)

    def _compare(self, key: str, first: FileTensor, other: FileTensor) -> None:
        a, b = (read_tensor(t.path, t.offset, t.dtype, t.shape) for t in (first, other))
        if not same_bits(a, b):
            raise CheckpointError(other.path, f"{key} differs from its copy in {first.path.parent.name}")

    def _item(self, key: str, tensor: StoredTensor, chunk: Chunk) -> FileTensor:
        assert tensor.dtype is not None
        return FileTensor(self.folder / chunk.place.file, tensor.dtype, chunk.sizes, chunk.place.offset)

    def _store(self, param: ParamMapping) -> StoredTensor | None:
        """A parameter's tensor from the chunks of its ranks; None if it is missing."""
        where = self._find(param)
        if where is None:
            return None
        pp, vp, name, ep = where
        pieces: list[tuple[int, int, FileTensor, str]] = []  # rank, number of ranks, tensor, file
        holders = self._holders[pp, ep]
        split = param.rule.tp_axis is not None
        size = self._expert_tp(param, holders, vp, name) if ep is not None else self._files.tp
        seen: dict[int, FileTensor] = {}
        for rank in holders:
            number = rank.tp % size if split else 0
            tensor = rank.chunks[vp].get(name)
            if tensor is None:
                raise CheckpointError(
                    self._files.folder / rank.file, f"{name} is missing, which {holders[0].name} has"
                )
            if number in seen:
                if seen[number].shape != tensor.shape or seen[number].dtype != tensor.dtype:
                    raise CheckpointError(
                        self._files.folder / rank.file,
                        f"{name} is {tensor.dtype} {list(tensor.shape)}; its copy in "
                        f"{seen[number].path.parent.name} is {seen[number].dtype} {list(seen[number].shape)}",
                    )
                self.copies.setdefault(param.megatron_name, []).append((seen[number], tensor))
                continue
            seen[number] = tensor
            pieces.append((number, size if split else 1, tensor, rank.file))
        missing = set(range(size if split else 1)) - seen.keys()
        if missing:
            of_expert = "" if ep is None else f"expert parallel rank {ep}, "
            raise CheckpointError(
                self._files.folder,
                f"{param.megatron_name}: the folder of {of_expert}stage {pp}, tensor parallel rank {min(missing)} of "
                f"{size} is missing",
            )
        return _put_together(param, pieces)

    def _find(self, param: ParamMapping) -> tuple[int, int, str, int | None] | None:
        """(stage, chunk, name in the rank, expert parallel rank) of a parameter; None if it is missing."""
        ep, expert = None, param.expert
        if expert is not None:
            share = max(1, param.dims.experts // self._files.ep)
            ep, expert = expert // share, expert % share
        if param.layer is not None and not param.is_mtp:
            place = self._layers.get(param.layer)
            places = [] if place is None else [place]
        else:
            stages = [(p, v, 0) for v in range(self._files.vp) for p in range(self._files.pp)]
            places = stages if param.on_first_stage else stages[::-1]
        mtp = param.layer - param.dims.layers if param.layer is not None and param.is_mtp else None
        for pp, vp, local in places:
            for name in rank_names(param.rule.megatron, local, expert, mtp):
                if name in self._holders[pp, ep][0].chunks[vp]:
                    self._used.add((pp, vp, name))
                    return pp, vp, name, ep
        return None

    def _expert_tp(self, param: ParamMapping, holders: list[RankFile], vp: int, name: str) -> int:
        """Expert tensor parallel size, by the rows or columns of one rank."""
        axis = param.rule.tp_axis
        if axis is None:
            return 1
        tensor = holders[0].chunks[vp].get(name)
        whole = param.megatron_shape[axis]
        part = tensor.shape[axis] if tensor is not None and len(tensor.shape) > axis else 0
        if not part or whole % part or self._files.tp % (whole // part):
            raise CheckpointError(
                self._files.folder / holders[0].file,
                f"{name} has size {part} of {whole} along axis {axis}, which does not fit any expert tensor parallel "
                f"size that divides the tensor parallel size {self._files.tp}",
            )
        return whole // part

    def _check_all_used(self) -> None:
        last = self._files.pp - 1
        copies = {"output_layer.weight"} if self._tied else set()  # the last stage's copy of the embedding
        copies |= {"embedding.word_embeddings.weight"} if last else set()
        for rank in self._files.ranks.values():
            for vp, chunk in enumerate(rank.chunks):
                for name in chunk:
                    if (rank.pp, vp, name) in self._used or "_extra_state" in name:
                        continue
                    if rank.pp != last or name not in copies:
                        raise CheckpointError(
                            self._files.folder / rank.file, f"{name} is not part of a model of this config"
                        )
                    self._copy_of_embedding(rank, chunk[name])

    def _copy_of_embedding(self, rank: RankFile, tensor: FileTensor) -> None:
        first = self._files.ranks.get((rank.tp, 0, rank.ep), self._files.first)
        embedding = first.chunks[0].get("embedding.word_embeddings.weight")
        if embedding is not None:
            self.copies.setdefault("embedding.word_embeddings.weight", []).append((embedding, tensor))


def _put_together(param: ParamMapping, pieces: list[tuple[int, int, FileTensor, str]]) -> StoredTensor:
    """A parameter's tensor from its pieces, each of one chunk, or of two (gate and up)."""
    whole = list(param.megatron_shape)
    axis = param.rule.tp_axis
    padded = isinstance(param.rule, Vocabulary)
    if padded:
        whole[0] = sum(tensor.shape[0] for _, _, tensor, _ in pieces)
    dtype = pieces[0][2].dtype
    chunks = []
    for number, size, tensor, file in pieces:
        if axis is None:
            runs = [(0, whole[0] if whole else 1)]
        elif padded:
            share = whole[0] // size
            runs = [(number * share, share)]
        else:
            runs = list(param.tp_slices(number, size))
        expected = list(whole)
        if axis is not None:
            expected[axis] = sum(length for _, length in runs)
        if (list(tensor.shape), tensor.dtype) != (expected, dtype):
            raise CheckpointError(
                tensor.path,
                f"{param.megatron_name} is {tensor.dtype} {list(tensor.shape)}; tensor parallel rank {number} of "
                f"{size} needs {dtype} {expected}",
            )
        offset = tensor.offset
        for start, length in runs:
            offsets, sizes = [0] * len(whole), list(whole)
            if axis is not None:
                offsets[axis], sizes[axis] = start, length
            nbytes = torch.Size(sizes).numel() * tensor.dtype.itemsize
            chunks.append(Chunk(tuple(offsets), tuple(sizes), StorageLocation(file, offset, nbytes)))
            offset += nbytes
    name = dtype_name(dtype)
    return StoredTensor(WEIGHT_DTYPES.get(name), name, tuple(whole), tuple(chunks))


def _layer_starts(files: LegacyFiles) -> dict[int, tuple[int, int, int]]:
    """(stage, chunk, number within the chunk) by global layer. Chunk v of all stages comes before chunk v + 1."""
    places: dict[int, tuple[int, int, int]] = {}
    for vp in range(files.vp):
        for pp in range(files.pp):
            rank = files.ranks[min(place for place in files.ranks if place[1] == pp)]
            numbers = sorted({int(match[1]) for name in rank.chunks[vp] if (match := LAYER_OF.match(name))})
            if numbers != list(range(len(numbers))):
                raise CheckpointError(files.folder / rank.file, f"its layers are numbered {numbers}, not from 0")
            for number in numbers:
                places[len(places)] = (pp, vp, number)
    return places
