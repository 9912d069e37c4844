"""`Bridge`: converts a model between the Hub's layout and Megatron's, on disk or in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints import PathLike, open_megatron
from dlm_bridge.convert.checkpoints.huggingface import open_hub
from dlm_bridge.convert.checkpoints.in_memory import InitialCheckpoint, LiveCheckpoint
from dlm_bridge.convert.planning import ConversionReport, MegatronFormat, Options
from dlm_bridge.convert.transfer import write_hub, write_megatron
from dlm_bridge.convert.workers import Progress
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.reading import reading
from dlm_bridge.mapping.dtypes import parse_dtype, parse_size, promote
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.registration import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Bridge:
    """Weights of one model, addressed by their Hub names, and their conversion to Megatron or to the Hub.

    Opening a checkpoint reads only its configuration and headers. Every method raises DlmBridgeError, with a one-line
    message, for bad input.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @classmethod
    def from_hf(
        cls,
        path_or_id: PathLike,
        revision: str | None = None,
        family: str | None = None,
        dequantize_fp8: bool = False,
        dequantize_mxfp4: bool = False,
    ) -> Bridge:
        """Open a Hub folder or a Hub id.

        Args:
            path_or_id: Hub folder or Hub id.
            revision: branch, tag or commit of a Hub id.
            family: the model family, if config.json does not identify it.
            dequantize_fp8: read block-scaled FP8 weights as bfloat16; otherwise they are refused.
            dequantize_mxfp4: read MXFP4 weights as bfloat16; otherwise they are refused.
        """
        return cls(open_hub(os.fspath(path_or_id), revision, family, dequantize_fp8, dequantize_mxfp4))

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
    def from_megatron(
        cls,
        root: PathLike,
        like: PathLike | None = None,
        hf_config: PathLike | None = None,
        family: str | None = None,
        averaged: bool = False,
    ) -> Bridge:
        """Open a Megatron checkpoint of any format, or a plain torch distributed checkpoint.

        Args:
            root: folder of the checkpoint.
            like: Hub folder or id of the same model, for a checkpoint that was not written by dlm-bridge.
            hf_config: a config.json, instead of `like`.
            family: the model family, if the config does not identify it.
            averaged: read the moving averages of a run with `--ema-decay` in place of the weights.

        Raises:
            DlmBridgeError: not such a checkpoint, or an adapter without its base.
        """
        from dlm_bridge.convert.lora.megatron import ADAPTER_MANIFEST

        if (Path(root) / ADAPTER_MANIFEST).is_file():
            raise DlmBridgeError(
                f"{root}: is an adapter without its base: dlm-bridge adapter export --base MODEL --merge"
            )
        return cls(open_megatron(root, like, hf_config, family, averaged))

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

    def to_megatron(
        self,
        output: PathLike,
        layout: Layout | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        vocab_multiple: int | None = None,
        format: str = "torch_dist",
        key_style: str = "te",
        run_config: bool = False,
        weights_only: bool = False,
        workers: int | None = None,
        processes: int = 1,
        overwrite: bool = False,
        dry_run: bool = False,
        resume: bool = False,
        accept_changed_tensors: bool = False,
        progress: Progress | None = None,
    ) -> ConversionReport:
        """Write a Megatron checkpoint.

        Args:
            output: folder to write.
            layout: parallel layout; None: one rank.
            dtype: "keep" (also None), "bf16", "fp16", "fp32" or a torch dtype.
            vocab_multiple: pad the vocabulary with zero rows to a multiple of this number.
            format: "torch_dist", or "torch" for Megatron's legacy format.
            key_style: parameter names with `format="torch"`: "te", "te-sequential" or "local".
            run_config: also write Megatron Bridge's run_config.yaml.
            weights_only: omit the source's optimizer state. Otherwise it is converted with the weights, or refused
                where it cannot be.
            workers: number of threads per process; None: one per core, at most 8.
            processes: number of forked processes.
            overwrite: replace `output` once the new checkpoint is complete.
            dry_run: check everything and return the report; write nothing.
            resume: continue an interrupted conversion.
            accept_changed_tensors: accept tensors that differ from the digests in the source's dlm_bridge.json, and
                list them in the new one.
            progress: called from any thread with (bytes just written, total bytes).

        Raises:
            ChangedTensorsError: tensors differ from their recorded digests, without `accept_changed_tensors`.
        """
        megatron = MegatronFormat(format, key_style, run_config, weights_only)
        options = Options(
            parse_dtype(dtype),
            workers,
            overwrite,
            dry_run,
            progress,
            resume,
            megatron,
            processes,
            accept_changed_tensors,
        )
        return write_megatron(self.checkpoint, Path(output), layout or Layout(), options, vocab_multiple)

    def to_hf(
        self,
        output: PathLike,
        dtype: str | torch.dtype | None = None,
        *,
        shard_size: int | str | None = None,
        workers: int | None = None,
        processes: int = 1,
        overwrite: bool = False,
        dry_run: bool = False,
        resume: bool = False,
        accept_changed_tensors: bool = False,
        progress: Progress | None = None,
    ) -> ConversionReport:
        """Write a Hub folder.

        Args:
            shard_size: largest weight file, in bytes or as text such as "5GB". None: the source's files and shards.

        See `to_megatron` for the other arguments.
        """
        dtype = parse_dtype(dtype)
        options = Options(
            dtype,
            workers,
            overwrite,
            dry_run,
            progress,
            resume,
            processes=processes,
            accept_changed_tensors=accept_changed_tensors,
        )
        return write_hub(self.checkpoint, Path(output), options, parse_size(shard_size))

    @property
    def code_place(self) -> str:
        """`name_or_path` for a model with these weights: the folder with the code that the config's auto_map names,
        which `save_pretrained` copies; "" if there is none."""
        return str(self.checkpoint.hub.folder or "")

    def build_hf_model(
        self, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
    ) -> PreTrainedModel:
        """Build a PreTrainedModel with these weights, in eval mode.

        Args:
            dtype: dtype of the model; None: the stored dtype (if dtypes are mixed, one that represents all of them).
            device: device of the model; None: CPU.

        Raises:
            DlmBridgeError: the checkpoint does not contain all parameters of the model.
        """
        self.checkpoint.check()
        state = dict(self._tensors())
        own = {name for param in self.checkpoint.params if param.rule.own_dtype for name in param.hub_names}
        wanted = parse_dtype(dtype) or promote([tensor.dtype for name, tensor in state.items() if name not in own])
        with reading(self.checkpoint.where, "its config makes no model"):
            config = self.family.load("config_class").from_dict(self.config)
            model, info = self.family.load("model_class").from_pretrained(
                None, config=config, state_dict=state, dtype=wanted, output_loading_info=True
            )
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info.get(problem):
                raise DlmBridgeError(
                    f"{self.checkpoint.where}: {problem.replace('_', ' ')}: {sorted(info[problem])[0]}"
                )
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
