"""torch.distributed.checkpoint of a Hub model, as saved under FSDP2 (by Accelerate or a custom loop).

Stored names are the transformers model's, with any prefix ("model." if a dict was saved). They are translated to the
Hub's if the transformers class uses other names, or stacks the experts of a layer in one tensor.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import ByNameCheckpoint, HubMetadata, TensorSpec
from dlm_bridge.convert.formats.dcp import DCP_METADATA, ChunkedReader, Contents, read_metadata
from dlm_bridge.errors import CheckpointError, counted
from dlm_bridge.hub import CONFIG_FILE, read_config
from dlm_bridge.models.families import FamilySpec, find_family

_FSDP_FOLDER = "pytorch_model_fsdp_0"  # Accelerate's, in the folder of a training checkpoint
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_OF_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class _Location:
    """Location of a Hub tensor: stored key, index on its first axis, first row within that index."""

    key: str
    expert: int | None = None
    row: int = 0


class DcpCheckpoint(ByNameCheckpoint):
    """torch.distributed.checkpoint in `path`, with a config.json in or beside it. Raises CheckpointError."""

    format = "dcp"
    folder: Path

    def __init__(self, path: Path, family: str | None = None) -> None:
        super().__init__(str(path))
        folder = _dcp_folder(path) or path
        self.folder, self._family = folder, family
        self._config_folder = next((f for f in (path, folder, folder.parent) if (f / CONFIG_FILE).is_file()), None)
        self.names_model = self._config_folder is not None
        self._contents = read_metadata(folder)
        self._reader = ChunkedReader(folder, self._contents)

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        return _dcp_folder(folder) is not None

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> DcpCheckpoint:
        return cls(path, family)

    def _hub_metadata(self) -> HubMetadata:
        if self._config_folder is None:
            raise CheckpointError(
                self.where,
                f"is a torch.distributed.checkpoint without {CONFIG_FILE}: name its model with `like` or `hf_config`",
            )
        return hub_of_config(self._config_folder / CONFIG_FILE, self._family, self.where)

    @cached_property
    def _places(self) -> dict[str, _Location]:
        """Location of every stored tensor that the Hub model has, by Hub name."""
        names = {name for param in self.mapping.params(self.config_dims) for name in param.hub_names}
        found = _by_name(self._contents, {name: name for name in names})
        if found.keys() < names:
            renamed = _module_names(self.family, self.config)
            found |= _by_name(self._contents, {module: hub for module, hub in renamed.items() if hub not in found})
        left = self._contents.tensors.keys() - {place.key for place in found.values()}
        if left:
            self.notes.append(f"weights only: {counted(len(left), 'other tensor')} (optimizer state) not read")
        return found

    @cached_property
    def _stored(self) -> dict[str, TensorSpec]:  # type: ignore[override]
        return {name: self._spec(place) for name, place in self._places.items()}

    def check(self) -> list[str]:
        notes = super().check()
        for key in {place.key for place in self._places.values()}:
            self._reader.check_tiled(key)
        return notes

    def files(self) -> dict[str, int]:
        return self._contents.files(self.folder, {place.key for place in self._places.values()})

    def folders(self) -> list[Path]:
        return [self.folder, *([self.hub.folder] if self.hub.folder else [])]

    def _tensor(self, name: str) -> torch.Tensor:
        place = self._places[name]
        _, shape = self._stored[name]
        if place.expert is None:
            return self._reader.read(place.key, (), shape)
        rows = self._reader.read(place.key, (place.expert,), (place.row + shape[0], *shape[1:]))
        return rows[place.row :]

    def _spec(self, place: _Location) -> TensorSpec:
        dtype, shape = self._reader.dtype(place.key), self._reader.tensor(place.key).shape
        if place.expert is None:
            return dtype, shape
        rows = shape[1] // len(_OF_EXPERT[place.key.rpartition(".")[2]])
        return dtype, (rows, *shape[2:])


def hub_of_config(path: Path, family: str | None, name: str) -> HubMetadata:
    """Metadata from a config.json alone, without side files and shard map. `name` is recorded as the source."""
    config = read_config(path)
    spec = find_family(config, family, str(path))
    return HubMetadata(spec, config, {"name": name, "revision": None}, texts={CONFIG_FILE: path.read_bytes()})


def _dcp_folder(path: Path) -> Path | None:
    """Folder with `.metadata`: `path` itself or Accelerate's below it."""
    return next((folder for folder in (path, path / _FSDP_FOLDER) if (folder / DCP_METADATA).is_file()), None)


def _by_name(contents: Contents, wanted: dict[str, str]) -> dict[str, _Location]:
    """Locations by Hub name, under the prefix that most keys have. `wanted` maps model names to Hub names."""
    prefixes: Counter[str] = Counter()
    for key in contents.tensors:
        if not key.startswith("optim"):
            plain = _STACKED.sub(r"\1.0.down_proj.weight", key)
            parts = plain.split(".")
            prefixes.update(
                ".".join(parts[:cut]) + "." * bool(cut)
                for cut in range(min(4, len(parts)))
                if ".".join(parts[cut:]) in wanted
            )
    if not prefixes:
        return {}
    prefix = prefixes.most_common(1)[0][0]
    found: dict[str, _Location] = {}
    for key, tensor in contents.tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix):
            continue
        if name in wanted:
            found[wanted[name]] = _Location(key)
        elif (match := _STACKED.fullmatch(name)) and len(tensor.shape) == 3:
            kinds = _OF_EXPERT[match[2]]
            for expert in range(tensor.shape[0]):
                for number, kind in enumerate(kinds):
                    hub = f"{match[1]}.{expert}.{kind}.weight"
                    if hub in wanted:
                        found[wanted[hub]] = _Location(key, expert, number * (tensor.shape[1] // len(kinds)))
    return found


def _module_names(family: FamilySpec, config: dict[str, Any]) -> dict[str, str]:
    """Map of the transformers model's names to Hub names, without tensors that transformers reshapes."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = family.load("model_class")(family.load("config_class").from_dict(config))
    found = {}
    for name, tensor in model.state_dict().items():
        reverted = revert_weight_conversion(model, {name: tensor})
        if len(reverted) == 1 and next(iter(reverted.values())).shape == tensor.shape:
            found[name] = next(iter(reverted))
    return found
