"""One view of a model's tensors by their Hub names, whichever format holds them: what every conversion reads from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.derive import Derived
from dlm_bridge.convert.manifest import ShardRecord
from dlm_bridge.convert.mapping import Carried, Dims, Link, Mapping
from dlm_bridge.convert.streaming import Region
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models import find_family
from dlm_bridge.models.spec import FamilySpec

_LARGEST = 10**6  # layers times experts; a hostile config must not ask for more names than memory holds
TensorSpec = tuple[torch.dtype, tuple[int, ...]]


@dataclass
class HubSide:
    """What a checkpoint knows of its Hub side besides the tensors."""

    family: FamilySpec
    config: dict[str, Any]
    source: dict[str, Any]  # name and revision, as the manifest records them
    folder: Path | None = None  # where the side files lie
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    texts: dict[str, bytes] = field(default_factory=dict)  # side files that lie nowhere: name -> content
    shards: list[ShardRecord] = field(default_factory=list)  # the Hub's own shard map, where known
    carried: tuple[str, ...] = ()  # the mapping's carried tensors that the model has
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

    def __init__(self, where: str, hub: HubSide) -> None:
        self.where = where  # for messages
        self.hub = hub
        self.family: FamilySpec = hub.family
        self.config: dict[str, Any] = hub.config
        self.mapping: Mapping = hub.family.load("mapping")
        self.dims: Dims = checked_dims(self.mapping, hub.config, where)
        self.notes: list[str] = []  # for the report

    def _drop_absent_mtp(self, present: Callable[[Link], bool]) -> None:
        """A checkpoint without any of its multi-token prediction layers is whole too: transformers drops them."""
        if not self.dims.mtp:
            return
        layers = (link for link in self.mapping.links(self.dims) if link.is_mtp)
        if not any(present(link) for link in layers):
            self.notes.append(f"no multi-token prediction layer is there, though the config says {self.dims.mtp}")
            self.dims = replace(self.dims, mtp=0)

    @cached_property
    def links(self) -> list[Link]:
        """Every link of the model."""
        return list(self.mapping.links(self.dims))

    @cached_property
    def link_of(self) -> dict[str, Link]:
        """Hub name -> the link that it belongs to."""
        return {name: link for link in self.links for name in link.hub_names}

    @cached_property
    def carried(self) -> dict[str, Carried]:
        """The carried tensors that this model has."""
        known = self.mapping.carried_names(self.dims)
        return {name: known[name] for name in self.hub.carried if name in known}

    @property
    def derived(self) -> dict[str, str]:
        """Carried tensors that are not stored, since each is a copy: name -> the tensor that it copies."""
        return {}

    def hub_names(self) -> list[str]:
        """Every Hub tensor of the model."""
        return [*self.link_of, *self.carried]

    def read(self, name: str) -> torch.Tensor:
        """One Hub tensor, in the dtype and shape that `spec` says."""
        if name in self.carried:
            return self.read_carried(name)
        link = self.link_of[name]
        return self.read_link(link)[link.hub_names.index(name)]

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """dtype and shape of a Hub tensor."""

    @abstractmethod
    def read_link(self, link: Link) -> tuple[torch.Tensor, ...]:
        """The Hub tensors of a link. Raises DlmBridgeError."""

    def read_each(self, link: Link) -> Iterator[torch.Tensor]:
        """The same one by one, so that not all need to be held where they lie apart."""
        yield from self.read_link(link)

    def streams(self, link: Link) -> bool:
        """Whether `regions` can tell where the bytes of a link's Megatron slice lie. Nothing is read."""
        return False

    def regions(self, link: Link) -> list[Region]:
        """Where they lie, in the one dtype that all of the link's tensors then have. Raises DlmBridgeError."""
        raise NotImplementedError(f"{self.format} has no files to read rows from")

    @abstractmethod
    def read_carried(self, name: str) -> torch.Tensor:
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
