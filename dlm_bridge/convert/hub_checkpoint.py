"""A Hub folder, and a live PreTrainedModel, as checkpoints."""

from __future__ import annotations

import copy
import json
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, HubSide, TensorSpec, first_of, open_family
from dlm_bridge.convert.collector import collector_paused
from dlm_bridge.convert.formats.fp8 import DequantisedReader
from dlm_bridge.convert.formats.huggingface import HubReader
from dlm_bridge.convert.hub import read_config, resolve
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.side_files import inside, list_side_files
from dlm_bridge.convert.streaming import Part, Region
from dlm_bridge.convert.tensors import SAFETENSORS_NAMES, dtype_name
from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "config.json"
_NAMED = 5  # missing tensors are looked for no further: a wrong config can ask for millions


class ByNameCheckpoint(Checkpoint):
    """A checkpoint whose tensors lie under their Hub names."""

    _stored: dict[str, TensorSpec]

    @abstractmethod
    def _tensor(self, name: str) -> torch.Tensor:
        """One of `_stored`."""

    def spec(self, name: str) -> TensorSpec:
        return self._stored[name]

    def read_link(self, link: Link) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensor(name) for name in link.hub_names)

    def read_each(self, link: Link) -> Iterator[torch.Tensor]:
        return (self._tensor(name) for name in link.hub_names)

    def read_carried(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def check(self) -> list[str]:
        stored = self._stored
        missing = []
        for name, _ in self._expected():
            if name not in stored:
                missing.append(name)
                if len(missing) == _NAMED:
                    break
        if missing:
            raise DlmBridgeError(f"{self.where}: tensor {first_of(missing)} is missing")
        expected = dict(self._expected())
        extra = stored.keys() - expected.keys() - self.carried.keys()
        if extra:
            raise DlmBridgeError(
                f"{self.where}: tensor {first_of(extra)} is not part of a {self.family.name} model of this config"
            )
        for name, copied in self.carried.items():
            if copied.copy_of:
                expected[name] = expected[copied.copy_of]
        for name, shape in expected.items():
            if stored[name][1] != shape:
                raise DlmBridgeError(
                    f"{self.where}: tensor {name} has shape {list(stored[name][1])}, the config asks for {list(shape)}"
                )
        return list(self.notes)

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for link in self.mapping.links(self.dims):
            yield from zip(link.hub_names, link.hub_shapes, strict=True)


class HubCheckpoint(ByNameCheckpoint):
    """A Hub folder. Raises DlmBridgeError for everything that HubReader does, and for an unknown family.

    With `dequantize_fp8` block-scaled FP8 weights are bfloat16 ones, and config.json no longer names the quantisation.
    """

    format = "huggingface"

    def __init__(
        self,
        folder: Path,
        family: str | None = None,
        source: dict[str, Any] | None = None,
        dequantize_fp8: bool = False,
    ) -> None:
        config = read_config(inside(folder, CONFIG) if (folder / CONFIG).exists() else folder / CONFIG)
        spec = open_family(config, family, f"{folder / CONFIG}")
        self.folder = folder
        texts = {}
        self.reader = DequantisedReader(folder, config) if dequantize_fp8 else HubReader(folder)
        if dequantize_fp8:
            config = {key: value for key, value in config.items() if key != "quantization_config"}
            texts[CONFIG] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        entries = [self.reader.entry(name) for name in self.reader.names]
        self._stored = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        files = list_side_files(folder, self.reader.weight_files())
        hub = HubSide(
            family=spec,
            config=config,
            source=source or {"name": str(folder), "revision": None},
            folder=folder,
            files=files.carried,
            left_out=files.left_out,
            texts=texts,
            shards=self.reader.shards(),
            dtypes={entry.name: entry.dtype for entry in entries},
        )
        super().__init__(str(folder), hub)
        if isinstance(self.reader, DequantisedReader):
            self.notes.append(f"{len(self.reader.quantised)} FP8 tensors are dequantised to bfloat16")
        self._drop_absent_mtp(lambda link: any(name in self._stored for name in link.hub_names))
        known = self.mapping.carried_names(self.dims)
        hub.carried = tuple(name for name in self.reader.names if name in known)

    def _tensor(self, name: str) -> torch.Tensor:
        return self.reader.read(name)

    def streams(self, link: Link) -> bool:
        dtypes = {self.reader.stored_dtype(name) for name in link.hub_names}
        return link.hub_rows is not None and dtypes == {self.spec(link.hub_names[0])[0]}

    def regions(self, link: Link) -> list[Region]:
        assert link.hub_rows is not None
        return [self.reader.region(name, Part(rows)) for name, rows in zip(link.hub_names, link.hub_rows, strict=True)]

    def folders(self) -> list[Path]:
        return [self.folder]


class LiveCheckpoint(ByNameCheckpoint):
    """A PreTrainedModel in memory, under its Hub names. Its tensors are shared, not copied."""

    format = "live"

    def __init__(self, model: PreTrainedModel, family: str | None = None) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._tensors: dict[str, torch.Tensor] = dict(revert_weight_conversion(model, _state(model)))
        config, text = _config_of(model)
        where = f"the live {type(model).__name__}"
        # A model of this package knows its family, also where its config cannot tell (DiffuLLaMA's is Llama's).
        family = family or getattr(getattr(type(model), "family", None), "name", None)
        spec = open_family(config, family, where)
        super().__init__(where, HubSide(spec, config, {"name": where, "revision": None}, texts={CONFIG: text}))
        self._drop_absent_mtp(lambda link: any(name in self._tensors for name in link.hub_names))
        for name, entry in self.mapping.carried_names(self.dims).items():
            if entry.copy_of:  # a tied head: the state dict names one parameter twice
                self._tensors.pop(name, None)
        self.hub.carried = tuple(name for name in self.mapping.carried_names(self.dims) if name in self._tensors)
        self.hub.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._stored = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in SAFETENSORS_NAMES:
                raise DlmBridgeError(f"{where}: tensor {name} has dtype {dtype_name(tensor.dtype)}, no weight's dtype")
            if tensor.device.type == "meta":
                raise DlmBridgeError(f"{where}: tensor {name} is on the meta device: it has no values")

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().cpu()

    def folders(self) -> list[Path]:
        return []


@collector_paused()
def open_hub(
    name: str | Path, revision: str | None = None, family: str | None = None, dequantize_fp8: bool = False
) -> HubCheckpoint:
    """Open a local folder or a Hub id. Raises DlmBridgeError."""
    folder = resolve(name, revision)
    source = {"name": str(folder.absolute()) if folder == Path(name).expanduser() else str(name), "revision": revision}
    if folder.parent.name == "snapshots":  # the Hub's cache names a snapshot by its commit
        source["revision"] = folder.name
    return HubCheckpoint(folder, family, source, dequantize_fp8)


def _state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dict without a tied weight's second name, which transformers would not turn back into a Hub name."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    again = names - {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}


def _config_of(model: PreTrainedModel) -> tuple[dict[str, Any], bytes]:
    """config.json as save_pretrained would write it for this model, as a dict and as bytes."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        path = Path(folder) / CONFIG
        return read_config(path), path.read_bytes()
