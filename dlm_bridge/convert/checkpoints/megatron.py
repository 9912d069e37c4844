"""Base classes of Megatron's formats: iterations, Hub metadata, and tensors by a family's parameter mapping."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, HubMetadata, RawTensor, TensorSpec
from dlm_bridge.convert.checkpoints.huggingface import CARRIED_FILE, HUB_FOLDER, list_side_files
from dlm_bridge.convert.formats.dcp import DCP_METADATA, ChunkedReader, Contents
from dlm_bridge.convert.formats.hub_weights import read_header
from dlm_bridge.convert.manifest import MANIFEST, Manifest
from dlm_bridge.convert.optimizer_state import is_training_state, stored_keys
from dlm_bridge.convert.run_settings import RUN_CONFIG, derive_config, read_settings
from dlm_bridge.convert.streaming import FileRegion, read_tensor
from dlm_bridge.convert.workers import new_tensor
from dlm_bridge.errors import CheckpointError, DlmBridgeError, first_of, one_line
from dlm_bridge.files.reading import check_plain_file
from dlm_bridge.hub import CONFIG_FILE, TRACKER, read_config
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, narrow_exactly, promote
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary
from dlm_bridge.models.families import family_by_name

_EXTRA_STATE = re.compile(r"\._extra_state\d*(/|$)")
_EMBEDDING = re.compile(r"^(?!optimizer|chained).*\bembedding\.word_embeddings\.weight$")
_PARALLEL_SIZES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("vp", "virtual_pipeline_model_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("etp", "expert_tensor_parallel_size"),
)


def iteration_folder(root: Path) -> Path:
    """Folder of the newest iteration, by the tracker file; an iteration's folder is returned unchanged.

    Raises:
        CheckpointError: the tracker file is missing, damaged, or names a missing folder.
    """
    if (root / DCP_METADATA).is_file():
        return root
    tracker = root / TRACKER
    try:
        check_plain_file(tracker)
        text = tracker.read_text("utf-8").strip()
        folder = root / (text if text == "release" else f"iter_{int(text):07d}")
        if len(text) > 15 or not folder.is_dir():
            raise CheckpointError(tracker, f"names iteration {text[:40]}, but {folder} does not exist")
        return folder
    except FileNotFoundError:
        raise CheckpointError(root, f"is not a Megatron checkpoint: it has no {TRACKER}") from None
    except DlmBridgeError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(tracker, f"neither an iteration's number nor 'release': {one_line(error)}") from None


class MegatronCheckpoint(Checkpoint):
    """One iteration below a root. Its model is the manifest's, or else derived from the run's own settings.

    Args:
        path: the checkpoint.
        folder: the iteration.
        common: the state that is not a tensor, with `args` as a plain dict.
        family: model family, if the settings do not identify it.

    Raises:
        CheckpointError: damaged or incomplete.
    """

    folder: Path
    root: Path
    iteration: str

    def __init__(self, path: Path, folder: Path, common: dict[str, Any], family: str | None = None) -> None:
        super().__init__(str(path))
        parent = folder.absolute().parent
        self.folder, self.iteration, self.common = folder, folder.name, common
        self.root = parent if path == folder and (parent / MANIFEST).is_file() else path
        self.names_model = self.manifest is not None
        self._family = family
        self._like: Checkpoint | None = None
        step = common.get("iteration")
        self.step = step if isinstance(step, int) else folder.name
        args = common.get("args")
        if isinstance(args, dict) and _PARALLEL_SIZES[0][1] in args:
            self.layout = {short: args[name] for short, name in _PARALLEL_SIZES if args.get(name) is not None}

    @classmethod
    @abstractmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> MegatronCheckpoint:
        """Open the iteration in `folder` of the checkpoint `path`. Raises CheckpointError."""

    @abstractmethod
    def _reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        """Reader of the tensors of `params`. Raises CheckpointError if a tensor does not fit its parameter."""

    @abstractmethod
    def objects(self) -> Iterable[str]:
        """Names of the stored objects that are not tensors."""

    def scaling_histories(self) -> list[str]:
        """Modules whose extra state is not empty, such as an FP8 scaling history."""
        return []

    @cached_property
    def reader(self) -> ChunkedReader:
        """Reader of the global, unsharded tensors."""
        dims = self.config_dims
        pieces = (piece for param in self.mapping.params(dims) for piece in param.pieces)
        return self._reader(pieces, dims.tied)

    def adopt(self, other: Checkpoint) -> None:
        super().adopt(other)
        self._like = other

    def _hub_metadata(self) -> HubMetadata:
        manifest = self.manifest
        if manifest is None:
            return self._derived_metadata()
        folder = self.root / HUB_FOLDER
        if not (folder / CONFIG_FILE).is_file():
            raise CheckpointError(self.root, f"{HUB_FOLDER}/{CONFIG_FILE} is missing: name the Hub model with `like`")
        read_config(folder / CONFIG_FILE)  # it is exported byte for byte, so a damaged one must be refused
        files = list_side_files(folder, {CARRIED_FILE})
        return HubMetadata(
            family=family_by_name(manifest.family),
            config=manifest.config,
            source=manifest.source,
            folder=folder,
            files=files.kept,
            excluded=tuple(manifest.left_out),
            shards=manifest.shards,
            passthrough=tuple(manifest.carried),
            shared=manifest.shared,
            dtypes={name: WEIGHT_DTYPES[record.dtype] for name, record in manifest.tensors.items()},
        )

    def _derived_metadata(self) -> HubMetadata:
        """Hub metadata derived from a run's own settings."""
        settings = read_settings(self.root, self.folder, self.common)
        if settings is None:
            raise CheckpointError(
                self.root,
                f"has no {MANIFEST}, no {RUN_CONFIG} and no saved args, so its Hub model is not known: name it with "
                "`like` or `hf_config`",
            )
        rows, dtype = self._embedding()
        spec, config, derived = derive_config(settings, self._family, rows, dtype, str(self.root))
        texts = {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}
        return HubMetadata(spec, config, {"name": str(self.root), "revision": None}, texts=texts, derived=derived)

    def _embedding(self) -> tuple[int | None, str]:
        """Rows of the stored embedding over all ranks (None if it is missing), and its dtype's name."""
        found = [t for name, t in self.stored_tensors().items() if _EMBEDDING.search(name) and len(t.shape) == 2]
        return (found[0].shape[0], found[0].dtype) if found else (None, "float32")

    @property
    def derived(self) -> dict[str, str]:
        return {name: entry.copy_of for name, entry in self.passthrough.items() if entry.copy_of}

    def training_state(self) -> list[str]:
        return [key for key in (*self.stored_tensors(), *self.objects()) if is_training_state(key)]

    def folders(self) -> list[Path]:
        return [self.root, self.folder, *([self.hub.folder] if self.hub.folder else [])]

    def has(self, param: ParamMapping) -> bool:
        return any(self.stored_key(piece) is not None for piece in param.pieces)

    def spec(self, name: str) -> TensorSpec:
        if name in self.passthrough:
            copy_of = self.passthrough[name].copy_of
            if copy_of:
                return self.spec(copy_of)
            tensor = self.read_passthrough(name)
            return tensor.dtype, tuple(tensor.shape)
        param = self.param_of[name]
        number = param.hub_names.index(name)
        return self._hub_dtypes(param)[number], param.hub_shapes[number]

    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        tensors = param.to_hub(self._slice(param))
        stored = zip(tensors, self._hub_dtypes(param), param.hub_names, strict=True)
        return tuple(narrow_exactly(tensor, dtype, name) for tensor, dtype, name in stored)

    def streams(self, param: ParamMapping) -> bool:
        places = [(*self._place(piece), piece.megatron_shape) for piece in param.pieces]
        dtypes = {self.reader.tensor(key).dtype for key, _, _ in places}
        if param.hub_rows is None or len({*dtypes, *self._hub_dtypes(param)}) != 1:
            return False
        return all(self.reader.in_regions(*place) for place in places)

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        if param.pieces == (param,):
            return self.reader.regions(*self._place(param), param.megatron_shape)
        found, first = [], 0
        for piece in param.pieces:
            for region in self.reader.regions(*self._place(piece), piece.megatron_shape):
                found.append(replace(region, part=region.part.moved(first)))
            first += piece.megatron_shape[0]
        return found

    def _slice(self, param: ParamMapping) -> torch.Tensor:
        """A parameter's slice, assembled from its pieces. Raises CheckpointError."""
        places = [self._place(piece) for piece in param.pieces]
        slice_, first = new_tensor(param.megatron_shape, self.reader.dtype(places[0][0])), 0
        for piece, place in zip(param.pieces, places, strict=True):
            if piece is param:
                self.reader.read_into(*place, slice_)
            else:
                rows = piece.megatron_shape[0]
                self.reader.read_into(*place, slice_[first : first + rows])
                first += rows
        return slice_

    def read_passthrough(self, name: str) -> torch.Tensor:
        if copy_of := self.passthrough[name].copy_of:
            return self.read(copy_of)
        if self._like is not None:
            return self._like.read(name)
        path = self.root / HUB_FOLDER / CARRIED_FILE
        for entry in read_header(path).entries:
            if entry.name == name:
                return read_tensor(path, entry.offset, entry.dtype, entry.shape)
        raise CheckpointError(path, f"tensor {name} is missing")

    def check(self) -> list[str]:
        used = {self._check_param(piece) for param in self.mapping.params(self.dims) for piece in param.pieces}
        extra = self._unmapped(used) + [key for key in self.reader.contents.objects if not _is_state(key)]
        if extra:
            raise CheckpointError(
                self.where, f"{first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        full = self.scaling_histories()
        resets = [f"extra states with content (an FP8 scaling history) are reset: {first_of(full)}"] if full else []
        return [*self.notes, *resets]

    def stored_key(self, param: ParamMapping) -> str | None:
        """Stored key of the parameter's slice; None if it is missing."""
        tensors = self.reader.contents.tensors
        return next((key for key, _ in stored_keys(param) if key in tensors), None)

    def stored_specs(self) -> dict[str, TensorSpec]:
        names = [name for param in self.params if self.has(param) for name in param.hub_names]
        there = set(names)
        names += [n for n, entry in self.passthrough.items() if not entry.copy_of or entry.copy_of in there]
        return {name: self.spec(name) for name in names}

    def read_group(self, names: Any) -> dict[str, torch.Tensor]:
        param = self.param_of.get(names[0])
        if param is None:
            return super().read_group(names)
        for piece in param.pieces:
            self._check_param(piece)
        return dict(zip(param.hub_names, self.read_param(param), strict=True))

    def group_of(self, name: str) -> str:
        param = self.param_of.get(name)
        return param.megatron_name if param is not None else name

    def unmapped(self) -> list[str]:
        return self._unmapped({self.stored_key(piece) for param in self.params for piece in param.pieces})

    def _unmapped(self, used: set[Any]) -> list[str]:
        left = self.reader.contents.tensors.keys() - used
        return sorted(key for key in left if not _is_state(key))

    def changed_files(self, manifest: Manifest) -> list[str]:
        found = self._file_digests()
        prefix = f"{self.iteration}/"
        return [file for file, recorded in manifest.files.items() if found.get(file.removeprefix(prefix)) != recorded]

    def _file_digests(self) -> dict[str, str]:
        return self.reader.file_digests()

    def _check_param(self, param: ParamMapping) -> str:
        """Stored key of a parameter. Raises CheckpointError unless it has its shape and its chunks cover it."""
        key, _ = self._place(param)
        stack = dict(stored_keys(param))[key]
        found, wanted = self.reader.tensor(key).shape, (*(size for _, size in stack), *param.megatron_shape)
        padded = isinstance(param.rule, Vocabulary)
        rest = slice(1, None) if padded else slice(0, None)
        if found[rest] != wanted[rest] or (found and found[0] < wanted[0]):
            more = " or more rows" if padded else ""
            raise CheckpointError(
                self.where, f"tensor {key} has shape {list(found)}, the config asks for {list(wanted)}{more}"
            )
        self.reader.check_tiled(key)
        return key

    def _place(self, param: ParamMapping) -> tuple[str, tuple[int, ...]]:
        """Stored key of a parameter's slice, and its index on the stacked axes."""
        key = self.stored_key(param)
        if key is None:
            raise CheckpointError(self.where, f"tensor {self._expected_name(param)} is missing")
        return key, tuple(index for index, _ in dict(stored_keys(param))[key])

    def _expected_name(self, param: ParamMapping) -> str:
        return param.megatron_name

    @cached_property
    def _key_dtypes(self) -> dict[str, torch.dtype]:
        """Common dtype, by stored key, of the Hub tensors that share a Megatron tensor."""
        groups: dict[str, list[torch.dtype]] = {}
        for param in self.params:
            for name in param.hub_names:
                if name in self.hub.dtypes:
                    groups.setdefault(param.megatron_key, []).append(self.hub.dtypes[name])
        return {key: promote(dtypes) for key, dtypes in groups.items()}

    def _hub_dtypes(self, param: ParamMapping) -> tuple[torch.dtype, ...]:
        """Dtypes of the Hub tensors: as stored, except for tensors that were widened at import to share one."""
        stored = self.reader.dtype(self._place(param.pieces[0])[0])
        if self._key_dtypes.get(param.megatron_key) != stored:
            return (stored,) * len(param.hub_names)
        return tuple(self.hub.dtypes.get(name, stored) for name in param.hub_names)


class DistributedCheckpoint(MegatronCheckpoint):
    """Megatron checkpoint saved by torch.distributed.checkpoint, with a `.metadata`."""

    contents: Contents

    def stored_tensors(self) -> dict[str, RawTensor]:
        return {
            key: RawTensor(t.dtype_name, t.shape, prod(t.shape) * (t.dtype.itemsize if t.dtype else 0))
            for key, t in self.contents.tensors.items()
        }

    def objects(self) -> Iterable[str]:
        return self.contents.objects

    def files(self) -> dict[str, int]:
        return self.contents.files(self.folder)


def is_extra_state(key: str) -> bool:
    """True for the key of a module's Transformer Engine `_extra_state`."""
    return _EXTRA_STATE.search(key) is not None


def _is_state(key: str) -> bool:
    return is_training_state(key) or is_extra_state(key)
