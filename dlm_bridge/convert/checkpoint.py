"""The `Checkpoint` interface: a model's tensors by their Hub names, and what is known of the files that hold them.

Every kind of checkpoint (checkpoints/) implements it, so that planning, transfer, verify and inspect never ask which
kind they have.
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
from dlm_bridge.errors import DlmBridgeError, first_of
from dlm_bridge.hub import CONFIG_FILE, with_dtype
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Mapping, ParamMapping, Passthrough
from dlm_bridge.models.families import FamilySpec

if TYPE_CHECKING:
    import torch  # imported where tensors are moved: headers alone must not cost that

    from dlm_bridge.convert.optimizer_state import OptimizerState

_LARGEST = 10**6  # layers times experts; a hostile config must not ask for more names than memory holds
_MAX_NAMED = 5  # missing tensors are looked for no further: a wrong config can ask for millions
TensorSpec = tuple["torch.dtype", tuple[int, ...]]


@dataclass(frozen=True)
class Derived:
    """One key of a derived config: its value, and the setting (or the assumption) that it follows from."""

    key: str
    value: Any
    origin: str
    assumed: bool = False


@dataclass
class HubMetadata:
    """What a checkpoint knows of its Hub side besides the tensors."""

    family: FamilySpec
    config: dict[str, Any]
    source: dict[str, Any]  # name and revision, as the manifest records them
    folder: Path | None = None  # where the side files lie
    files: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # files that are left out, as reported
    texts: dict[str, bytes] = field(default_factory=dict)  # side files that lie nowhere: name -> content
    shards: list[ShardRecord] = field(default_factory=list)  # the Hub's own shard map, where known
    passthrough: tuple[str, ...] = ()  # passthrough tensors of a checkpoint that does not store them by name
    shared: dict[str, str] = field(default_factory=dict)  # of them those that became copies: name -> of which tensor
    dtypes: MappingType[str, torch.dtype] = field(
        default_factory=dict
    )  # of the Hub tensors when imported, where known
    derived: tuple[Derived, ...] = ()  # how `config` was made, where the checkpoint names no Hub model

    def config_bytes(self, dtype: torch.dtype | None = None) -> bytes:
        """config.json in the Hub's spelling, with its dtype field set where the weights are cast to `dtype`."""
        data = self.texts.get(CONFIG_FILE)
        if data is None:
            assert self.folder is not None
            data = (self.folder / CONFIG_FILE).read_bytes()
        text = self.family.published_config(data.decode("utf-8"))
        return (text if dtype is None else with_dtype(text, dtype_name(dtype))).encode("utf-8")


@dataclass(frozen=True)
class RawTensor:
    """A stored tensor as it is, whatever it belongs to."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint(ABC):
    """One checkpoint of any kind. Opening it reads configuration and headers, no tensor.

    Family, mapping and sizes are looked up when they are first asked for (`bind` does so at once), so that files can
    be listed and compared also where nothing names a supported model.
    """

    format: ClassVar[str]
    writable: ClassVar[bool] = False  # whether `plan_output` can write it as a Megatron checkpoint
    root: Path | None = None  # the folder that dlm_bridge.json describes
    folder: Path | None = None  # the folder of the weights
    iteration: str | None = None  # a Megatron checkpoint's, by its folder: "iter_0000000" or "release"
    step: int | str | None = None  # the iteration as the checkpoint itself counts it
    layout: dict[str, Any] | None = None  # parallel sizes, where files or saved arguments show them
    names_model: bool = True  # False: nothing beside the tensors says for sure which model it is

    def __init__(self, where: str, hub: HubMetadata | None = None) -> None:
        self.where = where  # for messages
        self.notes: list[str] = []  # for the report
        if hub is not None:
            self.hub = hub

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder is a checkpoint of this kind."""
        return False

    @classmethod
    def open(cls, path: Path, folder: Path, family: str | None = None) -> Checkpoint:
        """The checkpoint `path`; `folder` is its newest iteration's, if it has any. Raises DlmBridgeError."""
        raise NotImplementedError

    @classmethod
    def plan_output(cls, request: OutputRequest) -> tuple[dict[str, int], Callable[[Path], CheckpointWriter]]:
        """Lay out a checkpoint of this kind before any tensor is read: the bytes of its files below the iteration's
        folder, and what writes it there. Raises DlmBridgeError."""
        raise NotImplementedError

    # The model.

    @cached_property
    def hub(self) -> HubMetadata:
        """Its Hub side. Raises DlmBridgeError where nothing names the model."""
        return self._hub_metadata()

    def _hub_metadata(self) -> HubMetadata:
        raise NotImplementedError

    def adopt(self, other: Checkpoint) -> None:
        """Take the Hub side of `other` in place of its own, before anything else is asked for."""
        self.hub = replace(other.hub, dtypes={}, passthrough=tuple(other.passthrough))

    def bind(self) -> Self:
        """Look the model up now. Raises DlmBridgeError where nothing names it, or its config is not supported."""
        _ = self.dims
        return self

    @property
    def family(self) -> FamilySpec:
        return self.hub.family

    @property
    def config(self) -> dict[str, Any]:
        """The Hub's config.json."""
        return self.hub.config

    @property
    def mapping(self) -> Mapping:
        return self.family.mapping

    @cached_property
    def dims(self) -> Dims:
        """The model's sizes. A checkpoint without any multi-token prediction layer is whole too: transformers drops
        them."""
        dims = self.config_dims
        if dims.mtp and not any(self.has(param) for param in self.mapping.params(dims) if param.is_mtp):
            self.notes.append(f"no multi-token prediction layer is there, though the config says {dims.mtp}")
            return replace(dims, mtp=0)
        return dims

    @cached_property
    def config_dims(self) -> Dims:
        """The sizes that config.json says."""
        return checked_dims(self.mapping, self.config, self.where)

    @cached_property
    def params(self) -> list[ParamMapping]:
        """Every parameter of the model."""
        return list(self.mapping.params(self.dims))

    @cached_property
    def param_of(self) -> dict[str, ParamMapping]:
        """Hub name -> the parameter that it belongs to."""
        return {name: param for param in self.params for name in param.hub_names}

    @cached_property
    def passthrough(self) -> dict[str, Passthrough]:
        """The passthrough tensors that this model has."""
        known = self.mapping.passthrough_names(self.dims)
        found = {name: known[name] for name in self.hub.passthrough if name in known}
        copies = {name: other for name, other in self.hub.shared.items() if name in found}
        return found | {name: replace(found[name], copy_of=other) for name, other in copies.items()}

    @property
    def derived(self) -> dict[str, str]:
        """Passthrough tensors that are not stored, since each is a copy: name -> the tensor that it copies."""
        return {}

    @property
    def shared(self) -> dict[str, str]:
        """Passthrough tensors of multi-token prediction layers, and those that a live Megatron model has in their
        place."""
        passthrough = self.passthrough
        named = {name: entry.shared_with for name, entry in passthrough.items() if entry.shared_with}
        return {name: getattr(passthrough.get(other), "copy_of", other) for name, other in named.items()}

    def hub_names(self) -> list[str]:
        """Every Hub tensor of the model."""
        return [*self.param_of, *self.passthrough]

    def check(self) -> list[str]:
        """Raise DlmBridgeError unless tensors and mapping cover each other exactly. Returns notes for the report."""
        raise NotImplementedError

    # Tensors.

    @abstractmethod
    def has(self, param: ParamMapping) -> bool:
        """Whether any tensor of a parameter is stored."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """dtype and shape of a Hub tensor."""

    def described(self, name: str) -> RawTensor:
        """A Hub tensor in plain values."""
        dtype, shape = self.spec(name)
        return RawTensor(dtype_name(dtype), shape, spec_bytes((dtype, shape)))

    def read(self, name: str) -> torch.Tensor:
        """One Hub tensor, in the dtype and shape that `spec` says."""
        if name in self.passthrough:
            return self.read_passthrough(name)
        param = self.param_of[name]
        return self.read_param(param)[param.hub_names.index(name)]

    @abstractmethod
    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        """The Hub tensors of a parameter. Raises DlmBridgeError."""

    def read_each(self, param: ParamMapping) -> Iterator[torch.Tensor]:
        """The same one by one, so that not all need to be held where they lie apart."""
        yield from self.read_param(param)

    @abstractmethod
    def read_passthrough(self, name: str) -> torch.Tensor:
        """A tensor that Megatron has no place for."""

    def streams(self, param: ParamMapping) -> bool:
        """Whether `regions` can tell where the bytes of a parameter's Megatron slice lie. Nothing is read."""
        return False

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        """Where they lie, in the one dtype that all of the parameter's tensors then have. Raises DlmBridgeError."""
        raise NotImplementedError

    def read_elements(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a Hub tensor in row-major order, in one dimension and the dtype that `spec`
        says. Where `regions` can tell where they lie, only the rows that hold them are read. Raises DlmBridgeError."""
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
        """Its dlm_bridge.json. Raises DlmBridgeError for a broken one."""
        return None if self.root is None else read_manifest(self.root)

    @property
    def record(self) -> Manifest | None:
        """The manifest that recorded these weights when they were written."""
        manifest = self.manifest
        return manifest if manifest is not None and manifest.iteration == self.iteration else None

    def stored_record(self, name: str) -> TensorRecord | None:
        """What was read of a tensor that this checkpoint changes before it gives it out; None: it gives what it
        reads."""
        return None

    def damaged_files(self, workers: int | None = None) -> list[ChangedFile]:
        """The weight files of a training run's checkpoint that are not as the digests beside them say; reads them.
        Raises DlmBridgeError where the digests cannot be read."""
        if self.folder is None or not (self.folder / FILE_DIGESTS).is_file():
            return []
        return check_files(self.folder, workers, only=self.files())

    @abstractmethod
    def folders(self) -> list[Path]:
        """The folders that are read, which no output may touch."""

    def files(self) -> dict[str, int]:
        """The files that hold tensors, below `folder`, and their bytes."""
        return {}

    def stored_tensors(self) -> dict[str, RawTensor]:
        """Every stored tensor, the training state's too, by the names that the format gives."""
        return {name: self.described(name) for name in self.hub_names()}

    def use_averages(self) -> None:
        """Read a run's averaged weights in place of its weights. Raises DlmBridgeError where it has none."""
        raise DlmBridgeError(f"{self.where}: has no averaged weights (--ema-decay of a Megatron run): leave --ema out")

    def training_state(self) -> list[str]:
        """The keys of a training run's state: optimizer, random generators."""
        return []

    def optimizer_state(self, padded: Sequence[ParamMapping], format_: str) -> OptimizerState | None:
        """The optimizer's state that goes into a checkpoint of `padded` parameters, None where there is none.

        Raises DlmBridgeError for a state that cannot be cut anew; --weights-only is the way without it.
        """
        from dlm_bridge.convert.optimizer_state import is_optimizer_key

        if any(map(is_optimizer_key, self.training_state())):
            raise DlmBridgeError(
                f"{self.where}: an optimizer's state goes from torch_dist to torch_dist only: give --weights-only to "
                "leave the optimizer's state out"
            )
        return None

    # For comparisons: what is there, whole or not.

    def stored_specs(self) -> dict[str, TensorSpec]:
        """The Hub tensors that are there, whether or not they are all of the model's."""
        return {name: self.spec(name) for name in self.hub_names()}

    def read_group(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Stored Hub tensors of one `group_of`. Raises DlmBridgeError for those that are not whole."""
        return {name: self.read(name) for name in names}

    def group_of(self, name: str) -> str:
        """Names with the same value lie in one stored tensor and are best read together."""
        return name

    def unmapped(self) -> list[str]:
        """Stored tensors that belong to no Hub tensor and to no training state."""
        return []

    def differing_copies(self) -> list[tuple[str, str]]:
        """(tensor, what is wrong) of every parameter that several ranks hold and that is not the same in all."""
        return []

    def changed_files(self, manifest: Manifest) -> list[str]:
        """Weight files whose bytes around the tensors are not what the manifest says."""
        return []


class ByNameCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie under their Hub names, listed in `_stored`."""

    _stored: MappingType[str, TensorSpec]

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """One of `_stored`."""

    def has(self, param: ParamMapping) -> bool:
        return any(name in self._stored for name in param.hub_names)

    def spec(self, name: str) -> TensorSpec:
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """That of a stored tensor."""
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
            raise DlmBridgeError(f"{self.where}: tensor {first_of(missing)} is missing")
        expected = dict(self._expected())
        extra = self._stored.keys() - expected.keys() - self.passthrough.keys()
        if extra:
            raise DlmBridgeError(
                f"{self.where}: tensor {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        for name, entry in self.passthrough.items():
            if entry.copy_of:
                expected[name] = expected[entry.copy_of]
        for name, shape in expected.items():
            found = self.shape(name)
            if found != shape:
                raise DlmBridgeError(
                    f"{self.where}: tensor {name} has shape {list(found)}, the config asks for {list(shape)}"
                )
        return list(self.notes)

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for param in self.mapping.params(self.dims):
            yield from zip(param.hub_names, param.hub_shapes, strict=True)


class CheckpointWriter(Protocol):
    """Writes slices in any order and from any thread or process."""

    def write(self, param: ParamMapping, bands: Bands) -> list[str]:
        """Put a parameter's whole slice in its places; returns digests for `has` and `note`."""

    def has(self, param: ParamMapping, digests: Sequence[str]) -> bool:
        """Whether an earlier run put it there."""

    def note(self, param: ParamMapping, digests: Sequence[str]) -> None:
        """The slice is there; every one must be noted in the process that finishes."""

    def finish(self, iteration: int) -> dict[str, str]:
        """Complete the checkpoint; digests of its files."""


@dataclass(frozen=True)
class OutputRequest:
    """A Megatron checkpoint to lay out: `params` have their vocabulary padded, `dtypes` go by their keys."""

    source: Checkpoint
    params: Sequence[ParamMapping]
    layout: Layout
    dtypes: dict[str, torch.dtype]
    iteration: int
    key_style: str
    state: OptimizerState | None = None


def checked_dims(mapping: Mapping, config: dict[str, Any], where: str) -> Dims:
    """The sizes of a config, every one a positive whole number. Raises DlmBridgeError naming the config."""
    try:
        dims = mapping.dims(config)
    except DlmBridgeError as error:
        raise DlmBridgeError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise DlmBridgeError(f"{where}: config.json: sizes cannot be read: {error!r}") from None
    feed_forward = ("moe_ffn",) if dims.experts else ("ffn",)
    for name in ("layers", "hidden", "heads", "groups", "head_dim", "vocab", *feed_forward):
        value = getattr(dims, name)
        if type(value) is not int or not 0 < value < 1 << 40:
            raise DlmBridgeError(f"{where}: config.json: the size '{name}' is {value!r}, not a positive whole number")
    optional = {name: getattr(dims, name) for name in ("experts", "moe_ffn", "shared_ffn", "mtp")} | dict(dims.sizes)
    for name, value in optional.items():
        if type(value) is not int or value < 0:
            raise DlmBridgeError(f"{where}: config.json: the size '{name}' is {value!r}, not a whole number")
    if (dims.layers + dims.mtp) * max(1, dims.experts) > _LARGEST:
        raise DlmBridgeError(f"{where}: config.json: {dims.layers} layers of {dims.experts} experts cannot be")
    return dims


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return prod(shape) * dtype.itemsize
