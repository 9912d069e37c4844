"""A Megatron checkpoint, of any of its formats, as a checkpoint of Hub tensors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, HubSide, TensorSpec, first_of, open_family
from dlm_bridge.convert.derive import RUN_CONFIG, derive_config, read_settings
from dlm_bridge.convert.formats.dcp import StoredTensor
from dlm_bridge.convert.formats.megatron_store import Store, newest_iteration, open_store
from dlm_bridge.convert.formats.safetensors_file import read_header
from dlm_bridge.convert.hub import read_config
from dlm_bridge.convert.hub_checkpoint import CONFIG, HubCheckpoint
from dlm_bridge.convert.manifest import FILE_NAME, Manifest, read_manifest
from dlm_bridge.convert.mapping import Link, Vocabulary
from dlm_bridge.convert.side_files import list_side_files
from dlm_bridge.convert.streaming import Region
from dlm_bridge.convert.tensors import WEIGHT_DTYPES, narrow_exactly, promote, read_tensor
from dlm_bridge.errors import DlmBridgeError

HUB_FOLDER = "hf"  # in a Megatron checkpoint's root: the Hub's side files
CARRIED_FILE = "carried.safetensors"

# What a training checkpoint holds besides the weights.
_NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state\b|rerun_state_machine_state\b|common_state/")
_EXTRA_STATE = re.compile(r"\._extra_state\d*(/|$)")


class MegatronCheckpoint(Checkpoint):
    """The newest iteration under a root, by the Hub names of its manifest's model or of `hub`'s; where there is
    neither, of a model derived from the run's own settings (`family` says which).

    Raises DlmBridgeError for what is not a whole checkpoint, and where nothing names the model.
    """

    def __init__(
        self, path: Path, hub: HubSide | None = None, like: HubCheckpoint | None = None, family: str | None = None
    ) -> None:
        self.folder = newest_iteration(path)
        self.root = megatron_root(path, self.folder)
        self.store = open_store(self.folder)
        self.format = self.store.format
        self.manifest = read_manifest(self.root)
        self._like = like
        super().__init__(str(path), hub or _hub_side(self.root, self.manifest, self.store, family))
        self.reader = self.store.reader(self.mapping.links(self.dims), self.dims.tied)
        self._drop_absent_mtp(lambda link: self.stored_key(link) is not None)

    @property
    def iteration(self) -> str:
        """The folder's name: "iter_0000000" or "release"."""
        return self.folder.name

    @property
    def derived(self) -> dict[str, str]:
        return {name: carried.copy_of for name, carried in self.carried.items() if carried.copy_of}

    def spec(self, name: str) -> TensorSpec:
        if name in self.carried:
            copy_of = self.carried[name].copy_of
            if copy_of:
                return self.spec(copy_of)
            tensor = self.read_carried(name)
            return tensor.dtype, tuple(tensor.shape)
        link = self.link_of[name]
        shape = link.hub_shapes[link.hub_names.index(name)]
        return self._hub_dtypes(link)[link.hub_names.index(name)], shape

    def read_link(self, link: Link) -> tuple[torch.Tensor, ...]:
        key, stack = self._place(link)
        tensors = link.to_hub(self.reader.read(key, tuple(index for index, _ in stack), link.megatron_shape))
        dtypes = self._hub_dtypes(link)
        return tuple(
            narrow_exactly(tensor, dtype, name)
            for tensor, dtype, name in zip(tensors, dtypes, link.hub_names, strict=True)
        )

    def streams(self, link: Link) -> bool:
        key, stack = self._place(link)
        if link.hub_rows is None or len({self.reader.tensor(key).dtype, *self._hub_dtypes(link)}) != 1:
            return False
        return self.reader.in_regions(key, tuple(index for index, _ in stack), link.megatron_shape)

    def regions(self, link: Link) -> list[Region]:
        key, stack = self._place(link)
        return self.reader.regions(key, tuple(index for index, _ in stack), link.megatron_shape)

    def read_carried(self, name: str) -> torch.Tensor:
        if copy_of := self.carried[name].copy_of:
            return self.read(copy_of)
        if self._like is not None:
            return self._like.read(name)
        for entry in read_header(self.root / HUB_FOLDER / CARRIED_FILE).entries:
            if entry.name == name:
                return read_tensor(self.root / HUB_FOLDER / CARRIED_FILE, entry.offset, entry.dtype, entry.shape)
        raise DlmBridgeError(f"{self.root / HUB_FOLDER / CARRIED_FILE}: tensor {name} is missing")

    def check(self) -> list[str]:
        used = set()
        for link in self.mapping.links(self.dims):
            used.add(self.check_link(link))
        contents = self.reader.contents
        extra = [key for key in contents.tensors.keys() - used if not is_training_state(key)]
        extra += [key for key in contents.objects if not is_training_state(key) and not is_extra_state(key)]
        if extra:
            raise DlmBridgeError(
                f"{self.where}: {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        return self._notes()

    def check_link(self, link: Link) -> str:
        """The stored key of a link's tensor. Raises DlmBridgeError unless it has its shape and its chunks cover it."""
        key, stack = self._place(link)
        self._check_shape(link, key, tuple(size for _, size in stack))
        self.reader.check_tiled(key)
        return key

    def stored_key(self, link: Link) -> str | None:
        """The key that the link's slice is stored under, None where it is missing."""
        tensors = self.reader.contents.tensors
        return next((key for key, _ in stored_keys(link) if key in tensors), None)

    def folders(self) -> list[Path]:
        return [self.root, self.folder, *([self.hub.folder] if self.hub.folder else [])]

    def _notes(self) -> list[str]:
        notes = list(self.notes)
        if full := self.store.histories():
            notes.append(f"extra states with content (an FP8 scaling history) are reset: {first_of(full)}")
        return notes

    def _place(self, link: Link) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The stored key of a link's slice, and (index, size) on the axes that are stacked before it."""
        key = self.stored_key(link)
        if key is None:
            name = link.megatron_key if self.format == "torch_dist" else link.megatron_name
            raise DlmBridgeError(f"{self.where}: tensor {name} is missing")
        return key, dict(stored_keys(link))[key]

    def _check_shape(self, link: Link, key: str, stack: tuple[int, ...]) -> None:
        found = self.reader.tensor(key).shape
        wanted = (*stack, *link.megatron_shape)
        padded = isinstance(link.rule, Vocabulary)
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
        for link in self.links:
            for name in link.hub_names:
                if name in self.hub.dtypes:
                    groups.setdefault(link.megatron_key, []).append(self.hub.dtypes[name])
        return {key: promote(dtypes) for key, dtypes in groups.items()}

    def _hub_dtypes(self, link: Link) -> tuple[torch.dtype, ...]:
        """The stored dtype, but for tensors that were widened at import so as to share one Megatron tensor."""
        stored: StoredTensor = self.reader.tensor(self._place(link)[0])
        if stored.dtype is None:
            raise DlmBridgeError(f"{self.where}: tensor {link.megatron_key} has dtype {stored.dtype_name}")
        if self._key_dtypes.get(link.megatron_key) != stored.dtype:
            return (stored.dtype,) * len(link.hub_names)
        return tuple(self.hub.dtypes.get(name, stored.dtype) for name in link.hub_names)


def stored_keys(link: Link) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """The keys that a link's slice may be stored under, each with what is then stacked before it: all layers in one
    tensor, each layer by itself, or each layer and expert by itself."""
    of_layer = link.rule.megatron.replace("{expert}.", "").replace("{layer}", str(link.layer))
    found = {link.megatron_name: (), of_layer: link.stack[1:], link.megatron_key: link.stack}
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
    return parent if path == iteration and (parent / FILE_NAME).is_file() else path


def hub_side_like(like: HubCheckpoint) -> HubSide:
    """Config, side files and shard map of a Hub folder, for a Megatron checkpoint that was not imported from it."""
    like.check()
    hub = like.hub
    return replace(hub, dtypes={})


def hub_side_of_config(path: Path, family: str | None = None) -> HubSide:
    """Only a config.json: no side files, no shard map."""
    config = read_config(path)
    spec = open_family(config, family, str(path))
    return HubSide(spec, config, {"name": str(path), "revision": None}, texts={CONFIG: path.read_bytes()})


def _hub_side(root: Path, manifest: Manifest | None, store: Store, family: str | None) -> HubSide:
    if manifest is None:
        return _derived_side(root, store, family)
    folder = root / HUB_FOLDER
    if not (folder / CONFIG).is_file():
        raise DlmBridgeError(f"{root}: {HUB_FOLDER}/{CONFIG} is missing: name the Hub model with --like HF")
    files = list_side_files(folder, {CARRIED_FILE})
    return HubSide(
        family=open_family({}, manifest.family, str(root / FILE_NAME)),
        config=manifest.config,
        source=manifest.source,
        folder=folder,
        files=files.carried,
        left_out=tuple(manifest.left_out),
        shards=manifest.shards,
        carried=tuple(manifest.carried),
        dtypes={name: WEIGHT_DTYPES[record.dtype] for name, record in manifest.tensors.items()},
    )


def _derived_side(root: Path, store: Store, family: str | None) -> HubSide:
    """The Hub side of a run that no dlm-bridge wrote, from its own settings."""
    settings = read_settings(root, store.folder, store.common)
    if settings is None:
        raise DlmBridgeError(
            f"{root} has no {FILE_NAME}, no {RUN_CONFIG} and no saved args, so its Hub model is not known: name it "
            "with --like HF or --hf-config FILE"
        )
    rows, dtype = store.embedding()
    spec, config, derived = derive_config(settings, family, rows, dtype, str(root))
    texts = {CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
    return HubSide(spec, config, {"name": str(root), "revision": None}, texts=texts, derived=derived)
