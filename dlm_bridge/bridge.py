"""The Bridge: one model between the Hub's layout and Megatron's, on disk or live."""

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
    """A model's weights under their Hub names, from whichever side they come, and the ways to the other side.

    Opening reads configuration and headers only. Every method raises DlmBridgeError, with one line, for bad input.
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
        """A Hub folder or Hub id. `family` names the family where the config cannot tell; `dequantize_fp8` reads
        block-scaled FP8 weights as bfloat16, `dequantize_mxfp4` those in MXFP4, which are refused without it."""
        return cls(open_hub(os.fspath(path_or_id), revision, family, dequantize_fp8, dequantize_mxfp4))

    @classmethod
    def from_model(cls, hf_model: PreTrainedModel, family: str | None = None) -> Bridge:
        """A live model; its parameters are shared, so what is read later is what they are then."""
        return cls(LiveCheckpoint(hf_model, family))

    @classmethod
    def from_scratch(cls, folder: PathLike, seed: int, family: str | None = None) -> Bridge:
        """A folder with a config.json, its weights not trained yet: each is made when it is read, in fp32, by its
        family's rule from (`seed`, Hub name), so that every layout and every engine starts from the same values."""
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
        """A Megatron checkpoint of any format, or a plain distributed one. `like` (Hub folder or id) or `hf_config` (a
        config.json) names the Hub model of one that was not written by dlm-bridge. `averaged`: with the averages of a
        run with `--ema-decay` for weights. Raises DlmBridgeError, also for an adapter's."""
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
        """The Hub's config.json."""
        return self.checkpoint.config

    @property
    def mapping(self) -> Mapping:
        return self.checkpoint.mapping

    @property
    def dims(self) -> Dims:
        return self.checkpoint.dims

    def hub_names(self) -> list[str]:
        """The names of all Hub tensors."""
        return self.checkpoint.hub_names()

    def read(self, hub_name: str) -> torch.Tensor:
        """One whole Hub tensor, in its stored dtype, on the CPU."""
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
        """Write a Megatron checkpoint for the layout. `dtype` is keep, bf16, fp16, fp32 or a torch dtype;
        `vocab_multiple` pads the vocabulary's rows with zeros. `format` "torch" is the legacy one, whose parameters
        are named by `key_style` te, te-sequential or local; `run_config` adds Megatron Bridge's run_config.yaml.
        An optimizer's state in the source goes with the weights, or is refused, unless `weights_only`. `workers` are
        threads, of each of `processes` forked processes. Tensors that are not as dlm_bridge.json recorded them are a
        ChangedTensorsError, unless `accept_changed_tensors`: then the new manifest names them."""
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
        """Write a Hub folder, with the source's own files and shards unless `shard_size` (bytes or "5GB") asks for
        new ones; see `to_megatron` for the other options."""
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
        """The `name_or_path` of a model of these weights: the folder with the code that its config's auto_map names,
        which `save_pretrained` copies from there; "" where there is none."""
        return str(self.checkpoint.hub.folder or "")

    def build_hf_model(
        self, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
    ) -> PreTrainedModel:
        """The live PreTrainedModel with these weights, in eval mode, on `device` (CPU where None).

        `dtype` None keeps the stored dtype (the one that holds all, where they are mixed). Raises DlmBridgeError
        where any parameter does not come from the checkpoint.
        """
        self.checkpoint.check()
        state = dict(self._tensors())
        own = {name for param in self.checkpoint.params if param.rule.own_dtype for name in param.hub_names}
        wanted = parse_dtype(dtype) or promote([tensor.dtype for name, tensor in state.items() if name not in own])
        with reading(f"{self.checkpoint.where}: its config makes no model"):
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
        """This rank's megatron-core GPTModel chunks with the weights loaded; see `parallel.parallelize`."""
        return load("engines", "megatron")().build_model(self.checkpoint, layout, dtype, **overrides)

    def refresh_hf_model(self, hf_model: PreTrainedModel, megatron_model: Any) -> None:
        """Copy a live Megatron model's weights into `hf_model` in place; see `parallel.handover`."""
        load("engines", "megatron")().refresh_hf_model(self.checkpoint, hf_model, megatron_model)

    def stream_hf_weights(self, megatron_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a live Megatron model's weights under their Hub names, one at a time; see `parallel.handover`."""
        return load("engines", "megatron")().stream_hf_weights(self.checkpoint, megatron_model)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every Hub tensor that the transformers model has and that is not a copy of another; each is read once."""
        for param in self.checkpoint.params:
            if param.is_mtp:
                continue
            yield from zip(param.hub_names, self.checkpoint.read_param(param), strict=True)
        for name, entry in self.checkpoint.passthrough.items():
            if entry.in_model and not entry.copy_of:
                yield name, self.checkpoint.read(name)
