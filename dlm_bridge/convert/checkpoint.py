"""`Checkpoint` interface: tensors of a model by their Hub names, and metadata of its files.

Every kind of checkpoint (checkpoints/) implements this interface, so that planning, transfer, verify and inspect do
not depend on the kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from dlm_bridge.convert.formats.hub_weights import ShardRecord
from dlm_bridge.convert.manifest import FILE_DIGESTS, ChangedFile, Manifest, TensorRecord, check_files, read_manifest
from dlm_bridge.convert.streaming import Bands, FileRegion, SliceRange, read_rows
from dlm_bridge.errors import CheckpointError, DlmBridgeError, SettingError, first_of
from dlm_bridge.hub import CONFIG_FILE, with_dtype
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Mapping, ParamMapping, Passthrough
from dlm_bridge.models.families import FamilySpec

if TYPE_CHECKING:
    import torch  # imported where tensors are moved, because reading headers must be fast

    from dlm_bridge.convert.optimizer_state import OptimizerState

_LARGEST = 10**6  # limit of layers times experts, so that a malicious config cannot exhaust memory with names
_MAX_NAMED = 5  # missing tensors to look for at most: a wrong config can list millions
TensorSpec = tuple["torch.dtype", tuple[int, ...]]


@dataclass(frozen=True)
class Derived:
    """One key of a derived config: its value, and the setting (or assumption) that it was derived from."""

    key: str
    value: Any
    origin: str
    assumed: bool = False


@dataclass
class HubMetadata:
    """Metadata of a checkpoint's Hub side, without the tensors."""

    family: FamilySpec
    config: dict[str, Any]
    source: dict[str, Any]  # name and revision, as recorded in the manifest
    folder: Path | None = None  # folder of the side files
    files: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # files that are not converted, as reported
    texts: dict[str, bytes] = field(default_factory=dict)  # side files that exist in memory only: name -> content
    shards: list[ShardRecord] = field(default_factory=list)  # the Hub's shard map, if known
    passthrough: tuple[str, ...] = ()  # passthrough tensors of a checkpoint that does not store them by name
    shared: dict[str, str] = field(default_factory=dict)  # passthrough tensors that are copies: name -> original
    # Dtypes of the Hub tensors at import, if known.
    dtypes: MappingType[str, torch.dtype] = field(default_factory=dict)
    derived: tuple[Derived, ...] = ()  # derivation of `config`, if the checkpoint does not name a Hub model

    def config_bytes(self, dtype: torch.dtype | None = None) -> bytes:
        """Contents of config.json with the Hub's keys, and with its dtype field set to `dtype` if not None."""
        data = self.texts.get(CONFIG_FILE)
        if data is None:
            assert self.folder is not None
            data = (self.folder / CONFIG_FILE).read_bytes()
        text = self.family.published_config(data.decode("utf-8"))
        return (text if dtype is None else with_dtype(text, dtype_name(dtype))).encode("utf-8")


@dataclass(frozen=True)
class RawTensor:
    """Description of a stored tensor of any kind."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint(ABC):
    """A checkpoint of any kind. Opening it reads configuration and headers, but no tensors.

    Family, mapping and sizes are determined at first use (or by `bind`), so that the files of a checkpoint without a
    supported model can be listed and compared too.
    """

    format: ClassVar[str]
    root: Path | None = None  # folder that dlm_bridge.json describes
    folder: Path | None = None  # folder of the weights
    iteration: str | None = None  # folder name of a Megatron checkpoint's iteration: "iter_0000000" or "release"
    step: int | str | None = None  # iteration as stored in the checkpoint
    layout: dict[str, Any] | None = None  # parallel sizes, if files or saved arguments contain them
    names_model: bool = True  # False: the model cannot be identified without its tensors

    def __init__(self, where: str, hub: HubMetadata | None = None) -> None:
        self.where = where  # for messages
        self.notes: list[str] = []  # for the report
        if hub is not None:
            self.hub = hub

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """True if the folder is a checkpoint of this kind."""
        return False

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> Checkpoint:
        """Open the checkpoint `path`. `folder`: its newest iteration, if it has iterations. Raises CheckpointError."""
        raise NotImplementedError

    @classmethod
    def plan_output(cls, request: OutputRequest) -> tuple[dict[str, int], Callable[[Path], CheckpointWriter]]:
        """Plan a checkpoint of this kind before any tensor is read. Raises LayoutError or SettingError.

        Returns:
            Sizes of its files in bytes, by name below the iteration's folder; a function that creates the writer.
        """
        raise NotImplementedError

    # The model.

    @cached_property
    def hub(self) -> HubMetadata:
        """Metadata of the Hub side. Raises CheckpointError if the model cannot be identified."""
        return self._hub_metadata()

    def _hub_metadata(self) -> HubMetadata:
        raise NotImplementedError

    def adopt(self, other: Checkpoint) -> None:
        """Use the Hub metadata of `other` in place of its own. Call it before any other method."""
        self.hub = replace(other.hub, dtypes={}, passthrough=tuple(other.passthrough))

    def bind(self) -> Self:
        """Determine the model now. Raises CheckpointError if it cannot be identified or is not supported."""
        _ = self.dims
        return self

    @property
    def family(self) -> FamilySpec:
        return self.hub.family

    @property
    def config(self) -> dict[str, Any]:
        """Contents of the Hub's config.json."""
        return self.hub.config

    @property
    def mapping(self) -> Mapping:
        return self.family.mapping

    @cached_property
    def dims(self) -> Dims:
        """Sizes of the model. A checkpoint without multi-token prediction layers is complete too, because transformers
        drops these layers."""
        dims = self.config_dims
        if dims.mtp and not any(self.has(param) for param in self.mapping.params(dims) if param.is_mtp):
            self.notes.append(f"the checkpoint has no multi-token prediction layers, its config has {dims.mtp}")
            return replace(dims, mtp=0)
        return dims

    @cached_property
    def config_dims(self) -> Dims:
        """Sizes of the model according to config.json."""
        return checked_dims(self.mapping, self.config, self.where)

    @cached_property
    def params(self) -> list[ParamMapping]:
        """All parameters of the model."""
        return list(self.mapping.params(self.dims))

    @cached_property
    def param_of(self) -> dict[str, ParamMapping]:
        """Map each Hub name to its parameter."""
        return {name: param for param in self.params for name in param.hub_names}

    @cached_property
    def passthrough(self) -> dict[str, Passthrough]:
        """Passthrough tensors of the model by Hub name."""
        known = self.mapping.passthrough_names(self.dims)
        found = {name: known[name] for name in self.hub.passthrough if name in known}
        copies = {name: other for name, other in self.hub.shared.items() if name in found}
        return found | {name: replace(found[name], copy_of=other) for name, other in copies.items()}

    @property
    def derived(self) -> dict[str, str]:
        """Passthrough tensors that are not stored because they are copies: name -> original."""
        return {}

    @property
    def shared(self) -> dict[str, str]:
        """Map passthrough tensors of multi-token prediction layers to the tensors that a Megatron model uses in their
        place."""
        passthrough = self.passthrough
        named = {name: entry.shared_with for name, entry in passthrough.items() if entry.shared_with}
        return {name: getattr(passthrough.get(other), "copy_of", other) for name, other in named.items()}

    def hub_names(self) -> list[str]:
        """Names of all Hub tensors of the model."""
        return [*self.param_of, *self.passthrough]

    def check(self) -> list[str]:
        """Raise CheckpointError unless stored tensors and mapping match exactly. Returns notes for the report."""
        raise NotImplementedError

    # Tensors.

    @abstractmethod
    def has(self, param: ParamMapping) -> bool:
        """True if any tensor of the parameter is stored."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a Hub tensor."""

    def described(self, name: str) -> RawTensor:
        """Description of a Hub tensor."""
        dtype, shape = self.spec(name)
        return RawTensor(dtype_name(dtype), shape, spec_bytes((dtype, shape)))

    def read(self, name: str) -> torch.Tensor:
        """Read one Hub tensor, with the dtype and shape of `spec`."""
        if name in self.passthrough:
            return self.read_passthrough(name)
        param = self.param_of[name]
        return self.read_param(param)[param.hub_names.index(name)]

    @abstractmethod
    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        """Read the Hub tensors of a parameter. Raises CheckpointError."""

    def read_each(self, param: ParamMapping) -> Iterator[torch.Tensor]:
        """Read the Hub tensors of a parameter one at a time, to save memory if they are stored separately."""
        yield from self.read_param(param)

    @abstractmethod
    def read_passthrough(self, name: str) -> torch.Tensor:
        """Read a passthrough tensor, which Megatron does not have."""

    def streams(self, param: ParamMapping) -> bool:
        """True if `regions` supports this parameter. Reads no tensors."""
        return False

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        """File regions that contain the bytes of a parameter's Megatron slice. All tensors of such a parameter have
        the same dtype. Raises CheckpointError."""
        raise NotImplementedError

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read elements `start` to `stop` of a Hub tensor in row-major order, as one dimension, in the dtype of
        `spec`. If `regions` supports the parameter, only the rows that contain them are read. Raises
        CheckpointError."""
        param = self.param_of.get(name)
        if param is None or param.hub_rows is None or not self.streams(param):
            return self.read(name).reshape(-1)[start:stop]
        dtype, width = self.spec(name)[0], prod(param.megatron_shape[1:])
        own = SliceRange(param.hub_rows[param.hub_names.index(name)])
        first, last = start // width, -(-stop // width)
        rows = read_rows(self.regions(param), own.subset(first, last), width * dtype.itemsize)
        return rows.view(-1).view(dtype)[start - first * width : stop - first * width]

    # Files, metadata and digests.

    @cached_property
    def manifest(self) -> Manifest | None:
        """Contents of dlm_bridge.json, or None. Raises CheckpointError for a damaged file."""
        return None if self.root is None else read_manifest(self.root)

    @property
    def record(self) -> Manifest | None:
        """The manifest if it describes these weights (this iteration), else None."""
        manifest = self.manifest
        return manifest if manifest is not None and manifest.iteration == self.iteration else None

    def stored_record(self, name: str) -> TensorRecord | None:
        """Digest record of the stored bytes if `read` converts them, else None."""
        return None

    def damaged_files(self, workers: int | None = None) -> list[ChangedFile]:
        """Weight files of a training run's checkpoint that differ from their recorded digests. Reads these files.
        Raises CheckpointError if the digests cannot be read."""
        if self.folder is None or not (self.folder / FILE_DIGESTS).is_file():
            return []
        return check_files(self.folder, workers, only=self.files())

    @abstractmethod
    def folders(self) -> list[Path]:
        """Folders of the checkpoint, which must not be overwritten by an output."""

    def files(self) -> dict[str, int]:
        """Weight files below `folder`, with their sizes in bytes."""
        return {}

    def stored_tensors(self) -> dict[str, RawTensor]:
        """All stored tensors, including training state, by their names in the format."""
        return {name: self.described(name) for name in self.hub_names()}

    def use_averages(self) -> None:
        """Read the moving averages of a run instead of its weights. Raises SettingError if there are none."""
        raise SettingError("ema", f"{self.where} has no averaged weights, which Megatron runs with `ema_decay` save")

    def training_state(self) -> list[str]:
        """Keys of the training state: optimizer and random generators."""
        return []

    def optimizer_state(self, padded: Sequence[ParamMapping], format_: str) -> OptimizerState | None:
        """Optimizer state for a checkpoint of `padded` parameters, or None.

        Raises SettingError for a state that cannot be resharded; `weights_only` omits it.
        """
        from dlm_bridge.convert.optimizer_state import is_optimizer_key

        if any(map(is_optimizer_key, self.training_state())):
            raise SettingError(
                "weights_only",
                f"is needed: {self.where} has optimizer state, which can only be converted from torch_dist to "
                "torch_dist",
            )
        return None

    # For comparisons: the stored tensors, complete or not.

    def stored_specs(self) -> dict[str, TensorSpec]:
        """Stored Hub tensors, which may be incomplete."""
        return {name: self.spec(name) for name in self.hub_names()}

    def read_group(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read stored Hub tensors of one `group_of`. Raises CheckpointError for incomplete tensors."""
        return {name: self.read(name) for name in names}

    def group_of(self, name: str) -> str:
        """Key of the stored tensor that contains this Hub tensor. Tensors with the same key are read together."""
        return name

    def unmapped(self) -> list[str]:
        """Stored tensors that are neither part of a Hub tensor nor of the training state."""
        return []

    def differing_copies(self) -> list[tuple[str, str]]:
        """(tensor, problem) for every parameter whose copies on several ranks differ."""
        return []

    def changed_files(self, manifest: Manifest) -> list[str]:
        """Weight files whose bytes outside the tensors differ from the manifest."""
        return []


class ByNameCheckpoint(Checkpoint):
    """Checkpoint that stores tensors under their Hub names, listed in `_stored`."""

    _stored: MappingType[str, TensorSpec]

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of `_stored`."""

    def has(self, param: ParamMapping) -> bool:
        return any(name in self._stored for name in param.hub_names)

    def spec(self, name: str) -> TensorSpec:
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""
        return self._stored[name][1]

    @cached_property
    def passthrough(self) -> dict[str, Passthrough]:
        known = self.mapping.passthrough_names(self.dims)
        return {name: known[name] for name in self._stored if name in known}

    def stored_specs(self) -> dict[str, TensorSpec]:
        return dict(self._stored)

    def read(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensor(name) for name in param.hub_names)

    def read_each(self, param: ParamMapping) -> Iterator[torch.Tensor]:
        return (self._tensor(name) for name in param.hub_names)

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def read_group(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._tensor(name) for name in names}

    def check(self) -> list[str]:
        missing = []
        for name, _ in self._expected():
            if name not in self._stored:
                missing.append(name)
                if len(missing) == _MAX_NAMED:
                    break
        if missing:
            raise CheckpointError(self.where, f"tensor {first_of(missing)} is missing")
        expected = dict(self._expected())
        extra = self._stored.keys() - expected.keys() - self.passthrough.keys()
        if extra:
            reason = f"tensor {first_of(extra)} is not part of a {self.family.name} model of this config"
            raise CheckpointError(self.where, reason)
        for name, entry in self.passthrough.items():
            if entry.copy_of:
                expected[name] = expected[entry.copy_of]
        for name, shape in expected.items():
            found = self.shape(name)
            if found != shape:
                reason = f"tensor {name} has shape {list(found)}, the config asks for {list(shape)}"
                raise CheckpointError(self.where, reason)
        return list(self.notes)

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for param in self.mapping.params(self.dims):
            yield from zip(param.hub_names, param.hub_shapes, strict=True)


class CheckpointWriter(Protocol):
    """Writer of slices, in any order and from any thread or process."""

    def write(self, param: ParamMapping, bands: Bands) -> list[str]:
        """Write a parameter's whole slice. Returns digests for `has` and `note`."""

    def has(self, param: ParamMapping, digests: Sequence[str]) -> bool:
        """True if an earlier run has written the parameter with these digests."""

    def note(self, param: ParamMapping, digests: Sequence[str]) -> None:
        """Record that a slice is written. Must be called for every slice in the process that calls `finish`."""

    def finish(self, iteration: int) -> dict[str, str]:
        """Complete the checkpoint. Returns the digests of its files."""


@dataclass(frozen=True)
class OutputRequest:
    """Arguments of `plan_output`. `params` have the padded vocabulary; `dtypes` maps Megatron keys to dtypes."""

    source: Checkpoint
    params: Sequence[ParamMapping]
    layout: Layout
    dtypes: dict[str, torch.dtype]
    iteration: int
    key_style: str
    mcore: str
    state: OptimizerState | None = None


def checked_dims(mapping: Mapping, config: dict[str, Any], where: str) -> Dims:
    """Sizes of a config, each checked to be a positive integer. Raises CheckpointError."""
    try:
        dims = mapping.dims(config)
    except DlmBridgeError as error:
        raise CheckpointError(where, str(error)) from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(where, f"config.json: sizes cannot be read: {error!r}") from None
    required = ("layers", "hidden", "heads", "groups", "head_dim", "vocab", "moe_ffn" if dims.experts else "ffn")
    optional = {name: getattr(dims, name) for name in ("experts", "moe_ffn", "shared_ffn", "mtp")} | dict(dims.sizes)
    for name, value in (optional | {name: getattr(dims, name) for name in required}).items():
        minimum = 1 if name in required else 0
        if type(value) is not int or not minimum <= value < 1 << 40:
            raise CheckpointError(
                where, f"config.json: the size '{name}' is {value!r}, not a whole number of at least {minimum}"
            )
    if (dims.layers + dims.mtp) * max(1, dims.experts) > _LARGEST:
        raise CheckpointError(where, f"config.json: {dims.layers} layers of {dims.experts} experts are too many")
    return dims


def spec_bytes(spec: TensorSpec) -> int:
    """Size in bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return prod(shape) * dtype.itemsize
