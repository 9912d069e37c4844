"""Megatron checkpoints of any format by Hub names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, HubMetadata, TensorSpec, first_of, open_family
from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint
from dlm_bridge.convert.checkpoints.store import Store, newest_iteration, open_store
from dlm_bridge.convert.formats.dcp_metadata import StoredTensor
from dlm_bridge.convert.formats.safetensors_file import read_header
from dlm_bridge.convert.manifest import MANIFEST, Manifest, read_manifest
from dlm_bridge.convert.run_settings import RUN_CONFIG, derive_config, read_settings
from dlm_bridge.convert.side_files import CARRIED_FILE, HUB_FOLDER, list_side_files
from dlm_bridge.convert.streaming import FileRegion, read_tensor
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import CONFIG_FILE, read_config
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, narrow_exactly, promote
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary

# What a training checkpoint holds besides the weights.
_NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state\b|rerun_state_machine_state\b|common_state/")
_EXTRA_STATE = re.compile(r"\._extra_state\d*(/|$)")


class MegatronCheckpoint(Checkpoint):
    """The newest iteration under a root, by the Hub names of its manifest's model or of `hub`'s; where there is
    neither, of a model derived from the run's own settings (`family` says which).

    Raises DlmBridgeError for what is not a whole checkpoint, and where nothing names the model.
    """

    def __init__(
        self, path: Path, hub: HubMetadata | None = None, like: HubCheckpoint | None = None, family: str | None = None
    ) -> None:
        self.folder = newest_iteration(path)
        self.root = megatron_root(path, self.folder)
        self.store = open_store(self.folder)
        self.format = self.store.format
        self.manifest = read_manifest(self.root)
        self._like = like
        super().__init__(str(path), hub or _hub_side(self.root, self.manifest, self.store, family))
        self.reader = self.store.reader(self.mapping.params(self.dims), self.dims.tied)
        self._drop_absent_mtp(lambda param: self.stored_key(param) is not None)

    @property
    def iteration(self) -> str:
        """The folder's name: "iter_0000000" or "release"."""
        return self.folder.name

    @property
    def derived(self) -> dict[str, str]:
        return {name: entry.copy_of for name, entry in self.passthrough.items() if entry.copy_of}

    def spec(self, name: str) -> TensorSpec:
        if name in self.passthrough:
            copy_of = self.passthrough[name].copy_of
            if copy_of:
                return self.spec(copy_of)
            tensor = self.read_passthrough(name)
            return tensor.dtype, tuple(tensor.shape)
        param = self.param_of[name]
        shape = param.hub_shapes[param.hub_names.index(name)]
        return self._hub_dtypes(param)[param.hub_names.index(name)], shape

    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        key, stack = self._place(param)
        tensors = param.to_hub(self.reader.read(key, tuple(index for index, _ in stack), param.megatron_shape))
        dtypes = self._hub_dtypes(param)
        return tuple(
            narrow_exactly(tensor, dtype, name)
            for tensor, dtype, name in zip(tensors, dtypes, param.hub_names, strict=True)
        )

    def streams(self, param: ParamMapping) -> bool:
        key, stack = self._place(param)
        if param.hub_rows is None or len({self.reader.tensor(key).dtype, *self._hub_dtypes(param)}) != 1:
            return False
        return self.reader.in_regions(key, tuple(index for index, _ in stack), param.megatron_shape)

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        key, stack = self._place(param)
        return self.reader.regions(key, tuple(index for index, _ in stack), param.megatron_shape)

    def read_passthrough(self, name: str) -> torch.Tensor:
        if copy_of := self.passthrough[name].copy_of:
            return self.read(copy_of)
        if self._like is not None:
            return self._like.read(name)
        for entry in read_header(self.root / HUB_FOLDER / CARRIED_FILE).entries:
            if entry.name == name:
                return read_tensor(self.root / HUB_FOLDER / CARRIED_FILE, entry.offset, entry.dtype, entry.shape)
        raise DlmBridgeError(f"{self.root / HUB_FOLDER / CARRIED_FILE}: tensor {name} is missing")

    def check(self) -> list[str]:
        used = set()
        for param in self.mapping.params(self.dims):
            used.add(self.check_param(param))
        contents = self.reader.contents
        extra = [key for key in contents.tensors.keys() - used if not is_training_state(key)]
        extra += [key for key in contents.objects if not is_training_state(key) and not is_extra_state(key)]
        if extra:
            raise DlmBridgeError(
                f"{self.where}: {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        return self._notes()

    def check_param(self, param: ParamMapping) -> str:
        """The stored key of a parameter. Raises DlmBridgeError unless it has its shape and its chunks cover it."""
        key, stack = self._place(param)
        self._check_shape(param, key, tuple(size for _, size in stack))
        self.reader.check_tiled(key)
        return key

    def stored_key(self, param: ParamMapping) -> str | None:
        """The key that the parameter's slice is stored under, None where it is missing."""
        tensors = self.reader.contents.tensors
        return next((key for key, _ in stored_keys(param) if key in tensors), None)

    def folders(self) -> list[Path]:
        return [self.root, self.folder, *([self.hub.folder] if self.hub.folder else [])]

    def _notes(self) -> list[str]:
        notes = list(self.notes)
        if full := self.store.histories():
            notes.append(f"extra states with content (an FP8 scaling history) are reset: {first_of(full)}")
        return notes

    def _place(self, param: ParamMapping) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The stored key of a parameter's slice, and (index, size) on the axes that are stacked before it."""
        key = self.stored_key(param)
        if key is None:
            name = param.megatron_key if self.format == "torch_dist" else param.megatron_name
            raise DlmBridgeError(f"{self.where}: tensor {name} is missing")
        return key, dict(stored_keys(param))[key]

    def _check_shape(self, param: ParamMapping, key: str, stack: tuple[int, ...]) -> None:
        found = self.reader.tensor(key).shape
        wanted = (*stack, *param.megatron_shape)
        padded = isinstance(param.rule, Vocabulary)
        rest = slice(1, None) if padded else slice(0, None)
        if found[rest] != wanted[rest] or (found and found[0] < wanted[0]):
            more = " or more rows" if padded else ""
            raise DlmBridgeError(
                f"{self.where}: tensor {key} has shape {list(found)}, the config asks for {list(wanted)}{more}"
            )

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
        stored: StoredTensor = self.reader.tensor(self._place(param)[0])
        if stored.dtype is None:
            raise DlmBridgeError(f"{self.where}: tensor {param.megatron_key} has dtype {stored.dtype_name}")
        if self._key_dtypes.get(param.megatron_key) != stored.dtype:
            return (stored.dtype,) * len(param.hub_names)
        return tuple(self.hub.dtypes.get(name, stored.dtype) for name in param.hub_names)


def stored_keys(param: ParamMapping) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """The keys that a parameter may be stored under, each with what is then stacked before it: all layers in one
    tensor, each layer by itself, or each layer and expert by itself."""
    of_layer = param.rule.megatron.replace("{expert}.", "").replace("{layer}", str(param.layer))
    found = {param.megatron_name: (), of_layer: param.stack[1:], param.megatron_key: param.stack}
    return list(reversed(found.items()))


def is_training_state(key: str) -> bool:
    """Whether a stored key is an optimizer's, a random generator's or another part of a training run's state."""
    return _NOT_WEIGHTS.match(key) is not None


def is_extra_state(key: str) -> bool:
    """Whether a stored key is Transformer Engine's `_extra_state` of a module."""
    return _EXTRA_STATE.search(key) is not None


def megatron_root(path: Path, iteration: Path) -> Path:
    """The folder that holds dlm_bridge.json and hf/: the parent where an iteration's own folder was named."""
    parent = iteration.absolute().parent
    return parent if path == iteration and (parent / MANIFEST).is_file() else path


def hub_side_like(like: HubCheckpoint) -> HubMetadata:
    """Config, side files and shard map of a Hub folder, for a Megatron checkpoint that was not imported from it."""
    like.check()
    hub = like.hub
    return replace(hub, dtypes={})


def hub_side_of_config(path: Path, family: str | None = None) -> HubMetadata:
    """Only a config.json: no side files, no shard map."""
    config = read_config(path)
    spec = open_family(config, family, str(path))
    return HubMetadata(spec, config, {"name": str(path), "revision": None}, texts={CONFIG_FILE: path.read_bytes()})


def _hub_side(root: Path, manifest: Manifest | None, store: Store, family: str | None) -> HubMetadata:
    if manifest is None:
        return _derived_side(root, store, family)
    folder = root / HUB_FOLDER
    if not (folder / CONFIG_FILE).is_file():
        raise DlmBridgeError(f"{root}: {HUB_FOLDER}/{CONFIG_FILE} is missing: name the Hub model with --like HF")
    files = list_side_files(folder, {CARRIED_FILE})
    return HubMetadata(
        family=open_family({}, manifest.family, str(root / MANIFEST)),
        config=manifest.config,
        source=manifest.source,
        folder=folder,
        files=files.kept,
        excluded=tuple(manifest.left_out),
        shards=manifest.shards,
        passthrough=tuple(manifest.carried),
        dtypes={name: WEIGHT_DTYPES[record.dtype] for name, record in manifest.tensors.items()},
    )


def _derived_side(root: Path, store: Store, family: str | None) -> HubMetadata:
    """The Hub side of a run that no dlm-bridge wrote, from its own settings."""
    settings = read_settings(root, store.folder, store.common)
    if settings is None:
        raise DlmBridgeError(
            f"{root} has no {MANIFEST}, no {RUN_CONFIG} and no saved args, so its Hub model is not known: name it "
            "with --like HF or --hf-config FILE"
        )
    rows, dtype = store.embedding()
    spec, config, derived = derive_config(settings, family, rows, dtype, str(root))
    texts = {CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode()}
    return HubMetadata(spec, config, {"name": str(root), "revision": None}, texts=texts, derived=derived)
