"""Megatron's formats before the model is known."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from dlm_bridge.convert.checkpoints.fsdp_dtensor import PerLayerReader, fsdp_names, read_fsdp, singleton_names
from dlm_bridge.convert.checkpoints.legacy import LegacyFiles, LegacyReader, is_legacy, open_legacy
from dlm_bridge.convert.checkpoints.torch_dist import TRACKER, TorchDistReader, iteration_folder
from dlm_bridge.convert.formats.chunked_reader import ChunkedReader
from dlm_bridge.convert.formats.dcp_metadata import DCP_METADATA, Contents
from dlm_bridge.convert.formats.torch_dist_writer import object_item
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping

_EMBEDDING = re.compile(r"^(?!optimizer|chained).*\bembedding\.word_embeddings\.weight$")
_BACKEND = "metadata.json"  # which torch_dist has and torch's own writer leaves out


@dataclass(frozen=True)
class RawTensor:
    """A stored tensor as it is, whatever it belongs to."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Store(ABC):
    """One iteration's files. `common` is what is not a tensor, with `args` as a plain dict."""

    format: str

    def __init__(self, folder: Path, common: dict[str, Any]) -> None:
        self.folder = folder
        self.common = common

    @abstractmethod
    def reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        """The tensors by the keys of `params`. Raises DlmBridgeError where they cannot be these params'."""

    @abstractmethod
    def tensors(self) -> dict[str, RawTensor]:
        """Every stored tensor, the training state's too; by the names that the format gives."""

    def embedding(self) -> tuple[int | None, str]:
        """Rows of the stored embedding over all ranks (None where there is none), and its dtype's name."""
        found = [t for name, t in self.tensors().items() if _EMBEDDING.search(name) and len(t.shape) == 2]
        return (found[0].shape[0], found[0].dtype) if found else (None, "float32")

    @abstractmethod
    def objects(self) -> Iterable[str]:
        """The names of what is stored beside the tensors."""

    @abstractmethod
    def histories(self) -> list[str]:
        """The modules with an extra state that has content, such as an FP8 scaling history."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """The files that hold tensors, and their bytes."""

    @property
    def layout(self) -> dict[str, Any] | None:
        """The parallel sizes, where files or saved arguments show them."""
        args = self.common.get("args")
        if not isinstance(args, dict) or "tensor_model_parallel_size" not in args:
            return None
        return {
            short: args.get(name)
            for short, name in (
                ("tp", "tensor_model_parallel_size"),
                ("pp", "pipeline_model_parallel_size"),
                ("vp", "virtual_pipeline_model_parallel_size"),
                ("ep", "expert_model_parallel_size"),
                ("etp", "expert_tensor_parallel_size"),
            )
            if args.get(name) is not None
        }


class _Distributed(Store):
    contents: Contents

    def tensors(self) -> dict[str, RawTensor]:
        return {
            key: RawTensor(t.dtype_name, t.shape, prod(t.shape) * (t.dtype.itemsize if t.dtype else 0))
            for key, t in self.contents.tensors.items()
        }

    def objects(self) -> Iterable[str]:
        return self.contents.objects

    def histories(self) -> list[str]:
        empty = len(object_item([None]))
        return [
            key for key, place in self.contents.objects.items() if "_extra_state" in key and place.length > 2 * empty
        ]

    def files(self) -> dict[str, int]:
        names = {chunk.place.file for tensor in self.contents.tensors.values() for chunk in tensor.chunks}
        return {name: (self.folder / name).stat().st_size for name in sorted(names)}


class TorchDistStore(_Distributed):
    """megatron-core's distributed checkpoint."""

    format = "torch_dist"

    def __init__(self, folder: Path) -> None:
        self._reader = TorchDistReader(folder)
        self.contents = self._reader.contents
        super().__init__(folder, self._reader.common)

    def reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        content = self.common.get("content_metadata")
        if isinstance(content, dict) and content.get("singleton_local_shards"):
            # The reader's check of tensor parallel halves is for torch's own writer: megatron-core keeps them apart.
            common = {key: value for key, value in self.common.items() if key != "args"}
            return PerLayerReader(self.folder, self.contents, common, singleton_names(self.contents), params)
        return self._reader


class FsdpStore(_Distributed):
    """What Megatron FSDP saves, `fsdp_dtensor`."""

    format = "fsdp_dtensor"

    def __init__(self, folder: Path) -> None:
        self.contents, common = read_fsdp(folder)
        self._names = fsdp_names(self.contents)
        super().__init__(folder, common)
        if not self._names:
            raise DlmBridgeError(
                f"{folder}: its tensors are not named as Megatron FSDP does (model.module.decoder...), and it has no "
                f"{_BACKEND}, as torch_dist has"
            )

    def reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        return PerLayerReader(self.folder, self.contents, self.common, self._names, params)


class LegacyStore(Store):
    """Megatron's legacy format, `torch`."""

    format = "torch"

    def __init__(self, folder: Path) -> None:
        self._files: LegacyFiles = open_legacy(folder)
        super().__init__(folder, self._files.common)

    def reader(self, params: Iterable[ParamMapping], tied: bool) -> ChunkedReader:
        return LegacyReader(self._files, params, tied)

    def tensors(self) -> dict[str, RawTensor]:
        return {name: RawTensor(dtype_name(t.dtype), t.shape, t.nbytes) for name, t in self._files.tensors()}

    def objects(self) -> Iterable[str]:
        return self._files.training_state()

    def histories(self) -> list[str]:
        return self._files.histories()

    def files(self) -> dict[str, int]:
        names = sorted(rank.file for rank in self._files.ranks.values())
        return {name: (self.folder / name).stat().st_size for name in names}

    def embedding(self) -> tuple[int | None, str]:
        rows, dtype = super().embedding()
        return (None if rows is None else rows * self._files.tp), dtype

    @property
    def layout(self) -> dict[str, Any]:
        files = self._files
        return {"tp": files.tp, "pp": files.pp, "vp": files.vp, "ep": files.ep}


def is_megatron(folder: Path) -> bool:
    """Whether a folder is (or claims to be) a Megatron checkpoint of any format, or one of its iterations."""
    if (folder / TRACKER).is_file() or ((folder / DCP_METADATA).is_file() and (folder / _BACKEND).is_file()):
        return True
    return folder.is_dir() and (is_legacy(folder) or ((folder / DCP_METADATA).is_file() and _is_fsdp(folder)))


def newest_iteration(root: Path) -> Path:
    """The folder of the newest iteration, by the tracker file; an iteration's own folder is itself.

    Raises DlmBridgeError.
    """
    return root if not (root / TRACKER).is_file() and is_legacy(root) else iteration_folder(root)


def open_store(folder: Path) -> Store:
    """Open an iteration's folder in its own format. Raises DlmBridgeError."""
    if is_legacy(folder):
        return LegacyStore(folder)
    if (folder / DCP_METADATA).is_file() and not (folder / _BACKEND).exists():
        return FsdpStore(folder)
    return TorchDistStore(folder)


def _is_fsdp(folder: Path) -> bool:
    return bool(fsdp_names(read_fsdp(folder)[0]))
