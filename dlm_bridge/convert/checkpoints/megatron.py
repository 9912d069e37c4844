"""Base of Megatron's formats: iterations, the Hub side, and stored tensors by the names of a family's mapping."""

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
from dlm_bridge.convert.formats.dcp import DCP_METADATA, ChunkedReader, Contents, StoredTensor
from dlm_bridge.convert.formats.hub_weights import read_header
from dlm_bridge.convert.manifest import MANIFEST, Manifest
from dlm_bridge.convert.optimizer_state import is_training_state, stored_keys
from dlm_bridge.convert.run_settings import RUN_CONFIG, derive_config, read_settings
from dlm_bridge.convert.streaming import FileRegion, read_tensor
from dlm_bridge.convert.workers import new_tensor
from dlm_bridge.errors import DlmBridgeError, first_of, one_line
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
    """The folder of the newest iteration, by the tracker file; an iteration's own folder is itself.

    Raises DlmBridgeError.
    """
    if (root / DCP_METADATA).is_file():
        return root
    tracker = root / TRACKER
    try:
        check_plain_file(tracker)
        text = tracker.read_text("utf-8").strip()
    except FileNotFoundError:
        raise DlmBridgeError(f"{root} is not a Megatron checkpoint: it has no {TRACKER}") from None
    except DlmBridgeError:
        raise
    except (OSError, ValueError) as error:
        raise DlmBridgeError(f"{tracker}: cannot be read: {one_line(error)}") from None
    if text != "release" and not (text.isascii() and text.isdigit() and len(text) < 16):
        raise DlmBridgeError(f"{tracker}: says {text[:40]!r}, neither an iteration's number nor 'release'")
    folder = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise DlmBridgeError(f"{tracker} names iteration {text}, but {folder} does not exist")
    return folder


class MegatronCheckpoint(Checkpoint):
    """One iteration under a root, by the Hub names of its manifest's model; without a manifest, of a model derived
    from the run's own settings (`family` says which).

    `common` is what is not a tensor, with `args` as a plain dict. Raises DlmBridgeError for what is not a whole
    checkpoint.
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
        """The iteration in `folder` of the checkpoint `path`. Raises DlmBridgeError."""

    @abstractmethod
    def _reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        """The tensors by the keys of `params`. Raises DlmBridgeError where they cannot be theirs."""

    @abstractmethod
    def objects(self) -> Iterable[str]:
        """The names of what is stored beside the tensors."""

    def scaling_histories(self) -> list[str]:
        """The modules with an extra state that has content, such as an FP8 scaling history."""
        return []

    @cached_property
    def reader(self) -> ChunkedReader:
        """Its tensors, global and unsharded."""
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
            raise DlmBridgeError(
                f"{self.root}: {HUB_FOLDER}/{CONFIG_FILE} is missing: name the Hub model with --like HF"
            )
        read_config(folder / CONFIG_FILE)  # which is written again byte for byte: a damaged one would be, too
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
        """The Hub side of a run that no dlm-bridge wrote, from its own settings."""
        settings = read_settings(self.root, self.folder, self.common)
        if settings is None:
            raise DlmBridgeError(
                f"{self.root} has no {MANIFEST}, no {RUN_CONFIG} and no saved args, so its Hub model is not known: "
                "name it with --like HF or --hf-config FILE"
            )
        rows, dtype = self._embedding()
        spec, config, derived = derive_config(settings, self._family, rows, dtype, str(self.root))
        texts = {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}
        return HubMetadata(spec, config, {"name": str(self.root), "revision": None}, texts=texts, derived=derived)

    def _embedding(self) -> tuple[int | None, str]:
        """Rows of the stored embedding over all ranks (None where there is none), and its dtype's name."""
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
        """A parameter's slice, from its pieces. Raises DlmBridgeError."""
        places = [self._place(piece) for piece in param.pieces]
        dtype = self.reader.tensor(places[0][0]).dtype
        assert dtype is not None
        slice_, first = new_tensor(param.megatron_shape, dtype), 0
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
        raise DlmBridgeError(f"{path}: tensor {name} is missing")

    def check(self) -> list[str]:
        used = {self._check_param(piece) for param in self.mapping.params(self.dims) for piece in param.pieces}
        extra = self._unmapped(used) + [key for key in self.reader.contents.objects if not _is_state(key)]
        if extra:
            raise DlmBridgeError(
                f"{self.where}: {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        full = self.scaling_histories()
        resets = [f"extra states with content (an FP8 scaling history) are reset: {first_of(full)}"] if full else []
        return [*self.notes, *resets]

    def stored_key(self, param: ParamMapping) -> str | None:
        """The key that the parameter's slice is stored under, None where it is missing."""
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
        """The stored key of a parameter. Raises DlmBridgeError unless it has its shape and its chunks cover it."""
        key, _ = self._place(param)
        stack = dict(stored_keys(param))[key]
        found, wanted = self.reader.tensor(key).shape, (*(size for _, size in stack), *param.megatron_shape)
        padded = isinstance(param.rule, Vocabulary)
        rest = slice(1, None) if padded else slice(0, None)
        if found[rest] != wanted[rest] or (found and found[0] < wanted[0]):
            more = " or more rows" if padded else ""
            raise DlmBridgeError(
                f"{self.where}: tensor {key} has shape {list(found)}, the config asks for {list(wanted)}{more}"
            )
        self.reader.check_tiled(key)
        return key

    def _place(self, param: ParamMapping) -> tuple[str, tuple[int, ...]]:
        """The stored key of a parameter's slice, and its index on the axes that are stacked before it."""
        key = self.stored_key(param)
        if key is None:
            raise DlmBridgeError(f"{self.where}: tensor {self._expected_name(param)} is missing")
        return key, tuple(index for index, _ in dict(stored_keys(param))[key])

    def _expected_name(self, param: ParamMapping) -> str:
        return param.megatron_name

    @cached_property
    def _key_dtypes(self) -> dict[str, torch.dtype]:
        """Stored key -> what the dtypes recorded at import become when they share one tensor."""
        groups: dict[str, list[torch.dtype]] = {}
        for param in self.params:
            for name in param.hub_names:
                if name in self.hub.dtypes:
                    groups.setdefault(param.megatron_key, []).append(self.hub.dtypes[name])
        return {key: promote(dtypes) for key, dtypes in groups.items()}

    def _hub_dtypes(self, param: ParamMapping) -> tuple[torch.dtype, ...]:
        """The stored dtype, but for tensors that were widened at import so as to share one Megatron tensor."""
        stored: StoredTensor = self.reader.tensor(self._place(param.pieces[0])[0])
        if stored.dtype is None:
            raise DlmBridgeError(f"{self.where}: tensor {param.megatron_key} has dtype {stored.dtype_name}")
        if self._key_dtypes.get(param.megatron_key) != stored.dtype:
            return (stored.dtype,) * len(param.hub_names)
        return tuple(self.hub.dtypes.get(name, stored.dtype) for name in param.hub_names)


class DistributedCheckpoint(MegatronCheckpoint):
    """A Megatron checkpoint that torch.distributed.checkpoint's `.metadata` lists."""

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
    """Whether a stored key is Transformer Engine's `_extra_state` of a module."""
    return _EXTRA_STATE.search(key) is not None


def _is_state(key: str) -> bool:
    return is_training_state(key) or is_extra_state(key)
