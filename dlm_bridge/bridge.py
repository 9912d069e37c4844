"""`Bridge`: converts a model between the Hub's layout and Megatron's, on disk or in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints import PathLike, open_megatron
from dlm_bridge.convert.checkpoints.huggingface import open_hub
from dlm_bridge.convert.checkpoints.in_memory import InitialCheckpoint, LiveCheckpoint
from dlm_bridge.convert.planning import ConversionReport
from dlm_bridge.convert.settings import (
    ExportSettings,
    HubSourceSettings,
    MegatronSettings,
    MegatronSourceSettings,
    settings_from,
    takes,
)
from dlm_bridge.convert.transfer import write_hub, write_megatron
from dlm_bridge.errors import CheckpointError
from dlm_bridge.files.reading import reading
from dlm_bridge.mapping.dtypes import parse_dtype, promote
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.registration import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Bridge:
    """Weights of one model, addressed by their Hub names, and their conversion to Megatron or to the Hub.

    Opening a checkpoint reads only its configuration and headers. For bad input every method raises a subclass of
    DlmBridgeError, with a one-line message.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @classmethod
    @takes(HubSourceSettings)
    def from_hf(
        cls, path_or_id: PathLike, revision: str | None = None, family: str | None = None, **settings: Any
    ) -> Bridge:
        """Open a Hub folder or a Hub id.

        Args:
            path_or_id: Hub folder or Hub id.
            revision: branch, tag or commit of a Hub id.
            family: the model family, if config.json does not identify it.
            settings: the other fields of `HubSourceSettings`.
        """
        chosen = settings_from(HubSourceSettings, revision=revision, family=family, **settings)
        return cls(open_hub(path_or_id, chosen))

    @classmethod
    def from_model(cls, hf_model: PreTrainedModel, family: str | None = None) -> Bridge:
        """Open a model in memory. Its parameters are shared: each read returns their current values."""
        return cls(LiveCheckpoint(hf_model, family))

    @classmethod
    def from_scratch(cls, folder: PathLike, seed: int, family: str | None = None) -> Bridge:
        """Open a folder with only a config.json, for a model with newly initialised weights.

        Each weight is initialised when it is read, in fp32, by the family's rule. Its values depend only on `seed` and
        its Hub name, so every layout and both engines start from the same values.
        """
        return cls(InitialCheckpoint(folder, seed, family))

    @classmethod
    @takes(MegatronSourceSettings)
    def from_megatron(
        cls,
        root: PathLike,
        like: PathLike | None = None,
        hf_config: PathLike | None = None,
        family: str | None = None,
        **settings: Any,
    ) -> Bridge:
        """Open a Megatron checkpoint of any format, or a plain torch distributed checkpoint.

        Args:
            root: folder of the checkpoint.
            like: Hub folder or id of the same model, for a checkpoint that was not written by dlm-bridge.
            hf_config: a config.json, instead of `like`.
            family: the model family, if the config does not identify it.
            settings: the other fields of `MegatronSourceSettings`.

        Raises:
            CheckpointError: not such a checkpoint, or an adapter without its base.
        """
        from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST

        if (Path(root) / ADAPTER_MANIFEST).is_file():
            raise CheckpointError(
                root, "is an adapter without its base: merge it with its base first (dlm-bridge adapter export)"
            )
        chosen = settings_from(MegatronSourceSettings, like=like, hf_config=hf_config, family=family, **settings)
        return cls(open_megatron(root, chosen.like, chosen.hf_config, chosen.family, chosen.ema))

    @property
    def family(self) -> FamilySpec:
        return self.checkpoint.family

    @property
    def config(self) -> dict[str, Any]:
        """Contents of the Hub's config.json."""
        return self.checkpoint.config

    @property
    def mapping(self) -> Mapping:
        return self.checkpoint.mapping

    @property
    def dims(self) -> Dims:
        return self.checkpoint.dims

    def hub_names(self) -> list[str]:
        """Names of all Hub tensors."""
        return self.checkpoint.hub_names()

    def read(self, hub_name: str) -> torch.Tensor:
        """Read one whole Hub tensor, in its stored dtype, to the CPU."""
        return self.checkpoint.read(hub_name)

    @takes(MegatronSettings)
    def to_megatron(
        self,
        output: PathLike,
        layout: Layout | None = None,
        dtype: str | torch.dtype | None = None,
        **settings: Any,
    ) -> ConversionReport:
        """Write a Megatron checkpoint.

        Args:
            output: folder to write.
            layout: parallel layout; None: one rank.
            dtype: "keep" (also None), "bf16", "fp16", "fp32" or a torch dtype.
            settings: the other fields of `MegatronSettings` and `ConversionSettings`.

        Raises:
            ChangedTensorsError: tensors differ from their recorded digests, without `accept_changed_tensors`.
            CheckpointError: the source is incomplete or does not match its family.
            LayoutError: the model does not fit the layout.
            SettingError: a setting is refused.
        """
        chosen = settings_from(MegatronSettings, layout=layout or Layout(), dtype=dtype, **settings)
        return write_megatron(self.checkpoint, Path(output), chosen)

    @takes(ExportSettings)
    def to_hf(self, output: PathLike, dtype: str | torch.dtype | None = None, **settings: Any) -> ConversionReport:
        """Write a Hub folder, or with `to="gguf"` a GGUF file.

        Args:
            output: folder or file to write.
            dtype: "keep" (also None), "bf16", "fp16", "fp32" or a torch dtype.
            settings: the other fields of `ExportSettings` and `ConversionSettings`.

        Raises the errors of `to_megatron`.
        """
        chosen = settings_from(ExportSettings, dtype=dtype, **settings)
        write = write_hub if chosen.feature is None else load("features", chosen.feature)
        report: ConversionReport = write(self.checkpoint, Path(output), chosen)
        return report

    @property
    def code_place(self) -> str:
        """`name_or_path` of a model with these weights: folder of the code that the config's auto_map names, which
        `save_pretrained` copies; "" if there is none."""
        return str(self.checkpoint.hub.folder or "")

    def build_hf_model(
        self, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
    ) -> PreTrainedModel:
        """Build a PreTrainedModel with these weights, in eval mode.

        Args:
            dtype: dtype of the model; None: the stored dtype (if dtypes are mixed, one that represents all of them).
            device: device of the model; None: CPU.

        Raises:
            CheckpointError: the checkpoint does not contain all parameters of the model.
        """
        self.checkpoint.check()
        state = dict(self._tensors())
        own = {name for param in self.checkpoint.params if param.rule.own_dtype for name in param.hub_names}
        wanted = parse_dtype(dtype) or promote([tensor.dtype for name, tensor in state.items() if name not in own])
        with reading(self.checkpoint.where, "the model cannot be built from its config"):
            config = self.family.load("config_class").from_dict(self.config)
            model, info = self.family.load("model_class").from_pretrained(
                None, config=config, state_dict=state, dtype=wanted, output_loading_info=True
            )
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info.get(problem):
                found = sorted(map(str, info[problem]))[0]
                raise CheckpointError(self.checkpoint.where, f"{problem.replace('_', ' ')}: {found}")
        model.config.name_or_path = self.code_place
        return model if device is None else model.to(device)

    def build_megatron_model(
        self, layout: Layout, dtype: str | torch.dtype | None = None, **overrides: Any
    ) -> list[Any]:
        """Build this rank's megatron-core GPTModel chunks and load the weights; see `parallel.parallelize`."""
        return load("engines", "megatron")().build_model(self.checkpoint, layout, dtype, **overrides)

    def refresh_hf_model(self, hf_model: PreTrainedModel, megatron_model: Any) -> None:
        """Copy the weights of a Megatron model into `hf_model` in place; see `parallel.handover`."""
        load("engines", "megatron")().refresh_hf_model(self.checkpoint, hf_model, megatron_model)

    def stream_hf_weights(self, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a Megatron model under their Hub names, one at a time; see `parallel.handover`."""
        return load("engines", "megatron")().stream_hf_weights(self.checkpoint, megatron_model)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every Hub tensor of the transformers model once, without copies of other tensors."""
        for param in self.checkpoint.params:
            if param.is_mtp:
                continue
            yield from zip(param.hub_names, self.checkpoint.read_param(param), strict=True)
        for name, entry in self.checkpoint.passthrough.items():
            if entry.in_model and not entry.copy_of:
                yield name, self.checkpoint.read(name)
