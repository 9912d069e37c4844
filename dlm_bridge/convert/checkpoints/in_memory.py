"""Checkpoints without weight files: a live PreTrainedModel, and a newly initialised model."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.checkpoint import ByNameCheckpoint, HubMetadata
from dlm_bridge.convert.checkpoints.huggingface import list_side_files
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.files.atomic import temporary_folder
from dlm_bridge.hub import CONFIG_FILE, read_config
from dlm_bridge.mapping.dtypes import SAFETENSORS_NAMES, dtype_name
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.families import find_family
from dlm_bridge.models.initialisation import InitialisationRule, initialise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LiveCheckpoint(ByNameCheckpoint):
    """PreTrainedModel in memory, by Hub names. Its tensors are shared, not copied."""

    format = "live"

    def __init__(self, model: PreTrainedModel, family: str | None = None) -> None:
        self._tensors = hub_tensors(model, {name: tensor.detach() for name, tensor in stored_tensors(model)})
        self._stored = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}
        config, text = _config_of(model)
        where = f"the live {type(model).__name__}"
        # A model of this package has its family, which its config may not identify (DiffuLLaMA's is Llama's).
        family = family or getattr(getattr(type(model), "family", None), "name", None)
        spec = find_family(config, family, where)
        super().__init__(
            where, HubMetadata(spec, config, {"name": where, "revision": None}, texts={CONFIG_FILE: text})
        )
        for name, entry in self.mapping.passthrough_names(self.dims).items():
            # A tied parameter has one name here, possibly the copy's.
            if entry.copy_of and (tensor := self._tensors.pop(name, None)) is not None:
                stored = self._stored.pop(name)
                self._tensors.setdefault(entry.copy_of, tensor)
                self._stored.setdefault(entry.copy_of, stored)
        self.hub.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            if tensor.dtype not in SAFETENSORS_NAMES or tensor.device.type == "meta":
                kind = "no values (meta device)" if tensor.device.type == "meta" else dtype_name(tensor.dtype)
                raise CheckpointError(where, f"tensor {name} cannot be saved: it has {kind}")

    def _tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].cpu()

    def folders(self) -> list[Path]:
        return []


def stored_tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers. A tied weight is listed once, because transformers cannot translate its
    second name back to a Hub name."""
    stored = model.state_dict().keys()
    return [*model.named_parameters(), *(each for each in model.named_buffers() if each[0] in stored)]


def hub_tensors(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hub tensors of a live model, whose class may merge several into one (experts)."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def keep_hub_names(model: PreTrainedModel) -> None:
    """Store the name conversions of a model that was not loaded: `hub_tensors` finds them by the class name, which
    FSDP changes."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = get_model_conversion_mapping(model, add_legacy=False)
    # transformers drops prefix changes, too: they belong to a checkpoint that was loaded.
    own = [conversion for conversion in found if type(conversion).__name__ != "PrefixChange"]
    vars(model)["_weight_conversions"] = own or None  # as `from_pretrained` does


def _config_of(model: PreTrainedModel) -> tuple[dict[str, Any], bytes]:
    """config.json that save_pretrained writes for this model, as a dict and as bytes."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    with temporary_folder() as folder:
        config.save_pretrained(folder)
        path = folder / CONFIG_FILE
        return read_config(path), path.read_bytes()


class InitialCheckpoint(ByNameCheckpoint):
    """Randomly initialised fp32 model of a config.json. Values depend on the seed and the tensor's Hub name alone.

    Raises:
        SettingError: `folder`, the value of `model`, has no config.json.
        CheckpointError: config.json is damaged, or no family supports it.
    """

    format = "initial"

    def __init__(self, folder: str | os.PathLike[str], seed: int, family: str | None = None) -> None:
        root = Path(folder)
        path = root / CONFIG_FILE
        if not path.is_file():
            raise SettingError("model", f"{root} has no {CONFIG_FILE}, which `from_scratch` needs")
        config = read_config(path)
        spec = find_family(config, family, str(path))
        files = list_side_files(root, ())
        hub = HubMetadata(
            family=spec,
            config=config,
            source={"name": str(root.absolute()), "revision": None},
            folder=root,
            files=files.kept,
            excluded=files.excluded,
        )
        super().__init__(str(root), hub)
        self.folder, self.seed = root, seed
        self._rule: InitialisationRule = spec.initialisation(config)
        self._stored = {name: (torch.float32, shape) for name, shape in self._expected()}
        hub.dtypes = {name: dtype for name, (dtype, _) in self._stored.items()}

    def has(self, param: ParamMapping) -> bool:
        return not param.is_mtp  # transformers' models do not have these layers

    def _tensor(self, name: str) -> torch.Tensor:
        return initialise(name, self._stored[name][1], self._rule(name), self.seed)

    def folders(self) -> list[Path]:
        assert self.folder is not None
        return [self.folder]
