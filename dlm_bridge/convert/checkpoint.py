"""The `Checkpoint` interface: a model's tensors by their Hub names, whichever format holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dlm_bridge.convert.formats.safetensors_file import ShardRecord
from dlm_bridge.convert.streaming import Bands, FileRegion
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.hub import Derived, with_dtype
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import Dims, Mapping, ParamMapping, Passthrough
from dlm_bridge.models.families import find_family
from dlm_bridge.models.family_spec import FamilySpec

if TYPE_CHECKING:
    pass


_LARGEST = 10**6  # layers times experts; a hostile config must not ask for more names than memory holds
TensorSpec = tuple[torch.dtype, tuple[int, ...]]


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
    passthrough: tuple[str, ...] = ()  # the mapping's passthrough tensors that the model has
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of the Hub tensors when imported, where known
    derived: tuple[Derived, ...] = ()  # how `config` was made, where the checkpoint names no Hub model

    def config_bytes(self) -> bytes:
        """config.json as it stands."""
        if "config.json" in self.texts:
            return self.texts["config.json"]
        assert self.folder is not None
        return (self.folder / "config.json").read_bytes()


class Checkpoint(ABC):
    """A model's tensors by Hub name. Opening one reads no tensor."""

    format: str

    def __init__(self, where: str, hub: HubMetadata) -> None:
        self.where = where  # for messages
        self.hub = hub
        self.family: FamilySpec = hub.family
        self.config: dict[str, Any] = hub.config
        self.mapping: Mapping = hub.family.mapping
        self.dims: Dims = checked_dims(self.mapping, hub.config, where)
        self.notes: list[str] = []  # for the report

    def _drop_absent_mtp(self, present: Callable[[ParamMapping], bool]) -> None:
        """A checkpoint without any of its multi-token prediction layers is whole too: transformers drops them."""
        if not self.dims.mtp:
            return
        layers = (param for param in self.mapping.params(self.dims) if param.is_mtp)
        if not any(present(param) for param in layers):
            self.notes.append(f"no multi-token prediction layer is there, though the config says {self.dims.mtp}")
            self.dims = replace(self.dims, mtp=0)

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
        return {name: known[name] for name in self.hub.passthrough if name in known}

    @property
    def derived(self) -> dict[str, str]:
        """Passthrough tensors that are not stored, since each is a copy: name -> the tensor that it copies."""
        return {}

    def hub_names(self) -> list[str]:
        """Every Hub tensor of the model."""
        return [*self.param_of, *self.passthrough]

    def read(self, name: str) -> torch.Tensor:
        """One Hub tensor, in the dtype and shape that `spec` says."""
        if name in self.passthrough:
            return self.read_passthrough(name)
        param = self.param_of[name]
        return self.read_param(param)[param.hub_names.index(name)]

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """dtype and shape of a Hub tensor."""

    @abstractmethod
    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        """The Hub tensors of a parameter. Raises DlmBridgeError."""

    def read_each(self, param: ParamMapping) -> Iterator[torch.Tensor]:
        """The same one by one, so that not all need to be held where they lie apart."""
        yield from self.read_param(param)

    def streams(self, param: ParamMapping) -> bool:
        """Whether `regions` can tell where the bytes of a parameter's Megatron slice lie. Nothing is read."""
        return False

    def regions(self, param: ParamMapping) -> list[FileRegion]:
        """Where they lie, in the one dtype that all of the parameter's tensors then have. Raises DlmBridgeError."""
        raise NotImplementedError(f"{self.format} has no files to read rows from")

    @abstractmethod
    def read_passthrough(self, name: str) -> torch.Tensor:
        """A tensor that Megatron has no place for."""

    @abstractmethod
    def check(self) -> list[str]:
        """Raise DlmBridgeError unless tensors and mapping cover each other exactly. Returns notes for the report."""

    @abstractmethod
    def folders(self) -> list[Path]:
        """The folders that are read, which no output may touch."""


def open_family(config: dict[str, Any], family: str | None, where: str) -> FamilySpec:
    """The family of a config, named by its file in errors. Raises DlmBridgeError."""
    return find_family(config, family, where)


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
    if (dims.layers + dims.mtp) * max(1, dims.experts) > _LARGEST:
        raise DlmBridgeError(f"{where}: config.json: {dims.layers} layers of {dims.experts} experts cannot be")
    return dims


def first_of(names: Iterable[str]) -> str:
    """ "a (and 3 more)": one line whatever the number of names."""
    found = sorted(names)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}"


_MAX_NAMED = 5  # missing tensors are looked for no further: a wrong config can ask for millions


class ByNameCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie under their Hub names."""

    _stored: dict[str, TensorSpec]

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """One of `_stored`."""

    def spec(self, name: str) -> TensorSpec:
        return self._stored[name]

    def read_param(self, param: ParamMapping) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensor(name) for name in param.hub_names)

    def read_each(self, param: ParamMapping) -> Iterator[torch.Tensor]:
        return (self._tensor(name) for name in param.hub_names)

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def check(self) -> list[str]:
        stored = self._stored
        missing = []
        for name, _ in self._expected():
            if name not in stored:
                missing.append(name)
                if len(missing) == _MAX_NAMED:
                    break
        if missing:
            raise DlmBridgeError(f"{self.where}: tensor {first_of(missing)} is missing")
        expected = dict(self._expected())
        extra = stored.keys() - expected.keys() - self.passthrough.keys()
        if extra:
            raise DlmBridgeError(
                f"{self.where}: tensor {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        for name, entry in self.passthrough.items():
            if entry.copy_of:
                expected[name] = expected[entry.copy_of]
        for name, shape in expected.items():
            if stored[name][1] != shape:
                raise DlmBridgeError(
                    f"{self.where}: tensor {name} has shape {list(stored[name][1])}, the config asks for {list(shape)}"
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


def config_bytes(source: Checkpoint, dtype: torch.dtype | None) -> bytes:
    """The source's config.json, with its dtype field set where the weights were cast."""
    data = source.hub.config_bytes()
    return data if dtype is None else with_dtype(data.decode("utf-8"), dtype_name(dtype)).encode("utf-8")
